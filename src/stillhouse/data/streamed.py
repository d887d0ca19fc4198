"""Streamed sources: shards read one after the other, shuffled within blocks, exactly resumable.

datasets' own shuffle buffer loses its content in a resume, so rows are shuffled in blocks instead:
`buffer` rows in the order of the shards, handed out in an order keyed by the block's place. A
reader's position is then where its block starts and how far into it we are; a resume reads the
block again and goes on at the same row. While one block is handed out the next one is read, row
for row, so reading is spread evenly.

With the same number of processes and workers, batch and buffer, a resume is exact. Otherwise it
goes on at the granularity of shards, and `note` says how many samples repeat at most.
"""

import hashlib
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from stillhouse.data.faults import Corrupt, Fault, FaultConfig, FaultLog
from stillhouse.data.loaded import (
    Loaded,
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
from stillhouse.data.shardfiles import passing
from stillhouse.data.shards import Cursor, ShardPlan, find_cursors
from stillhouse.data.sources import ShardedImages
from stillhouse.errors import UserError

_TRIES = 6  # of a read that fails for reasons outside the file


@dataclass(frozen=True)
class Job:
    """What a process streams; the same in all its workers."""

    images: ShardedImages
    maker: Maker
    plan: ShardPlan
    batch: int
    origin: int = 0  # images seen when the plan began
    rank: int = 0
    world: int = 1
    buffer: int = 1024
    faults: FaultConfig = field(default_factory=FaultConfig)


class Place(NamedTuple):
    """Where a row was read."""

    shards: int  # of this reader, before its shard
    row: int


class Reader:
    """The endless batches of one worker; its state is a cursor."""

    def __init__(self, job: Job, worker: int, workers: int) -> None:
        self.job, self.worker, self.workers = job, worker, workers
        self.readers = job.world * workers
        self.cursor = Cursor(job.rank * workers + worker)
        self.log = FaultLog(job.faults)
        self.news: list[Fault] = []
        self.error: UserError | None = None
        self.rows: Iterator[tuple[Place, Row]] | None = None
        self.coming: list[tuple[Place, Row]] = []

    # -------- state

    def state_dict(self) -> dict[str, int]:
        return self.cursor.to_json()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.cursor, self.rows = Cursor(**state), None

    # -------- batches

    def __iter__(self) -> "Reader":
        return self

    def __next__(self) -> Stack | UserError:
        if self.error:  # the loader asks ahead; there is nothing after an error
            return self.error
        try:
            keys = self._keys()
            pictures = [self._picture(key) for key in keys]
            self.cursor = replace(self.cursor, batches=self.cursor.batches + 1)
            faults, self.news = self.news, []
            return self.job.maker.stack(pictures, keys, faults)
        except UserError as error:
            self.error = error.with_traceback(None)
            return self.error

    def _keys(self) -> range:
        """Streams have no end, so the loader takes the workers' batches strictly in turn."""
        job = self.job
        low, high = rows_of(job.batch, job.rank, job.world)
        step = self.cursor.batches * self.workers + self.worker
        base = job.origin + step * job.batch
        return range(base + low, base + high)

    def _picture(self, key: int) -> Picture:
        while True:
            row = self._row()
            try:
                return self.job.maker.picture(row, key)
            except Corrupt as reason:
                self._fault(row.where, f"{reason}; the next image takes its place")

    def _fault(self, where: str, reason: str) -> None:
        self.news.append(Fault(where, reason))
        self.log.add(self.news[-1:])

    # -------- blocks

    def _row(self) -> Row:
        """The next row in the shuffled order."""
        if self.rows is None:
            self._open()
        row = self.block[self.order[self.cursor.offset]][1]
        self.cursor = replace(self.cursor, offset=self.cursor.offset + 1)
        self._read_one()
        if self.cursor.offset == len(self.block):
            self._next_block()
        return row

    def _open(self) -> None:
        """Reads the block at the cursor."""
        offset = self.cursor.offset
        self.rows = self._read_on(self.cursor.shards, self.cursor.row)
        self.ahead, self.coming = next(self.rows), []
        self._next_block()
        self.cursor = replace(self.cursor, offset=offset)

    def _read_one(self) -> bool:
        """One more row of the coming block; False when it is whole.

        Epochs do not share a block: a reader shows all of one before any of the next.
        """
        full = len(self.coming) == self.job.buffer
        if full or (self.coming and self._epoch(self.ahead) != self._epoch(self.coming[0])):
            return False
        self.coming.append(self.ahead)
        self.ahead = next(self.rows)  # type: ignore[arg-type]
        return True

    def _next_block(self) -> None:
        while self._read_one():
            pass
        self.block, self.coming = self.coming, []
        place = self.block[0][0]
        key = (self.job.plan.seed, self._visit(place.shards), place.row, "block")
        self.order = permute(range(len(self.block)), len(self.block), *key)
        self.cursor = replace(self.cursor, **place._asdict(), offset=0)

    def _epoch(self, read: tuple[Place, Row]) -> int:
        return self._visit(read[0].shards) // self.job.plan.shards

    # -------- rows

    def _visit(self, shards: int) -> int:
        return self.job.plan.visit(self.cursor.reader + shards * self.readers)

    def _read_on(self, shards: int, row: int) -> Iterator[tuple[Place, Row]]:
        """All rows from a place on, shard after shard, without end."""
        barren = 0
        while True:
            shard = self.job.plan.shard(self._visit(shards))
            start = row
            for found in self._read_shard(shard, start):
                yield Place(shards, row), found
                row += 1
            barren = barren + 1 if row == 0 else 0
            if row == 0:
                self._fault(self.job.images.shards[shard], "the shard has no rows")
            if barren > len(self.job.images):
                raise UserError(f"no shard has any rows; {self.log.report()}")
            shards, row = shards + 1, 0

    def _read_shard(self, shard: int, row: int) -> Iterator[Row]:
        """The rows of a shard. A damaged one ends early; a failing network is tried again."""
        path, failures = self.job.images.shards[shard], 0
        while True:
            try:
                for found in self.job.images.rows(shard, row):
                    yield found
                    row, failures = row + 1, 0
                return
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                if not passing(error):
                    return self._fault(path, f"read up to row {row} only: {reason}")
                failures += 1
                if failures == _TRIES:
                    raise UserError(
                        f"{path} cannot be read after {_TRIES} tries ({reason}). Run the same "
                        "command again once it can: the position is in the checkpoint"
                    ) from error
                time.sleep(0.1 * 4**failures)


class _Stream(IterableDataset):
    def __init__(self, job: Job) -> None:
        self.job = job

    def __iter__(self) -> Reader:
        info = get_worker_info()
        return Reader(self.job, info.id, info.num_workers) if info else Reader(self.job, 0, 1)


# ---------------------------------------------------------------- the loader


class StreamedLoader:
    """Batches of a streamed source through torchdata's StatefulDataLoader.

    `resume` holds the states of all processes of the run that is resumed, by rank.
    """

    def __init__(
        self,
        images: ShardedImages,
        maker: Maker,
        *,
        batch: int,
        start: int = 0,
        resume: Sequence[State] = (),
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        worker_start: WorkerStart = "auto",
        buffer: int = 1024,
        faults: FaultConfig | None = None,
    ) -> None:
        self.log = FaultLog(faults or FaultConfig())
        self.options = worker_options(workers, worker_start)
        self.classes = images.classes
        self.run = {
            "kind": "streamed",
            "world": world,
            "workers": workers,
            "batch": batch,
            "buffer": buffer,
            "seed": maker.seed,
            "shards": len(images),
            "names": _digest(images.names),
        }
        plan, self.loader_state, self.note = self._resume(resume, rank)
        origin = start if not resume else resume[0]["origin" if self.loader_state else "images"]
        self.images_seen = resume[0]["images"] if resume else start
        self.job = Job(images, maker, plan, batch, origin, rank, world, buffer, self.log.config)

    def _resume(self, states: Sequence[State], rank: int) -> tuple[ShardPlan, State | None, str]:
        """The plan, the loader's own state where it still fits, and a sentence for people."""
        fresh = ShardPlan(self.run["shards"], self.run["seed"])
        if not states:
            return fresh, None, ""
        self._check(states)
        plan = replace(fresh, pending=tuple(states[0]["pending"]), start=states[0]["start"])
        if all(states[0][key] == value for key, value in self.run.items()):
            return plan, states[rank]["loader"], "continues at the very next sample"
        cursors = [cursor for state in states for cursor in find_cursors(state["loader"])]
        if len(cursors) != states[0]["world"] * max(1, states[0]["workers"]):
            raise UserError("the checkpoint does not hold the position of every reader")
        repeat = sum(cursor.unfinished for cursor in cursors)
        return plan.rest(cursors), None, _note(states[0], self.run, repeat)

    def _check(self, states: Sequence[State]) -> None:
        first = states[0]
        if first.get("kind") != "streamed":
            raise UserError("the checkpoint comes from an indexed source, this one is streamed")
        if len(states) != first["world"]:
            raise UserError(
                f"the checkpoint is of {first['world']} processes, {len(states)} data states came"
            )
        for key in ("seed", "shards", "names"):
            if first[key] != self.run[key]:
                what = "seed" if key == "seed" else "list of shards"
                raise UserError(
                    f"the {what} is not the one of the checkpoint, so its position in the data "
                    "means nothing here: use the same, or start a new run"
                )

    def __iter__(self) -> Iterator[Loaded]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        # torchdata 0.11 calls a function that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        loader = StatefulDataLoader(_Stream(self.job), **self.options)
        if self.loader_state:
            loader.load_state_dict(self.loader_state)
        try:
            for step, item in enumerate(loader, start=1):
                state = self._state(step, loader.state_dict())
                yield self.job.maker.finish(item, self.log, state)
        finally:
            del loader  # ends its workers now, even where a traceback keeps this frame alive

    def _state(self, step: int, loader: State) -> State:
        plan = self.job.plan
        return {
            **self.run,
            "images": self.images_seen + step * self.job.batch,
            "origin": self.job.origin,
            "pending": list(plan.pending),
            "start": plan.start,
            "loader": loader,
        }


def _digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()


def _note(before: State, now: State, repeat: int) -> str:
    changes = [
        f"{key} {before[key]} -> {now[key]}"
        for key in ("world", "workers", "batch", "buffer")
        if before[key] != now[key]
    ]
    return (
        f"continues at the granularity of shards ({', '.join(changes)}): at most {repeat} samples "
        "are seen again in this epoch"
    )
