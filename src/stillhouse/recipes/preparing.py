"""`stillhouse prepare`: images and captions, encoded once, as shards that training reads.

    OUT/shard-*.parquet   latents, captions and their embeddings   OUT/index.json   what is there
    OUT/failures.jsonl    what is not, and why                     OUT/run.json     the settings

Running the same command again goes on where it stopped.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from stillhouse import __version__
from stillhouse.config import Config
from stillhouse.data import CentreCrop, Columns, ImageConfig, Parquet, Source, Tars
from stillhouse.data import prepare as work
from stillhouse.data.crops import Crop
from stillhouse.data.prepare import Fate, Form, Job, Plan, Pool, Precision, Rules, Words
from stillhouse.data.prepare.files import write
from stillhouse.data.prepare.units import END
from stillhouse.data.prepare.worker import SUMMARIES
from stillhouse.data.prepared import INDEX
from stillhouse.data.shardfiles import is_folder
from stillhouse.engine import storage
from stillhouse.errors import UserError
from stillhouse.models import Codec
from stillhouse.models.text import TextEncoder, packaged
from stillhouse.pipelines import load_codec
from stillhouse.recipes import known_data
from stillhouse.recipes.claims import differences, listed, locked
from stillhouse.recipes.progress import progress_bar

CLAIM = "run.json"
NULL = "null.safetensors"  # the empty caption, which dropped ones become
MACHINE = {"workers", "readers", "ray", "device"}  # where it ran, not what was made
# What another try may change: source and encoders are known by what they hold.
FREE = {"source", "out", "codec", "text", *MACHINE}


class PrepareRun(Config):
    """Latents from images."""

    source: str = ""
    """A folder of images; Parquet files, tars (with globs) or a folder of them; a data set by its
    name (cifar10). Local, or a URL such as s3://bucket/train-*.tar."""
    out: str = "shards"
    """Folder of the shards, local or a URL."""
    codec: str = ""
    """A diffusers autoencoder, or a pipeline with one: directory or hub id."""
    text: str = "none"
    """Encodes the captions: a folder or hub id of a CLIP, T5 or BERT; minilm, which a package
    brings with it; or none."""
    resolution: PositiveInt = 256
    """Side of the square that images are cropped and resized to."""
    columns: Columns = Columns()
    """Where images, labels and captions are, if not where they usually are."""
    crop: Crop = CentreCrop()
    """Random crops are drawn once, by the image's id."""
    flip: bool = False
    """Mirror every other image; which ones, the column flip tells."""
    filter: Literal["lanczos", "bicubic", "bilinear", "box"] = "lanczos"
    """Of the resize."""
    min_size: NonNegativeInt = 0
    """Leave out images whose shorter side has fewer pixels."""
    max_aspect: NonNegativeFloat = 0
    """Leave out images whose longer side is so many times the shorter; 0: keep all."""
    duplicates: Literal["keep", "drop"] = "keep"
    """drop: of files that are the same byte for byte, the first stays. Reads everything twice."""
    rows_per_shard: NonNegativeInt = 0
    """At most; 0: 1000, fewer for small data. A tar becomes one shard, however long."""
    dtype: Precision = "float32"
    """Of the latents as they are stored."""
    text_dtype: Precision = "float32"
    """Of the captions' embeddings."""
    text_length: NonNegativeInt = 0
    """Tokens at most; longer captions are cut. 0: what is usual for the encoder."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """In which the codec computes."""
    tile: NonNegativeInt = 0
    """Encode larger images in overlapping squares of this side; 0: whole."""
    batch: PositiveInt = 16
    """Images that are encoded at once."""
    seed: int = 0
    """Of random crops and flips."""
    workers: NonNegativeInt = 0
    """Processes that encode; 0: one for each GPU, or each core where there is none."""
    readers: PositiveInt = 1
    """Threads of each that decode meanwhile; a GPU needs several to be busy."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the codec computes."""
    ray: str = ""
    """Address of a Ray cluster; $RAY_ADDRESS if not given, and this machine alone without it."""


