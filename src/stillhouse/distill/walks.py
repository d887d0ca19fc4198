"""How a few-step student is walked: what `few_steps.json` beside its weights says.

Students are trained for their own timestamps and no others; one that is told how many there are
must be told the same when it samples.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from stillhouse.distill.grids import SIGMA_MIN, Grids, Native, Polynomial, Single, timestamps_for
from stillhouse.distill.trajectories import with_steps
from stillhouse.errors import UserError
from stillhouse.process import Condition, Scaling

GridKind = Literal["polynomial", "native", "single"]
StepKind = Literal["euler", "renoise"]


@dataclass(frozen=True)
class FewSteps:
    """The walks that a student knows."""

    evaluations: tuple[int, ...]  # of the student, each a walk of its own
    method: str = "sfd"
    step: StepKind = "euler"  # renoise: to the clean image, and noise anew (consistency)
    afs: bool = True  # the first step is analytical and needs no evaluation
    told: bool = False  # how many timestamps there are
    grid: GridKind = "polynomial"
    sigma_min: float = SIGMA_MIN  # of a polynomial grid alone
    sigma_max: float = 80.0  # of a polynomial grid; of a single step, the level that it begins at
    rho: float = 7.0
    guidance: dict[str, Any] | None = None  # what the teacher was guided by: it is in the weights
    drop: float | None = None  # share of lessons in which it was told nothing, if that is known

    def __post_init__(self) -> None:
        if not self.evaluations or min(self.evaluations) < 1:
            raise ValueError(f"evaluations are one or more numbers above 0, not {self.evaluations}")
        for value, kind in ((self.grid, GridKind), (self.step, StepKind)):
            if value not in get_args(kind):
                raise ValueError(f"{value!r} is none of {', '.join(get_args(kind))}")

    def grids(self, scaling: Scaling) -> Grids:
        if self.grid == "native":
            return Native(scaling, self.rho)
        if self.grid == "single":
            return Single(self.sigma_max)
        return Polynomial(self.sigma_min, self.sigma_max, self.rho)

    def timestamps(self, evaluations: int) -> int:
        """Of the walk with so many evaluations, which must be one that the student knows."""
        if evaluations not in self.evaluations:
            known = ", ".join(map(str, sorted(self.evaluations)))
            choice = "give" if len(self.evaluations) == 1 else "give one of"
            raise UserError(
                f"this student was not trained for {evaluations} evaluations: {choice} --steps "
                f"{known}"
            )
        return timestamps_for(evaluations, afs=self.afs)

    def levels(self, evaluations: int, scaling: Scaling) -> Tensor:
        """The noise levels of that walk."""
        return self.grids(scaling).student(self.timestamps(evaluations))

    def condition(self, cond: Condition | None, evaluations: int, like: Tensor) -> Condition | None:
        """What the student is told on that walk."""
        return with_steps(cond, self.timestamps(evaluations), like) if self.told else cond

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> "FewSteps":
        """Raises ValueError or TypeError where it is none."""
        kept: dict[str, Any] = {**facts, "evaluations": tuple(facts["evaluations"])}
        return cls(**kept)
