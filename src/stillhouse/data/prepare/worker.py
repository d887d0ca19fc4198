"""What a worker does with a unit: read, look, encode, write the shard and then what became of it.

A unit is finished when its summary is there. Whoever makes it, and however often it was tried
before, shard and summary are the same to the bit: batches are cut from the unit alone, and a CPU
worker computes with one thread.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stillhouse.data.faults import Fault
from stillhouse.data.loaded import Words
from stillhouse.data.prepare.files import exists, partial_file, publish, write
from stillhouse.data.prepare.moments import ChannelMoments
from stillhouse.data.prepare.samples import Failed, Look, Rules, Sample, ahead, batches
from stillhouse.data.prepare.shard import Form, ShardFile
from stillhouse.data.prepare.units import Entry, Rows, Unit, read_patiently
from stillhouse.data.transforms import to_float
from stillhouse.engine.storage import Folder
from stillhouse.errors import UserError

SUMMARIES = "units"
TRIES = "tries"
MOST_TRIES = 4  # of a unit in one run; what ends its worker so often is in the unit

Encode = Callable[[Tensor], Tensor]  # images [B, 3, H, W] in [-1, 1] to latents [B, C, h, w]
EncodeText = Callable[[Sequence[str]], Sequence[Words]]


class Factory(Protocol):
    """Picklable; called in the worker with the name of its device."""

    def __call__(self, device: str) -> Any: ...


@dataclass(frozen=True)
class Job:
    """All that workers need to know."""

    rows: Rows
    rules: Rules
    form: Form
    out: str
    """Path or URL of the folder of shards."""
    codec: Factory
    """Makes an `Encode`."""
    text: Factory | None = None
    """Makes an `EncodeText`."""
    batch: int = 16
    readers: int = 1
    """Threads that decode ahead."""
    device: str = "cpu"

    def folder(self) -> Folder:
        return Folder.at(self.out)


class Encoders:
    """The networks of a worker, loaded once."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)  # sums are split by threads, so their number changes the bits
        self.encode: Encode = job.codec(job.device)
        self.encode_text: EncodeText | None = job.text(job.device) if job.text else None
        self.device = job.device

    @torch.no_grad()
    def latents(self, samples: Sequence[Sample]) -> NDArray[np.float32]:
        pixels = torch.from_numpy(np.stack([sample.pixels for sample in samples]))
        images = to_float(pixels.to(self.device))
        # The order that convolutions are fastest with; always the same, or bits would differ.
        images = images.contiguous(memory_format=torch.channels_last)
        return self.encode(images).float().cpu().numpy()

    @torch.no_grad()
    def words(self, samples: Sequence[Sample]) -> Sequence[Words | None]:
        if self.encode_text is None:
            return [None] * len(samples)
        return self.encode_text([sample.text for sample in samples])


# ---------------------------------------------------------------- one unit


@dataclass(eq=False)
class Tally:
    """What became of the rows of a unit."""

    rows: int = 0
    failures: list[Failed] = field(default_factory=list)
    filtered: Counter[str] = field(default_factory=Counter)
    shape: list[int] | None = None
    moments: ChannelMoments | None = None
    tokens: int = 0
    enlarged: int = 0

    def sort(self, looks: Iterator[Look | Fault]) -> Iterator[Sample]:
        """Passes on what is to be encoded."""
        for look in looks:
            if isinstance(look, Fault):
                self.failures.append(Failed("", look.where, look.reason))
                continue
            self.rows += 1
            if isinstance(look, Sample):
                yield look
            elif isinstance(look, Failed):
                self.failures.append(look)
            else:
                self.filtered[look] += 1

    def take(self, latents: Sequence[NDArray[np.float32]], words: Sequence[Words | None]) -> None:
        if not latents:
            return
        found = ChannelMoments.of(np.stack(latents))
        self.moments = found if self.moments is None else self.moments + found
        self.shape = list(latents[0].shape)
        self.tokens += sum(len(said.tokens) for said in words if said is not None)


def make_shard(
    job: Job, encoders: Encoders, unit: Unit, drop: frozenset[int] = frozenset()
) -> dict[str, Any]:
    """The summary of a unit, whose shard is then there; `drop` are the places of duplicates."""
    tally, out = Tally(), job.folder()

    def look(entry: Entry, place: int) -> Look:
        return job.rules.look(entry, place in drop)

    looks = ahead(read_patiently(job.rows, unit), look, job.readers, 2 * job.batch)
    file_name = f"{unit.name}.parquet"
    with partial_file(out, file_name) as path:
        shard = ShardFile(path, job.form.schema())
        for samples in batches(tally.sort(looks), job.batch):
            shard.add(encode(job.form, encoders, samples, tally))
        shard.close()
        size = path.stat().st_size if shard.rows else 0
        if shard.rows:
            publish(out, file_name, path)
    summary = _summary(job, unit, tally, shard, size)
    write(out / SUMMARIES, f"{unit.name}.json", json.dumps(summary).encode())
    return summary


def encode(
    form: Form, encoders: Encoders, samples: Sequence[Sample], tally: Tally
) -> list[dict[str, Any]]:
    """The rows of a batch; what cannot be stored is a failure."""
    latents, words = encoders.latents(samples), encoders.words(samples)
    records, kept = [], []
    for sample, latent, said in zip(samples, latents, words, strict=True):
        try:
            records.append(form.record(sample, latent, said))
            kept.append((latent, said))
            tally.enlarged += _enlarged(sample)
        except OverflowError as reason:
            tally.failures.append(Failed(sample.name, sample.where, str(reason)))
    tally.take([latent for latent, _ in kept], [said for _, said in kept])
    return records


def _enlarged(sample: Sample) -> bool:
    source, resized, *_ = sample.layout
    return resized[0] > source[0] or resized[1] > source[1]


def _summary(job: Job, unit: Unit, tally: Tally, shard: ShardFile, size: int) -> dict[str, Any]:
    return {
        "unit": unit.number,
        "from": job.rows.where(unit),
        "rows": tally.rows,
        "kept": shard.rows,
        "filtered": dict(sorted(tally.filtered.items())),
        "failures": [failure._asdict() for failure in tally.failures],
        "shape": tally.shape,
        "moments": None if tally.moments is None else tally.moments.to_json(),
        "tokens": tally.tokens,
        "enlarged": tally.enlarged,
        "bytes": size,
        "digest": shard.digest.hexdigest(),
    }


# ---------------------------------------------------------------- a process of many units


class Worker:
    """Ray makes one in each of its processes, and hands it units."""

    lasting: ClassVar[bool] = True

    def __init__(self, job: Job) -> None:
        self.job, self.out = job, job.folder()
        self.encoders = Encoders(job)

    def do(self, unit: Unit, drop: frozenset[int]) -> dict[str, Any]:
        """What became of the unit; if another process has finished it already, nothing is done."""
        summaries, name = self.out / SUMMARIES, f"{unit.name}.json"
        if exists(summaries, name):
            return json.loads(summaries.read(name))
        self._count_try(unit)
        return make_shard(self.job, self.encoders, unit, drop)

    def _count_try(self, unit: Unit) -> None:
        """Ray would restart a worker for ever that its unit ends each time."""
        folder = self.out / TRIES / unit.name
        tries = len(folder.names())
        if tries >= MOST_TRIES:
            raise UserError(
                f"{tries} workers have died over {self.job.rows.where(unit)}. One of its images "
                "may need more memory than there is: find and remove it, or give each worker more "
                "(fewer --workers)"
            )
        folder.write(str(tries), b"")
