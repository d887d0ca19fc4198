"""What a distillation can be asked for."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from stillhouse.config import Config
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.optimisers import AdamW, Optimiser, Steps
from stillhouse.errors import UserError
from stillhouse.recipes.distill.generators import GENERATORS
from stillhouse.recipes.distill.methods import Method, SfdV
from stillhouse.recipes.parts import Dpmpp3M, Guidance, NoGuidance, SolverName
from stillhouse.recipes.train.sessions import LongRun

MOST = 100  # evaluations of a student: it is to have few


class StudentPreview(Config):
    """Samples of the teacher above those of the student, from the same noise."""

    every: NonNegativeInt = 0
    """Images between pictures; 0: an eighth of the run, 12,800 at most."""
    count: PositiveInt = 8
    """Samples in a row."""
    steps: PositiveInt = 20
    """Of the teacher."""
    seed: int = 0
    """Of the samples' noise."""


class Comparison(Config):
    """At the end: distance to the teacher's long walks."""

    count: NonNegativeInt = 64
    """Samples; 0: nothing is compared."""
    steps: PositiveInt = 50
    """Of the teacher's long walks."""
    walk: Dpmpp3M = Dpmpp3M()
    """What takes them."""
    solvers: tuple[SolverName | Literal["gits"], ...] = ("euler", "dpmpp-3m", "gits")
    """Of the teacher with as few evaluations; euler is DDIM, gits ipndm on a searched grid."""
    searched: PositiveInt = 16
    """Samples that the search of gits walks with; 256 in its paper."""
    fine: Annotated[int, Field(ge=3)] = 41
    """Levels that it chooses from; 61 in its paper."""
    batch: PositiveInt = 16
    """Samples per network call."""
    seed: int = 1
    """Of the samples' noise."""
    against: str = ""
    """Whose long walks they are, where the teacher is a student itself: the model that taught it
    first. The teacher, if not given; stages of progressive distillation know theirs."""


# What generators begin with where nothing else is asked for: their papers', not SFD's.
USUAL: dict[str, Any] = {
    "evaluations": "1",
    "images": 12_800_000,  # 100,000 updates: at this rate a tenth would leave weights as they are
    "optim": AdamW(lr=2e-6, betas=(0.0, 0.99)),
    "averages": (HalfLife(images=20_000),),
    "comparison": Comparison(solvers=()),
}


class DistillRun(LongRun):
    """A distillation. What is not given is as SFD's paper has it, or EMD's for generators.

    From Python, a part that is given (`optim`, `comparison`) replaces the method's own as a whole.
    """

    model: str = ""
    """The teacher: a diffusers directory, a run's folder, or a hub id."""
    method: Method = SfdV()
    """--method NAME is short for --method.kind NAME."""
    evaluations: str = "2..5"
    """How often the student is called for one image: 3, 2..5 or 2,4."""
    exportable: bool = False
    """Train on the grid of a diffusers scheduler: the student opens in plain diffusers."""
    guidance: Guidance = NoGuidance()
    """Of the teacher: the student learns it, and needs none at sampling."""
    drop: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of images that are told nothing, so that the student itself can be guided."""
    labels: tuple[int, ...] = ()
    """Classes to distil on; all of them if not given."""
    labels_of: str = ""
    """A data set whose classes to distil on, as often as it has them (cifar10, a folder)."""
    label_column: str = ""
    """Of that data set; its own, or `label`, if not given."""
    null_label: int | None = None
    """The label that stands for no class, for classifier-free guidance."""
    prompts: str = ""
    """Prompts to distil on: a text file with one a line, or a data set (emoji, a folder)."""
    prompt_column: str = ""
    """Of that data set; `text` if not given."""
    control: tuple[str, ...] = ()
    """How images are framed, as name=value, where the teacher takes that."""
    prompt_encoder: str = ""
    """Folder or hub id of the teacher's text encoder, if it is not where the model says."""
    adapters: NonNegativeInt = 0
    """Rank of LoRA adapters that are trained in place of all weights; 0: all weights."""
    teacher: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the teacher."""
    images: PositiveInt = 200_000
    """Trajectories to train on."""
    batch: PositiveInt = 128
    """Trajectories per step, over all processes."""
    optim: Optimiser = AdamW(lr=5e-5, schedule=Steps())
    clip: PositiveFloat = 1e6
    """Largest norm of the gradient: of a sum over elements, and not clipped in the paper."""
    log_every: NonNegativeInt = 0
    """Trajectories between log lines; 0: a fiftieth of the run, 1,280 at most."""
    checkpoint_every: NonNegativeInt = 0
    """Trajectories between checkpoints; 0: an eighth of the run, 12,800 at most."""
    preview: StudentPreview = StudentPreview()
    comparison: Comparison = Comparison()
    out: Path = Path("runs/student")
    """The run's folder."""

    @model_validator(mode="before")
    @classmethod
    def _follow_method(cls, given: Any) -> Any:
        method = given.get("method") if isinstance(given, dict) else None
        kind = method.get("kind") if isinstance(method, dict) else getattr(method, "kind", "")
        return {**USUAL, **given} if kind in GENERATORS else given


def usual(method: str) -> DistillRun:
    """The settings that a method begins with; of one that is not known, those of any."""
    known: dict[str, Any] = {"method": {"kind": method}} if method in GENERATORS else {}
    return DistillRun(**known)


def read_evaluations(words: str) -> tuple[int, ...]:
    """`3`, `2..5` or `2,4` as numbers, in order."""
    spans = [re.fullmatch(r"(\d+)(?:\.\.(\d+))?", word.strip()) for word in words.split(",")]
    ends = [(int(span[1]), int(span[2] or span[1])) for span in spans if span]
    if not all(spans) or any(not 1 <= first <= last <= MOST for first, last in ends):
        raise UserError(
            f"--evaluations {words}: write 3, 2..5 or 2,4, with numbers from 1 to {MOST}, the "
            "smaller one of two first"
        )
    return tuple(sorted({n for first, last in ends for n in range(first, last + 1)}))
