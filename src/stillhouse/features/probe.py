"""Forward selection with a linear probe: which activations tell labels best, together.

The probe is a ridge regression onto one-hot labels, in closed form: no steps, no seed. Activations
of any resolution are read at the same points of the images, as `features_at` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, one_hot

from stillhouse.errors import UserError


def features_at(features: Tensor, points: Tensor) -> Tensor:
    """Bilinear values of maps [B, C, H, W] at points [B, P, 2]: [B * P, C].

    A point is (x, y) within its image, from 0 to 1: the middle of the first cell is at 0.5 / W.
    """
    grid = 2 * points[:, :, None] - 1
    found = grid_sample(features.float(), grid.float(), align_corners=False, padding_mode="border")
    return found[..., 0].mT.flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Points:
    """Labelled points, and what every activation says of them."""

    features: Mapping[str, Tensor]  # id -> [N, C]
    labels: Tensor  # [N] from 0

    def joined(self, ids: Sequence[str]) -> Tensor:
        return torch.cat([self.features[name].double() for name in ids], dim=1)


class Step(NamedTuple):
    id: str
    accuracy: float  # of the probe on the held-out points, with this and all earlier ones


def probe_accuracy(train: Points, held_out: Points, ids: Sequence[str], ridge: float) -> float:
    """Share of the held-out points whose label the probe tells."""
    x, test = train.joined(ids), held_out.joined(ids)
    mean, deviation = x.mean(0), x.std(0).clamp(min=1e-12)
    x, test = (x - mean) / deviation, (test - mean) / deviation
    target = one_hot(train.labels).double()
    offset = target.mean(0)
    square = x.T @ x + ridge * len(x) * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(square, x.T @ (target - offset))
    guess = (test @ weights + offset).argmax(1)
    return float((guess == held_out.labels).double().mean())


def forward_selection(
    train: Points,
    held_out: Points,
    ids: Sequence[str],
    *,
    count: int = 4,
    ridge: float = 1e-2,
    least_gain: float = 0.0,
) -> list[Step]:
    """Adds, one at a time, the activation that helps most; ends where none gains `least_gain`.

    Split points by image: neighbours in one image would tell each other's labels.
    """
    missing = [n for n in ids if n not in train.features or n not in held_out.features]
    if missing or not ids:
        raise UserError(f"there are no features of {missing[0] if missing else 'any activation'}")
    chosen: list[Step] = []
    left = list(dict.fromkeys(ids))
    while left and len(chosen) < count:
        taken = [step.id for step in chosen]
        tried = [Step(n, probe_accuracy(train, held_out, [*taken, n], ridge)) for n in left]
        best = max(tried, key=lambda step: step.accuracy)
        if chosen and best.accuracy - chosen[-1].accuracy <= least_gain:
            break
        chosen.append(best)
        left.remove(best.id)
    return chosen
