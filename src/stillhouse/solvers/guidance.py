"""Guidance: takes denoisers and is one. D = weight * D_wanted + (1 - weight) * D_guide.

| function          | guide                                | paper                       |
|-------------------|--------------------------------------|-----------------------------|
| `classifier_free` | the same network, condition dropped  | Ho & Salimans 2022          |
| `autoguidance`    | a smaller or less trained network    | Karras et al. 2024          |
| `TwoTerm`         | the same, without control; with none | Berrada et al. 2024         |

Each may be limited to an interval of noise levels (Kynkaanniemi et al. 2024); outside it, and at
weight 1, the guide is not evaluated.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
        weight = _within(self.interval, sigma, x, self.weight)
        if weight is None:
            return self.wanted(x, sigma, cond)
        return _push(*self.both(x, sigma, cond), weight)


def _push(wanted: Tensor, guide: Tensor, weight: float | Tensor) -> Tensor:
    return guide + weight * (wanted - guide)


def _within(interval: Interval, sigma: Tensor, x: Tensor, weight: float) -> float | Tensor | None:
    """The weight where low < sigma <= high, 1 elsewhere; None where it is 1 for every sample."""
    if interval == EVERYWHERE:
        return weight
    low, high = interval
    inside = (sigma > low) & (sigma <= high)
    if not bool(inside.any()):
        return None
    full = torch.full_like(sigma, weight, dtype=torch.float64)
    return rows(torch.where(inside, full, 1.0), x)


def _evaluate(
    denoiser: Denoiser, x: Tensor, sigma: Tensor, conds: Sequence[Condition], joined: bool
) -> Sequence[Tensor]:
    """One point under several conditions, in one large batch if `joined`."""
    if not joined or len(conds) == 1:
        return [denoiser(x, sigma, cond) for cond in conds]
    count = len(conds)
    level = sigma if sigma.ndim == 0 else torch.cat([sigma] * count)
    return denoiser(torch.cat([x] * count), level, Condition.cat(conds)).chunk(count)


def _dropped(cond: Condition, null: Condition, count: int, only: Sequence[str] = ()) -> Condition:
    empty = cond.drop(torch.ones(count, dtype=torch.bool), null, only=only)
    if empty.same_as(cond):
        what = f"{', '.join(only)}: cannot drop it" if only else "fields: no guidance"
        raise ValueError(f"the null condition has none of the condition's {what}")
    return empty


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
        wanted, guide = _evaluate(denoiser, x, sigma, [cond, _dropped(cond, null, len(x))], joined)
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


@dataclass(frozen=True)
class TwoTerm:
    """Guidance by what is drawn (semantics s) and how it is framed (control c), each by itself.

    out = weight * [control * D(c, s) + (1 - control) * D(0, s)] + (1 - weight) * D(0, 0)

    on all channels. `null` (one row) has the nothing of both. `control` = 1 is classifier-free
    guidance; outside the interval the model is left to itself, D(c, s). Terms of weight 0 are not
    evaluated; the others share one batch if `joined`.
    """

    denoiser: Denoiser
    null: Condition
    weight: float
    control: float = 1.0
    interval: Interval = EVERYWHERE
    joined: bool = True

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        if cond is None:
            raise ValueError("two-term guidance needs a condition to guide towards")
        weight = _within(self.interval, sigma, x, self.weight)
        control = _within(self.interval, sigma, x, self.control)
        if weight is None or control is None or self.weight == self.control == 1:
            return self.denoiser(x, sigma, cond)
        # Each term is pushed away from the next one there is.
        terms = self._terms(cond, len(x))
        out, *guides = _evaluate(self.denoiser, x, sigma, list(terms.values()), self.joined)
        pushes = {"s": control, "": weight}
        for name, guide in zip(list(terms)[1:], guides, strict=True):
            out = _push(out, guide, pushes[name])
        return out

    def _terms(self, cond: Condition, count: int) -> dict[str, Condition]:
        """The conditions to evaluate, by what is left in them."""
        limited = self.interval != EVERYWHERE  # samples outside want D(c, s) at any weights
        terms: dict[str, Condition] = {}
        if limited or self.weight * self.control != 0:
            terms["cs"] = cond
        if self.weight != 0 and self.control != 1:
            terms["s"] = _dropped(cond, self.null, count, only=("control",))
        if self.weight != 1:
            _dropped(cond, replace(self.null, control=None), count)  # control alone is not enough
            terms[""] = _dropped(cond, self.null, count)
        return terms
