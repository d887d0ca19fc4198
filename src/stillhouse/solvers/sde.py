"""Solvers of the reverse SDE: Euler ancestral, DPM++ SDE (two evaluations) and DPM++ 2M SDE.

In lambda = -ln sigma the SDE with noise share eta is

    dx = -(1 + eta) (x - D) dlambda + sqrt(2 eta) sigma dW,

so over a step H, with D held: x' = e^-(1+eta)H x + (1 - e^-(1+eta)H) D + s' sqrt(1 - e^-2 eta H) z.
eta = 0 is the ODE, eta = 1 the time reversal of the forward process (ancestral sampling).
"""

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Unpack

from torch import Tensor

from stillhouse.process import Condition, Denoiser, noise_source
from stillhouse.solvers.walk import Options, Point, level, level_gap, walk


def _decay(h: float, eta: float) -> float:
    return math.exp(-(1 + eta) * h)


def _spread(sigma_next: float, h: float, eta: float) -> float:
    """Standard deviation of the noise that a step to sigma_next adds."""
    return sigma_next * math.sqrt(-math.expm1(-2 * eta * h))


def _drift(x: Tensor, denoised: Tensor, h: float, eta: float) -> Tensor:
    return _decay(h, eta) * x + (1 - _decay(h, eta)) * denoised


def _draws(options: Options) -> Callable[[Tensor], Tensor]:
    noise, draws = noise_source(options.get("generator")), count()
    return lambda like: noise(like, next(draws))


def sample_euler_ancestral(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    eta: float = 1.0,
    **options: Unpack[Options],
) -> Tensor:
    """Down to sigma_down by the ODE, then noise back up to sigma' (DDPM at eta = 1)."""
    draw = _draws(options)

    def predict(points: Sequence[Point], sigma_next: float) -> Tensor:
        here = points[-1]
        full = sigma_next * math.sqrt(1 - (sigma_next / here.sigma) ** 2)
        up = min(sigma_next, eta * full)
        down = math.sqrt(sigma_next**2 - up**2) / here.sigma
        return down * here.x + (1 - down) * here.denoised + up * draw(here.x)

    return walk(denoiser, x, sigmas, cond, predict, options=options)


def sample_dpmpp_sde(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    eta: float = 1.0,
    **options: Unpack[Options],
) -> Tensor:
    """DPM-Solver++ SDE, single step: D is taken at the middle of the step in lambda.

    Both halves see one Brownian path: the noise of the first half is carried into the whole step.
    """
    draw = _draws(options)

    def predict(points: Sequence[Point], sigma_next: float) -> Tensor:
        here = points[-1]
        half = level_gap(here.sigma, sigma_next) / 2
        sigma_mid = here.sigma * math.exp(-half)
        early = _spread(sigma_mid, half, eta) * draw(here.x)
        x_mid = _drift(here.x, here.denoised, half, eta) + early
        denoised = denoiser(x_mid, level(sigma_mid), cond)
        late = _spread(sigma_next, half, eta) * draw(here.x)
        return _drift(here.x, denoised, 2 * half, eta) + _decay(half, eta) * early + late

    return walk(denoiser, x, sigmas, cond, predict, options=options)


def sample_dpmpp_2m_sde(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    eta: float = 1.0,
    **options: Unpack[Options],
) -> Tensor:
    """DPM-Solver++(2M) SDE: D extrapolated to the middle of the step, one evaluation."""
    draw = _draws(options)

    def predict(points: Sequence[Point], sigma_next: float) -> Tensor:
        here = points[-1]
        h = level_gap(here.sigma, sigma_next)
        denoised = here.denoised
        if len(points) > 1:
            h0 = level_gap(points[-2].sigma, here.sigma)
            denoised = denoised + h / (2 * h0) * (denoised - points[-2].denoised)
        return _drift(here.x, denoised, h, eta) + _spread(sigma_next, h, eta) * draw(here.x)

    return walk(denoiser, x, sigmas, cond, predict, order=2, options=options)
