"""Configs of the ways to distil. Each says which walks its students learn, and builds its task.

| `--method` | students | task |
|---|---|---|
| `sfd` | take their teacher's walk in few steps; one number of them, or several untold | `SFD` |
| `sfd-v` | the same, told how many steps there are | `SFD` |
| `progressive` | take two steps of the teacher in one, again and again | `Progressive` |
| `consistency` | say where a walk ends, with noise anew in between | `ConsistencyDistillation` |
| `emd` and its family | draw in one step: see `generators.py` | `Matching` |
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, autocast
from torch.nn.functional import interpolate

from stillhouse.config import Config
from stillhouse.distill.consistency import ConsistencyDistillation
from stillhouse.distill.grids import SIGMA_MIN, evaluations_of, timestamps_for
from stillhouse.distill.progressive import Progressive
from stillhouse.distill.sfd import DISTANCES, SFD
from stillhouse.distill.trajectories import Kept, Teacher, earlier_student
from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError
from stillhouse.metrics.perceptual import Lpips
from stillhouse.process import SIGMA_CAP, Scaling
from stillhouse.recipes.distill.generators import Emd, FDistill, ReverseKL, SidConfig
from stillhouse.recipes.distill.lessons import Lesson, Wanted, check_level
from stillhouse.recipes.parts import Dpmpp3M, Solver
from stillhouse.solvers import STOCHASTIC, sample_euler, sample_heun

WALKS = "walks"  # of the teacher, in the run's folder where they are kept
START = 80.0  # the first level of students of a process whose own is infinite


class Walked(Config):
    """What all have: where walks begin and end, and whether they come again."""

    sigma_min: PositiveFloat = SIGMA_MIN
    """Where walks end, unless they are exportable; 0.1 for Stable Diffusion."""
    sigma_max: PositiveFloat | None = None
    """Where they begin; the model's own noisiest level, or 80 where that has no signal left."""
    walks: NonNegativeInt = 0
    """Distinct walks of the teacher, kept in RUN/walks and learnt from again and again; 0: every
    walk is new. A multiple of the batch; in progressive distillation, for every stage."""

    def few_steps(self, method: str, wanted: Wanted, **how: Any) -> FewSteps:
        """Walks between these ends, without an analytical step unless `how` has one."""
        low, high = self.ends(wanted.scaling)
        return FewSteps(
            wanted.evaluations,
            method,
            sigma_min=low,
            sigma_max=high,
            guidance=wanted.guidance,
            **{"afs": False, **how},
        )

    def ends(self, scaling: Scaling) -> tuple[float, float]:
        """Where walks end and begin: at levels that the model knows."""
        if self.sigma_min != SIGMA_MIN:  # the usual end gives way: few models know it
            check_level("--method.sigma-min", self.sigma_min, scaling)
        check_level("--method.sigma-max", self.sigma_max, scaling)
        low, highest = max(self.sigma_min, scaling.sigma_min), scaling.sigma_max
        high = self.sigma_max or (START if highest >= SIGMA_CAP else highest)
        if low >= high:
            raise UserError(
                f"walks would begin at {high:g} and end at {low:g}: give a --method.sigma-min "
                "below --method.sigma-max"
            )
        return low, high

    def kept(self, lesson: Lesson) -> Kept | None:
        return Kept(lesson.folder / WALKS) if self.walks else None


class Sfd(Walked):
    """Simple and fast distillation (Zhou et al. 2024): no data, one update per step."""

    kind: Literal["sfd"] = "sfd"
    afs: bool = True
    """The first step is analytical and costs no evaluation; not with --exportable."""
    refinement: PositiveInt = 4
    """Steps of the teacher for each of the student's: K."""
    solver: Solver = Dpmpp3M()
    """Of the teacher."""
    distance: Literal["l1", "l2", "huber"] = "l1"
    """Between where the student and its teacher arrive."""
    lpips: bool = False
    """Also compare how images look, at the last step: for pixels, in a second stage."""

    @property
    def told(self) -> bool:
        return False

    def walk(self, wanted: Wanted) -> FewSteps:
        exportable = wanted.exportable
        check_solver(self.solver)
        if exportable and (self.told or wanted.told):
            raise UserError(
                "plain diffusers cannot tell a student how many steps there are: give --method "
                "sfd, or leave --exportable out and sample with Stillhouse"
            )
        if exportable and (self.sigma_min, self.sigma_max) != (SIGMA_MIN, None):
            raise UserError(
                "an exportable student walks between the ends that its scheduler has: leave "
                "--method.sigma-min and --method.sigma-max out"
            )
        return self.few_steps(
            self.kind,
            wanted,
            afs=self.afs and not exportable,
            told=self.told or wanted.told,
            grid="native" if exportable else "polynomial",
        )

    def task(self, lesson: Lesson) -> SFD:
        walk = lesson.walk
        counts = tuple(timestamps_for(n, afs=walk.afs) for n in walk.evaluations)
        grids = walk.grids(lesson.scaling)
        if lesson.earlier is None:
            lowered, solve = self.solver.lower_order_final, self.solver.build()
            teacher = Teacher(lesson.teacher, grids, self.refinement, solve, lowered)
        else:
            check_second_stage(lesson, lesson.earlier, self.refinement)
            if self.solver != type(self).model_fields["solver"].default:
                raise UserError(
                    "a teacher that is a student itself walks as it was taught to: leave "
                    "--method.solver out"
                )
            how = {"afs": lesson.earlier.afs, "told": lesson.earlier.told}
            teacher = earlier_student(lesson.teacher, grids, self.refinement, **how)
        return SFD(
            lesson.student,
            teacher,
            grids,
            counts,
            lesson.world,
            lesson.seed,
            walk.afs,
            walk.told,
            DISTANCES[self.distance],
            how_it_looks(lesson) if self.lpips else None,
            self.kept(lesson),
        )


