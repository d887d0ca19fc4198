"""Guidance: takes denoisers and is one. D = weight * D_wanted + (1 - weight) * D_guide.

| function          | guide                                | paper                       |
|-------------------|--------------------------------------|-----------------------------|
| `classifier_free` | the same network, condition dropped  | Ho & Salimans 2022          |
| `autoguidance`    | a smaller or less trained network    | Karras et al. 2024          |

Either may be limited to an interval of noise levels (Kynkaanniemi et al. 2024); outside it, and at
weight 1, the guide is not evaluated.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.process import Condition, Denoiser
from stillhouse.process.predictions import rows

Interval = tuple[float, float]
EVERYWHERE: Interval = (0.0, math.inf)

# evaluates the wanted and the guiding denoiser at one point
Pair = Callable[[Tensor, Tensor, Condition | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Guided:
    """A denoiser pushed away from its guide while low < sigma <= high."""

    wanted: Denoiser
    both: Pair
    weight: float
    interval: Interval = EVERYWHERE

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        if self.weight == 1:
            return self.wanted(x, sigma, cond)
        weight: float | Tensor = self.weight
        if self.interval != EVERYWHERE:
            low, high = self.interval
            inside = (sigma > low) & (sigma <= high)
            if not bool(inside.any()):
                return self.wanted(x, sigma, cond)
            full = torch.full_like(sigma, self.weight, dtype=torch.float64)
            weight = rows(torch.where(inside, full, 1.0), x)
        wanted, guide = self.both(x, sigma, cond)
        return guide + weight * (wanted - guide)


def classifier_free(
    denoiser: Denoiser,
    null: Condition,
    weight: float,
    interval: Interval = EVERYWHERE,
    *,
    joined: bool = True,
) -> Guided:
    """`null` is the dropped condition, one row; fields that it lacks keep their values.

    `joined` evaluates both in one double batch.
    """

    def both(x: Tensor, sigma: Tensor, cond: Condition | None) -> tuple[Tensor, Tensor]:
        if cond is None:
            raise ValueError("classifier-free guidance needs a condition to guide towards")
        empty = cond.drop(torch.ones(len(x), dtype=torch.bool), null)
        if empty.same_as(cond):
            raise ValueError("the null condition has none of the condition's fields: no guidance")
        if not joined:
            return denoiser(x, sigma, cond), denoiser(x, sigma, empty)
        level = sigma if sigma.ndim == 0 else torch.cat([sigma, sigma])
        out = denoiser(torch.cat([x, x]), level, Condition.cat([cond, empty]))
        wanted, guide = out.chunk(2)
        return wanted, guide

    return Guided(denoiser, both, weight, interval)


def autoguidance(
    denoiser: Denoiser, guide: Denoiser, weight: float, interval: Interval = EVERYWHERE
) -> Guided:
    """Guides with a worse version of the same model, under the same condition."""
    return Guided(
        denoiser,
        lambda x, sigma, cond: (denoiser(x, sigma, cond), guide(x, sigma, cond)),
        weight,
        interval,
    )
