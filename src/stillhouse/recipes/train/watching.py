"""What is looked at during training: grids from fixed seeds, held-out loss, stored weights.

All are hooks of the engine, called by every process: drawing and measuring are shared among them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data import DataConfig, Folder, Loader, Parquet, PointsConfig, Prepared, Tars
from stillhouse.engine.ema import PowerFunction
from stillhouse.engine.loop import Engine
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.objectives import Draws, validate
from stillhouse.pipelines import save_codec, save_denoiser
from stillhouse.process import Batch
from stillhouse.recipes import pictures
from stillhouse.recipes.parts import Dpmpp3M, Solver
from stillhouse.recipes.sampling import SampleRun, draw_batch
from stillhouse.recipes.telling import Texts
from stillhouse.recipes.train.learner import EDGES, NAME, Learner, total_curve

HELD_OUT = -1  # the seed of validation data, which no run has
PREFIX = "network."  # of the network's weights within the denoiser


class Preview(Config):
    """Samples during training, from the same seeds each time."""

    every: PositiveInt = 50_000
    """Images between grids."""
    count: PositiveInt = 40
    """Samples in a grid."""
    steps: PositiveInt = 12
    """Of their solver."""
    solver: Solver = Dpmpp3M()
    seed: int = 0
    """Of their noise."""


class NoSource(Config):
    """Nothing is held out."""

    kind: Literal["none"] = "none"


class Validation(Config):
    """Loss on data that is not trained on, always with independent noise."""

    every: PositiveInt = 50_000
    """Images between measurements."""
    images: PositiveInt = 1024
    """Held-out images per measurement."""
    source: Annotated[
        NoSource | Parquet | Tars | Folder | Prepared, Field(discriminator="kind")
    ] = NoSource()

    def build(self, data: DataConfig | PointsConfig, batch: int, here: World) -> Loader | None:
        """The loader of this process, to be gone through again and again; None without data."""
        if isinstance(data, DataConfig) and isinstance(self.source, NoSource):
            return None
        batch = min(batch, self.images) // here.size * here.size
        if not batch:
            raise UserError(
                f"--validation.images {self.images} are too few for {here.size} processes: each "
                "takes one at least"
            )
        # As many batches on each process: a sharded network is called together.
        stop, held_out = self.images // batch * batch, data
        if isinstance(data, DataConfig):
            source: Any = self.source
            if not isinstance(source, Folder):  # a stream has no end to stop at
                source = source.model_copy(update={"streaming": False})
            image = data.image.model_copy(update={"flip": False})
            held_out = data.model_copy(update={"source": source, "image": image, "workers": 0})
        return held_out.build(
            batch=batch, seed=HELD_OUT, rank=here.rank, world=here.size, stop=stop
        )


@dataclass(frozen=True)
class Drawer:
    """Draws the grid, shared among processes, and logs where it is."""

    config: Preview
    learner: Learner
    average: str
    run: Path
    backdrop: Tensor | None = None  # a toy's own points

    def __call__(self, engine: Engine) -> None:
        here = engine.world
        each = -(-self.config.count // here.size)
        mine = list(range(here.rank * each, (here.rank + 1) * each))
        # Every process calls the network equally often; what is too much is left out.
        drawn = self.draw(engine, mine)[: max(0, self.config.count - mine[0])]
        samples = here.collect(drawn)
        if here.rank == 0:
            name = f"samples/images-{engine.images:012d}.png"
            (self.run / "samples").mkdir(exist_ok=True)
            self.picture(torch.cat(samples), self.run / name)
            engine.log({"samples": name})

    def draw(self, engine: Engine, indices: list[int]) -> Tensor:
        """The samples with these indices, on the host."""
        config = SampleRun(solver=self.config.solver, seed=self.config.seed)
        with engine.networks[NAME].evaluating(self.average) as denoiser:
            subject = self.learner.subject(denoiser)
            grid = subject.scaling.native_grid(self.learner.steps(self.config.steps))
            states = draw_batch(config, subject, grid, indices, engine.world.device)
            return subject.decode(states).cpu()

    def picture(self, samples: Tensor, target: Path) -> None:
        if self.backdrop is not None:
            pictures.save_points(samples, self.backdrop, target)
        else:
            columns = self.learner.classes if 1 < self.learner.classes <= 16 else None
            pictures.save_tiles([pictures.to_pil(s) for s in samples], target, columns=columns)


@dataclass(frozen=True)
class Validator:
    """Measures the held-out loss per noise level."""

    loader: Loader
    learner: Learner
    average: str
    texts: Texts | None = None  # the captions of this data

    def __call__(self, engine: Engine) -> None:
        device = engine.world.device
        batches = (self.told(item.batch).to(device) for item in self.loader)
        with engine.networks[NAME].evaluating(self.average) as denoiser:
            # One seed for every run: their curves can be compared.
            curve = validate(self.learner.objective, denoiser, batches, Draws(0), EDGES)  # type: ignore[arg-type]
        curve = total_curve(curve, engine.world)
        engine.log({"validation/loss": curve.overall, "validation/levels": curve.as_lists()})

    def told(self, batch: Batch) -> Batch:
        batch = self.learner.latents(batch)
        return batch if self.texts is None else self.texts.pad(self.texts.tell(batch), HELD_OUT)


@dataclass(frozen=True)
class Exporter:
    """Writes the inference weights as a diffusers folder."""

    learner: Learner
    average: str
    scheduler: Mapping[str, Any]
    facts: Mapping[str, Any]
    folder: Path

    def __call__(self, engine: Engine) -> None:
        weights = engine.networks[NAME].weights(self.average)
        if engine.world.rank == 0:
            network: Any = self.learner.denoiser.network
            save_denoiser(
                self.folder,
                network,
                {name.removeprefix(PREFIX): w for name, w in weights.items()},
                self.scheduler,
                facts={
                    **self.facts,
                    "images": engine.images,
                    "average": self.average,
                    "null_label": network.null_label,
                },
            )
            if self.learner.codec is not None and not (self.folder / "vae").is_dir():
                save_codec(self.folder, self.learner.codec)


@dataclass(frozen=True)
class Snapshots:
    """Stores every power average, whole, to synthesize others from later."""

    folder: Path

    def __call__(self, engine: Engine) -> None:
        from safetensors.torch import save

        for name, profile in engine.networks[NAME].averages.profiles.items():
            if not isinstance(profile, PowerFunction):
                continue
            weights = engine.networks[NAME].weights(name)
            if engine.world.rank == 0:
                self.folder.mkdir(exist_ok=True)
                facts = {"images": engine.images, "sigma_rel": profile.sigma_rel}
                file = self.folder / f"{name}-images-{engine.images:012d}.safetensors"
                write_whole(file, save(weights, metadata={"snapshot": json.dumps(facts)}))
