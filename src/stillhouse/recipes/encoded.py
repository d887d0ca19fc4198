"""What fine-tuning encodes once: the latents and captions of a data set, in a cache of their own.

Both lie below $STILLHOUSE_CACHE, or else ~/.cache/stillhouse, under the digest of all that they
depend on: another run on the same images, with another coupling perhaps, finds them there. What is
being made has a name that no other run knows, and gets the true one when it is whole: runs that
start together each make their own, and the first to be ready is kept.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from stillhouse.data import DataConfig, IndexedLoader, Loader, cached
from stillhouse.data.cached import Facts, part, row_file, share, writing
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models import Codec
from stillhouse.models.text import EmbeddedCaptions
from stillhouse.pipelines.prompts import BATCH, PromptEncoder, count_tokens
from stillhouse.process import Condition
from stillhouse.recipes.latents import prepared

if TYPE_CHECKING:
    from stillhouse.recipes.train.training import TrainRun

CACHE = Path("~/.cache/stillhouse")
ABANDONED = 24 * 3600  # seconds without a change, after which nobody is at work any more
COUNTS = "counts"  # tokens of each caption

T = TypeVar("T")


def cache_folder() -> Path:
    """Where all is kept."""
    folder = Path(os.environ.get("STILLHOUSE_CACHE") or CACHE).expanduser() / "encoded"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---------------------------------------------------------------- made once, by all processes


@dataclass(frozen=True)
class Job:
    """Rows to be encoded, a share by each process."""

    what: str
    rows: int
    name: Callable[[], str]
    """Of the folder; differs where anything does that the result depends on."""
    fill: Callable[[Path, range], Facts]
    """Writes one share."""
    join: Callable[[Path, list[Facts]], Facts]
    """Makes one of all shares, in order, and says what is kept in the manifest."""


def kept(job: Job, here: World) -> Path:
    """The folder, filled by this run if by none before.

    The first process looks for it, and tells the others: on a shared disk, one that had looked
    before the folder came would not see it for a while.
    """
    folder = cache_folder() / _told(job.name, here)
    if not _told(lambda: cached.is_whole(folder, job.rows), here):
        partial = folder.with_name(_told(lambda: _begin(folder, job), here))
        try:
            _check_shared(partial, here)
            mine = share(job.rows, here.rank, here.size)
            shares = _together(lambda: job.fill(partial, mine), here)
            here.first(lambda: _conclude(partial, folder, job, shares))
        except BaseException:
            if here.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
    _check_shared(folder, here)
    return folder


def _begin(folder: Path, job: Job) -> str:
    """The name of an empty folder of this run's own."""
    print(f"encoding {job.rows} {job.what}, once, into {folder.parent} ...", flush=True)
    for left in folder.parent.glob(f"{folder.name}.*.partial"):
        if time.time() - _changed(left) > ABANDONED:
            shutil.rmtree(left, ignore_errors=True)
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
    with writing(folder.parent):
        partial.mkdir()
    return partial.name


