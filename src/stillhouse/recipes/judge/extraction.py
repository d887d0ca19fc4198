"""Features of a gallery, kept in files as they come: a kill costs batches, not an evening.

The detector works in a thread of its own: while it looks at one batch, the next one is drawn.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.metrics.bank import Bank, Rows
from stillhouse.metrics.detectors import Detector, Output
from stillhouse.metrics.moments import Moments
from stillhouse.recipes.judge.galleries import Gallery, Shown

AHEAD = 2  # batches that the detector may be behind
DIGEST = 2**128


class Ledger:
    """A line of JSON for each batch: what the features cannot say."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, list(_whole_lines(path))

    def add(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.lines.append(line)

    def cut(self, count: int) -> None:
        self.lines = self.lines[:count]
        content = "".join(json.dumps(line) + "\n" for line in self.lines)
        write_whole(self.path, content.encode())


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Up to what a kill has left half-written."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


class Columns:
    """Some columns of rows."""

    def __init__(self, rows: Rows, columns: slice) -> None:
        self.rows, self.columns = rows, columns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        return self.rows[rows][:, self.columns]


class Collected:
    """What was found of a gallery: rows of features and logits, and a ledger of the batches."""

    def __init__(self, folder: Path, name: str, detector: Detector) -> None:
        self.dims, self.files = detector.dims, (folder / f"{name}.f32", folder / f"{name}.jsonl")
        self.classes = detector.classes
        self.sources: list[Collected] = []  # what this was joined from
        self.bank = Bank(self.files[0], self.dims + self.classes)
        self.ledger = Ledger(self.files[1])

    @property
    def features(self) -> Rows:
        return Columns(self.bank, slice(0, self.dims))

    @property
    def logits(self) -> Rows | None:
        return Columns(self.bank, slice(self.dims, None)) if self.classes else None

    @property
    def texts(self) -> list[str]:
        return [text for line in self.ledger.lines for text in line["text"]]

    @property
    def content(self) -> str:
        """Of all pixels: a sum, so that their order does not matter."""
        total = sum(int(line["digest"], 16) for line in self.ledger.lines) % DIGEST
        return f"blake2b:{total:032x}"

    def moments(self) -> Moments:
        return Moments.of(self.features)

    def resume(self, shares: Sequence[range]) -> int:
        """Keeps whole batches only, of the images they should be; returns how many there are."""
        done = rows = 0
        for share, line in zip(shares, self.ledger.lines, strict=False):
            same = line.get("images") == [share.start, share.stop]  # not with another batch size
            if not same or rows + len(share) > len(self.bank):
                break
            done, rows = done + 1, rows + len(share)
        self.bank.cut(rows)
        self.ledger.cut(done)
        return done

    def add(self, found: Output, line: dict[str, Any]) -> None:
        rows = [found.features.float().cpu()]
        rows += [] if found.logits is None else [found.logits.float().cpu()]
        self.bank.add(torch.cat(rows, 1))
        self.ledger.add(line)

    def remove(self) -> None:
        for source in self.sources:
            source.remove()
        self.bank.close()
        for file in self.files:
            with suppress(FileNotFoundError):
                file.unlink()


# ---------------------------------------------------------------- looking


def collect(
    gallery: Gallery,
    detector: Detector,
    here: World,
    folder: Path,
    name: str,
    advance: Callable[[float], None],
) -> Collected:
    """All features of a gallery at the first process, in the gallery's order; none at others."""
    mine = Collected(folder, f"{name}-{here.rank}-of-{here.size}", detector)
    shares = gallery.shares(here)
    skip = mine.resume(shares)
    advance(len(mine.bank))
    try:
        batches = looked_at(gallery.batches(here, skip, advance), detector)
        for share, (shown, found) in zip(shares[skip:], batches, strict=True):
            _check(found, detector, gallery)
            line = {"images": [share.start, share.stop], "digest": pixel_digest(shown.images)}
            mine.add(found, line | {"text": shown.text})
    except UserError:  # whatever mends it changes what is measured
        mine.remove()
        raise
    if here.size == 1:
        return mine
    joined = Collected(folder, f"{name}-joined-{here.rank}", detector)
    joined.resume([])
    join(mine, joined, shares, here)
    joined.sources.append(mine)  # until a result is written: a kill must not cost it
    return joined


def _check(found: Output, detector: Detector, gallery: Gallery) -> None:
    if not bool(torch.isfinite(found.features).all()):
        raise UserError(
            f"{detector.name} gives features that are not finite for images of {gallery.name}: "
            "check its weights, or choose another --detector"
        )


def looked_at(shown: Iterator[Shown], detector: Detector) -> Iterator[tuple[Shown, Output]]:
    """Each batch with its features, while the batches to come are being made."""
    waiting: deque[tuple[Shown, Future[Output]]] = deque()
    with ThreadPoolExecutor(1, "stillhouse-detector") as pool:
        for batch in shown:
            waiting.append((batch, pool.submit(detector, batch.images)))
            if len(waiting) > AHEAD:
                done, found = waiting.popleft()
                yield done, found.result()
        for done, found in waiting:
            yield done, found.result()


def first_images(gallery: Gallery, here: World, count: int) -> tuple[Tensor, list[int]]:
    """The first images of a gallery with their labels, at the first process."""
    mine, seen = [], 0
    for shown in gallery.batches(here, 0, lambda _: None):
        mine.append((shown.images.cpu(), shown.labels))
        seen += len(shown.images) * here.size
        if seen >= count:
            break
    rounds = zip_longest(*here.collect(mine))
    found = [part for each in rounds for part in each if part is not None]
    if not found:
        return torch.empty(0), []
    images = torch.cat([images for images, _ in found])[:count]
    return images, [label for _, labels in found for label in labels][:count]


def pixel_digest(images: Tensor) -> str:
    """The sum of the images' own digests."""
    pixels = images.cpu().contiguous().numpy()
    digests = (hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in pixels)
    return f"{sum(int.from_bytes(d, 'big') for d in digests) % DIGEST:032x}"


def join(mine: Collected, joined: Collected, shares: Sequence[range], here: World) -> None:
    """Every process's rows at the first one, round by round."""
    at = 0
    for number in range(int(max(here.gather(len(shares))))):
        share = len(shares[number]) if number < len(shares) else 0
        line = mine.ledger.lines[number] if share else None
        for rows, found in here.collect((mine.bank[at : at + share], line)):
            if found is not None:
                joined.bank.add(rows)
                joined.ledger.add(found)
        at += share
