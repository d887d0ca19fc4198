"""Latents of a whole data set, encoded once and read by row ever after.

    latents-N.npy   [rows, copies, C, H, W] float32, from row N of the data set on; a second copy is
                    mirrored, where images are
    layouts-N.npy   [rows, 6] where each crop comes from; zeros for an image that cannot be used
    manifest.json   rows, the first of each part, the size of every file; written last

Every process writes a part of its own, so no two machines ever write to one file. A row has one
crop, so only crops that no key decides can be kept: the cached run is then the same as one that
encodes on the way.
"""

import errno
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from stillhouse.data.crops import Layout, Size, uniform
from stillhouse.data.faults import Corrupt
from stillhouse.data.indexed import IndexedLoader
from stillhouse.data.loaded import Loader, Maker, Picture
from stillhouse.data.loaders import DataConfig
from stillhouse.data.rows import WHOLE_ROW, Row, label_number, text_of
from stillhouse.data.sources import Folder, IndexedImages
from stillhouse.data.transforms import to_float
from stillhouse.errors import UserError
from stillhouse.files import write_whole

FORMAT = 2
PIXELS, CHUNK = 16 * 512 * 512, 64  # the most that is encoded at once, and images at most
LATENTS, LAYOUTS, MANIFEST = "latents", "layouts", "manifest.json"
FIXED = ("centre", "none")  # crops that no key decides
MIRRORED = next(key for key in count() if uniform(key, 0, "flip") < 0.5)  # a key that flips

Encode = Callable[[Tensor], Tensor]  # images in [-1, 1] -> latents
Facts = dict[str, Any]  # JSON


def check_fixed(data: DataConfig, loader: Loader) -> IndexedLoader:
    """Refuses what one copy of an image cannot be."""
    if data.image.crop.kind not in FIXED or data.buckets.kind != "none":
        raise UserError(
            "latents are encoded once, of one crop per image: give --data.image.crop centre and no "
            "--data.buckets, or --encode-once false"
        )
    if not isinstance(loader, IndexedLoader):
        raise UserError(
            "only an indexed source can be encoded once: give --data.source.streaming false, or "
            "`stillhouse prepare` for large data"
        )
    return loader


def cache_key(data: DataConfig, images: IndexedImages, codec: str) -> str:
    """Of all that the latents depend on: files, column, crop, codec."""
    source, image = data.source, data.image.model_dump(mode="json")
    folder = isinstance(source, Folder)
    files = source.images_fingerprint(images) if folder else source.fingerprint()
    facts = [FORMAT, files, data.columns.image, image, codec]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


# ---------------------------------------------------------------- files of rows, and their manifest


def share(rows: int, rank: int, world: int) -> range:
    """The rows that belong to a process: one range, perhaps an empty one."""
    return range(rows * rank // world, rows * (rank + 1) // world)


def part(name: str, first: int) -> str:
    """The file of the part that begins with this row."""
    return f"{name}-{first:08d}.npy"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says what to do where a disk refuses."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to ({error.strerror or error}): make room there, or name "
            "another folder as STILLHOUSE_CACHE"
        ) from error


@contextmanager
def row_file(
    path: Path, dtype: DTypeLike, shape: Sequence[int]
) -> Iterator[Callable[[NDArray[Any]], None]]:
    """An .npy that is written row after row.

    All of its room is taken first, so that a full disk is told of before the work is done; and
    nothing is written through a memory map, where a full disk is a SIGBUS.
    """
    kind = np.dtype(dtype)
    facts = {"descr": kind.str, "fortran_order": False, "shape": tuple(shape)}

    def write(rows: NDArray[Any]) -> None:
        with writing(path.parent):
            rows = np.ascontiguousarray(rows, kind)
            file.write(rows.data if rows.size else b"")

    with path.open("wb") as file:
        with writing(path.parent):
            np.lib.format.write_array_header_1_0(file, facts)
            _reserve(file, file.tell() + int(np.prod(shape)) * kind.itemsize)
        yield write
        with writing(path.parent):
            file.flush()
            os.fsync(file.fileno())


def _reserve(file: BinaryIO, size: int) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    file.flush()
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:  # some file systems cannot; there writing itself tells
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


def write_manifest(folder: Path, name: str, rows: int, facts: Facts) -> None:
    """What makes a folder whole. `facts` holds the size of every file."""
    text = json.dumps({"name": name, "rows": rows, **facts})
    write_whole(folder / MANIFEST, text.encode(), durable=True)


def read_manifest(folder: Path) -> Facts:
    return json.loads((folder / MANIFEST).read_text())


def is_whole(folder: Path, rows: int) -> bool:
    """Whether all that the manifest says is there."""
    try:
        found = read_manifest(folder)
        sizes = {name: (folder / name).stat().st_size for name in found["files"]}
        return (found["name"], found["rows"], found["files"]) == (folder.name, rows, sizes)
    except (OSError, ValueError, LookupError, TypeError):
        return False


# ---------------------------------------------------------------- writing


