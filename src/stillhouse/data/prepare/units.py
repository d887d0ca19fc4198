"""A source cut into units of work, and the rows of a unit: the same whoever asks, and when.

| source | a unit is |
|---|---|
| tars | a whole tar, since only reading it tells where its samples begin |
| Parquet | row groups up to `size` rows together; a larger row group is divided evenly |
| a folder | as many images as fit into equal units of at most `size`, in the order of their names |

Units follow the order of the source, so that the shards, one after the other, do too.
"""

import os
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

from stillhouse.data import shardfiles
from stillhouse.data.faults import Fault
from stillhouse.data.rows import WHOLE_ROW, Columns, Row, check_columns
from stillhouse.data.sources import (
    Folder,
    IndexedImages,
    ShardedImages,
    Source,
    Tars,
    with_captions,
)
from stillhouse.errors import UserError, one_line

TRIES = 6  # of a read that fails for reasons outside the file
PAUSE = 0.1  # seconds before the second; each further one is four times as long
_CHUNK = 16  # rows that are made Python objects at once
_BLOCK = 8 << 20  # bytes that a remote file is asked for at a time
_FIRST = 100  # samples that tell the columns of tars
_FOOTERS = 16  # files whose footers are read at the same time
USUAL = 1000  # rows of a unit
LEAST, MANY = 16, 64  # of small data: rows of a unit, and units to share among workers
SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
IMAGES = ("image", "img", *SUFFIXES)  # usual names of columns, which in tars are suffixes
LABELS = ("label", "cls")
TEXTS = ("caption", "text", "txt")
BESIDE = "text"  # what captions are called that stand in files beside the images
FLAG = "--columns"
END = -1  # where a unit goes on to the end of its file


class Unit(NamedTuple):
    """Rows of one file that become one shard."""

    number: int
    file: int
    start: int
    stop: int  # or END

    @property
    def name(self) -> str:
        return f"shard-{self.number:06d}"


class Entry(NamedTuple):
    """A row with the name that the shards know it by."""

    name: str
    row: Row


class Cut(NamedTuple):
    """All work there is."""

    units: list[Unit]
    faults: list[Fault]  # files that cannot be read at all


class Rows(Protocol):
    """An opened source, which can be sent to workers."""

    @property
    def images(self) -> ShardedImages | IndexedImages: ...

    def cut(self, size: int) -> Cut:
        """Into units of at most `size` rows, where that can be told beforehand; 0: as usual."""
        ...

    def where(self, unit: Unit) -> str:
        """What a unit is read from, for people."""
        ...

    def read(self, unit: Unit, start: int) -> Iterator[Entry]:
        """The rows of a unit from row `start` of its file on."""
        ...


def open_rows(source: Source, columns: Columns, captions: bool = False) -> Rows:
    """Finds the files and the columns. Those that are not named are known by their usual names.

    `captions`: whether they are needed. Those beside the images of a folder are read only then,
    or where their column is named.
    """
    if isinstance(source, Folder):
        return _open_folder(source, columns, captions)
    shards = source.open_shards(Columns(image=""))
    features = _sampled_columns(shards) if isinstance(source, Tars) else shards.features
    chosen = usual_columns(columns, features)
    check_columns(features, chosen, shards.shards[0], FLAG)
    opened = ShardedImages(source, shards.shards, chosen, features)
    if isinstance(source, Tars):
        return TarRows(opened, columns.image == Columns().image)
    return ParquetRows(opened)


def _open_folder(source: Folder, columns: Columns, captions: bool) -> "FolderRows":
    found = source.open_indexed(Columns(image=""))
    data, faults = found.data, found.faults
    chosen = usual_columns(columns, data.features)
    named = chosen.text or (BESIDE if captions else "")
    if named and named not in data.features:
        data = with_captions(data, chosen.model_copy(update={"text": named}))
        chosen = usual_columns(columns, data.features)
    check_columns(data.features, chosen, source.path, FLAG)
    images = IndexedImages(data, chosen, faults)
    return FolderRows(images, os.path.abspath(os.path.expanduser(source.path)))


