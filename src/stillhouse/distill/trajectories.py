"""Where a teacher's walk passes: its states at the student's timestamps, from keyed noise.

A maker of trajectories takes first states, the number of timestamps N and a condition, and gives
the N - 1 states that follow. `Teacher` makes them with any solver; a student of an earlier stage,
run with Euler, is a teacher like any other (`earlier_student`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from stillhouse.distill.grids import Grids
from stillhouse.engine.world import World
from stillhouse.files import write_whole
from stillhouse.process import Condition, Denoiser, Record, keyed_normal, keyed_uniform
from stillhouse.solvers import Counted, Progress, sample_dpmpp_3m, sample_euler

# ---------------------------------------------------------------- where walks begin


@dataclass(frozen=True, eq=False)
class Start(Record):
    """A batch without data: what a walk needs to begin."""

    noise: Tensor  # [B, ...], unit
    key: Tensor  # [B] which starts they are
    condition: Condition | None = None
    turn: Tensor | None = None  # [B] how often they have come before; None: never

    @property
    def ids(self) -> Tensor:
        """By which the log names samples that had to be skipped."""
        return self.key


class Item(NamedTuple):
    """A batch and the position after it."""

    batch: Start
    state: dict[str, Any]


def no_condition(key: Tensor) -> None:
    """Of unconditional models."""


@dataclass(frozen=True)
class Labels:
    """One class per sample, each as likely."""

    classes: int
    seed: int

    def __call__(self, key: Tensor) -> Condition:
        drawn = keyed_uniform(key, seed=self.seed, purpose="distill/label")
        return Condition(label=(drawn * self.classes).long())


@dataclass(frozen=True)
class Starts:
    """Starts without end: row r depends on (seed, key[r]) alone, its condition on key[r]."""

    shape: tuple[int, ...]
    seed: int
    conditions: Callable[[Tensor], Condition | None] = no_condition
    distinct: int = 0  # after so many starts the first comes again; 0: they never do

    def rows(self, key: Tensor, turn: Tensor | None = None) -> Start:
        noise = keyed_normal(self.shape, key, seed=self.seed, purpose="distill/start")
        return Start(noise, key, self.conditions(key), turn)

    def feed(self, images: int, batch: int, world: World) -> Iterator[Item]:
        """This process's shares of batches of `batch`, after `images`."""
        share = batch // world.size
        while True:
            first = images + world.rank * share
            images += batch
            seen = torch.arange(first, first + share)
            again = (seen % self.distinct, seen // self.distinct) if self.distinct else (seen,)
            yield Item(self.rows(*again), {"images": images})


# ---------------------------------------------------------------- teachers


class Trajectories(Protocol):
    """States [B, ...] at the student's timestamps t_1 .. t_(N-1), from `x` at t_0."""

    def __call__(self, x: Tensor, timestamps: int, cond: Condition | None) -> Sequence[Tensor]: ...


@dataclass(frozen=True)
class Teacher:
    """A denoiser, guided or not, that a solver walks along the refined grid."""

    denoiser: Denoiser
    grids: Grids
    refinement: int = 4
    solver: Callable[..., Tensor] = sample_dpmpp_3m
    lower_order_final: bool = True  # as the paper's targets are made
    afs: bool = False
    told: bool = False  # the number of its own timestamps, where it is such a student itself

    def __call__(self, x: Tensor, timestamps: int, cond: Condition | None) -> list[Tensor]:
        if getattr(self.denoiser, "training", False):
            raise ValueError("a teacher in training mode has dropout: pass it through `frozen`")
        grid = self.grids.teacher(timestamps, self.refinement)
        cond = with_steps(cond, len(grid), x) if self.told else cond
        states: list[Tensor] = []

        def keep(progress: Progress) -> None:
            if progress.step % self.refinement == 0:
                states.append(progress.x)

        # Solvers keep no graph unless they are asked to.
        how = {"afs": self.afs, "lower_order_final": self.lower_order_final}
        self.solver(self.denoiser, x, grid, cond, callback=keep, **how)
        return states


@dataclass(frozen=True)
class Kept:
    """Trajectories on disk: what starts that come again would need anew is computed once.

    A file is known by the keys of its rows and the number of timestamps, so that any number of
    processes finds its own; the folder belongs to one teacher, grid and list of starts.
    """

    folder: Path

    def __call__(
        self, key: Tensor, timestamps: int, make: Callable[[], Sequence[Tensor]], world: World
    ) -> list[Tensor]:
        """Those of the rows with these keys: read, or made and written.

        If one process has none, all make theirs: a sharded teacher answers all or nobody.
        """
        first, last = int(key[0]), int(key[-1])
        file = self.folder / f"{first:09d}-{last:09d}-{timestamps}.safetensors"
        if world.total(not file.is_file()):
            made = {str(i): state.cpu() for i, state in enumerate(make())}
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, save(made))
        found = load(file.read_bytes())
        return [found[str(i)] for i in range(len(found))]


def walk_from(
    start: Start,
    timestamps: int,
    trajectories: Trajectories,
    grids: Grids,
    kept: Kept | None,
    world: World,
) -> list[Tensor]:
    """All states of the walk, its first among them: made, or read where they are kept."""
    x = grids.start(start.noise, float(grids.student(timestamps)[0]))

    def make() -> Sequence[Tensor]:
        return trajectories(x, timestamps, start.condition)

    following = make() if kept is None else kept(start.key, timestamps, make, world)
    return [x, *(state.to(x.device) for state in following)]


def earlier_student(
    student: Denoiser, grids: Grids, refinement: int = 3, *, afs: bool, told: bool
) -> Teacher:
    """The teacher of a second stage: a student with K (N - 1) + 1 timestamps, as it samples."""
    return Teacher(student, grids, refinement, sample_euler, False, afs, told)


def frozen(network: nn.Module) -> nn.Module:
    """The network as a teacher, in place: without dropout, without gradient."""
    return network.eval().requires_grad_(False)


def with_steps(cond: Condition | None, timestamps: int, like: Tensor) -> Condition:
    """The condition that also tells every row of `like` the number of timestamps."""
    steps = torch.full((len(like),), timestamps, device=like.device)
    return replace(cond or Condition(), steps=steps)


# ---------------------------------------------------------------- what a walk costs


class Evaluations(NamedTuple):
    """What one image of training costs on average, in network evaluations."""

    teacher: float  # forward passes, each twice the work where the teacher is guided
    student: float  # forward passes, with those of backward
    backward: float  # of the student

    def total(self, calls: int = 1, made: float = 1.0) -> float:
        """A backward pass is two forward ones; `calls` of its network make a teacher's one.

        `made`: the share of the teacher's walks that are made, where others come again.
        """
        return calls * made * self.teacher + self.student + 2 * self.backward


def walk_evaluations(trajectories: Trajectories, timestamps: int) -> int:
    """How often a teacher's walk evaluates its denoiser: counted on a walk of zeros."""
    if not isinstance(trajectories, Teacher):
        raise TypeError("only a `Teacher` says how often its walk evaluates a network")

    def nothing(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        return torch.zeros_like(x)

    counted = Counted(nothing)
    replace(trajectories, denoiser=counted)(torch.zeros(1, 1), timestamps, None)
    return counted.evaluations
