"""Consistency distillation: every state of the teacher's walk leads to its end (Song et al. 2023).

With y_i the teacher's state at t_i, on levels t_0 > ... > t_(N-1) = e, and f(x, t) the student read
as a consistency function, which is x at t = e,

    loss = d(f(y_i, t_i), stop(f(y_(i+1), t_(i+1))))

for an i that is drawn for each sample, each as likely. The paper noises data to t_i, and takes one
step of the teacher's solver from there; here there is no data, and both states are neighbours on
the teacher's walk from noise. The paper's target has averaged weights: here it is the student
itself without gradient, as Song & Dhariwal 2023 (section 3.2) found to be better in training.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from stillhouse.distill.grids import Grids, evaluations_of
from stillhouse.distill.progressive import StepLosses, Stretch, drawn_stretch
from stillhouse.distill.sfd import NAME, Distance, huber
from stillhouse.distill.trajectories import (
    Evaluations,
    Kept,
    Start,
    Trajectories,
    walk_evaluations,
    walk_from,
)
from stillhouse.engine.loop import Engine
from stillhouse.engine.world import World
from stillhouse.objectives.consistency import Consistent
from stillhouse.objectives.consistency import teacher as without_gradient


@dataclass
class ConsistencyDistillation:
    """What the engine drives: one walk of the teacher and one update per batch.

    An image costs the evaluations of the teacher's walk (2 (N - 1) of Heun's on the student's
    levels), two forwards of the student, one of them for the target, and one backward. The student
    samples with `sample_renoise`, on a part of its levels that ends with the last of them.
    """

    student: nn.Module  # a denoiser; starts as the teacher
    trajectories: Trajectories  # as of a `Teacher` with refinement 1 and Heun: the paper's
    grids: Grids
    timestamps: int  # N; the paper has 18 for CIFAR-10
    world: World
    seed: int = 0
    distance: Distance = huber
    kept: Kept | None = None  # where walks are kept, if starts come again
    losses: StepLosses = field(init=False)

    def __post_init__(self) -> None:
        evaluations_of(self.timestamps, afs=False)
        self.losses = StepLosses(self.timestamps, self.world)
        self.student.train()

    @property
    def evaluations_per_image(self) -> Evaluations:
        walk = walk_evaluations(self.trajectories, self.timestamps)
        return Evaluations(teacher=walk, student=2, backward=1)

    def modules(self) -> Mapping[str, nn.Module]:
        return {NAME: self.student}

    def step(self, batch: Start, engine: Engine) -> None:
        start, denoiser = batch.to(self.world.device), engine[NAME]
        function = Consistent(denoiser, float(self.grids.student(self.timestamps)[-1]))

        def loss(part: Stretch) -> tuple[Tensor, Any]:
            goal = without_gradient(function, part.x_next, part.sigma_next, part.condition)
            per_sample = self.distance(function(part.x, part.sigma, part.condition) - goal)
            return per_sample, per_sample

        states = walk_from(
            start, self.timestamps, self.trajectories, self.grids, self.kept, self.world
        )
        taken = drawn_stretch(states, self.grids.student(self.timestamps), start, self.seed)
        per_sample = engine.update(NAME, loss, taken)
        if not engine.skips_in_a_row:
            self.losses.add(taken.index, per_sample)

    def report(self) -> dict[str, float]:
        """The mean loss of every step, over all processes."""
        return self.losses.report()
