"""Solvers without memory: Euler, Heun, DPM-2, and Heun with EDM's churn."""

import math
from collections.abc import Sequence
from itertools import count
from typing import Unpack

from torch import Tensor

from stillhouse.process import Condition, Denoiser, noise_source
from stillhouse.solvers.walk import Options, Point, Predict, first_order, level, walk


def sample_euler(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """First order: x + h d (Song et al. 2021). The same as DDIM and DPM++ 1."""
    return walk(denoiser, x, sigmas, cond, lambda p, s: first_order(p[-1], s), options=options)


def _heun(denoiser: Denoiser, cond: Condition | None) -> Predict:
    """x + h (d + d')/2 (Karras et al. 2022, algorithm 1)."""

    def predict(points: Sequence[Point], sigma_next: float) -> Tensor:
        here = points[-1]
        x = first_order(here, sigma_next)
        there = Point(sigma_next, x, denoiser(x, level(sigma_next), cond))
        return x + (sigma_next - here.sigma) / 2 * (there.slope - here.slope)

    return predict


def sample_heun(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """Second order, two evaluations a step (one for the step to 0)."""
    return walk(denoiser, x, sigmas, cond, _heun(denoiser, cond), options=options)


def sample_dpm2(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """Second order by the midpoint in log sigma: x + h d_m (Lu et al. 2022; EDM's DPM-2)."""

    def predict(points: Sequence[Point], sigma_next: float) -> Tensor:
        here = points[-1]
        sigma_mid = math.sqrt(here.sigma * sigma_next)
        x_mid = first_order(here, sigma_mid)
        mid = Point(sigma_mid, x_mid, denoiser(x_mid, level(sigma_mid), cond))
        step = sigma_next - here.sigma
        return first_order(here, sigma_next) + step * (mid.slope - here.slope)

    return walk(denoiser, x, sigmas, cond, predict, options=options)


def sample_edm_churn(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    *,
    churn: float = 40.0,
    sigma_from: float = 0.05,
    sigma_to: float = 50.0,
    noise_scale: float = 1.003,
    **options: Unpack[Options],
) -> Tensor:
    """Heun with noise added before each step in [sigma_from, sigma_to] (EDM, algorithm 2)."""
    noise, draws = noise_source(options.get("generator")), count()
    gamma = min(churn / max(len(sigmas) - 1, 1), math.sqrt(2) - 1)

    def stir(x: Tensor, sigma: float) -> tuple[Tensor, float]:
        if not sigma_from <= sigma <= sigma_to or gamma == 0:
            return x, sigma
        raised = sigma * (1 + gamma)
        spread = noise_scale * math.sqrt(raised**2 - sigma**2)
        return x + spread * noise(x, next(draws)), raised

    return walk(denoiser, x, sigmas, cond, _heun(denoiser, cond), churn=stir, options=options)