def _changed(folder: Path) -> float:
    """When anything within was last written to."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:  # its run is ready, or takes it away
        return time.time()


def _conclude(partial: Path, folder: Path, job: Job, shares: list[Facts]) -> None:
    facts = job.join(partial, shares)
    with writing(folder.parent):
        cached.write_manifest(partial, folder.name, job.rows, facts)
        if folder.exists() and not cached.is_whole(folder, job.rows):
            damaged = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
            folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        try:
            partial.rename(folder)
        except OSError:
            if not cached.is_whole(folder, job.rows):
                raise
            shutil.rmtree(partial, ignore_errors=True)  # another run was ready before


def _check_shared(folder: Path, here: World) -> None:
    seen = all(here.gather(folder.is_dir()))

    def check() -> None:
        if not seen:
            raise UserError(
                f"{folder.parent} is not the same folder on all machines: name one that is as "
                "STILLHOUSE_CACHE"
            )

    here.first(check)


def _told(find: Callable[[], T], here: World) -> T:
    """What the first process finds, on all."""
    found: list[T] = []
    here.first(lambda: found.append(find()))
    return here.gather(found)[0][0]


def _together(work: Callable[[], T], here: World) -> list[T]:
    """What each process makes, by rank; what one of them refuses ends them all."""
    made: list[T] = []
    refused = ""
    try:
        made.append(work())
    except UserError as error:
        refused = str(error)
    answers = here.gather((made, refused))

    def check() -> None:
        for _, sentence in answers:
            if sentence:
                raise UserError(sentence)

    here.first(check)
    return [found for [found], _ in answers]


# ---------------------------------------------------------------- latents


def encodes_once(config: "TrainRun", codec: Codec | None) -> bool:
    """Whether batches are latents from the cache. Prepared shards hold latents already."""
    return config.encode_once and codec is not None and prepared(config) is None


def read_once(config: "TrainRun", here: World, loader: Loader, codec: Codec | None) -> Loader:
    """The loader, with latents from the cache where that is asked for."""
    if codec is None or not encodes_once(config, codec):
        return loader
    assert isinstance(config.data, DataConfig)
    indexed = cached.check_fixed(config.data, loader)
    # Held-out images are not mirrored.
    data = config.data.model_copy(update={"image": indexed.maker.image})
    return encoded_once(indexed, data, codec, here)


def encoded_once(
    loader: IndexedLoader, data: DataConfig, codec: Codec, here: World
) -> IndexedLoader:
    """From the cache, which all processes fill where it lacks these images."""
    shape = codec.latent_shape(data.image.shape)
    job = Job(
        "images",
        len(loader.images),
        lambda: f"latents-{cached.cache_key(data, loader.images, codec.digest)}",
        lambda folder, rows: {
            "first": rows.start,
            "files": cached.fill(folder, loader, codec.encode, rows, shape),
        },
        _join_latents,
    )
    return cached.from_cache(loader, kept(job, here))


def _join_latents(_: Path, shares: list[Facts]) -> Facts:
    """The parts stay as they are."""
    filled = [found for found in shares if found["files"]]
    files = {name: size for found in filled for name, size in found["files"].items()}
    return {"starts": [found["first"] for found in filled], "files": files}


# ---------------------------------------------------------------- captions


def encoded_captions(
    source: Path, digest: str, length: int, captions: Sequence[str], here: World
) -> EmbeddedCaptions:
    """Every distinct caption and the empty one, encoded by all processes if by none before."""
    distinct = tuple(dict.fromkeys([*captions, ""]))

    def fill(folder: Path, rows: range) -> Facts:
        if not rows:
            return {}
        table = encoded(source, length, distinct[rows.start : rows.stop], here.device)
        _save(table, folder, rows.start)
        return {"first": rows.start, "length": table.length, "longest": table.longest}

    def name() -> str:
        key = hashlib.sha256(json.dumps([digest, distinct]).encode()).hexdigest()
        return f"captions-{key[:32]}"

    job = Job("captions", len(distinct), name, fill, _join_captions)
    return _load(kept(job, here), distinct)


def encoded(
    source: Path, length: int, distinct: tuple[str, ...], device: torch.device
) -> EmbeddedCaptions:
    """Captions as a pipeline encodes them."""
    encoder = PromptEncoder(source, length=length, device=device)
    return encoded_by(encoder, distinct, count_tokens(source, distinct))


def encoded_by(
    encoder: PromptEncoder, distinct: tuple[str, ...], longest: int = 0
) -> EmbeddedCaptions:
    """The same by an encoder that is there already."""
    return EmbeddedCaptions.packed(distinct, _rows(encoder, distinct), longest)


def _rows(encoder: PromptEncoder, captions: Sequence[str]) -> Iterator[Condition]:
    """A few at a time, without their padding; the empty one is that of images without any."""
    for at in range(0, len(captions), BATCH):
        for told, some in groupby(captions[at : at + BATCH], key=bool):
            yield encoder.encode(list(some)) if told else encoder.null


def _save(table: EmbeddedCaptions, folder: Path, first: int) -> None:
    """One part, with the number of each caption's tokens."""
    tensors = {"tokens": table.tokens, "pooled": table.pooled, COUNTS: table.starts.diff()}
    for name, tensor in tensors.items():
        rows = tensor.numpy()
        with row_file(folder / part(name, first), rows.dtype, rows.shape) as add:
            add(rows)


def _join_captions(folder: Path, shares: list[Facts]) -> Facts:
    """One file of each kind, so that the table can be mapped as a whole."""
    filled = [found for found in shares if found]
    files = {}
    for name in ("tokens", "pooled", COUNTS):
        parts = [folder / part(name, found["first"]) for found in filled]
        whole = folder / f"{name}.npy"
        _join(parts, whole)
        files[whole.name] = whole.stat().st_size
    longest = max(found["longest"] for found in filled)
    return {"files": files, "length": filled[0]["length"], "longest": longest}


def _join(parts: list[Path], whole: Path) -> None:
    if len(parts) == 1:
        parts[0].rename(whole)
        return
    arrays = [np.load(path, mmap_mode="r") for path in parts]
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    with row_file(whole, arrays[0].dtype, shape) as add:
        for array in arrays:
            add(array)
    for path in parts:
        path.unlink()


def _load(folder: Path, captions: tuple[str, ...]) -> EmbeddedCaptions:
    """Mapped, not read."""
    facts = cached.read_manifest(folder)
    tokens, pooled, counts = (
        torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))
        for name in ("tokens", "pooled", COUNTS)
    )
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return EmbeddedCaptions(captions, tokens, starts, pooled, facts["length"], facts["longest"])
