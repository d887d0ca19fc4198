"""DEIS and UniPC: exponential integrators whose polynomial of D in lambda has any order.

DEIS (Zhang & Chen 2023) extrapolates D. UniPC (Zhao et al. 2023) does so as its predictor, and
once D at the new point is known uses it to correct the state before going on: one more order for
no more evaluations. Solving UniPC's linear system is the same as the Lagrange weights used here;
its function B(h) only enters through two customary shortcuts, the order-2 predictor and the
order-1 corrector (a factor 1/2 in place of the solution).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, Unpack, get_args

from torch import Tensor

from stillhouse.process import Condition, Denoiser
from stillhouse.solvers.quadrature import exponential_weights
from stillhouse.solvers.walk import Options, Point, first_order, level_gap, walk

B = Literal["bh1", "bh2"]


def _advance(base: Point, others: Sequence[Point], sigma_next: float) -> Tensor:
    """From `base`, with D the polynomial through `base` and `others`."""
    weights = exponential_weights([p.lam for p in (*others, base)], base.lam, -math.log(sigma_next))
    x = first_order(base, sigma_next)
    for weight, point in zip(weights[:-1], others, strict=True):
        x = x + weight * (point.denoised - base.denoised)
    return x


def deis_predict(points: Sequence[Point], sigma_next: float) -> Tensor:
    """One step of order len(points)."""
    return _advance(points[-1], points[:-1], sigma_next)


def sample_deis(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    order: int = 3,
    **options: Unpack[Options],
) -> Tensor:
    """Diffusion exponential integrator, order `order`."""
    return walk(denoiser, x, sigmas, cond, deis_predict, order=order, options=options)


def _b(h: float, b: B) -> float:
    return -h if b == "bh1" else math.expm1(-h)


def unipc_predict(points: Sequence[Point], sigma_next: float, *, b: B) -> Tensor:
    """UniP of order len(points); order 2 is the customary shortcut."""
    if len(points) != 2:
        return deis_predict(points, sigma_next)
    old, here = points
    h = level_gap(here.sigma, sigma_next)
    difference = (here.denoised - old.denoised) * (h / level_gap(old.sigma, here.sigma))
    return first_order(here, sigma_next) - _b(h, b) / 2 * difference


def unipc_correct(points: Sequence[Point], new: Point, *, b: B) -> Tensor:
    """UniC of order len(points): steps from points[-1] to `new` again, knowing D there."""
    base = points[-1]
    if len(points) == 1:
        half = _b(level_gap(base.sigma, new.sigma), b) / 2
        return first_order(base, new.sigma) - half * (new.denoised - base.denoised)
    return _advance(base, (*points[:-1], new), new.sigma)


def sample_unipc(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    order: int = 3,
    b: B = "bh2",
    corrector: bool = True,
    **options: Unpack[Options],
) -> Tensor:
    """Unified predictor-corrector; the last step is never corrected."""
    if b not in get_args(B):
        raise ValueError(f"b is bh1 or bh2, not {b!r}")
    return walk(
        denoiser,
        x,
        sigmas,
        cond,
        partial(unipc_predict, b=b),
        order=order,
        correct=partial(unipc_correct, b=b) if corrector else None,
        options=options,
    )
