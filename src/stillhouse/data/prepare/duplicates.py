"""Images that are there twice, byte for byte: the first in the order of the source stays.

A pass before all others hashes every image as it is stored (BLAKE2b, 128 bits), without decoding
it, and keeps a file of hashes per unit. They are then compared in turns, each of those hashes that
fall into it, so that memory has a bound whatever the number of images.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stillhouse.data.faults import Corrupt, Fault
from stillhouse.data.prepare.files import exists, read_many, sizes, write
from stillhouse.data.prepare.samples import label_of
from stillhouse.data.prepare.units import Rows, Unit, read_patiently
from stillhouse.data.prepare.worker import Job
from stillhouse.data.rows import Row, image_bytes
from stillhouse.engine.storage import Folder

HASHES = "hashes"
TURN = 1 << 24  # hashes that are compared at once: some 600 MB
_WIDTH = 16
_NONE = bytes(_WIDTH)  # of what is a failure anyway: a good copy that comes later is the first


class Hasher:
    """A worker of the first pass."""

    lasting: ClassVar[bool] = False

    def __init__(self, job: Job) -> None:
        self.rows, self.out = job.rows, job.folder()

    def do(self, unit: Unit, drop: frozenset[int]) -> dict[str, int]:
        folder, name = self.out / HASHES, file_of(unit)
        if not exists(folder, name):
            write(folder, name, b"".join(hashes(self.rows, unit)))
        return {"rows": 0}


def file_of(unit: Unit) -> str:
    return f"{unit.name}.blake2b"


def hashes(rows: Rows, unit: Unit) -> Iterator[bytes]:
    """One per row, in order."""
    for entry in read_patiently(rows, unit):
        if not isinstance(entry, Fault):
            yield hash_of(entry.row)


def hash_of(row: Row) -> bytes:
    try:
        label_of(row)
        raw = image_bytes(row.image)
    except Corrupt:
        return _NONE
    if raw is None:
        pixels = np.asarray(row.image)
        raw = f"{pixels.shape} {pixels.dtype}".encode() + pixels.tobytes()
    return hashlib.blake2b(raw, digest_size=_WIDTH).digest()


def find_duplicates(
    folder: Folder, units: Sequence[Unit], turn: int = TURN
) -> dict[int, frozenset[int]]:
    """By the number of the unit: the places of rows that an earlier row is the same as."""
    there = sizes(folder)
    rows = [there[file_of(unit)] // _WIDTH for unit in units]
    starts = np.cumsum([0, *rows])
    turns = int(-(-starts[-1] // turn)) or 1
    found = [_repeated(folder, units, part, turns) for part in range(turns)]
    places = np.sort(np.concatenate(found))
    which = np.searchsorted(starts, places, side="right") - 1
    dropped: dict[int, set[int]] = {}
    for unit, place in zip(which.tolist(), places.tolist(), strict=True):
        dropped.setdefault(units[unit].number, set()).add(place - int(starts[unit]))
    return {number: frozenset(inside) for number, inside in dropped.items()}


def _repeated(folder: Folder, units: Sequence[Unit], part: int, parts: int) -> NDArray[np.int64]:
    """Places in the whole source, of the hashes whose turn it is."""
    keys, places, start = [], [], 0
    for data in read_many(folder, [file_of(unit) for unit in units]):
        found = np.frombuffer(data, np.uint64).reshape(-1, 2)
        mine = np.flatnonzero(found[:, 0] % np.uint64(parts) == part)
        keys.append(found[mine])
        places.append(mine + start)
        start += len(found)
    key, place = np.concatenate(keys), np.concatenate(places)
    order = np.lexsort((key[:, 1], key[:, 0]))  # stable: of equal ones the first comes first
    same = (key[order][1:] == key[order][:-1]).all(1)
    return place[order[1:][same]]
