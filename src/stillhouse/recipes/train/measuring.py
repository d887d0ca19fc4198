"""Metrics during training: samples against a reference every so many images, logged as curves.

The samples are those that `stillhouse evaluate` draws of the exported model with the same settings.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data import Columns, DataConfig, PointsConfig
from stillhouse.engine.loop import Engine
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.metrics.detectors import Detector, DetectorConfig, InceptionConfig
from stillhouse.metrics.references import Reference
from stillhouse.process import Condition, Denoiser
from stillhouse.recipes.judge import verdicts
from stillhouse.recipes.judge.extraction import Collected, collect
from stillhouse.recipes.judge.galleries import Drawn, Pixels, Shown, Stored, find_data
from stillhouse.recipes.judge.measures import Evidence, Known, measure, rehearse
from stillhouse.recipes.judge.referring import CACHE, Library, baseline, cache_folder
from stillhouse.recipes.parts import Dpmpp3M, Solver
from stillhouse.recipes.progress import progress_bar
from stillhouse.recipes.sampling import SampleRun, draw_batch
from stillhouse.recipes.train.learner import NAME, Learner

LEAST = 32  # samples that every metric can be computed of
# Those that need no captions, and no second look at the images.
Watched = Literal["fid", "fid-infinity", "kid", "cmmd", "is", "prdc"]


class NoEvaluation(Config):
    """Nothing is evaluated during training."""

    kind: Literal["none"] = "none"


class Evaluation(Config):
    """Metrics of samples that are drawn during training, with the weights that are shown."""

    kind: Literal["metrics"] = "metrics"
    every: PositiveInt = 50_000
    """Images between evaluations."""
    reference: Annotated[str, Field(min_length=1)]
    """What samples are compared with: images as `stillhouse evaluate --reference` takes them."""
    metrics: tuple[Watched, ...] = ("fid", "kid")
    """Which distances."""
    detector: DetectorConfig = InceptionConfig()
    count: Annotated[int, Field(ge=LEAST)] = 1024
    """Samples of each evaluation. Values compare at the same count only."""
    steps: PositiveInt = 10
    """Of the samples' solver."""
    solver: Solver = Dpmpp3M()
    batch: PositiveInt = 64
    """Samples per network call, on each process."""
    seed: int = 0
    """Of the samples' noise."""
    cache: Path = CACHE
    """Where statistics of references are kept."""
    refresh: bool = False
    """Compute the reference anew where it has changed."""

    def build(
        self, data: DataConfig | PointsConfig, learner: Learner, average: str, here: World
    ) -> "Evaluator":
        """Opens the reference now: what is wrong with it is said before training, not hours on."""
        if isinstance(data, PointsConfig):
            raise UserError(
                "points of the plane are not images, and metrics compare images: leave "
                "--evaluation out"
            )
        detector = self.detector.build(here.device)
        channels, *_, side = learner.image_shape
        pixels = Pixels(side, "grey" if channels == 1 else "rgb")
        library = Library(cache_folder(self.cache), detector, here, refresh=self.refresh)
        images = Columns(image=data.columns.image)
        reference = library.open(self.reference, pixels, lambda: self._stored(images, pixels))
        known = Known(reference.features, reference.moments)
        here.first(lambda: rehearse(self.metrics, detector, known, self.count))
        return Evaluator(self, learner, average, pixels, detector, reference, known)

    def _stored(self, columns: Columns, pixels: Pixels) -> Stored:
        data = find_data(self.reference, columns)
        if data is None:
            raise UserError(
                f"--evaluation.reference {self.reference} is not there, or holds no images: name a "
                "data set (fashion:test), a folder of images, Parquet files, tars, or the "
                "statistics of an earlier reference (.safetensors)"
            )
        return Stored(self.reference, data, pixels, count=0, batch=self.batch, seed=0)


# ---------------------------------------------------------------- the hook


