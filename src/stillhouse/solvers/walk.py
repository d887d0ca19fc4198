"""The one loop of every solver: evaluate, correct, predict, from the first sigma to the last.

A solver is a `predict` function from the recent points of the walk to the next state, and for some
a `correct` function or a `churn`. What holds for all of them is written here once:

- A first-order step is (s'/s) x + (1 - s'/s) D, never x + (s' - s) d: from a large sigma the
  latter loses the answer to rounding in float32.
- A last sigma of 0 is x = D.
- A first sigma at the cap stands for a vanished signal: that step is first order in every solver
  and leaves no history (Heun from 1e5 to 9 on unit Gaussian data gives 618; the truth is 9.06).
- The analytical first step (AFS) puts d = x / sqrt(1 + sigma^2) in place of the first evaluation.
- Order k is reached by warming up: step i uses min(k, i + 1) points. `lower_order_final` also
  bounds it by the number of steps that are left, which helps at very few steps.
- History starts empty at every call.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from stillhouse.process import SIGMA_CAP, Condition, Denoiser, NoiseSource


@dataclass(frozen=True)
class Point:
    """One evaluated point of the walk."""

    sigma: float
    x: Tensor
    denoised: Tensor

    @property
    def slope(self) -> Tensor:
        """d = (x - D)/sigma, which is dx/dsigma of the probability-flow ODE."""
        return (self.x - self.denoised) / self.sigma

    @property
    def lam(self) -> float:
        """lambda = -ln sigma, the variable of the exponential integrators."""
        return -math.log(self.sigma)


class Progress(NamedTuple):
    """What a callback sees after each step: a progress bar counts, a preview draws `denoised`."""

    step: int  # steps done, from 1
    steps: int
    sigma: float  # the level reached
    x: Tensor  # the state at that level
    denoised: Tensor  # the denoiser's last word


class Options(TypedDict, total=False):
    """Options that every solver takes."""

    generator: torch.Generator | NoiseSource | None  # only stochastic solvers draw from it
    callback: Callable[[Progress], None] | None
    afs: bool
    lower_order_final: bool
    grad: bool  # keep the graph; off by default


Predict = Callable[[Sequence[Point], float], Tensor]
Correct = Callable[[Sequence[Point], Point], Tensor]
Churn = Callable[[Tensor, float], tuple[Tensor, float]]


def level(sigma: float) -> Tensor:
    """A sigma as denoisers take it: a float64 scalar that never moves a GPU's state."""
    return torch.tensor(sigma, dtype=torch.float64)


def at_least_float32(x: Tensor) -> Tensor:
    """A state in which steps can be added up; half precision is raised."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def level_gap(sigma: float, sigma_next: float) -> float:
    """H = lambda' - lambda = ln(sigma/sigma')."""
    return math.log(sigma / sigma_next)


def first_order(point: Point, sigma_next: float) -> Tensor:
    """Euler = DDIM = DPM++ 1."""
    ratio = sigma_next / point.sigma
    return ratio * point.x + (1 - ratio) * point.denoised


def walk(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None,
    predict: Predict,
    *,
    order: int = 1,
    correct: Correct | None = None,
    churn: Churn | None = None,
    options: Options,
) -> Tensor:
    """Walks `x` along `sigmas`. `predict` sees the last points, as many as the order allows."""
    unknown = set(options) - set(Options.__annotations__)
    if unknown:
        known = ", ".join(Options.__annotations__)
        raise TypeError(f"unknown solver options {sorted(unknown)}; every solver takes {known}")
    if order < 1:
        raise ValueError(f"the order of a solver counts from 1, not {order}")
    if not x.is_floating_point():
        raise TypeError(f"the state must be floating point, not {x.dtype}")
    grid = check_grid(sigmas)
    steps = len(grid) - 1
    callback = options.get("callback")
    points: list[Point] = []
    with torch.set_grad_enabled(options.get("grad", False) and torch.is_grad_enabled()):
        x = at_least_float32(x)
        for i, (sigma, sigma_next) in enumerate(itertools.pairwise(grid)):
            if churn is not None:
                x, sigma = churn(x, sigma)
            if i == 0 and options.get("afs", False):
                denoised = x - sigma * analytical_slope(x, sigma)
            else:
                denoised = denoiser(x, level(sigma), cond)
            if correct is not None and points:
                x = correct(points, Point(sigma, x, denoised))
            points = [*points, Point(sigma, x, denoised)][-order:]
            if sigma_next == 0:
                x = denoised
            elif sigma >= SIGMA_CAP:
                x, points = first_order(points[-1], sigma_next), []
            else:
                allowed = min(order, steps - i) if options.get("lower_order_final") else order
                x = predict(points[-allowed:], sigma_next)
            if callback is not None:
                callback(Progress(i + 1, steps, sigma_next, x, denoised))
    return x


def analytical_slope(x: Tensor, sigma: float) -> Tensor:
    """The slope far from the data, where it looks like a unit Gaussian (Dockhorn et al. 2022)."""
    return x / math.sqrt(1 + sigma**2)


def check_grid(sigmas: Tensor) -> list[float]:
    """The grid as Python floats (one transfer from the device), refused if it isn't a walk."""
    sigmas = torch.as_tensor(sigmas, dtype=torch.float64)
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise ValueError(f"a walk needs a row of two or more noise levels, not {[*sigmas.shape]}")
    grid: list[float] = sigmas.tolist()
    falling = all(a > b for a, b in itertools.pairwise(grid))
    if not falling or not all(map(math.isfinite, grid)) or grid[-1] < 0:
        shown = ", ".join(f"{s:.4g}" for s in grid[:8]) + (", ..." if len(grid) > 8 else "")
        raise ValueError(f"noise levels must be finite and decrease, to no less than 0: {shown}")
    return grid


class Counted:
    """A denoiser that counts its evaluations."""

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.evaluations = 0

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        self.evaluations += 1
        return self.denoiser(x, sigma, cond)
