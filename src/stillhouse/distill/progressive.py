"""Progressive distillation: one step of the student for two of its teacher (Salimans & Ho 2022).

Where two Euler (DDIM) steps of the teacher lead from x at t to x'' at t'', one step of a student
with D = x0* leads as well:

    x'' = (t''/t) x + (1 - t''/t) x0*,   so   x0* = (x'' - (t''/t) x)/(1 - t''/t)
    loss = max(1/t^2, 1) |D(x, t) - x0*|^2, summed over the elements of a sample

with 1/t^2 the signal-to-noise ratio, truncated so that x0 counts in the noise too (the paper's
algorithm 2 and section 4). Once a student with n steps has learnt that, it is the teacher of one
with n/2: each such stage is a run of its own, and `halvings` lists them.

The paper noises data to get x; here there is none. x is a state on the teacher's own walk from
noise, at a step that is drawn for each sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.distill.grids import Grids, evaluations_of
from stillhouse.distill.sfd import NAME, l2
from stillhouse.distill.trajectories import Evaluations, Kept, Start, Teacher, walk_from
from stillhouse.engine.loop import Engine
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.process import Condition, Denoiser, Record, keyed_uniform
from stillhouse.process.predictions import rows
from stillhouse.solvers import sample_euler

# ---------------------------------------------------------------- stages


def halvings(first: int, last: int) -> list[int]:
    """The steps of each stage's student: from a teacher of `first` steps down to `last`."""
    stages, wanted = [first], max(last, 1)
    while stages[-1] % 2 == 0 and stages[-1] > wanted:
        stages.append(stages[-1] // 2)
    if stages[-1] != last or first == last:
        raise UserError(
            f"{first} steps, halved again and again, do not come down to {last}: begin with "
            f"{wanted} times a power of 2, such as {8 * wanted}"
        )
    return stages[1:]


@dataclass(frozen=True)
class Nested:
    """The grids of a whole chain of stages: those of its last student, refined.

    A student must be walked at the levels it was trained at when it becomes a teacher. Polynomial
    grids contain each other as they are, but native ones need not: a flow's two steps begin at
    times 1000 and 1, its four at 1000, 667, 334 and 1.
    """

    grids: Grids
    last: int  # steps of the last student, which samples on `grids.student(last + 1)`

    def student(self, timestamps: int) -> Tensor:
        return self.teacher(timestamps, 1)

    def teacher(self, timestamps: int, refinement: int) -> Tensor:
        factor, left = divmod(timestamps - 1, self.last)
        if left:
            raise UserError(f"{timestamps - 1} steps are no multiple of the last {self.last}")
        fine = self.grids.teacher(self.last + 1, factor * refinement)
        fine[::refinement] = self.grids.teacher(self.last + 1, factor)  # to the last bit
        return fine

    def start(self, noise: Tensor, sigma: float) -> Tensor:
        return self.grids.start(noise, sigma)


# ---------------------------------------------------------------- one step of each walk


GOLDEN = 0.6180339887498949  # (sqrt(5) - 1)/2, whose multiples lie evenly on a circle of 1


@dataclass(frozen=True, eq=False)
class Stretch(Record):
    """One step of a walk for every sample, each at its own levels."""

    x: Tensor
    sigma: Tensor  # [B]
    x_next: Tensor
    sigma_next: Tensor  # [B]
    index: Tensor  # [B] which step it is, from 0
    condition: Condition | None = None


def drawn_stretch(states: list[Tensor], grid: Tensor, start: Start, seed: int) -> Stretch:
    """Which step of its walk a sample gets follows from (seed, key); each is as likely.

    A walk that comes again is dealt its other steps, in time all of them as often.
    """
    drawn = keyed_uniform(start.key, seed=seed, purpose="distill/stretch")
    if start.turn is not None:
        drawn = (drawn + start.turn.cpu().double() * GOLDEN) % 1
    index = (drawn * (len(grid) - 1)).long()

    def at(levels: Tensor) -> Tensor:
        return torch.stack([states[i][row] for row, i in enumerate(levels.tolist())])

    following = index + 1
    found = Stretch(at(index), grid[index], at(following), grid[following], index, start.condition)
    return found.to(states[0].device)


class StepLosses:
    """The mean loss of every step since the last log line."""

    def __init__(self, timestamps: int, world: World) -> None:
        self.timestamps, self.world = timestamps, world
        self.sums = torch.zeros(2, timestamps - 1, dtype=torch.float64)  # losses, and how many

    def add(self, index: Tensor, per_sample: Tensor) -> None:
        both = torch.stack([per_sample.double(), torch.ones_like(per_sample).double()])
        self.sums.index_add_(1, index.cpu(), both.cpu())

    def report(self) -> dict[str, float]:
        """Over all processes, of the steps that were drawn."""
        sums, counts = self.world.sum(self.sums).tolist()
        self.sums.zero_()
        name = f"timestamps{self.timestamps}/step"
        return {f"{name}{i}": s / n for i, (s, n) in enumerate(zip(sums, counts, strict=True)) if n}


# ---------------------------------------------------------------- the task


@dataclass
class Progressive:
    """One stage, as the engine drives it: one walk of the teacher and one update per batch.

    An image costs 2n evaluations of the teacher for its walk, and one forward and one backward of
    the student. The student samples with `sample_euler` on `grids.student(steps + 1)`.
    """

    student: nn.Module  # a denoiser; starts as the teacher
    teacher: Denoiser  # frozen; in later stages the student of the stage before
    grids: Grids  # in a chain of stages, ones that contain each other: polynomial or `Nested`
    steps: int  # n, of the student
    world: World
    seed: int = 0
    kept: Kept | None = None  # where walks are kept, if starts come again
    losses: StepLosses = field(init=False)

    def __post_init__(self) -> None:
        evaluations_of(self.steps + 1, afs=False)
        self.losses = StepLosses(self.steps + 1, self.world)
        self.student.train()

    @property
    def trajectories(self) -> Teacher:
        """The teacher's 2n steps, seen at every second level."""
        return Teacher(self.teacher, self.grids, 2, sample_euler, lower_order_final=False)

    @property
    def evaluations_per_image(self) -> Evaluations:
        return Evaluations(teacher=2 * self.steps, student=1, backward=1)

    def modules(self) -> Mapping[str, nn.Module]:
        return {NAME: self.student}

    def step(self, batch: Start, engine: Engine) -> None:
        start, denoiser = batch.to(self.world.device), engine[NAME]

        def loss(part: Stretch) -> tuple[Tensor, Any]:
            answer = denoiser(part.x, part.sigma, part.condition)
            per_sample = truncated_snr(part.sigma).to(answer) * l2(answer - landing(part))
            return per_sample, per_sample

        levels = self.steps + 1
        states = walk_from(start, levels, self.trajectories, self.grids, self.kept, self.world)
        taken = drawn_stretch(states, self.grids.student(levels), start, self.seed)
        per_sample = engine.update(NAME, loss, taken)
        if not engine.skips_in_a_row:
            self.losses.add(taken.index, per_sample)

    def report(self) -> dict[str, float]:
        """The mean loss of every step, over all processes."""
        return self.losses.report()


def landing(stretch: Stretch) -> Tensor:
    """x0*: the answer at `x` for which one Euler step lands at `x_next`."""
    ratio = stretch.sigma_next / stretch.sigma
    rest = stretch.x_next - rows(ratio, stretch.x) * stretch.x
    return rest / rows(1 - ratio, stretch.x)


def truncated_snr(sigma: Tensor) -> Tensor:
    """max(1/sigma^2, 1): a weight of x0 that never vanishes in the noise."""
    return sigma.pow(-2).clamp(min=1)