def _sampled_columns(shards: ShardedImages) -> dict[str, Any]:
    """Of the first samples of tars together, since one may lack what the others have."""
    whole = ShardedImages(shards.source, shards.shards, Columns(image=WHOLE_ROW), shards.features)
    rows = TarRows(whole, mixed=False)
    entries = chain.from_iterable(read_patiently(rows, unit) for unit in rows.cut(0).units)
    samples = (e.row.image for e in islice(entries, _FIRST) if not isinstance(e, Fault))
    return {**shards.features, **{name: None for sample in samples for name in sample}}


def usual_image(names: Iterable[str]) -> str | None:
    """The first that is usually the image, however it is written (tars may hold .JPG)."""
    there = {name.lower(): name for name in names}
    return next((there[name] for name in IMAGES if name in there), None)


def usual_columns(columns: Columns, features: Any) -> Columns:
    """With the image, the label and the caption where they usually are, if they are there."""
    found = {"image": columns.image, "label": columns.label, "text": columns.text}
    if columns.image == Columns().image:
        found["image"] = usual_image(features) or columns.image
    if not columns.label:
        found["label"] = next((name for name in LABELS if _whole(features, name)), "")
    if not columns.text:
        found["text"] = next((name for name in TEXTS if name in features), "")
    return columns.model_copy(update=found)


def _whole(features: Any, name: str) -> bool:
    """Whether it is a column of whole numbers; tars don't say, so there it is by its name."""
    if name not in features:
        return False
    dtype = getattr(features[name], "dtype", None)
    return name == "cls" if dtype is None else str(dtype).startswith(("int", "uint"))


def read_patiently(rows: Rows, unit: Unit) -> Iterator[Entry | Fault]:
    """The rows of a unit. A damaged file ends early, with a fault; a failing network is tried
    again."""
    at, failures = unit.start, 0
    while True:
        try:
            for entry in rows.read(unit, at):
                yield entry
                at, failures = at + 1, 0
            if at == unit.start:
                yield Fault(rows.where(unit), "no rows")
            return
        except Exception as error:
            if not shardfiles.passing(error):
                where = f"{rows.where(unit)} from row {at} on"
                yield Fault(where, one_line(error))
                return
            failures += 1
            if failures == TRIES:
                raise UserError(
                    f"{rows.where(unit)} cannot be read after {TRIES} tries ({one_line(error)})"
                ) from error
            time.sleep(PAUSE * 4 ** (failures - 1))


# ---------------------------------------------------------------- files of many rows


def _names(images: ShardedImages, file: int) -> tuple[str, str]:
    """Where a file is, and what it is called."""
    return images.shards[file], images.names[file]