def fill(
    folder: Path, loader: IndexedLoader, encode: Encode, rows: range, shape: Sequence[int]
) -> Facts:
    """One part: the sizes of its files."""
    if not rows:
        return {}
    copies = 1 + loader.maker.image.flip
    files = [folder / part(name, rows.start) for name in (LATENTS, LAYOUTS)]
    with (
        row_file(files[0], np.float32, (len(rows), copies, *shape)) as add_latents,
        row_file(files[1], np.int64, (len(rows), 6)) as add_layouts,
    ):
        for some in chunks(rows, loader.maker.image.shape):
            latents = np.zeros((len(some), copies, *shape), np.float32)
            layouts = np.zeros((len(some), 6), np.int64)
            _encode(loader, encode, some, latents, layouts)
            add_latents(latents)
            add_layouts(layouts)
    return {file.name: file.stat().st_size for file in files}


def chunks(rows: range, shape: Sequence[int]) -> Iterator[range]:
    """As many rows as may be encoded at once, of images [C, H, W]."""
    step = min(max(PIXELS // (shape[-2] * shape[-1]), 1), CHUNK)
    for at in range(0, len(rows), step):
        yield rows[at : at + step]


def _encode(
    loader: IndexedLoader,
    encode: Encode,
    some: range,
    latents: NDArray[np.float32],
    layouts: NDArray[np.int64],
) -> None:
    """Into arrays of these rows; an image that cannot be used leaves its row as it is."""
    rows = loader.images.rows(some)
    for mirrored in range(latents.shape[1]):
        found = list(_pictures(rows, loader.maker, bool(mirrored)))
        if not found:
            continue
        places = [row.id - some.start for row, _, _ in found]
        pixels = to_float(torch.from_numpy(np.stack([pixels for _, pixels, _ in found])))
        latents[places, mirrored] = encode(pixels).float().cpu().numpy()
        layouts[places] = [[*at.source, *at.resized, *at.crop] for _, _, at in found]


def _pictures(
    rows: Sequence[Row], maker: Maker, mirrored: bool
) -> Iterator[tuple[Row, NDArray[Any], Layout]]:
    image = maker.image.model_copy(update={"flip": mirrored})
    plain = Maker(image, maker.columns.model_copy(update={"label": "", "styles": ()}), 0)
    for row in rows:
        try:
            found = plain.picture(row._replace(styles=()), MIRRORED)
        except Corrupt:
            continue
        yield row, found.pixels, found.layout


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, eq=False)
class Parts:
    """All parts, in order."""

    starts: list[int]
    latents: list[NDArray[Any]]
    layouts: list[NDArray[Any]]

    def __getitem__(self, row: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """The latents and the layout of one row."""
        at = bisect_right(self.starts, row) - 1
        row -= self.starts[at]
        return self.latents[at][row], self.layouts[at][row]


@lru_cache(maxsize=8)
def _parts(folder: str) -> Parts:
    """Mapped, not read; in whichever process asks."""
    starts = read_manifest(Path(folder))["starts"]
    latents, layouts = (
        [np.load(Path(folder, part(name, first)), mmap_mode="r") for first in starts]
        for name in (LATENTS, LAYOUTS)
    )
    return Parts(starts, latents, layouts)


@dataclass(frozen=True)
class CachedMaker(Maker):
    """Rows into latents that are there already."""

    folder: str = ""

    def picture(self, row: Row, key: int, size: Size | None = None) -> Picture:
        latents, where = _parts(self.folder)[row.id]
        numbers = where.tolist()
        if not any(numbers):
            raise Corrupt("it could not be read when latents were encoded")
        flipped = self.image.flip and uniform(key, self.seed, "flip") < 0.5
        source, resized, crop = (tuple(numbers[at : at + 2]) for at in (0, 2, 4))
        layout = Layout(source, resized, crop, flipped)  # type: ignore[arg-type]
        styles = zip(self.columns.styles, row.styles, strict=True)
        return Picture(
            np.array(latents[int(flipped)]),
            layout,
            label_number(row.label) if self.columns.label else 0,
            text_of(row.text),
            row.id,
            self.control.values(layout, [s.number(v, row.where) for s, v in styles]),
        )

    def floats(self, pixels: NDArray[Any]) -> Tensor:
        return torch.from_numpy(pixels)


def from_cache(loader: Loader, folder: Path) -> IndexedLoader:
    """The same batches, of latents; the column of images is not read any more."""
    assert isinstance(loader, IndexedLoader)
    _parts.cache_clear()  # a damaged folder may have been made anew
    maker, images, made = loader.maker, copy(loader.images), copy(loader)
    column = images.columns.image
    if column in images.data.features and len(images.data.features) > 1:
        images.data = images.data.remove_columns([column])
    images.columns = images.columns.model_copy(update={"image": WHOLE_ROW})
    made.images = images
    made.maker = CachedMaker(maker.image, maker.columns, maker.seed, maker.control, str(folder))
    return made
