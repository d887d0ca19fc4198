"""What is looked at and kept during a distillation: the student beside its teacher, its folder.

Both are hooks of the engine, called by every process.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillhouse.distill.sfd import NAME
from stillhouse.distill.walks import FewSteps
from stillhouse.engine.loop import Engine
from stillhouse.pipelines import save_codec, save_denoiser
from stillhouse.pipelines.exportable import plain_pipeline, save_exportable
from stillhouse.pipelines.few_steps import save_walk
from stillhouse.pipelines.load import checkpoint_files, read_json
from stillhouse.pipelines.save import save_lora, save_pipeline, save_scheduler
from stillhouse.process import NetworkDenoiser
from stillhouse.recipes import pictures
from stillhouse.recipes.distill.settings import DistillRun, StudentPreview
from stillhouse.recipes.distill.students import Source, as_student
from stillhouse.recipes.sampling import SampleRun, build_grid, draw_batch, walked
from stillhouse.recipes.subjects import Subject
from stillhouse.recipes.train.tuning import Tuned
from stillhouse.recipes.train.watching import PREFIX


def draw_all(
    subject: Subject, run: SampleRun, count: int, engine: Engine, grid: Tensor | None = None
) -> Tensor:
    """The first samples of this run, decoded, on the first process; others get none.

    Every process draws equally many, as a sharded network must be called; what is too much is left
    out. A student takes its own walk of so many steps.
    """
    here, run = engine.world, walked(run, subject)
    grid = build_grid(run, subject, here.device) if grid is None else grid
    each = -(-count // here.size)
    mine = range(here.rank * each, (here.rank + 1) * each)
    parts = [
        subject.decode(draw_batch(run, subject, grid, list(some), here.device)).cpu()
        for some in (mine[i : i + run.batch] for i in range(0, each, run.batch))
    ]
    found = here.collect(torch.cat(parts))
    return torch.cat(found)[:count] if found else torch.empty(0)


@dataclass
class StudentDrawer:
    """Draws the picture and logs where it is."""

    config: StudentPreview
    source: Source
    walk: FewSteps
    average: str
    run: Path
    taught: Tensor | None = field(default=None, repr=False)  # the teacher's row, drawn once

    def __call__(self, engine: Engine) -> None:
        if self.taught is None:
            steps = self.source.long_walk(self.config.steps)
            self.taught = self._row(self.source.subject, steps, engine)
        rows = [self.taught]
        with engine.networks[NAME].evaluating(self.average) as student:
            subject = as_student(self.source.subject, student, self.walk)
            rows += [self._row(subject, n, engine) for n in self.walk.evaluations]
        if engine.world.rank == 0:
            name = f"samples/images-{engine.images:012d}.png"
            (self.run / "samples").mkdir(exist_ok=True)
            self.picture(torch.stack(rows), self.run / name)
            engine.log({"samples": name})

    def _row(self, subject: Subject, steps: int, engine: Engine) -> Tensor:
        run = SampleRun(seed=self.config.seed, steps=steps)
        return draw_all(subject, run, self.config.count, engine)

    def picture(self, rows: Tensor, target: Path) -> None:
        """[rows, columns, ...]: the teacher first, then the student, from few evaluations up."""
        toy = self.source.subject.toy
        if toy is not None:
            backdrop = toy.sample(2000, torch.Generator().manual_seed(0))
            return pictures.save_points(rows[1:].flatten(0, 1), backdrop, target)
        images = [pictures.to_pil(image) for image in rows.flatten(0, 1)]
        return pictures.save_tiles(images, target, columns=rows.shape[1])


@dataclass(frozen=True)
class StudentExporter:
    """Writes the student: as its teacher's folder is, and with the walks that it knows."""

    config: DistillRun
    source: Source
    student: NetworkDenoiser
    walk: FewSteps
    facts: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return self.config.out / "model"

    def __call__(self, engine: Engine) -> None:
        average = self.config.shown
        found = engine.networks[NAME].weights(average)
        if engine.world.rank:
            return
        network: Any = self.student.network
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
        facts = {
            **self.facts,
            "images": engine.images,
            "average": average,
            "null_label": network.null_label,
        }
        self.write(network, weights, facts)

    def write(self, network: Any, weights: dict[str, Tensor], facts: dict[str, Any]) -> None:
        config, folder, source = self.config, self.folder, self.source.folder
        folder.mkdir(parents=True, exist_ok=True)
        if config.exportable and not config.adapters:
            return save_exportable(folder, source, network, weights, self.walk, facts=facts)
        save_walk(folder, self.walk)  # before the weights, which say that all is there
        if config.adapters:
            adapter = Tuned(path=str(source), method="lora", rank=config.adapters).adapter()
            plain = plain_pipeline(source, network, self.walk)
            save_scheduler(folder / "scheduler", plain.scheduler)  # to be set beside them
            save_lora(folder, source, weights, adapter, facts=facts)
        elif self.source.pipeline:
            save_pipeline(folder, source, network, weights, facts=facts)
        else:
            scheduler = unclipped(read_json(checkpoint_files(source)["scheduler"][0]))
            save_denoiser(folder, network, weights, scheduler, facts=facts)
            codec = self.source.subject.codec
            if codec is not None and not (folder / "vae").is_dir():
                save_codec(folder, codec)
        return None


def unclipped(scheduler: dict[str, Any]) -> dict[str, Any]:
    """A student gives what it was trained to give, also where its scheduler clips by default."""
    import diffusers

    takes = inspect.signature(getattr(diffusers, scheduler["_class_name"]).__init__).parameters
    return {**scheduler, **({"clip_sample": False} if "clip_sample" in takes else {})}
