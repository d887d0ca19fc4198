"""SFD: a student learns to take its teacher's walk in few steps (Zhou et al. 2024).

From x_0 = t_0 noise, with y_i the teacher's state at t_i, for each step of the student

    x_(i+1) = x_i + (t_(i+1) - t_i) (x_i - D(x_i, t_i))/t_i
    loss    = |x_(i+1) - y_(i+1)|, summed over the elements of a sample

is one update, and the next step begins at x_(i+1), detached: the student learns to mend its own
errors, and no gradient crosses steps. With AFS the first step is analytical and not trained.
SFD-v draws the number of timestamps anew for each batch and tells the student.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.distill.grids import Grids, evaluations_of
from stillhouse.distill.trajectories import (
    Evaluations,
    Kept,
    Start,
    Trajectories,
    walk_evaluations,
    walk_from,
    with_steps,
)
from stillhouse.engine.loop import Engine
from stillhouse.engine.updates import Loss
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.objectives.consistency import pseudo_huber
from stillhouse.process import Condition, Denoiser, keyed_uniform
from stillhouse.solvers.walk import Point, analytical_slope, first_order, level

NAME = "student"  # of the one network

Distance = Callable[[Tensor], Tensor]  # differences [B, ...] -> [B]


def l1(difference: Tensor) -> Tensor:
    """Absolute values, summed: the paper's."""
    return difference.flatten(1).abs().sum(1)


def l2(difference: Tensor) -> Tensor:
    """Squares, summed."""
    return difference.flatten(1).square().sum(1)


def huber(difference: Tensor) -> Tensor:
    """sqrt(sum of squares + c^2 d) - c sqrt(d) over d elements (Song & Dhariwal 2023)."""
    return difference[0].numel() ** 0.5 * pseudo_huber(difference, 0.00054)


DISTANCES: dict[str, Distance] = {"l1": l1, "l2": l2, "huber": huber}


def euler_step(
    denoiser: Denoiser, x: Tensor, sigma: float, sigma_next: float, cond: Condition | None
) -> Tensor:
    """As `sample_euler` takes it."""
    return first_order(Point(sigma, x, denoiser(x, level(sigma), cond)), sigma_next)


def analytical_step(x: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """The first step without an evaluation (AFS), as `sample_euler` takes it."""
    return first_order(Point(sigma, x, x - sigma * analytical_slope(x, sigma)), sigma_next)


@dataclass
class SFD:
    """What the engine drives: one trajectory per batch, one update per student step."""

    student: nn.Module  # a denoiser; starts as the teacher
    trajectories: Trajectories
    grids: Grids
    timestamps: tuple[int, ...]  # one number, or for SFD-v those to draw from
    world: World
    seed: int = 0
    afs: bool = True
    told: bool = False  # whether the student is told the number of timestamps
    distance: Distance = l1
    perceptual: Callable[[Tensor, Tensor], Tensor] | None = None  # [B], added at the last step
    kept: Kept | None = None  # where trajectories are kept, if starts come again
    losses: dict[str, list[Tensor]] = field(default_factory=dict)  # since the last log line

    def __post_init__(self) -> None:
        if not self.timestamps:
            raise UserError("name one number of timestamps or more to distil into")
        for count in self.timestamps:
            evaluations_of(count, afs=self.afs)
        self.student.train()

    @property
    def evaluations_per_image(self) -> Evaluations:
        """Over all numbers of timestamps, which are equally likely."""
        own = fmean(evaluations_of(count, afs=self.afs) for count in self.timestamps)
        walks = fmean(walk_evaluations(self.trajectories, count) for count in self.timestamps)
        return Evaluations(teacher=walks, student=own, backward=own)

    def modules(self) -> Mapping[str, nn.Module]:
        return {NAME: self.student}

    def timestamps_at(self, images: int) -> int:
        """How many there are in the batch that begins with this key: the same on every process."""
        return self.timestamps[self._place_at(images)]

    def _place_at(self, key: int) -> int:
        """By chance, among the numbers of timestamps."""
        drawn = float(keyed_uniform([key], seed=self.seed, purpose="distill/timestamps"))
        return int(drawn * len(self.timestamps))

    def _timestamps_of(self, batch: Start) -> int:
        """By the first row of the whole batch: starts that come again have the same number."""
        share = len(batch.key)
        first = int(batch.key[0]) - self.world.rank * share
        if self.kept is None:
            return self.timestamps_at(first)
        # In turn: of few batches, chance might leave a number out for good. Each round begins at
        # another number: classes are dealt in turn too, and one might never hear the others.
        turn, place = divmod(first // (share * self.world.size), len(self.timestamps))
        return self.timestamps[(self._place_at(turn) + place) % len(self.timestamps)]

    def step(self, batch: Start, engine: Engine) -> None:
        start = batch.to(self.world.device)
        count = self._timestamps_of(batch)
        grid: list[float] = self.grids.student(count).tolist()
        x, *goals = walk_from(start, count, self.trajectories, self.grids, self.kept, self.world)
        cond = with_steps(start.condition, count, x) if self.told else start.condition
        for i, (ends, goal) in enumerate(zip(pairwise(grid), goals, strict=True)):
            if i == 0 and self.afs:
                x = analytical_step(x, *ends)
                continue
            loss = self._loss(engine, *ends, last=i == count - 2)
            x, per_sample = engine.update(NAME, loss, (x, goal, cond))
            if engine.skips_in_a_row:  # on every process; what follows would not be finite either
                return
            self.losses.setdefault(f"timestamps{count}/step{i}", []).append(per_sample)

    def _loss(self, engine: Engine, sigma: float, sigma_next: float, *, last: bool) -> Loss:
        denoiser: Any = engine[NAME]

        def loss(rows: tuple[Tensor, Tensor, Condition | None]) -> tuple[Tensor, Any]:
            x, goal, cond = rows
            reached = euler_step(denoiser, x, sigma, sigma_next, cond)
            per_sample = self.distance(reached - goal)
            if last and self.perceptual is not None:
                # The authors add it to the difference of every element.
                per_sample = per_sample + goal[0].numel() * self.perceptual(reached, goal)
            return per_sample, (reached, per_sample)

        return loss

    def report(self) -> dict[str, float]:
        """The mean loss of every step, over all processes."""
        losses, self.losses = self.losses, {}
        if not losses:
            return {}
        sums = [[float(sum(p.sum() for p in ps)), sum(map(len, ps))] for ps in losses.values()]
        total = self.world.sum(torch.tensor(sums, dtype=torch.float64))
        return dict(zip(losses, (total[:, 0] / total[:, 1]).tolist(), strict=True))
