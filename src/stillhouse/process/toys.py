"""Two-dimensional targets as Gaussian mixtures, so that their denoiser is exact."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stillhouse.process.analytic import GaussianMixture


def _curve(points: Tensor, std: float, labels: Tensor | None = None) -> GaussianMixture:
    count = len(points)
    return GaussianMixture(points, torch.full((count,), std), torch.ones(count), labels)


def _circle(angle: Tensor, radius: float | Tensor = 1.0) -> Tensor:
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1)


def _ramp(count: int, end: float) -> Tensor:
    return torch.linspace(0, end, count, dtype=torch.float64)


def moons() -> GaussianMixture:
    """Two interleaved half circles; the label is the moon."""
    upper = _circle(_ramp(40, math.pi)) - torch.tensor([0.5, 0.25])
    lower = torch.tensor([0.5, 0.25]) - _circle(_ramp(40, math.pi))
    labels = torch.arange(80) // 40
    return _curve(torch.cat([upper, lower]), 0.06, labels)


def ring() -> GaussianMixture:
    """Eight Gaussians on a circle; the label is the Gaussian."""
    return _curve(_circle(_ramp(9, 2 * math.pi)[:-1]), 0.1, torch.arange(8))


def spiral() -> GaussianMixture:
    """One arm, one and three quarter turns."""
    turn = _ramp(160, 1.0).sqrt()
    return _curve(_circle(turn * 3.5 * math.pi, 0.1 + 1.1 * turn), 0.04)


def checkerboard() -> GaussianMixture:
    """The dark squares of a 4 x 4 board, each a lattice of narrow Gaussians."""
    cell = (torch.arange(5, dtype=torch.float64) + 0.5) / 10
    inside = torch.cartesian_prod(cell, cell)
    corners = [(i, j) for i in range(4) for j in range(4) if (i + j) % 2 == 0]
    squares = [inside + torch.tensor([i / 2 - 1, j / 2 - 1]) for i, j in corners]
    return _curve(torch.cat(squares), 0.035)


def three_modes() -> GaussianMixture:
    """Three uneven modes on a line, to measure solvers with; not one of the plane's targets."""
    means = torch.tensor([[-1.0], [0.3], [1.2]], dtype=torch.float64)
    stds = torch.tensor([0.3, 0.2, 0.4], dtype=torch.float64)
    return GaussianMixture(means, stds, torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64))


TOYS: dict[str, Callable[[], GaussianMixture]] = {
    "moons": moons,
    "ring": ring,
    "spiral": spiral,
    "checkerboard": checkerboard,
}