@dataclass(eq=False)
class Evaluator:
    """Draws samples, shared among processes, and measures and logs at the first one."""

    config: Evaluation
    learner: Learner
    average: str
    pixels: Pixels
    detector: Detector
    reference: Reference
    known: Known  # the same, to compare with
    introduced: bool = field(default=False, init=False)

    def __call__(self, engine: Engine) -> None:
        here = engine.world
        with TemporaryDirectory(prefix="stillhouse-") as folder:
            found, spoilt = self.draw(engine, Path(folder))
            if here.total(spoilt):
                engine.log({"message": "not evaluated: samples are not finite"})
            elif here.rank == 0:
                values = self.measured(found)
                engine.log({f"evaluation/{name}": value for name, value in values.items()})
            found.remove()

    def draw(self, engine: Engine, folder: Path) -> tuple[Collected, bool]:
        """Features of all samples, at the first process; whether any of its own is not finite."""
        here = engine.world
        shown = here.rank == 0 and sys.stdout.isatty()
        with engine.networks[NAME].evaluating(self.average) as denoiser:
            subject = self.learner.subject(finite := Finite(denoiser))  # type: ignore[arg-type]
            gallery = Together(self.sampling(), subject, self.pixels, here.device)
            total = sum(map(len, gallery.shares(here)))
            with progress_bar("evaluation", total, "images", shown=shown) as advance:
                found = collect(gallery, self.detector, here, folder, "samples", advance)
        return found, finite.spoilt

    def sampling(self) -> SampleRun:
        config = self.config
        return SampleRun(
            solver=config.solver,
            steps=self.learner.steps(config.steps),
            count=config.count,
            seed=config.seed,
            batch=config.batch,
        )

    def measured(self, found: Collected) -> dict[str, Any]:
        """The values; the first time with what they mean."""
        seen = Evidence(
            self.detector.name,
            found.features,
            found.moments(),
            self.known,
            self.config.seed,
            logits=found.logits,
        )
        values: dict[str, Any] = dict(measure(self.config.metrics, seen))
        if not self.introduced:
            values["about"], self.introduced = self.about(), True
        return values | {"count": len(found.features)}

    def about(self) -> dict[str, Any]:
        """Where the numbers come from, what real images get, and what a reader must know."""
        config, facts, sampling = self.config, self.reference.facts, self.sampling()
        base = baseline(self.reference, config.metrics, config.count, cache_folder(config.cache))
        record = {
            "count": config.count,
            "dims": self.detector.dims,
            "detector": {"name": self.detector.name},
            "reference": {"count": facts.count},
            "expected_of_a_perfect_model": base.expected,
            "floor": base.floor,
            "floor_count": base.images,
        }
        return {
            "detector": self.detector.name,
            "reference": facts.name,
            "reference_count": facts.count,
            "count": config.count,
            "drawing": f"{sampling.solver.kind}, {sampling.steps} steps, seed {sampling.seed}",
            "floor": base.floor,
            "floor_count": base.images,
            "notes": verdicts.caveats(record),
        }


# ---------------------------------------------------------------- drawing


@dataclass(eq=False)
class Finite:
    """A denoiser whose outputs are finite: a metric must not end a run that may recover."""

    denoiser: Denoiser
    spoilt: bool = False  # whether others had to be replaced

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        found = self.denoiser(x, sigma, cond)
        good = torch.isfinite(found)
        self.spoilt |= not bool(good.all())
        return torch.where(good, found, 0.0)


class Together(Drawn):
    """Every process calls the network equally often, as one that is sharded demands."""

    def batches(self, here: World, skip: int, step: Callable[[float], None]) -> Iterator[Shown]:
        yield from super().batches(here, skip, step)
        rounds = -(-self.count // (self.config.batch * here.size))
        if len(self.shares(here)) < rounds:  # what is too much is thrown away
            draw_batch(self.config, self.subject, self.grid, [0], here.device)
