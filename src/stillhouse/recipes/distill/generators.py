"""Configs of one-step generators: students that match their teacher's distribution, not its walks.

| `--method` | how the generator learns |
|---|---|
| `emd` | from samples that Langevin steps have corrected (Xie et al. 2024) |
| `diff-instruct`, `dmd` | along the difference of two scores (Luo et al. 2023, Yin et al. 2024) |
| `sid` | by the Fisher divergence (Zhou et al. 2024) |
| `f-distill` | as `dmd`, weighted by the ratio of densities (Xu et al. 2025) |
"""

import copy
from abc import ABC, abstractmethod
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from stillhouse.config import Config
from stillhouse.distill import emd
from stillhouse.distill.langevin import Bookkeeping, Langevin
from stillhouse.distill.matching import Matching
from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError
from stillhouse.objectives.denoising import Constants, Denoising
from stillhouse.process import VP, NetworkDenoiser, Scaling
from stillhouse.process.levels import LogUniform
from stillhouse.recipes.distill.lessons import Lesson, Wanted, check_level

GENERATORS = tuple(emd.METHODS)  # the names of these methods
START = 20.0  # log-SNR -6, the paper's
RANK = 16  # of a fake score that is adapters


class Matched(Config, ABC):
    """What all have: three networks, and the levels at which two of them are compared."""

    start: PositiveFloat | None = None
    """The noise level that the generator draws from; 20, or the model's noisiest where that is
    less."""
    low: PositiveFloat | None = None
    """Teacher and fake score are compared from this level: 0.05, or the model's lowest ..."""
    high: PositiveFloat | None = None
    """... up to this one: 80, or the model's noisiest."""
    weighting: Literal["x0", "eps"] = "x0"
    """Of levels: x0 counts all alike, eps by 1/sigma^2."""
    score: Literal["full", "lora"] = "full"
    """The fake score: a network of its own, or LoRA adapters on the teacher (peft), which need less
    memory."""
    score_rank: PositiveInt = RANK
    """Of those adapters."""
    score_steps: PositiveInt = 1
    """Updates of the fake score for each of the generator."""
    score_rate: PositiveFloat = 5.0
    """Learning rate of the fake score, in those of the generator: it must not lag behind."""

    def walk(self, wanted: Wanted) -> FewSteps:
        """One step, from the generator's level to its answer."""
        if wanted.evaluations != (1,):
            raise UserError(f"--method {self.name} gives one-step generators: --evaluations 1")
        if self.score == "full" and self.score_rank != RANK:
            raise UserError("--method.score-rank is of adapters: add --method.score lora")
        if wanted.told:
            raise UserError(f"--method {self.name} begins with a model that takes many steps")
        scaling = wanted.scaling
        for name in ("start", "low", "high"):
            check_level(f"--method.{name}", getattr(self, name), scaling)
        self.levels(scaling)
        level = torch.tensor(self.start or min(START, scaling.sigma_max), dtype=torch.float64)
        if isinstance(scaling, VP):  # a whole timestep, as its network knows no others
            level = scaling.sigma_at(scaling.time_at(level).round())
        return FewSteps(
            (1,),
            self.name,
            afs=False,
            grid="single",
            sigma_max=float(level),
            guidance=wanted.guidance,
        )

    @property
    def name(self) -> str:
        return self.kind  # type: ignore[attr-defined]

    def task(self, lesson: Lesson) -> Matching:
        if lesson.earlier is not None:
            raise UserError("a generator learns from a model that takes many steps, no student")
        levels = self.levels(lesson.process)
        return Matching(
            lesson.student,
            lesson.score or full_score(lesson),
            lesson.teacher,
            lesson.walk.sigma_max,
            lesson.world,
            lesson.seed,
            self.method(levels.sigma_max),
            levels,
            self.weighting,
            Denoising(levels, constants=Constants(lesson.process.sigma_data)),
            self.score_steps,
        )

    def levels(self, process: Scaling) -> LogUniform:
        low = self.low or max(0.05, process.sigma_min)
        high = self.high or min(80.0, process.sigma_max)
        if low >= high:
            raise UserError(f"there are no levels from --method.low {low:g} to {high:g}")
        return LogUniform(low, high)

    @abstractmethod
    def method(self, highest: float) -> emd.Method:
        """The generator's update, where networks know no levels beyond the highest."""


def full_score(lesson: Lesson) -> NetworkDenoiser:
    """A network of its own that begins as the student does, of the teacher's process."""
    network = copy.deepcopy(lesson.student.network)
    return NetworkDenoiser(network, lesson.process, lesson.student.prediction).train()


class Emd(Matched):
    """EM distillation (Xie et al. 2024): forward KL, by Langevin steps on noise and latent."""

    kind: Literal["emd"] = "emd"
    langevin: PositiveInt = 8
    """Langevin steps per update: K. More cover more of the teacher's modes, and cost more."""
    noise_step: Annotated[float, Field(gt=0, lt=1)] = 0.16
    """Size of the Langevin steps on the noise."""
    latent_step: Annotated[float, Field(ge=0, lt=1)] = 1.6e-5
    """0: the latent stays where it is, which saves a backward pass per step."""
    stretch: PositiveFloat = 1.0
    """How much the generator may stretch its latents: the latent's step is at most (level over
    this) squared, which keeps it stable."""
    bookkeeping: Bookkeeping = "cancel"
    """What of the chain the generator learns: all but its noise (cancel), all (full), or the pull
    at its end (stein)."""

    def method(self, highest: float) -> emd.Method:
        if not self.latent_step and self.stretch != 1:
            raise UserError(
                "--method.stretch bounds the steps of the latent, and --method.latent-step 0 takes "
                "none: leave --method.stretch out"
            )
        sizes = (self.noise_step, self.latent_step, self.bookkeeping, self.stretch)
        return partial(emd.emd, chain=Langevin(self.langevin, *sizes))


class ReverseKL(Matched):
    """Diff-Instruct (Luo et al. 2023) and DMD without its regression (Yin et al. 2024)."""

    kind: Literal["diff-instruct", "dmd"] = "diff-instruct"

    def method(self, highest: float) -> emd.Method:
        return emd.METHODS[self.kind]


class SidConfig(Matched):
    """Score identity distillation (Zhou et al. 2024): Fisher divergence."""

    kind: Literal["sid"] = "sid"
    alpha: float = 1.2
    """1 is score implicit matching."""

    def method(self, highest: float) -> emd.Method:
        return partial(emd.sid, k=self.alpha)


class FDistill(Matched):
    """f-distill (Xu et al. 2025) without a discriminator: the ratio is estimated by the scores."""

    kind: Literal["f-distill"] = "f-distill"
    power: NonNegativeFloat = 1.0
    """Of the ratio: 1 is forward KL, 0 reverse KL; for images about 1/dimensions."""
    most: PositiveFloat = 20.0
    """The largest weight of a sample."""

    def method(self, highest: float) -> emd.Method:
        if not self.power and self.most != type(self).model_fields["most"].default:
            raise UserError(
                "with --method.power 0 every sample has the weight 1: leave --method.most out"
            )
        return partial(emd.f_distill, power=self.power, most=self.most, highest=highest)
