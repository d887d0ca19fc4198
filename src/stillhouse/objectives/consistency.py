"""Consistency training: a denoiser that lands where the probability-flow ODE ends, in one call.

The consistency function f(x, sigma) gives the end of the ODE that passes through x at sigma, so it
is the identity at sigma_min. Two neighbouring levels t > r of the same datum and the same noise
must agree; the lower one is the teacher, with the same weights and no gradient:

    loss = d(f(x0 + t noise, t), stop(f(x0 + r noise, r))) / (t - r)

| objective             | t                                | r                        | paper   |
|-----------------------|----------------------------------|--------------------------|---------|
| `ImprovedConsistency` | log-normal on a grid of N levels | the next lower level     | iCT [1] |
| `EasyConsistency`     | log-normal                       | t (1 - n(t)/q^(stage+1)) | ECT [2] |

[1] Song & Dhariwal 2023, "Improved Techniques for Training Consistency Models".
[2] Geng et al. 2024, "Consistency Models Made Easy"; starts from a trained diffusion model.

Both bring t and r closer as training proceeds. The place in that curriculum is the sample's own
key (images seen before it), so nothing is stored, and any split of the batch sees the same.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from stillhouse.objectives.base import Noised, Objective, per_sample_mean
from stillhouse.process import Batch, Condition, Denoiser, levels, predictions

DENSITY = levels.LogNormal(-1.1, 2.0)  # of both papers


@dataclass(frozen=True)
class Consistent:
    """A denoiser read as a consistency function, which is a denoiser too.

    f = (sigma_min/sigma) x + (1 - sigma_min/sigma) D, the first-order step to sigma_min. It holds
    the boundary condition f(x, sigma_min) = x exactly for any D. With c_skip and c_out of Song et
    al. 2023 (appendix C) the network's share is the same, c_out/scale = 1 - sigma_min/sigma; the
    shares of x differ by sigma_min/(4 sigma_data) at most. At and below sigma_min, f is x.
    """

    denoiser: Denoiser
    sigma_min: float

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        sigma = sigma.double().expand(len(x))
        boundary = sigma <= self.sigma_min
        # At the boundary the answer is x; the network is told a level it knows (0 has no time).
        inside = torch.where(boundary, 1.0, sigma)
        denoised = self.denoiser(x, inside, cond)
        share = predictions.rows(self.sigma_min / inside, x)
        return torch.where(
            predictions.rows(boundary, x).bool(), x, share * x + (1 - share) * denoised
        )


def pseudo_huber(difference: Tensor, c: float) -> Tensor:
    """sqrt(mean square + c^2) - c per sample ([1], section 3.3).

    The paper sums squares and takes c' = c sqrt(dimensions): its distance is ours times
    sqrt(dimensions), so here c = 0.00054 whatever the resolution.
    """
    square = per_sample_mean(difference**2)
    # (sqrt(m + c^2) - c) without its cancellation at small m.
    return square / ((square + c**2).sqrt() + c)


@dataclass(frozen=True)
class Pairs(Objective):
    """What both objectives share: agreement of two levels, and the place in the curriculum."""

    total_images: float  # over which the curriculum runs
    sigma_min: float = 0.002
    huber: float = 0.00054
    position: float | None = None  # images seen, where the curriculum should stand still

    @abstractmethod
    def lower(self, sigma: Tensor, images: Tensor) -> Tensor:
        """The teacher's level r < t for each sample."""

    def settled(self) -> Self:
        return replace(self, position=self.total_images)

    def losses(self, denoiser: Denoiser, noised: Noised) -> Tensor:
        function = Consistent(denoiser, self.sigma_min)
        t = noised.sigma
        r = self.lower(t, self._images(noised.key, t))
        taught = teacher(function, noised.at(r), r, noised.condition)
        student = function(noised.x, t, noised.condition)
        return pseudo_huber(student - taught, self.huber) / (t - r).to(student)

    def _images(self, key: Tensor | None, like: Tensor) -> Tensor:
        if self.position is not None:
            return torch.full_like(like, self.position, dtype=torch.float64)
        if key is None:
            raise ValueError("the curriculum goes by images seen: set Batch.key")
        return key.to(like.device).double()


