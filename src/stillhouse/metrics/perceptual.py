"""LPIPS: how different two images look, and the diversity of samples that it measures.

Zhang et al. 2018, version 0.1 on SqueezeNet: our backbone with the linear weights that are inside
the package lpips, whose code is not imported (it needs torchvision).
"""

import math
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stillhouse.errors import UserError, missing_extra
from stillhouse.metrics.exact import exactly
from stillhouse.metrics.networks import SqueezeNet, find_weights, load_weights, ready, sha256

# The package's own "scaling layer": ImageNet's mean and std for images in [-1, 1].
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


@dataclass(frozen=True, eq=False)
class Lpips:
    """d(a, b) = sum_l mean_hw sum_c w_lc (a_lhwc - b_lhwc)^2 of features of length 1 along c."""

    backbone: Callable[[Tensor], list[Tensor]]
    weights: list[Tensor]  # [1, C, 1, 1] for each stage
    device: torch.device
    digest: str  # of the backbone and the linear weights
    name: str = "LPIPS-squeeze"
    preprocessing: str = "size as it is; x / 127.5 - 1, then LPIPS's shift and scale"

    @classmethod
    def load(cls, weights: str = "", device: torch.device | str = "cpu") -> "Lpips":
        """`weights`: of the backbone; empty: squeezenet1_1.safetensors in $STILLHOUSE_WEIGHTS."""
        lines, network = _linear_weights_file(), SqueezeNet()
        path = find_weights(weights, "squeezenet1_1.safetensors")
        digest = load_weights(network, path, unused=("classifier.",))
        return cls(
            ready(network, device),
            [line.to(device) for line in _read_linear_weights(lines)],
            torch.device(device),
            f"{digest}+{sha256(lines.read_bytes())}",
        )

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Distances [B] of images [B, 3, H, W], uint8 or float in [-1, 1]."""
        if a.shape != b.shape:
            raise ValueError(
                f"images of one shape are compared, not {list(a.shape)}, {list(b.shape)}"
            )
        with exactly(self.device):
            return self.distance(a, b)

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """The same as a loss: with gradients, in the precision that is set around it."""
        pairs = zip(self.weights, self._stages(a), self._stages(b), strict=True)
        return torch.stack([(w * (x - y) ** 2).sum(1).mean((1, 2)) for w, x, y in pairs]).sum(0)

    def _stages(self, images: Tensor) -> list[Tensor]:
        x = _in_range(images).to(self.device)
        shift, scale = (x.new_tensor(v).view(3, 1, 1) for v in (SHIFT, SCALE))
        stages = self.backbone(((x - shift) / scale).contiguous(memory_format=torch.channels_last))
        # Inside the root too: where no unit answers, its slope is infinite.
        return [s / ((s.square().sum(1, keepdim=True) + 1e-20).sqrt() + 1e-10) for s in stages]


def _in_range(images: Tensor) -> Tensor:
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(f"images are RGB, [batch, 3, height, width], not {list(images.shape)}")
    if min(images.shape[2:]) < SqueezeNet.smallest:
        raise UserError(
            f"LPIPS needs images of at least {SqueezeNet.smallest} pixels a side, not "
            f"{min(images.shape[2:])}"
        )
    if images.dtype == torch.uint8:
        return images.float() / 127.5 - 1
    if not images.is_floating_point() or not bool((images.abs() <= 1.001).all()):
        raise ValueError("images are uint8, or float in [-1, 1]")
    return images.float()


def _linear_weights_file() -> Path:
    spec = find_spec("lpips")  # found, not imported
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "weights" / "v0.1" / "squeeze.pth"
        if path.is_file():
            return path
    raise missing_extra("lpips", "metrics")


def _read_linear_weights(path: Path) -> list[Tensor]:
    from pickle import UnpicklingError

    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
        lines = [found[f"lin{n}.model.1.weight"].float() for n in range(len(SqueezeNet.widths))]
    except (UnpicklingError, RuntimeError, EOFError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not hold LPIPS's linear weights: reinstall lpips") from error
    if [tuple(line.shape) for line in lines] != [(1, c, 1, 1) for c in SqueezeNet.widths]:
        raise UserError(f"{path} does not hold LPIPS's linear weights: reinstall lpips")
    return lines


# ---------------------------------------------------------------- diversity


class Diversity(NamedTuple):
    """Mean distance of samples of one class or prompt."""

    mean: float
    std: float  # over pairs
    pairs: int
    groups: int  # that had two images or more


def diversity(
    distance: Callable[[Tensor, Tensor], Tensor],
    images: Tensor,
    groups: Sequence[Hashable],
    pairs: int = 1000,
    seed: int = 0,
    *,
    batch: int = 64,
) -> Diversity:
    """Mean distance over random pairs of images of the same group, `batch` pairs at a time.

    No pair is taken twice and every group has the same share, as far as it has so many pairs.
    `images`: rows by number, a tensor or anything that is indexed like one.
    """
    chosen = choose_pairs(groups, pairs, seed)
    found = []
    for start in range(0, len(chosen), batch):
        left, right = torch.tensor(chosen[start : start + batch]).T
        found.append(distance(images[left], images[right]).double().cpu())
    distances = torch.cat(found)
    std = float(distances.std()) if len(distances) > 1 else 0.0
    counted = len({groups[left] for left, _ in chosen})
    return Diversity(float(distances.mean()), std, len(distances), counted)


def choose_pairs(groups: Sequence[Hashable], pairs: int, seed: int) -> list[tuple[int, int]]:
    """Pairs of row numbers, both of one group."""
    if pairs < 1:
        raise ValueError(f"at least 1 pair is needed, not {pairs}")
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    rng = random.Random(seed)
    several = [rows for rows in members.values() if len(rows) > 1]
    if not several:
        raise UserError(
            f"diversity compares images of one class or prompt, but {len(groups)} images have "
            f"{len(members)} of them: sample at least two of each"
        )
    rng.shuffle(several)
    several.sort(key=len)  # groups that cannot fill their share leave it to the larger ones
    chosen: list[tuple[int, int]] = []
    for number, rows in enumerate(several):
        share = (pairs - len(chosen)) // (len(several) - number)
        total = math.comb(len(rows), 2)
        for pair in rng.sample(range(total), min(share, total)):
            low, high = _pair(pair)
            chosen.append((rows[low], rows[high]))
    return chosen


def _pair(number: int) -> tuple[int, int]:
    """Pairs in the order (0, 1), (0, 2), (1, 2), (0, 3), ...: high(high - 1) / 2 + low."""
    high = (1 + math.isqrt(1 + 8 * number)) // 2
    return number - high * (high - 1) // 2, high