class SfdV(Sfd):
    """SFD-v: one student for several numbers of steps, which it is told."""

    kind: Literal["sfd-v"] = "sfd-v"  # type: ignore[assignment]

    @property
    def told(self) -> bool:
        return True


class ProgressiveConfig(Walked):
    """Progressive distillation (Salimans & Ho 2022) without data: every stage halves the steps."""

    kind: Literal["progressive"] = "progressive"
    first: PositiveInt = 32
    """Steps of the first teacher: a power of 2 times the student's."""

    def walk(self, wanted: Wanted) -> FewSteps:
        check_plain(self.kind, wanted)
        return self.few_steps(self.kind, wanted)

    def task(self, lesson: Lesson) -> Progressive:
        walk, (steps,) = lesson.walk, lesson.walk.evaluations
        if lesson.earlier is not None:
            check_second_stage(lesson, lesson.earlier, 2)
        grids = walk.grids(lesson.scaling)
        return Progressive(
            lesson.student,
            lesson.teacher,
            grids,
            steps,
            lesson.world,
            lesson.seed,
            self.kept(lesson),
        )


class ConsistencyConfig(Walked):
    """Consistency distillation (Song et al. 2023) without data."""

    kind: Literal["consistency"] = "consistency"
    timestamps: PositiveInt = 19
    """Levels of the teacher's walk, between neighbours of which the student must agree; with 19,
    walks of 1, 2, 3, 6 and 9 evaluations keep to them."""
    solver: Literal["heun", "euler"] = "heun"
    """Of the teacher."""
    distance: Literal["l1", "l2", "huber"] = "huber"
    """Between the student's two answers."""

    def walk(self, wanted: Wanted) -> FewSteps:
        check_plain(self.kind, wanted)
        return self.few_steps(self.kind, wanted, step="renoise")

    def task(self, lesson: Lesson) -> ConsistencyDistillation:
        if lesson.earlier is not None:
            raise UserError("consistency is learnt from a model that takes many steps, no student")
        grids = lesson.walk.grids(lesson.scaling)
        solve = sample_heun if self.solver == "heun" else sample_euler
        return ConsistencyDistillation(
            lesson.student,
            Teacher(lesson.teacher, grids, 1, solve, lower_order_final=False),
            grids,
            self.timestamps,
            lesson.world,
            lesson.seed,
            DISTANCES[self.distance],
            self.kept(lesson),
        )


Method = Annotated[
    Sfd | SfdV | ProgressiveConfig | ConsistencyConfig | Emd | ReverseKL | SidConfig | FDistill,
    Field(discriminator="kind"),
]


def check_plain(method: str, wanted: Wanted) -> None:
    if wanted.told:
        raise UserError(f"--method {method} cannot begin with a student that is told its steps")
    if wanted.exportable:
        raise UserError(f"--exportable is for --method sfd, not for {method}")


def check_solver(solver: Solver) -> None:
    """What a teacher shows must follow from the start of its walk, and from its own answers."""
    if solver.kind in STOCHASTIC:
        raise UserError(
            f"--method.solver {solver.kind} draws noise on its way, and a student can only learn "
            "where a walk leads that has none: give another, such as heun"
        )
    if solver.afs:
        raise UserError(
            "a teacher evaluates its first step: leave --method.solver.afs out (the student's own "
            "is --method.afs)"
        )


def how_it_looks(lesson: Lesson) -> Callable[[Tensor, Tensor], Tensor]:
    """LPIPS of images at 224 pixels, as the paper has it."""
    lpips = Lpips.load(device=lesson.world.device)

    def perceptual(reached: Tensor, goal: Tensor) -> Tensor:
        both = [images.clamp(-1, 1).expand(-1, 3, -1, -1) for images in (reached, goal)]
        large = [interpolate(images, 224, mode="bilinear") for images in both]
        with autocast(reached.device.type, enabled=False):
            return lpips.distance(*large)

    return perceptual


def check_second_stage(lesson: Lesson, earlier: FewSteps, refinement: int) -> None:
    """The teacher's own walk must pass through the student's timestamps."""
    walk = lesson.walk
    if earlier.grid == "single":
        raise UserError(
            "the teacher is a one-step generator, which walks nowhere: distil the model that it "
            "was made from"
        )
    theirs = (earlier.grid, earlier.sigma_min, earlier.sigma_max, earlier.rho)
    if theirs != (walk.grid, walk.sigma_min, walk.sigma_max, walk.rho):
        raise UserError(
            f"the teacher is a student that walks from {earlier.sigma_max:g} to "
            f"{earlier.sigma_min:g} on a {earlier.grid} grid: give it the same"
        )
    for n in walk.evaluations:
        timestamps = timestamps_for(n, afs=walk.afs)
        fine = refinement * (timestamps - 1) + 1
        if (needed := evaluations_of(fine, afs=earlier.afs)) not in earlier.evaluations:
            known = ", ".join(map(str, earlier.evaluations))
            raise UserError(
                f"a student of {n} evaluations at --method.refinement {refinement} follows a "
                f"teacher of {needed}, and this one knows {known}"
            )
        asked = walk.grids(lesson.scaling).teacher(timestamps, refinement)
        learnt = earlier.levels(needed, lesson.process)
        if not torch.allclose(asked, learnt, rtol=1e-9, atol=0):
            raise UserError(
                f"the teacher is a student of {needed} steps on the {earlier.grid} grid, which "
                f"does not pass through the levels of {n}: distil both stages without "
                "--exportable, or this one from the model that taught its teacher"
            )
