"""Checkpoints: tensors through DCP, all else JSON, and a manifest that is written last.

    images-000000051200/
        __0_0.distcp ...   tensors, as torch.distributed.checkpoint lays them out
        .metadata          DCP's description of them (a pickle; see contents.py)
        values.json        everything that is not a tensor
        values-00000.json  what belongs to one rank (its place in a stream, its generators)
        manifest.json      size and SHA-256 of every file above

A checkpoint exists when its manifest does, so a run may be killed at any moment, also on object
stores, which have no atomic rename. What the manifest says is checked before anything is loaded.
"""

import json
import re
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager

from stillhouse.engine.contents import (
    MANIFEST,
    VALUES,
    CheckpointError,
    FileRecord,
    Manifest,
    check_names,
    folder_name,
    outdated,
    plain,
    put_back,
    rank_file,
    read_manifest,
    spell_manifest,
    split,
)
from stillhouse.engine.storage import Folder, Reader, TensorsOnly, Writer, host_memory
from stillhouse.engine.world import gloo_group
from stillhouse.errors import UserError

T = TypeVar("T")

_NAME = re.compile(r"images-(\d{12,})")
_UNFINISHED = f"it has no {MANIFEST}, so the run ended before it was complete"


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole, and the newer ones that were not, each with its reason."""

    images: int
    world_size: int
    files: dict[str, FileRecord]
    skipped: tuple[str, ...] = ()


class CheckpointStore:
    """The checkpoints of one run. Every process makes the same calls in the same order.

    `save` copies the state and returns; a thread writes it while training goes on. Writing takes
    collectives (DCP's plan, the gathering of checksums), and those of training run at the same
    time. So the store has a gloo group of its own, which only that thread uses while it lives, and
    `save`, `find` and `load` wait for the thread before they use the group themselves: in no group
    can the order of calls differ between processes, and a checkpoint becomes complete without any
    help from the training loop.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        storage_options: dict[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        """Keeps the newest `keep_last`, and one per `keep_every` images for good.

        A process group that is passed must be gloo and used by nobody else.
        """
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise CheckpointError("keep_last and keep_every count from 1")
        self.root = Folder.at(root, storage_options)
        self.keep_last, self.keep_every = keep_last, keep_every
        self._peers = Peers(process_group)
        self._stager: DefaultStager | None = None
        self._pending: _Background | None = None
        self._complete: int | None = None
        self._damaged: set[int] = set()

    # ------------------------------------------------------------ writing

    def save(
        self,
        images: int,
        tensors: dict[str, Any],
        values: dict[str, Any],
        rank_values: dict[str, Any] | None = None,
    ) -> None:
        """Starts to write the state after `images` images; the state may change on return.

        `tensors` nests tensors and DTensors; the plain values among them (an optimiser's groups)
        travel as JSON. An unsharded tensor must be the same on every process, as `values` must;
        what differs between processes goes into `rank_values`.
        """
        self.wait()
        if images == self._complete:
            return
        flat, leaves = split(tensors)
        texts = {rank_file(self._peers.rank): plain(rank_values or {}, "rank_values")}
        if self._peers.rank == 0:
            texts[VALUES] = {"values": plain(values, "values"), "leaves": leaves}
        stager = self._stager = self._stager or host_memory()
        staged: Any = stager.stage(flat)
        self._pending = _Background(partial(self._write, images, staged, texts))

    def wait(self) -> None:
        """Returns when the pending save is complete everywhere; raises if it failed anywhere."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.finish()

    @property
    def busy(self) -> bool:
        """Whether this process is still writing; others may differ."""
        return self._pending is not None and self._pending.busy

    @property
    def failure(self) -> str | None:
        """Why the pending save failed, as soon as this process knows; `wait` raises it.

        Others may know a step later: stop on it only after asking all of them.
        """
        return self._pending.failure if self._pending is not None else None

    def close(self) -> None:
        """Waits, and gives back the memory that held the copy."""
        self.wait()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _write(self, images: int, staged: dict[str, Tensor], texts: dict[str, Any]) -> None:
        folder = self.root / folder_name(images)
        writer = Writer(folder)
        try:
            self._peers.first(folder.clear)
            self._peers.everyone(lambda: self._write_tensors(writer, staged))
            written = self._peers.everyone(lambda: _write_texts(folder, writer, texts))
            files = {name: record for part in written for name, record in part.items()}
            self._peers.first(lambda: _all_there(folder, files))
            manifest = spell_manifest(images, self._peers.size, files)
            self._peers.first(lambda: folder.write(MANIFEST, manifest))
        except CheckpointError as error:
            story = partial(self._give_up, images, str(error))
            raise CheckpointError(self._peers.first(story)) from None
        self._complete = images
        self._damaged.discard(images)
        self._peers.first(lambda: self._prune(images))

    def _write_tensors(self, writer: Writer, staged: dict[str, Tensor]) -> None:
        alone = self._peers.size == 1
        dcp.save(staged, storage_writer=writer, process_group=self._peers.group, no_dist=alone)

    def _give_up(self, images: int, reason: str) -> str:
        """What to say, once the room that the attempt took is free again."""
        folder = self.root / folder_name(images)
        with suppress(Exception):
            folder.clear()
        whole = [i for i, complete in self._listing().items() if complete]
        rest = f"the one at {max(whole)} images is intact" if whole else "there is no earlier one"
        return (
            f"The checkpoint at {images} images could not be written to {folder}: {reason}; {rest}."
        )

    def _prune(self, images: int) -> None:
        """Removes what the checkpoint at `images`, now complete, makes superfluous.

        What cannot be removed now is removed after a later save.
        """
        try:
            listing = self._listing()
            useless = {i for i, complete in listing.items() if not complete}
            useless |= {i for i in self._damaged if i < images}
            old = outdated(listing.keys() - useless, images, self.keep_last, self.keep_every)
            for stale in useless | old:
                (self.root / folder_name(stale)).clear()
        except Exception as error:
            warnings.warn(f"old checkpoints in {self.root} are still there: {error}", stacklevel=2)

    def _listing(self) -> dict[int, bool]:
        """The folders there are, and whether each has a manifest."""
        names = (match[1] for match in map(_NAME.fullmatch, self.root.names()) if match)
        return {int(n): MANIFEST in (self.root / f"images-{n}").names() for n in names}

    # ------------------------------------------------------------ reading

    def find(self) -> Found | None:
        """The newest checkpoint that is whole, the same on every process; none in a new folder.

        Damaged ones are passed over with a warning. Where all are damaged it raises: starting
        from nothing would waste what may still be saved by hand.
        """
        self.wait()
        skipped: list[str] = []
        damaged: set[int] = set()
        for images, entry in self._peers.first(self._candidates):
            reason = entry if isinstance(entry, str) else self._damage(images, entry)
            if reason is None and isinstance(entry, Manifest):
                self._warn(skipped, f"the one at {images} images is used")
                return Found(images, entry.world_size, entry.files, tuple(skipped))
            skipped.append(f"{self.root / folder_name(images)} is passed over: {reason}")
            if reason != _UNFINISHED:
                damaged.add(images)
                self._damaged.add(images)
        if damaged:
            raise CheckpointError(
                f"No checkpoint in {self.root} is intact; move the folder away to start anew. "
                + "; ".join(skipped)
            )
        self._warn(skipped, "there is no earlier one")
        return None

    def _warn(self, skipped: list[str], instead: str) -> None:
        if skipped and self._peers.rank == 0:
            warnings.warn("; ".join([*skipped, instead]), stacklevel=3)

    def _candidates(self) -> list[tuple[int, Manifest | str]]:
        """Newest first; a sentence for those that are certainly none."""
        return [
            (images, self._manifest(images) if complete else _UNFINISHED)
            for images, complete in sorted(self._listing().items(), reverse=True)
        ]

    def _manifest(self, images: int) -> Manifest | str:
        try:
            return read_manifest((self.root / folder_name(images)).read(MANIFEST), images)
        except (CheckpointError, OSError) as error:
            return str(error)

    def _damage(self, images: int, manifest: Manifest) -> str | None:
        """What is wrong with the files. Each process reads its share: hashing is slow."""
        folder = self.root / folder_name(images)
        by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
        share = by_size[self._peers.rank :: self._peers.size]
        shares = self._peers.everyone(
            lambda: [r for name in share if (r := folder.damage(name, manifest.files[name]))]
        )
        return "; ".join(reason for reasons in shares for reason in reasons) or None

    def load(
        self, found: Found, tensors: dict[str, Any], *, partial: bool = False
    ) -> dict[str, Any]:
        """Fills `tensors` in place, whatever number of processes saved them; returns the values.

        The names must be those that were saved; `partial` allows the checkpoint to have more.
        """
        self.wait()
        folder = self.root / folder_name(found.images)
        flat, _ = split(tensors)
        reader = Reader(folder, set(found.files))
        try:
            self._peers.everyone(lambda: check_names(reader.read_metadata(), flat, partial))
            self._peers.everyone(lambda: self._read_tensors(reader, flat))
            saved = self._peers.first(lambda: _read_json(folder, VALUES))
        except CheckpointError as error:
            raise CheckpointError(f"{folder} cannot be loaded: {error}.") from None
        put_back(tensors, saved["leaves"])
        self._complete = found.images
        return saved["values"]

    def _read_tensors(self, reader: Reader, flat: dict[str, Tensor]) -> None:
        planner, alone = TensorsOnly(), self._peers.size == 1
        group = self._peers.group
        dcp.load(flat, storage_reader=reader, planner=planner, process_group=group, no_dist=alone)

    def rank_values(self, found: Found) -> list[dict[str, Any]]:
        """What each of the processes that saved passed as its `rank_values`."""
        return self._texts(found, [rank_file(rank) for rank in range(found.world_size)])

    def values(self, found: Found) -> dict[str, Any]:
        """What was saved as `values`, without loading the rest."""
        return self._texts(found, [VALUES])[0]["values"]

    def _texts(self, found: Found, names: list[str]) -> list[dict[str, Any]]:
        folder = self.root / folder_name(found.images)
        try:
            return self._peers.first(lambda: [_read_json(folder, name) for name in names])
        except CheckpointError as error:
            raise CheckpointError(f"{folder} cannot be loaded: {error}.") from None


# ---------------------------------------------------------------- files


def _write_texts(folder: Folder, writer: Writer, texts: dict[str, Any]) -> dict[str, FileRecord]:
    """Writes this process's JSON; returns all that it wrote, after a look at what has arrived."""
    written = {name: folder.write(name, json.dumps(text).encode()) for name, text in texts.items()}
    written |= writer.files.written
    for name, record in written.items():
        if (size := folder.size(name)) != record.size:
            raise CheckpointError(f"{name} has {size} bytes after writing {record.size}")
    return written


def _all_there(folder: Folder, files: dict[str, FileRecord]) -> None:
    """What the others wrote, as the first process sees it."""
    missing = sorted(files.keys() - set(folder.names()))
    if missing:
        raise CheckpointError(
            f"the first process cannot see {missing[0]}: all machines must write to one folder"
        )


def _read_json(folder: Folder, name: str) -> dict[str, Any]:
    try:
        return json.loads(folder.read(name))
    except ValueError as error:
        raise CheckpointError(f"{name} is not JSON") from error


# ---------------------------------------------------------------- processes and threads


class Peers:
    """The processes that write one checkpoint together; one alone without torch.distributed.

    What fails in one of them fails in all, with the same sentence.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta = timedelta(hours=1)):
        self.group: Any = group
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = group or gloo_group(timeout)
            self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.size == 1:  # what DCP says each time, though nothing is wrong
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

    def everyone(self, work: Callable[[], T]) -> list[T]:
        """Each does it; all get all results."""
        answers: list[Any] = [self._attempt(work)]
        if self.size > 1:
            mine, answers = answers[0], [None] * self.size
            dist.all_gather_object(answers, mine, group=self.group)
        return _unless_failed(answers)

    def first(self, work: Callable[[], T]) -> T:
        """One does it; all get its result."""
        answers: list[Any] = [self._attempt(work) if self.rank == 0 else None]
        if self.size > 1:
            dist.broadcast_object_list(answers, group_src=0, group=self.group)
        return _unless_failed(answers)[0]

    def _attempt(self, work: Callable[[], T]) -> tuple[T | None, str | None]:
        """The result or the reason why there is none: exceptions may not survive the journey."""
        try:
            return work(), None
        except dcp.CheckpointException as error:  # DCP has told every rank of it already
            failures = {rank: _sentence(failure) for rank, (failure, _) in error.failures.items()}
            return None, "; ".join(self._signed(text, rank) for rank, text in failures.items())
        except CheckpointError as error:
            return None, str(error)
        except Exception as error:
            return None, self._signed(_sentence(error), self.rank)

    def _signed(self, sentence: str, rank: int) -> str:
        return f"{sentence} (rank {rank})" if self.size > 1 else sentence


def _unless_failed(answers: list[tuple[Any, str | None]]) -> list[Any]:
    failures = list(dict.fromkeys(failure for _, failure in answers if failure is not None))
    if failures:
        raise CheckpointError("; ".join(failures))
    return [answer for answer, _ in answers]


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).split("\n")[0] or type(error).__name__


class _Background:
    """Work on a thread of its own, whose failure is kept until it is asked for.

    A daemon: when a peer dies, the thread may wait for it for long, and must not keep the process.
    """

    def __init__(self, work: Callable[[], None]):
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=[work], name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        # Every operation of a forward pass asks for the interpreter again. By default this thread
        # could keep it for 5 ms each time, many times what the operation takes.
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            work()
        except BaseException as error:
            self._error = error
        finally:
            sys.setswitchinterval(before)

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    @property
    def failure(self) -> str | None:
        return None if self._error is None else _sentence(self._error)

    def finish(self) -> None:
        self._thread.join()
        if isinstance(self._error, UserError):
            raise self._error
        if self._error is not None:
            raise CheckpointError(f"writing a checkpoint failed: {self.failure}") from self._error