def run(config: PrepareRun) -> dict[str, Any]:
    """Makes what is missing; returns the index."""
    check(config)
    task = Task(config)
    with task.claimed():
        plan = work.make_plan(task.job, config.rows_per_shard)
        index = None if plan.missing else work.find_index(task.folder)
        if index is not None:
            return index
        if plan.missing:
            with work.cluster(config.ray, config.workers) as resources:
                encode(task, plan, resources)
        index = work.conclude(task.job, plan, task.facts)
        tell_enlarged(index, config.resolution)
        return index


def tell_enlarged(index: dict[str, Any], side: int) -> None:
    if index["enlarged"]:
        print(
            f"{index['enlarged']} of {index['counts']['kept']} images were enlarged to {side} "
            f"pixels: a smaller --resolution fits them, --min-size {side} leaves them out"
        )


def check(config: PrepareRun) -> None:
    if not config.source or not config.codec:
        raise UserError(
            "name the images and what encodes them: stillhouse prepare SOURCE --codec DIR"
        )
    if 0 < config.max_aspect < 1:
        raise UserError("--max-aspect is the longer side over the shorter: 1 or more, 0 for all")
    local = [Path(name).expanduser().resolve() for name in (config.out, config.source)]
    if "://" not in config.out and local[1].is_dir() and local[0].is_relative_to(local[1]):
        raise UserError("the shards would be among the images: choose an --out outside of them")


def encode(task: "Task", plan: Plan, resources: dict[str, float]) -> None:
    """On whatever the cluster has."""
    config = task.config
    pool = find_pool(config, resources)
    job = replace(task.job, device="cuda" if pool.gpus else "cpu")
    drop: dict[int, frozenset[int]] = {}
    if config.duplicates == "drop":
        with progress_bar("looking for duplicates", len(plan.units), "shards") as advance:
            drop = work.hash_all(job, plan, pool, lambda fate: advance(1))
    with shown(plan.missing) as tell:
        work.encode_all(job, plan, pool, drop, tell)


@contextmanager
def shown(units: Sequence[work.Unit]) -> Iterator[Callable[[Fate], None]]:
    """A bar of images where their number is known beforehand, of shards otherwise."""
    known = all(unit.stop != END for unit in units)
    total = sum(unit.stop - unit.start for unit in units) if known else len(units)
    with progress_bar("encoding", total, "images" if known else "shards") as advance:
        yield lambda fate: advance(fate.rows if known else 1)


def find_pool(config: PrepareRun, resources: dict[str, float]) -> Pool:
    """A worker per GPU, or per core."""
    cores, gpus = (int(resources.get(kind, 0)) for kind in ("CPU", "GPU"))
    if config.device == "cuda" and not gpus:
        raise UserError("--device cuda: Ray knows of no GPU. Leave it out, or look at the cluster")
    on_gpu = bool(gpus) and config.device != "cpu"
    workers, cpus = config.workers or (gpus if on_gpu else cores), config.readers if on_gpu else 1
    if workers * cpus > cores or (on_gpu and workers > gpus):
        raise UserError(
            f"{workers} workers of {cpus} cores{' and a GPU' if on_gpu else ''} each are more than "
            f"the {cores} cores and {gpus} GPUs that there are: fewer --workers or --readers"
        )
    return Pool(workers, cpus, int(on_gpu))


# ---------------------------------------------------------------- encoders


def known_everywhere(folder_or_hub_id: str) -> str:
    """A folder by its whole path; a hub id as it is, which every machine fetches for itself."""
    local = Path(folder_or_hub_id).expanduser()
    return str(local.absolute()) if local.is_dir() else folder_or_hub_id


