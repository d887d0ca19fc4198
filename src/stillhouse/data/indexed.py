"""Indexed sources: the position in the data is the number of images seen, nothing else.

Image k of the run (its key) belongs to epoch k // n and is row permutation(seed, epoch)[k % n] of
the data set. A process takes its rows of each global batch. So any number of processes, any split
and any resume give the same images under the same keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np
from torch.utils.data import DataLoader, Dataset

from stillhouse.data.crops import Size
from stillhouse.data.faults import Corrupt, Fault, FaultConfig, FaultLog
from stillhouse.data.loaded import (
    Loaded,
    Loader,
    Maker,
    Picture,
    Stack,
    State,
    WorkerStart,
    rows_of,
    worker_options,
)
from stillhouse.data.permutation import permute
from stillhouse.data.rows import Row
from stillhouse.data.sources import Captions, IndexedImages
from stillhouse.errors import UserError

_NEIGHBOURS = 16  # damaged images in a row that are passed over


def rows_at(keys: Sequence[int], n: int, seed: int) -> list[int]:
    """The rows of a data set of n that the images `keys` of the run are."""
    epochs, places = np.divmod(np.asarray(keys, dtype=np.int64), n)
    rows = np.empty_like(places)
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        rows[inside] = permute(places[inside], n, seed, int(epoch), "epoch")
    return rows.tolist()


class Order(Protocol):
    """Which rows the images of the run are, and the size they are made: None is the usual one."""

    def __call__(self, keys: range) -> tuple[Sequence[int], Size | None]: ...


@dataclass(frozen=True)
class Shuffled:
    """Every row once in each epoch."""

    n: int
    seed: int

    def __call__(self, keys: range) -> tuple[Sequence[int], Size | None]:
        return rows_at(keys, self.n, self.seed), None


@dataclass(frozen=True)
class KeySampler:
    """The keys of a process, one range per global batch, from `start` images on."""

    batch: int
    start: int = 0
    stop: int | None = None
    rank: int = 0
    world: int = 1

    def __iter__(self) -> Iterator[range]:
        low, high = rows_of(self.batch, self.rank, self.world)
        for base in count(self.start, self.batch):
            stop = base + self.batch if self.stop is None else self.stop
            keys = range(base + low, min(base + high, stop))
            if base >= stop:
                return
            if keys:
                yield keys


class _Fetch(Dataset):
    """A range of keys in, a batch out; runs in the workers."""

    def __init__(self, images: IndexedImages, maker: Maker, order: Order | None = None) -> None:
        self.images, self.maker = images, maker
        self.order = order or Shuffled(len(images), maker.seed)

    def __getitem__(self, keys: range) -> Stack | UserError:
        faults: list[Fault] = []
        try:
            rows, size = self.order(keys)
            pairs = zip(self.images.rows(rows), keys, strict=True)
            pictures = [self._good(row, key, size, faults) for row, key in pairs]
            return self.maker.stack(pictures, keys, faults)
        except UserError as error:
            return error

    def _good(self, row: Row, key: int, size: Size | None, faults: list[Fault]) -> Picture:
        """The picture, or that of the next row of the data set that can be used.

        No other key sees a different image because of it, and the replacement is always the same.
        """
        n = len(self.images)
        for _ in range(_NEIGHBOURS):
            try:
                return self.maker.picture(row, key, size)
            except Corrupt as reason:
                after = (row.id + 1) % n
                faults.append(Fault(row.where, f"{reason}; image {after} is shown instead"))
                row = self.images.rows([after])[0]
        raise UserError(
            f"{_NEIGHBOURS} images in a row cannot be used, up to {faults[-1]}. Is the image "
            "column the right one?"
        )


class IndexedLoader:
    """Batches of an indexed source through a plain DataLoader."""

    def __init__(
        self,
        images: IndexedImages,
        maker: Maker,
        order: Order | None = None,
        *,
        batch: int,
        start: int = 0,
        stop: int | None = None,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        worker_start: WorkerStart = "auto",
        faults: FaultConfig | None = None,
    ) -> None:
        self.images, self.maker, self.order = images, maker, order
        self.sampler = KeySampler(batch, start, stop, rank, world)
        self.options = worker_options(workers, worker_start)
        self.log = FaultLog(faults or FaultConfig())
        self.log.add(images.faults)
        self.classes = images.classes
        self.note = f"continues at image {start}" if start else ""

    def __iter__(self) -> Iterator[Loaded]:
        keys, batch = self.sampler, self.sampler.batch
        fetch = _Fetch(self.images, self.maker, self.order)
        loader = DataLoader(fetch, sampler=keys, **self.options)  # type: ignore[arg-type]
        try:
            for step, item in enumerate(loader, start=1):
                seen = keys.start + step * batch
                yield self.maker.finish(item, self.log, self._state(min(seen, keys.stop or seen)))
        finally:
            del loader  # ends its workers now, even where a traceback keeps this frame alive

    def _state(self, images: int) -> State:
        state = indexed_state(images, len(self.images))
        return state if self.order is None else {**state, "batch": self.sampler.batch}


def numbered_captions(loader: Loader) -> Captions:
    """The captions behind a loader, which `Captions.of` finds by the ids of a batch."""
    if not isinstance(loader, IndexedLoader):
        raise UserError(
            "only the captions of an indexed source can be listed before training: give "
            "--data.source.streaming false"
        )
    if not loader.images.columns.text:
        raise UserError("the data has no column of captions: name it as --data.columns.text")
    return loader.images.captions()


def indexed_state(images: int, rows: int) -> State:
    """The position of an indexed source, for a checkpoint: it means nothing in other data."""
    return {"kind": "indexed", "images": images, "rows": rows}
