"""The timestamps of a student with few steps, and its teacher's finer ones, which contain them.

N timestamps t_0 > ... > t_(N-1) are N - 1 steps of one evaluation each, or N - 2 evaluations where
the first step is analytical (AFS). A teacher with refinement K walks K steps for each of those.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.process import SIGMA_CAP, Scaling, levels

SIGMA_MIN = 0.006  # where the paper's students end, not EDM's 0.002


class Grids(Protocol):
    """Grids of any number of timestamps, float64 and decreasing."""

    def student(self, timestamps: int) -> Tensor: ...
    def teacher(self, timestamps: int, refinement: int) -> Tensor:
        """K (N - 1) + 1 levels; `[::refinement]` is the student's grid."""
        ...

    def start(self, noise: Tensor, sigma: float) -> Tensor:
        """The first state, given unit noise."""
        ...


@dataclass(frozen=True)
class Polynomial:
    """The paper's: evenly spaced in sigma^(1/rho), ending above 0 (Zhou et al. 2024)."""

    sigma_min: float = SIGMA_MIN
    sigma_max: float = 80.0
    rho: float = 7.0

    @classmethod
    def of(cls, scaling: Scaling, sigma_min: float = SIGMA_MIN) -> "Polynomial":
        """From the process's own noisiest level; `sigma_min` is 0.1 for Stable Diffusion.

        For use from Python: `stillhouse distill` begins a process without such a level at 80.
        """
        if scaling.sigma_max >= SIGMA_CAP:
            raise UserError(
                "this process starts from pure noise, and a polynomial grid from there would spend "
                "its steps where nothing happens: distil on the native grid"
            )
        return cls(max(sigma_min, scaling.sigma_min), scaling.sigma_max)

    def student(self, timestamps: int) -> Tensor:
        return levels.polynomial(timestamps, self.sigma_min, self.sigma_max, self.rho)

    def teacher(self, timestamps: int, refinement: int) -> Tensor:
        return levels.refine(self.student(timestamps), refinement, self.rho)

    def start(self, noise: Tensor, sigma: float) -> Tensor:
        return sigma * noise


@dataclass(frozen=True)
class Native:
    """What a scheduler of diffusers would walk itself, ending at 0: students that open there."""

    scaling: Scaling
    rho: float = 7.0

    def student(self, timestamps: int) -> Tensor:
        return self.scaling.native_grid(timestamps - 1)

    def teacher(self, timestamps: int, refinement: int) -> Tensor:
        """Evenly in t^(1/rho), t = sigma/(1 + sigma): pure noise is as finite there as 0 is."""
        grid = self.student(timestamps)
        time = levels.refine(grid / (1 + grid), refinement, self.rho)
        fine = time / (1 - time)
        fine[::refinement] = grid
        return fine

    def start(self, noise: Tensor, sigma: float) -> Tensor:
        return self.scaling.start(noise, sigma)


@dataclass(frozen=True)
class Single:
    """From one level to 0, where the answer is the denoiser's own: one-step generators."""

    sigma: float

    def student(self, timestamps: int) -> Tensor:
        if timestamps != 2:
            raise UserError("a one-step generator is evaluated once: it knows no other walk")
        return torch.tensor([self.sigma, 0.0], dtype=torch.float64)

    def teacher(self, timestamps: int, refinement: int) -> Tensor:
        raise UserError("a one-step generator follows no walk: there is none to refine")

    def start(self, noise: Tensor, sigma: float) -> Tensor:
        return sigma * noise


def evaluations_of(timestamps: int, *, afs: bool) -> int:
    """How often a walk over so many timestamps calls the student."""
    count = timestamps - 1 - afs
    if count < 1:
        least = "3 timestamps with an analytical first step" if afs else "2 timestamps"
        raise UserError(f"{timestamps} timestamps leave nothing to train: take {least} or more")
    return count


def timestamps_for(evaluations: int, *, afs: bool) -> int:
    """The timestamps of a student that is called so often."""
    if evaluations < 1:
        raise UserError(f"a student is evaluated once or more, not {evaluations} times")
    return evaluations + 1 + afs
