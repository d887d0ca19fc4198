"""Matching distributions: a one-step generator, its teacher, and a fake score between them.

    generator    g(z) = D(sigma* z, sigma*): a denoiser at one level, which starts as the teacher
    fake score   a denoiser of the generator's own samples; starts as the teacher too
    teacher      a frozen denoiser, guided or not

For every batch the fake score learns to denoise fresh samples of the generator, then the generator
is updated by one of `emd.METHODS`. Samples that a chain has corrected never reach the fake score:
it must know what the generator draws, not what it should draw.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.distill.emd import Method, Outcome, Rows, Still, emd
from stillhouse.distill.langevin import ChainNoise
from stillhouse.distill.sfd import NAME
from stillhouse.distill.trajectories import Evaluations, Start
from stillhouse.engine.loop import Engine
from stillhouse.engine.updates import Loss
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.objectives.base import Draws, Objective
from stillhouse.objectives.denoising import CONSTANTS, WEIGHTINGS, Denoising, Weighting
from stillhouse.process import Batch, Condition, Denoiser
from stillhouse.process.levels import Density, LogUniform
from stillhouse.solvers.walk import level

SCORE = "score"  # of the fake score, beside the student's `NAME`
LARGEST = ("stiffness",)  # what is watched for its worst sample: a mean over levels would hide it


def generated(denoiser: Denoiser, z: Tensor, sigma: float, cond: Condition | None) -> Tensor:
    """g(z): what a generator of this start level draws, in training as in sampling."""
    return denoiser(sigma * z, level(sigma), cond)


# ---------------------------------------------------------------- the task

LEVELS = LogUniform(0.02, 80.0)
DENOISING = Denoising(LEVELS)


@dataclass
class Matching:
    """What the engine drives: `score_steps` updates of the fake score, one of the generator."""

    student: nn.Module  # the generator's denoiser; starts as the teacher
    score: nn.Module  # the fake score; starts as the teacher
    teacher: Denoiser  # frozen, perhaps guided; `WithoutAdapters` where the fake score is LoRA
    sigma_star: float  # the generator's level, to be stored with its weights
    world: World
    seed: int = 0
    method: Method = emd
    levels: Density = LEVELS  # at which teacher and fake score are compared
    weighting: Weighting = "x0"  # w: x0 for 1, eps for 1/sigma^2 (exact EM)
    objective: Objective = DENOISING  # of the fake score
    score_steps: int = 1
    watched: "Watched" = field(init=False)

    def __post_init__(self) -> None:
        if getattr(self.teacher, "training", False):
            raise ValueError("a teacher in training mode has dropout: pass it through `frozen`")
        if self.score_steps < 1 or self.sigma_star <= 0:
            raise UserError(
                "a generator needs a start level above 0, and its fake score one step or more for "
                "each of its own"
            )
        self.watched = Watched(self.world)
        self.student.train()
        self.score.train()

    @property
    def evaluations_per_image(self) -> Evaluations:
        """`student` and `backward` count the generator and the fake score alike."""
        own, steps = method_evaluations(self.method), self.score_steps
        return own._replace(student=own.student + 2 * steps, backward=own.backward + steps)

    def modules(self) -> Mapping[str, nn.Module]:
        return {NAME: self.student, SCORE: self.score}

    def step(self, batch: Start, engine: Engine) -> None:
        # Keys stay on the host, where what they key is drawn.
        start = replace(batch.to(self.world.device), key=batch.key)
        for i in range(self.score_steps):
            engine.update(SCORE, self._score_loss(engine, i), start)
            if engine.skips_in_a_row:  # on every process
                return
        try:
            x, numbers = engine.update(NAME, self._student_loss(engine), start)
        except UserError as error:  # too many in a row were skipped
            raise UserError(f"{error}{self.watched.suspicion()}") from error
        self.watched.add(x, numbers, skipped=bool(engine.skips_in_a_row))

    def _score_loss(self, engine: Engine, update: int) -> Loss:
        draws, denoiser = Draws(self.seed, f"distill/score{update}"), engine[SCORE]

        def loss(part: Start) -> tuple[Tensor, Any]:
            z = draws.rows(part.noise.shape[1:], part.key, "latent").to(part.noise)
            with engine.networks[NAME].evaluating() as generator:
                x = generated(generator, z, self.sigma_star, part.condition)
            batch = Batch(x, part.condition, key=part.key)
            return self.objective(denoiser, batch, draws).per_sample, None

        return loss

    def _student_loss(self, engine: Engine) -> Loss:
        networks = Hosted(engine, self.teacher, self.sigma_star)

        def loss(part: Start) -> tuple[Tensor, Any]:
            noise = ChainNoise(part.key.tolist(), self.seed)
            found: Outcome = self.method(networks, self.rows(part), noise)
            return found.per_sample, (found.x, found.numbers)

        return loss

    def rows(self, part: Start) -> Rows:
        """The latents of a batch, with noise and levels of their own."""
        z, batch, draws = part.noise, Batch(part.noise, key=part.key), Draws(self.seed, "distill")
        sigma = self.levels.quantile(draws.uniform(batch, "level")).to(z.device)
        weight = WEIGHTINGS[self.weighting](sigma, CONSTANTS)
        return Rows(z, draws.normal(batch).to(z), sigma, weight, part.condition)

    def report(self) -> dict[str, float]:
        """Since the last line, over all processes: R, the spread of samples, the chain."""
        return self.watched.report()


@dataclass(frozen=True)
class Hosted:
    """The family's networks, as the engine holds them."""

    engine: Engine
    teacher: Denoiser
    sigma: float  # sigma*

    def generate(self, z: Tensor, cond: Condition | None) -> Tensor:
        return generated(self.engine[NAME], z, self.sigma, cond)

    @contextmanager
    def still(self) -> Iterator[Still]:
        trained = self.engine.networks
        with trained[NAME].evaluating() as student, trained[SCORE].evaluating() as score:
            yield Still(
                lambda z, cond: generated(student, z, self.sigma, cond), self._taught, score
            )

    def _taught(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        """The teacher answers as it is kept: an update's mixed precision is of what learns."""
        with torch.autocast(x.device.type, enabled=False):
            return self.teacher(x, sigma, cond)


# ---------------------------------------------------------------- what to watch


class Watched:
    """What a method tells of its samples, as means or the largest, and how they are spread."""

    def __init__(self, world: World) -> None:
        self.world, self.latest = world, dict[str, Tensor]()
        self._reset()

    def _reset(self) -> None:
        self.count, self.sums = 0, dict[str, Tensor]()
        self.most = dict[str, Tensor]()  # of `LARGEST`
        self.total: Tensor | None = None  # of samples, element by element
        self.squares: Tensor | None = None  # of all elements of all samples

    def add(self, x: Tensor, numbers: Mapping[str, Tensor], skipped: bool = False) -> None:
        """Of an update that was skipped only the largest, and where they say why."""
        self.latest = {name: numbers[name].double().max() for name in LARGEST if name in numbers}
        if skipped and not self.suspicion():
            return
        for name, most in self.latest.items():
            self.most[name] = torch.maximum(self.most.get(name, most), most)
        if skipped:
            return
        total, squares = x.double().sum(0).flatten(), x.double().square().sum()
        self.count += len(x)
        self.total = total if self.total is None else self.total + total
        self.squares = squares if self.squares is None else self.squares + squares
        for name, values in numbers.items():
            if name not in LARGEST:
                self.sums[name] = self.sums.get(name, 0) + values.double().sum()

    def report(self) -> dict[str, float]:
        every = self.world.gather({name: float(most) for name, most in self.most.items()})
        # torch's: Python's max of 2 and what is not a number is 2
        largest = {
            name: torch.tensor(values, dtype=torch.float64).max().item()
            for name in LARGEST
            if (values := [each[name] for each in every if name in each])
        }
        found = self._means() | largest
        self._reset()
        return {f"watch/{name}": value for name, value in found.items()}

    def _means(self) -> dict[str, float]:
        """`spread`: the standard deviation of an element over samples, root mean square of all."""
        if self.total is None or self.squares is None:
            return {}
        names, size = list(self.sums), self.total.numel()
        single = torch.stack([self.squares, *self.sums.values()]).cpu()
        mine = torch.cat([torch.tensor([float(self.count)]), single, self.total.cpu()])
        count, squares, *others = self.world.sum(mine).tolist()
        means = dict(zip(names, (s / count for s in others[: len(names)]), strict=True))
        middle = sum((t / count) ** 2 for t in others[len(names) :]) / size
        means["spread"] = max(squares / count / size - middle, 0.0) ** 0.5
        return means

    def suspicion(self) -> str:
        """Why the last updates were not finite, where a chain shows it."""
        stiffness = float(self.latest.get("stiffness", 0.0))
        if stiffness < 2:
            return ""
        return (
            f" Or the Langevin steps are too large (stiffness {stiffness:.3g}, stable below 2): "
            "lower --method.latent-step, or raise --method.stretch."
        )


# ---------------------------------------------------------------- what an update costs


@dataclass
class Tally:
    """Networks that answer nothing and count their calls.

    A product with a Jacobian takes about a forward's work: half of a backward, which also goes into
    the weights.
    """

    teacher: float = 0
    student: float = 0
    backward: float = 0

    def generate(self, z: Tensor, cond: Condition | None) -> Tensor:
        x = self._answer(z.detach().requires_grad_(), "backward", 1)
        self.student += 1
        return x

    @contextmanager
    def still(self) -> Iterator[Still]:
        with torch.no_grad():
            yield Still(self._generator, self._teacher, self._score)

    def _generator(self, z: Tensor, cond: Condition | None) -> Tensor:
        self.student += 1
        return self._answer(z, "backward", 0.5)

    def _teacher(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        self.teacher += 1
        return self._answer(x, "teacher", 1)

    def _score(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        self.student += 1
        return self._answer(x, "backward", 0.5)

    def _answer(self, x: Tensor, what: str, work: float) -> Tensor:
        answer = 0 * x
        if answer.requires_grad:
            answer.register_hook(lambda _: setattr(self, what, getattr(self, what) + work))
        return answer


def method_evaluations(method: Method) -> Evaluations:
    """What one update of the generator costs an image: counted on an update of zeros."""
    tally, one = Tally(), torch.ones(1, dtype=torch.float64)
    zeros = torch.zeros(1, 1)
    found = method(tally, Rows(zeros, zeros, one, one), lambda like, draw: torch.zeros_like(like))
    found.per_sample.sum().backward()
    return Evaluations(tally.teacher, tally.student, tally.backward)
