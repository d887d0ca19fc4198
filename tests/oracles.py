"""Shared oracles: the mixture of the solver spec and a reference ODE solution."""

import math

import torch
from torch import Tensor

from stillhouse.process import Denoiser, GaussianMixture


def spec_mixture() -> GaussianMixture:
    """One-dimensional, three modes, uneven: means (-1, .3, 1.2)."""
    return GaussianMixture(
        torch.tensor([[-1.0], [0.3], [1.2]], dtype=torch.float64),
        torch.tensor([0.3, 0.2, 0.4], dtype=torch.float64),
        torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64),
    )


def rk4_reference(
    denoiser: Denoiser, x: Tensor, sigma: float, to: float, steps: int = 8000
) -> Tensor:
    """The probability-flow ODE dx/d(ln sigma) = x - D by classical Runge-Kutta in ln sigma."""
    h = math.log(to / sigma) / steps

    def slope(x: Tensor, log_sigma: float) -> Tensor:
        return x - denoiser(x, torch.tensor(math.exp(log_sigma), dtype=torch.float64), None)

    for i in range(steps):
        u = math.log(sigma) + i * h
        k1 = slope(x, u)
        k2 = slope(x + h / 2 * k1, u + h / 2)
        k3 = slope(x + h / 2 * k2, u + h / 2)
        k4 = slope(x + h * k3, u + h)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x
