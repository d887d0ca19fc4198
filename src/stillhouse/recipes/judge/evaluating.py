"""`stillhouse evaluate`: how good are these images, compared with those, and how sure is that.

    OUT/evaluation.json   every number and its origin       OUT/evaluation.png   the picture
    OUT/results/          a file per setting and seed       OUT/parts/           while drawing

Running the same command again goes on where it stopped; more seeds, solvers or steps add to it.
"""

import hashlib
import json
import time
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stillhouse import __version__
from stillhouse.config import Config
from stillhouse.data import Columns
from stillhouse.engine.world import World, world
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.metrics.detectors import DetectorConfig, InceptionConfig
from stillhouse.recipes.claims import claimed, make_folder
from stillhouse.recipes.judge import verdicts
from stillhouse.recipes.judge.captions import read_prompts, text_encoder
from stillhouse.recipes.judge.extraction import Collected, collect, first_images
from stillhouse.recipes.judge.galleries import (
    Drawn,
    Gallery,
    Pixels,
    Stored,
    find_data,
    model_folder,
)
from stillhouse.recipes.judge.measures import Evidence, Known, MetricName, measure, rehearse
from stillhouse.recipes.judge.referring import (
    CACHE,
    Library,
    baseline,
    cache_folder,
    facts_of,
)
from stillhouse.recipes.parts import (
    Dpmpp3M,
    Grid,
    Guidance,
    NativeGrid,
    NoGuidance,
    SolverName,
    solver,
)
from stillhouse.recipes.progress import progress_bar
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.subjects import Subject, Wish, load_subject

RECORD = "evaluation.json"
PERCEIVED = 512  # samples among which perceptual distances are measured
REFERENCE_SEED = 1_000_003  # of a model that serves as reference: no evaluation draws with it
COMPARED = {"count", "content", "size", "mode", "detector"}  # of a reference: the same numbers
# What another try may change: how much is measured, not what.
FREE = {
    "model",
    "prompt_encoder",
    "seeds",
    "solvers",
    "steps",
    "batch",
    "out",
    "device",
    "within",
    "refresh",
    "cache",
}


class EvaluateRun(Config):
    """An evaluation."""

    model: str = ""
    """What is measured: a diffusers directory, a hub id, a run's folder; or images: a folder, a
    data set (cifar10, fashion:test), Parquet files, tars."""
    reference: str = ""
    """What it is compared with: the same, or the statistics of an earlier reference."""
    metrics: tuple[MetricName, ...] = ("fid", "kid", "prdc")
    """With commas or spaces between; a sweep is judged by the first."""
    detector: DetectorConfig = InceptionConfig()
    count: PositiveInt = 10_000
    """Samples per seed."""
    seeds: PositiveInt = 1
    """How often it is measured anew; the spread is over these."""
    reference_count: NonNegativeInt = 0
    """Images of the reference; 0: all."""
    solvers: tuple[SolverName, ...] = ("dpmpp-3m",)
    """Several (and several steps) make a sweep."""
    steps: tuple[PositiveInt, ...] = (20,)
    """Steps of the walk: a number is one of model and sampler together."""
    lower_order_final: bool = True
    """Solvers lower their order over the last steps."""
    within: PositiveFloat = 5.0
    """A sweep names the cheapest setting within so many percent of the best."""
    grid: Grid = NativeGrid()
    guidance: Guidance = NoGuidance()
    labels: tuple[int, ...] = ()
    """Classes to draw, in turn; all of them if not given."""
    null_label: int | None = None
    """The label that stands for no class, for classifier-free guidance."""
    size: NonNegativeInt = 0
    """Stored images are cropped and resized to this square; 0: the model's size, or as they are."""
    columns: Columns = Columns()
    """Of data sets that are given as files."""
    prompts: str = ""
    """A text file: what a model is to draw, in turn; or a line for each image of a folder, in the
    order of their names."""
    control: tuple[str, ...] = ()
    """How a model frames what it draws, as name=value, where it takes that."""
    prompt_encoder: str = ""
    """Folder or hub id of the model's text encoder, if it is not where the model says."""
    text_encoder: str = ""
    """A folder or hub id of a sentence encoder, for retrieval."""
    kept: PositiveInt = 10_000
    """Rows of the reference that neighbours and kernels are computed with."""
    cache: Path = CACHE
    """Where statistics of references are kept."""
    refresh: bool = False
    """Compute the reference anew where it has changed."""
    batch: PositiveInt = 64
    """Images per network call."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the model; the state and the detector are always float32."""
    out: Path = Path("evaluation")
    """Where the record, the picture and the results go."""
    device: Annotated[str, Field(min_length=1)] = "auto"
    """auto, cpu or cuda."""


class Setting(NamedTuple):
    """A way of drawing; stored images have the empty one."""

    solver: str = ""
    steps: int = 0

    @property
    def slug(self) -> str:
        return f"{self.solver}-{self.steps}" if self.solver else "images"


