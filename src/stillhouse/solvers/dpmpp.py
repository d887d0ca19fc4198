"""DPM-Solver++ multistep (Lu et al. 2022b): exponential integrators of D in lambda = -ln sigma.

With H = lambda' - lambda and phi_k as in `quadrature.phi`, order 1 is (s'/s) x - phi1 D0. The
published 3M halves its second-derivative term, which makes it second order: `compat` is that
formula (and what distilled models were made with), `exact` doubles the term and is third order.
Exact is not better at few steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, Unpack, get_args

from torch import Tensor

from stillhouse.process import Condition, Denoiser
from stillhouse.solvers.quadrature import phi
from stillhouse.solvers.walk import Options, Point, Predict, first_order, level_gap, walk

Variant = Literal["compat", "exact"]


def _step(variant: Variant) -> Predict:
    if variant not in get_args(Variant):
        raise ValueError(f"variant is compat or exact, not {variant!r}")
    return partial(dpmpp_predict, variant=variant)


def dpmpp_predict(points: Sequence[Point], sigma_next: float, *, variant: Variant) -> Tensor:
    """One step of order len(points) <= 3."""
    x = first_order(points[-1], sigma_next)
    if len(points) == 1:
        return x
    h = level_gap(points[-1].sigma, sigma_next)
    phi1, phi2, phi3 = phi(h)
    d0, d_1 = points[-1].denoised, points[-2].denoised
    r0 = level_gap(points[-2].sigma, points[-1].sigma) / h
    first = (d0 - d_1) / r0  # D1_0
    if len(points) == 2:
        return x + (phi2 if variant == "exact" else -phi1 / 2) * first
    r1 = level_gap(points[-3].sigma, points[-2].sigma) / h
    second = (first - (d_1 - points[-3].denoised) / r1) / (r0 + r1)  # D2
    first = first + r0 * second  # D1
    return x + phi2 * first - (2 if variant == "exact" else 1) * phi3 * second


def sample_dpmpp_2m(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    variant: Variant = "compat",
    **options: Unpack[Options],
) -> Tensor:
    """Second order, one evaluation a step. `compat` has -phi1/2 where `exact` has phi2."""
    return walk(denoiser, x, sigmas, cond, _step(variant), order=2, options=options)


def sample_dpmpp_3m(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    variant: Variant = "compat",
    **options: Unpack[Options],
) -> Tensor:
    """Three points of history; third order only as `exact`."""
    return walk(denoiser, x, sigmas, cond, _step(variant), order=3, options=options)