def teacher(function: Denoiser, x: Tensor, sigma: Tensor, cond: Condition | None) -> Tensor:
    """The target, without gradient and with the dropout masks that the student will draw.

    The generators are put back afterwards, so both draw the same ([1], section 3.1).
    """
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        return function(x, sigma, cond)


@dataclass(frozen=True)
class ImprovedConsistency(Pairs):
    """iCT: a grid of levels that doubles, and neighbours on it drawn by a log-normal density."""

    sigma_max: float = 80.0
    rho: float = 7.0
    density: levels.Density = DENSITY
    first_steps: int = 10
    last_steps: int = 1280

    def steps(self, images: Tensor) -> Tensor:
        """Steps of the grid, N(k) - 1: doubling from first to last over the run ([1], 3.4)."""
        doublings = math.log2(self.last_steps // self.first_steps)
        stage = (images.double() / (self.total_images / (doublings + 1))).floor()
        return (self.first_steps * 2**stage).clamp(max=self.last_steps)

    def grid(self, index: Tensor, steps: Tensor) -> Tensor:
        """Level `index` of 0 .. steps, evenly spaced in sigma^(1/rho), the ends exact."""
        low, span = self._roots()
        sigma = (low + index / steps * span) ** self.rho
        sigma = torch.where(index <= 0, self.sigma_min, sigma)
        return torch.where(index >= steps, self.sigma_max, sigma)

    def place(self, sigma: Tensor, steps: Tensor) -> Tensor:
        """The inverse of `grid`, with fractions."""
        low, span = self._roots()
        return steps * (sigma.double() ** (1 / self.rho) - low) / span

    def _roots(self) -> tuple[float, float]:
        low = self.sigma_min ** (1 / self.rho)
        return low, self.sigma_max ** (1 / self.rho) - low

    def sigmas(self, u: Tensor, batch: Batch) -> Tensor:
        """The upper level of a pair. P(pair) is the density's mass between its levels ([1], 3.5),
        so a draw from the density between the ends is moved up to the grid."""
        steps = self.steps(self._images(batch.key, u)).to(u.device)
        ends = self.density.cdf(torch.tensor([self.sigma_min, self.sigma_max], dtype=torch.float64))
        sigma = self.density.quantile(ends[0] + u * (ends[1] - ends[0]))
        upper = self.place(sigma, steps).floor().clamp(min=0) + 1
        return self.grid(torch.minimum(upper, steps), steps)

    def lower(self, sigma: Tensor, images: Tensor) -> Tensor:
        steps = self.steps(images)
        # The tolerance forgives a sigma that went through float32.
        below = (self.place(sigma, steps) - 1e-3).ceil() - 1
        return self.grid(below.clamp(min=0), steps)


@dataclass(frozen=True)
class EasyConsistency(Pairs):
    """ECT: any level t, and r = t (1 - n(t)/q^(stage + 1)) with n(t) = 1 + k sigmoid(-b t).

    This is the sigmoid mapping of [2], eq. 18, with the defaults of its CIFAR-10 runs.
    Where r would be negative it is 0 and the teacher is the datum: at first this is denoising.
    """

    sigma_min: float = 0.0
    huber: float = 1e-6  # the paper has the plain norm, whose gradient at 0 is not a number
    density: levels.Density = DENSITY
    q: float = 2.0
    k: float = 8.0
    b: float = 1.0
    stages: int = 8

    def stage(self, images: Tensor) -> Tensor:
        """0 .. stages - 1, each as long."""
        return (
            (images.double() * (self.stages / self.total_images)).floor().clamp(0, self.stages - 1)
        )

    def sigmas(self, u: Tensor, batch: Batch) -> Tensor:
        return self.density.quantile(u)

    def lower(self, sigma: Tensor, images: Tensor) -> Tensor:
        gap = (1 + self.k * torch.sigmoid(-self.b * sigma)) * self.q ** -(self.stage(images) + 1)
        return sigma * (1 - gap).clamp(min=0)
