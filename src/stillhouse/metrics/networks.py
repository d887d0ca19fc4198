"""The small convolutional networks that detectors and distances are made of.

Written after their papers, with the key names of the published weights; weights are safetensors and
must fit exactly. BatchNorm is folded into the convolutions before it, which it equals in eval mode.
"""

import hashlib
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from stillhouse.errors import UserError

FOLDER = "STILLHOUSE_WEIGHTS"  # the environment variable that names the folder of weights


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def find_weights(given: str, name: str, flag: str = "") -> Path:
    """The file that is given by a flag, or `name` in the folder of weights."""
    folder = os.environ.get(FOLDER, "")
    if not given and not folder:
        either = f"name the file with {flag}, or " if flag else ""
        raise UserError(
            f"the weights {name} are needed: {either}name the folder that has them in the "
            f"environment variable {FOLDER}"
        )
    path = Path(given).expanduser() if given else Path(folder).expanduser() / name
    if not path.is_file():
        where = flag if given else FOLDER
        raise UserError(f"there are no weights at {path}: put {name} there, or correct {where}")
    return path


def load_weights(network: nn.Module, path: Path, *, unused: tuple[str, ...] = ()) -> str:
    """Loads float32 weights, all and only those of the network; returns the digest of the file.

    `unused`: beginnings of names that may be there, such as a classifier.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = path.read_bytes()
        found = load(content)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read as safetensors ({error}): fetch it again"
        ) from error
    state = {
        name: tensor.float()
        for name, tensor in found.items()
        if not name.endswith("num_batches_tracked") and not name.startswith(unused)
    }
    problems = list(_misfits(network, state))
    if problems:
        kind = type(network).__name__
        raise UserError(f"{path} does not hold the weights of {kind}: {'; '.join(problems)}")
    network.load_state_dict(state, strict=False)  # a counter of batches may be missing, no more
    return sha256(content)


def _misfits(network: nn.Module, state: dict[str, Tensor]) -> Iterator[str]:
    own = {n: t for n, t in network.state_dict().items() if not n.endswith("num_batches_tracked")}
    shared = own.keys() & state.keys()
    cases = {
        "missing": own.keys() - state.keys(),
        "unexpected": state.keys() - own.keys(),
        "of another shape": {n for n in shared if own[n].shape != state[n].shape},
        "not finite": {n for n in shared if not bool(state[n].isfinite().all())},
    }
    for what, names in cases.items():
        if names:
            yield f"{len(names)} tensors {what} (first: {min(names)})"


def fold_norms(network: nn.Module) -> nn.Module:
    """Each BatchNorm becomes part of the convolution before it, computed in float64."""
    for module in list(network.modules()):
        for (name, conv), (after, norm) in pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                fused = fuse_conv_bn_eval(conv.double().eval(), norm.double().eval())
                setattr(module, name, fused.float())
                setattr(module, after, nn.Identity())
    return network


def ready(network: nn.Module, device: torch.device | str) -> nn.Module:
    """For inference: folded, frozen, channels last."""
    network = fold_norms(network.eval()).requires_grad_(False)
    return network.to(device=device, memory_format=torch.channels_last)  # pyright: ignore


# ---------------------------------------------------------------- MobileNetV2 (Sandler et al. 2018)

# Table 2: expansion, channels, repeats, stride of the first.
STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]


def _conv_norm_act(
    given: int, taken: int, size: int, stride: int = 1, groups: int = 1
) -> nn.Module:
    conv = nn.Conv2d(given, taken, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(taken), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Widen, filter each channel, narrow without activation; added where the shape stays."""

    def __init__(self, given: int, taken: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = given * expansion
        widen = [_conv_norm_act(given, wide, 1)] if expansion > 1 else []
        self.conv = nn.Sequential(
            *widen,
            _conv_norm_act(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, taken, 1, bias=False),
            nn.BatchNorm2d(taken),
        )
        self.added = stride == 1 and given == taken

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.added else self.conv(x)


class MobileNetV2(nn.Module):
    """Features only: [B, 1280], the mean over the last feature map."""

    dims, classes = 1280, 0

    def __init__(self) -> None:
        super().__init__()
        layers, given = [_conv_norm_act(3, 32, 3, 2)], 32
        for expansion, taken, repeats, stride in STAGES:
            for repeat in range(repeats):
                first = repeat == 0
                layers.append(InvertedResidual(given, taken, expansion, stride if first else 1))
                given = taken
        self.features = nn.Sequential(*layers, _conv_norm_act(given, self.dims, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).mean((2, 3))


# ------------------------------------------------------------- SqueezeNet 1.1 (Iandola et al. 2016)


class Fire(nn.Module):
    """Squeeze to few channels, expand with 1x1 and 3x3 filters side by side."""

    def __init__(self, given: int, few: int, taken: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(given, few, 1)
        self.expand1x1 = nn.Conv2d(few, taken, 1)
        self.expand3x3 = nn.Conv2d(few, taken, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return F.relu(torch.cat([self.expand1x1(x), self.expand3x3(x)], 1))


def _pool() -> nn.Module:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


class SqueezeNet(nn.Module):
    """Features only: the seven stages that LPIPS compares."""

    widths = (64, 128, 256, 384, 384, 512, 512)
    ends = (1, 4, 7, 9, 10, 11, 12)  # the layer that each stage ends with
    smallest = 17  # pixels: less leaves nothing to pool

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2),
            nn.ReLU(),
            _pool(),
            Fire(64, 16, 64),
            Fire(128, 16, 64),
            _pool(),
            Fire(128, 32, 128),
            Fire(256, 32, 128),
            _pool(),
            Fire(256, 48, 192),
            Fire(384, 48, 192),
            Fire(384, 64, 256),
            Fire(512, 64, 256),
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        stages = []
        for number, layer in enumerate(self.features):
            x = layer(x)
            if number in self.ends:
                stages.append(x)
        return stages


# ---------------------------------------------------------------- ResNet for CIFAR (He et al. 2016)


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut without weights (option A): every other pixel, zeros for the

    channels that are new.
    """

    def __init__(self, given: int, taken: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(given, taken, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(taken)
        self.conv2 = nn.Conv2d(taken, taken, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(taken)
        self.stride, self.zeros = stride, (taken - given) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.zeros:
            x = F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, self.zeros, self.zeros))
        return F.relu(x + y)


class Classified(NamedTuple):
    """What a classifier saw and said."""

    features: Tensor  # [B, D]
    logits: Tensor  # [B, classes]


class ResNet56(nn.Module):
    """6n + 2 layers with n = 9; 64 features, the mean over the last feature map, 10 classes."""

    dims = 64

    def __init__(self, blocks: int = 9, classes: int = 10) -> None:
        super().__init__()
        self.classes = classes
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, 1, blocks)
        self.layer2 = self._stage(16, 32, 2, blocks)
        self.layer3 = self._stage(32, self.dims, 2, blocks)
        self.linear = nn.Linear(self.dims, classes)

    @staticmethod
    def _stage(given: int, taken: int, stride: int, blocks: int) -> nn.Module:
        rest = (BasicBlock(taken, taken, 1) for _ in range(blocks - 1))
        return nn.Sequential(BasicBlock(given, taken, stride), *rest)

    def forward(self, x: Tensor) -> Classified:
        x = F.relu(self.bn1(self.conv1(x)))
        features = self.layer3(self.layer2(self.layer1(x))).mean((2, 3))
        return Classified(features, self.linear(features))