def run(config: EvaluateRun) -> dict[str, Any]:
    """Measures what is missing; returns all of it (at the first process)."""
    check(config)
    with world(config.device) as here:
        return evaluate(config, here)


def check(config: EvaluateRun) -> None:
    """Mistakes that need no model to be seen."""
    if not config.model or not config.reference:
        raise UserError(
            "name what is measured and what it is compared with: stillhouse evaluate MODEL "
            "--reference DATA"
        )
    if config.count < 2 or config.reference_count == 1:
        raise UserError(
            "one image has no spread to compare: a count of 2 is the least, 10000 usual"
        )


def evaluate(config: EvaluateRun, here: World) -> dict[str, Any]:
    """The evaluation of one process among all."""
    bench = Bench(config, here)
    here.first(bench.rehearse)
    with ExitStack() as stack:
        here.first(lambda: stack.enter_context(bench.claimed()))
        results = [
            (setting, [bench.result(setting, seed) for seed in range(config.seeds)])
            for setting in bench.settings
        ]
        return bench.conclude(results) if here.rank == 0 else {}


# ---------------------------------------------------------------- what is measured


class Bench:
    """An evaluation with everything that it needs loaded once."""

    def __init__(self, config: EvaluateRun, here: World) -> None:
        self.config, self.here = config, here
        self.data = find_data(config.model, config.columns)
        self.prompts = read_prompts(config.prompts)
        own = (self.prompts, config.control)
        self.subject = None if self.data else self._load(config.model, *own)
        self.pixels = self._pixels(self.subject) if self.subject else Pixels(config.size)
        self.detector = config.detector.build(here.device)  # may be a download: it comes late
        folder = cache_folder(config.cache)
        library = Library(folder, self.detector, here, config.kept, config.refresh)
        self.reference = library.open(config.reference, self.pixels, self.reference_gallery)
        self.known = Known(self.reference.features, self.reference.moments, self.reference.texts)

    def _load(
        self, name: str, prompts: tuple[str, ...] = (), control: tuple[str, ...] = ()
    ) -> Subject:
        config = self.config
        dtype = getattr(torch, config.dtype)
        wish = Wish(
            config.guidance,
            config.labels,
            config.null_label,
            dtype,
            self.here.device,
            prompts,
            control,
            config.prompt_encoder,
        )
        return load_subject(model_folder(name, images=True), wish)

    def _pixels(self, subject: Subject) -> Pixels:
        """What the model draws; a reference is made to look like it."""
        if subject.toy is not None:
            raise UserError("points of the plane are not images: name a model that draws images")
        shape = subject.decode(torch.zeros(1, *subject.shape, device=self.here.device)).shape[1:]
        if self.config.size not in (0, shape[1]):
            raise UserError(f"the model draws {shape[1]} pixels: leave --size out")
        return Pixels(shape[-1], "grey" if shape[0] == 1 else "rgb")

    @property
    def settings(self) -> list[Setting]:
        if self.subject is None:
            return [Setting()]
        walk = self.subject.walk
        solvers = self.config.solvers if walk is None else (walk.step,)  # as it was taught
        return [Setting(*pair) for pair in product(solvers, self.config.steps)]

    def gallery(self, setting: Setting, seed: int) -> Gallery:
        config = self.config
        if self.subject is not None:
            return self._drawn(self.subject, self.pixels, setting, seed, config.count)
        assert self.data is not None
        stored = Stored(
            config.model,
            self.data,
            self.pixels,
            count=config.count,
            batch=config.batch,
            seed=seed,
            texts=self.prompts,
        )
        if stored.whole and config.seeds > 1:
            raise UserError(
                f"{config.model} holds {stored.count} images, and all are measured: more than one "
                "seed would see the same. Give --seeds 1, or a smaller --count"
            )
        return stored

    def _drawn(
        self, subject: Subject, pixels: Pixels, setting: Setting, seed: int, count: int
    ) -> Gallery:
        config = self.config
        final = {"lower_order_final": config.lower_order_final}
        how = solver(setting.solver).model_copy(update=final) if subject.walk is None else None
        sampling = SampleRun(
            model=config.reference if seed == REFERENCE_SEED else config.model,
            solver=how or Dpmpp3M(),  # a student walks as it was taught
            grid=config.grid,
            guidance=config.guidance,
            labels=config.labels,
            null_label=config.null_label,
            dtype=config.dtype,
            steps=setting.steps,
            count=count,
            seed=seed,
            batch=config.batch,
        )
        return Drawn(sampling, subject, pixels, self.here.device)

    def reference_gallery(self) -> Gallery:
        """The reference, read or drawn."""
        config = self.config
        name, count = config.reference, config.reference_count
        data = find_data(name, config.columns)
        if data is not None:
            return Stored(name, data, self.pixels, count=count, batch=config.batch, seed=0)
        subject, setting = self._load(name), Setting(config.solvers[0], max(config.steps))
        pixels = self._pixels(subject)
        return self._drawn(subject, pixels, setting, REFERENCE_SEED, count or config.count)

    # -------- results

    def claimed(self) -> AbstractContextManager[None]:
        """The folder, for this evaluation alone, and the same one as before."""
        for part in ("results", "parts"):
            make_folder(self.config.out / part)
        facts = self.reference.facts.model_dump(include=COMPARED)
        captions = hashlib.sha256(repr(self.prompts).encode()).hexdigest()
        seen = {"what is measured": self.fingerprint, "the reference": facts}
        seen |= {"captions": captions}
        return claimed(self.config.out, self.config, seen, FREE)

    def rehearse(self) -> None:
        """What a metric refuses, it refuses before anything is drawn."""
        config = self.config
        captioned = bool(config.prompts) or (self.data is not None and bool(config.columns.text))
        encode = text_encoder(config.text_encoder, self.detector)
        rehearse(
            config.metrics,
            self.detector,
            self.known,
            config.count,
            captioned=captioned,
            encode_text=encode,
        )

    @property
    def parts(self) -> Path:
        return self.config.out / "parts"

    @cached_property
    def fingerprint(self) -> str:
        """Of what is measured."""
        if self.subject is not None:
            return ", ".join(self.subject.fingerprints().values())
        assert self.data is not None
        return self.data.source.fingerprint()

    def result(self, setting: Setting, seed: int) -> dict[str, Any]:
        """What was measured with one setting and seed; nothing at other than the first process."""
        name = f"{setting.slug}-seed-{seed}"
        file = self.config.out / "results" / f"{name}.json"
        done = json.loads(file.read_text()) if self.here.rank == 0 and file.exists() else {}
        if self.here.gather(bool(done))[0]:
            return done
        gallery, began = self.gallery(setting, seed), time.perf_counter()
        if gallery.size != self.reference.facts.size:
            raise UserError(
                f"{gallery.name} has images of {gallery.size} pixels, the reference of "
                f"{self.reference.facts.size}: give --size, and both are cropped and resized to it"
            )
        label = f"{gallery.name} ({gallery.reading})"
        total = sum(map(len, gallery.shares(self.here)))
        with progress_bar(label, total, "images", shown=self.here.rank == 0) as advance:
            found = collect(gallery, self.detector, self.here, self.parts, name, advance)
        images = first_images(gallery, self.here, PERCEIVED) if self.perceives else None
        if self.here.rank == 0:
            values = measure(self.config.metrics, self.evidence(found, images, seed))
            done = {
                "values": values,
                "evaluations": gallery.evaluations if isinstance(gallery, Drawn) else 0,
                "seconds": round(time.perf_counter() - began, 2),
                "content": found.content,
            }
            write_whole(file, json.dumps(done, indent=2).encode())
        self.here.barrier()
        found.remove()
        return done

    @property
    def perceives(self) -> bool:
        return "lpips" in self.config.metrics

    def evidence(self, found: Collected, images: Any, seed: int) -> Evidence:
        return Evidence(
            detector=self.detector.name,
            samples=found.features,
            moments=found.moments(),
            known=self.known,
            seed=seed,
            logits=found.logits,
            texts=found.texts,
            encode_text=text_encoder(self.config.text_encoder, self.detector),
            joint_text=getattr(self.detector, "encode_text", None),
            images=images,
        )

    # -------- the end of it

    def conclude(self, results: list[tuple[Setting, list[dict[str, Any]]]]) -> dict[str, Any]:
        """The table, the picture, and the record with where every number comes from."""
        config, reference = self.config, self.reference
        base = baseline(reference, config.metrics, config.count, cache_folder(config.cache))
        record = {
            "model": config.model,
            "files": self.fingerprint,
            "count": config.count,
            "seeds": config.seeds,
            "detector": facts_of(self.detector).model_dump(),
            "dims": self.detector.dims,
            "reference": reference.facts.model_dump(),
            "metrics": list(config.metrics),
            "settings": [setting_record(setting, found) for setting, found in results],
            "floor": base.floor,
            "floor_count": base.images,
            "expected_of_a_perfect_model": base.expected,
            "within": config.within,
            "versions": {"stillhouse": __version__, "torch": torch.__version__},
        }
        record["recommended"] = verdicts.cheapest(record)
        record["warnings"] = verdicts.warnings(record)
        write_whole(config.out / RECORD, json.dumps(record, indent=2).encode())
        try:
            verdicts.draw(record, config.out / "evaluation.png")
        except UserError as error:  # the numbers are there all the same
            record["warnings"].append(f"there is no picture: {error}")
        return record


def setting_record(setting: Setting, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the table: values by metric, one per seed."""
    names = found[0]["values"]
    return {
        **setting._asdict(),
        "evaluations": found[0]["evaluations"],
        "values": {name: [one["values"][name] for one in found] for name in names},
        "seconds": [one["seconds"] for one in found],
    }


__all__ = ["EvaluateRun", "run"]