@dataclass(frozen=True)
class CodecFactory:
    """Loads the codec where it is needed, and makes sure that it is the same one."""

    name: str
    dtype: str
    tile: int
    digest: str = ""

    def load(self, device: str) -> Codec:
        """In float32, in which every codec has one digest, whatever it will compute in."""
        codec = load_codec(self.name, device=device)
        if codec is None:
            raise UserError(
                f"{self.name} has no autoencoder: name a diffusers pipeline of latents, or the "
                "autoencoder's own directory"
            )
        if 0 < self.tile < 2 * codec.downscale:
            raise UserError(
                f"--tile {self.tile} is too small: this codec takes squares of at least "
                f"{2 * codec.downscale} pixels; 0 is for whole images"
            )
        return codec.enable_tiling(self.tile) if self.tile else codec

    def __call__(self, device: str) -> Callable[[Tensor], Tensor]:
        codec = self.load(device)
        if codec.digest != self.digest:
            raise UserError(f"the codec {self.name} is another one here than where the job began")
        return codec.to(getattr(torch, self.dtype)).encode


@dataclass(frozen=True)
class TextFactory:
    """The same of the text encoder."""

    name: str
    length: int
    digest: str = ""

    def load(self, device: str) -> TextEncoder:
        return TextEncoder(packaged(self.name), length=self.length, device=device)

    def __call__(self, device: str) -> Callable[[Sequence[str]], list[Words]]:
        encoder = self.load(device)
        if encoder.digest != self.digest:
            raise UserError(f"the text encoder {self.name} is another one here than at the start")
        return lambda texts: embed(encoder, texts)


def embed(encoder: TextEncoder, texts: Sequence[str]) -> list[Words]:
    """Without padding."""
    found: Any = encoder.encode(texts).to("cpu")
    rows = zip(found.text, found.text_mask, found.pooled, strict=True)
    return [Words(text[mask].numpy(), pooled.numpy()) for text, mask, pooled in rows]


# ---------------------------------------------------------------- the parts of a run


