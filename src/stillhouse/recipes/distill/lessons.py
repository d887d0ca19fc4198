"""What a way to distil is given: what is asked of a student, and the networks of its lesson."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from stillhouse.distill.walks import FewSteps
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.process import Denoiser, NetworkDenoiser, Scaling


@dataclass(frozen=True)
class Lesson:
    """What a task is made of."""

    student: NetworkDenoiser
    teacher: Denoiser  # guided, where guidance is to be learnt
    process: Scaling  # of the teacher; an exportable student may know a part of it
    walk: FewSteps  # of the student
    earlier: FewSteps | None  # of the teacher, where it is a student itself
    world: World
    seed: int
    folder: Path  # of the run
    score: nn.Module | None = None  # of a generator, where it is adapters on the teacher

    @property
    def scaling(self) -> Scaling:
        return self.student.scaling


@dataclass(frozen=True)
class Wanted:
    """What is asked of a student before there is one."""

    scaling: Scaling  # of its teacher
    evaluations: tuple[int, ...]
    guidance: dict[str, Any] | None  # which it is to learn
    exportable: bool
    told: bool  # whether its network takes the number of timestamps already


def check_level(flag: str, level: float | None, scaling: Scaling) -> None:
    """Beyond its own levels a network would be told another one than there is."""
    if level and not scaling.sigma_min <= level <= scaling.sigma_max:
        raise UserError(
            f"{flag} {level:g} is no level of this model, whose levels go from "
            f"{scaling.sigma_min:g} to {scaling.sigma_max:g}: leave it out, or give one of these"
        )