@dataclass(frozen=True, eq=False)
class TarRows:
    """WebDataset tars."""

    images: ShardedImages
    mixed: bool = True
    """Whether each sample has its image under any of the usual suffixes."""

    def cut(self, size: int) -> Cut:
        return Cut([Unit(n, n, 0, END) for n in range(len(self.images))], [])

    def where(self, unit: Unit) -> str:
        return self.images.shards[unit.file]

    def read(self, unit: Unit, start: int) -> Iterator[Entry]:
        images, path, name = self.images, *_names(self.images, unit.file)
        for at, values in enumerate(images.source.read(path, start, images.features), start):
            row = images.row(unit.file, at, values, self._columns(values))
            yield Entry(f"{name}/{at}", row)
        self._check_end(path)

    def _columns(self, values: dict[str, Any]) -> Columns:
        found = usual_image(values) if self.mixed else None
        return self.images.columns.model_copy(update={"image": found} if found else {})

    def _check_end(self, path: str) -> None:
        """tarfile takes an archive that breaks off between two members for a whole one."""
        fs, inner = shardfiles.filesystem(path, self.images.source.storage)
        if fs.cat_file(inner, start=-tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError("the archive breaks off")


@dataclass(frozen=True, eq=False)
class ParquetRows:
    """Parquet files, of which row groups can be read alone."""

    images: ShardedImages

    def cut(self, size: int) -> Cut:
        with ThreadPoolExecutor(_FOOTERS) as pool:
            footers = list(pool.map(self._footer, self.images.shards))
        good = {file: found for file, found in enumerate(footers) if not isinstance(found, Fault)}
        size = size or usual_size(sum(map(sum, good.values())))
        units: list[Unit] = []
        for file, groups in good.items():
            pieces = enumerate(divide(groups, size), len(units))
            units += [Unit(number, file, *piece) for number, piece in pieces]
        return Cut(units, [found for found in footers if isinstance(found, Fault)])

    def where(self, unit: Unit) -> str:
        return f"rows {unit.start} to {unit.stop - 1} of {self.images.shards[unit.file]}"

    def read(self, unit: Unit, start: int) -> Iterator[Entry]:
        path, name = _names(self.images, unit.file)
        for at, values in enumerate(self._values(path, start, unit.stop), start):
            yield Entry(f"{name}/{at}", self.images.row(unit.file, at, values))

    def _footer(self, path: str) -> list[int] | Fault:
        """Rows of each row group."""
        from pyarrow.parquet import ParquetFile

        for failures in range(1, TRIES + 1):
            try:
                with self._open(path) as file:
                    metadata = ParquetFile(file).metadata
                groups = range(metadata.num_row_groups)
                counts = [metadata.row_group(group).num_rows for group in groups]
                return counts if sum(counts) else Fault(path, "no rows")
            except Exception as error:
                if not shardfiles.passing(error):
                    return Fault(path, one_line(error))
                if failures == TRIES:
                    raise UserError(f"{path} cannot be reached ({one_line(error)})") from error
                time.sleep(PAUSE * 4 ** (failures - 1))
        raise AssertionError  # the last try either returns or raises

    def _open(self, path: str) -> Any:
        fs, inner = shardfiles.filesystem(path, self.images.source.storage)
        return fs.open(inner, "rb", block_size=_BLOCK)

    def _values(self, path: str, start: int, stop: int) -> Iterator[dict[str, Any]]:
        from pyarrow.parquet import ParquetFile

        with self._open(path) as stream:
            # Buffered, or all of a row group would be held at once.
            file = ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
            groups, at = covering(file.metadata, start, stop)
            for table in file.iter_batches(_CHUNK, row_groups=groups, columns=self._needed()):
                low, high = max(start - at, 0), min(stop - at, len(table))
                at += len(table)
                if low < high:
                    yield from table.slice(low, high - low).to_pylist()
                if at >= stop:
                    return

    def _needed(self) -> list[str]:
        """Names of the columns in the file, without the fields inside them."""
        named = {name for _, name in self.images.columns.roles if name}
        features = self.images.features
        return sorted({name if name in features else name.split(".")[0] for name in named})


def usual_size(rows: int) -> int:
    """Small data is cut finer, so that every worker has something to do."""
    return min(USUAL, max(LEAST, -(-rows // MANY)))


def divide(groups: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Rows from, up to: row groups joined up to `size` rows; larger ones divided evenly."""
    start = end = 0
    for rows in groups:
        if end > start and end - start + rows > size:
            yield start, end
            start = end
        if rows <= size:
            end += rows
            continue
        parts = -(-rows // size)
        for part in range(parts):
            yield start + rows * part // parts, start + rows * (part + 1) // parts
        start = end = start + rows
    if end > start:
        yield start, end


def covering(metadata: Any, start: int, stop: int) -> tuple[list[int], int]:
    """The row groups that hold these rows, and the row that the first of them begins with."""
    groups, first, at = [], 0, 0
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        if at < stop and at + rows > start:
            first = first if groups else at
            groups.append(group)
        at += rows
    return groups, first


# ---------------------------------------------------------------- folders


@dataclass(frozen=True, eq=False)
class FolderRows:
    """A folder of images; what is sent to workers is where its list is kept, and the captions that
    stood beside the images."""

    images: IndexedImages
    root: str

    def cut(self, size: int) -> Cut:
        ranges = divide([len(self.images)], size or usual_size(len(self.images)))
        return Cut([Unit(number, 0, *piece) for number, piece in enumerate(ranges)], [])

    def where(self, unit: Unit) -> str:
        return f"images {unit.start} to {unit.stop - 1} of {self.root}"

    def read(self, unit: Unit, start: int) -> Iterator[Entry]:
        for low in range(start, unit.stop, _CHUNK):
            for row in self.images.rows(range(low, min(low + _CHUNK, unit.stop))):
                yield Entry(self._name(row), row)

    def _name(self, row: Row) -> str:
        """The path in the folder; a remote folder's files have other paths in the cache."""
        path = row.image.get("path") if isinstance(row.image, dict) else None
        inside = str(path or "").startswith(f"{self.root}/")
        return os.path.relpath(str(path), self.root) if inside else str(row.id)


__all__ = ["Cut", "Entry", "Rows", "Unit", "open_rows", "read_patiently"]