class Task:
    """A run with its parts found, each once."""

    def __init__(self, config: PrepareRun) -> None:
        self.config = config
        self.source, columns = find_source(config.source, config.columns)
        self.rows = work.open_rows(self.source, columns, config.text != "none")
        self.columns = self.rows.images.columns
        if config.text != "none" and not self.columns.text:
            raise UserError(
                "there are no captions to encode: name their column as --columns.text, put a .txt "
                "beside each image of a folder, or leave --text out"
            )
        self.folder = storage.Folder.at(config.out)

    @cached_property
    def codec(self) -> CodecFactory:
        config = self.config
        factory = CodecFactory(known_everywhere(config.codec), config.precision, config.tile)
        codec = factory.load("cpu")
        codec.latent_shape((3, config.resolution, config.resolution))  # or refuse
        return replace(factory, digest=codec.digest)

    @cached_property
    def text(self) -> TextFactory | None:
        config = self.config
        if config.text == "none":
            return None
        factory = TextFactory(known_everywhere(config.text), config.text_length)
        encoder = factory.load("cpu")
        self._null = embed(encoder, [""])[0]
        return replace(factory, length=encoder.length, digest=encoder.digest)

    @cached_property
    def job(self) -> Job:
        config = self.config
        image = ImageConfig(
            size=config.resolution, crop=config.crop, flip=config.flip, filter=config.filter
        )
        text_dtype = None if self.text is None else config.text_dtype
        return Job(
            rows=self.rows,
            rules=Rules(image, config.min_size, config.max_aspect or float("inf"), config.seed),
            form=Form(self.columns, self.rows.images.classes, config.dtype, text_dtype),
            out=str(self.folder),
            codec=self.codec,
            text=self.text,
            batch=config.batch,
            readers=config.readers,
        )

    @cached_property
    def seen(self) -> dict[str, str | None]:
        """What is outside of the config and must not change."""
        return {
            "source": self.source.fingerprint(),
            "codec": self.codec.digest,
            "text": self.text and self.text.digest,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """What the index says beside the counts."""
        text = None
        if self.text is not None:
            tokens, pooled = self._null
            widths = {"width": tokens.shape[1], "pooled_width": len(pooled)}
            text = {"length": self.text.length, "null": NULL} | widths
        packages = ("torch", "numpy", "pillow", "diffusers")
        return {
            "source": {"fingerprint": self.seen["source"]},
            "codec": {"digest": self.codec.digest},
            "text": text and {"digest": self.seen["text"], **text},
            "columns": self.columns.model_dump(mode="json"),
            "classes": list(self.rows.images.classes),
            "config": self.config.model_dump(mode="json", exclude={"out", *MACHINE}),
            "versions": {name: version(name) for name in packages} | {"stillhouse": __version__},
        }

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The folder for this run alone: one with the same settings, but for the free ones."""
        folder = self.folder
        try:
            folder.make()
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written to ({error}): choose another --out"
            ) from error
        with locked(Path(folder.path)) if folder.local else nullcontext():
            self._claim()
            yield

    def _claim(self) -> None:
        settings = self.config.model_dump(mode="json")
        if CLAIM in self.folder.names():
            try:
                old = json.loads(self.folder.read(CLAIM))
            except ValueError as error:
                raise UserError(
                    f"{self.folder}/{CLAIM} cannot be read ({error}): choose another --out, or "
                    "remove that file to go on with the same settings"
                ) from error
            changed = self._changes(old, settings)
            if changed and ("seen" not in old or self._begun()):
                raise UserError(
                    f"{self.folder} holds shards of another run ({listed(changed)}). Choose "
                    "another --out, or remove it"
                )
            if changed:
                work.forget(self.folder)
        elif any(name.endswith(".parquet") for name in self.folder.names()):
            raise UserError(f"{self.folder} holds files of another kind: choose another --out")
        claim = {"run": settings, "seen": self.seen}
        write(self.folder, CLAIM, json.dumps(claim, indent=2).encode())
        if self.text is not None:
            from safetensors.numpy import save

            write(self.folder, NULL, save(self._null._asdict()))

    def _begun(self) -> bool:
        return INDEX in self.folder.names() or bool((self.folder / SUMMARIES).names())

    def _changes(self, old: dict[str, Any], settings: dict[str, Any]) -> list[str]:
        if not {"run", "seen"} <= old.keys():
            return [f"its {CLAIM} is of another kind"]
        other = [what for what, found in self.seen.items() if old["seen"].get(what) != found]
        names = {"source": "the images", "codec": "the codec", "text": "the text encoder"}
        changed = differences(old["run"], settings, FREE)
        return changed + [f"{names[what]} changed" for what in other]


# ---------------------------------------------------------------- the source


def find_source(name: str, columns: Columns) -> tuple[Source, Columns]:
    """By the name of a data set, by the files' suffix, or by what a folder holds."""
    known, _, split = name.partition(":")
    if known in known_data.HUB and split in ("", "train", "test"):
        if not split and is_folder(name, {}):
            raise UserError(
                f"{name} is both a folder here and a data set: write ./{name} for the folder, "
                f"{name}:train for the data set"
            )
        source = known_data.parquet(known, "test" if split == "test" else "train")
        return source, merged(known_data.columns(known), columns)
    if name.endswith(".tar"):
        return Tars(files=(name,)), columns
    if name.endswith(".parquet"):
        return Parquet(files=(name,)), columns
    if not is_folder(name, {}):
        raise UserError(
            f"{name} is neither a folder nor a data set: name a folder of images, Parquet files, "
            "tars, or a data set (cifar10)"
        )
    return work.source_in(name, columns), columns


def merged(usual: Columns, named: Columns) -> Columns:
    """The usual columns, but for those that the user has named."""
    plain = Columns()
    own = {role: value for role, value in named if value != getattr(plain, role)}
    return usual.model_copy(update=own)
