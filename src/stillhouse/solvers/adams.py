"""Adams-Bashforth in sigma: iPNDM (fixed weights) and rho-AB (exact weights on uneven grids).

The slope d is extrapolated from its last k values. iPNDM (Zhang & Chen 2023) keeps the weights of
an even grid, so it is second order for every k >= 2 on the uneven grids that are used in practice.
rho-AB integrates the Lagrange polynomial over the grid as it is.
"""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from torch import Tensor

from stillhouse.process import Condition, Denoiser
from stillhouse.solvers.quadrature import lagrange_weights
from stillhouse.solvers.walk import Options, Point, first_order, walk

# Newest slope first.
EVEN_WEIGHTS = {
    1: (1.0,),
    2: (3 / 2, -1 / 2),
    3: (23 / 12, -16 / 12, 5 / 12),
    4: (55 / 24, -59 / 24, 37 / 24, -9 / 24),
}


def slope_weights(points: Sequence[Point], sigma_next: float, *, exact: bool) -> list[float]:
    """Weights of the slopes at `points` (newest last) that sum to the step sigma' - sigma."""
    here = points[-1].sigma
    if exact:
        return lagrange_weights([p.sigma for p in points], here, sigma_next)
    return [(sigma_next - here) * w for w in reversed(EVEN_WEIGHTS[len(points)])]


def adams_predict(points: Sequence[Point], sigma_next: float, *, exact: bool) -> Tensor:
    """x + sum_j w_j d_j, written as the first-order step plus differences of slopes."""
    x, newest = first_order(points[-1], sigma_next), points[-1].slope
    weights = slope_weights(points, sigma_next, exact=exact)
    for weight, point in zip(weights[:-1], points[:-1], strict=True):
        x = x + weight * (point.slope - newest)
    return x


def sample_ipndm(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    order: int = 4,
    **options: Unpack[Options],
) -> Tensor:
    """Improved PNDM with the even grid's weights, order 1 to 4."""
    if order not in EVEN_WEIGHTS:
        raise ValueError(f"iPNDM has orders 1 to 4, not {order}")
    predict = partial(adams_predict, exact=False)
    return walk(denoiser, x, sigmas, cond, predict, order=order, options=options)


def sample_rho_ab(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    order: int = 3,
    **options: Unpack[Options],
) -> Tensor:
    """Adams-Bashforth with exact weights on any grid."""
    predict = partial(adams_predict, exact=True)
    return walk(denoiser, x, sigmas, cond, predict, order=order, options=options)
