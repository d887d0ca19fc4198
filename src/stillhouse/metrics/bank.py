"""Features of many images, in a file: however many there are, memory holds a block of them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

BLOCK = 1024  # rows that are held at once


class Rows(Protocol):
    """Rows of features: a bank, or simply a matrix."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice | Tensor, /) -> Tensor: ...


def blocks(rows: Rows, size: int = BLOCK) -> Iterator[Tensor]:
    """All rows in order, some at a time."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


class Bank:
    """float32 rows of one width, appended to a file and read back by number.

    Files are read, not mapped: mapped pages would count as this process's memory. What a kill
    leaves of a half-written row is cut off when the file is opened again.
    """

    def __init__(self, path: Path, dims: int) -> None:
        self.path, self.dims = path, dims
        self._width = 4 * dims
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        self.cut(os.fstat(self._file.fileno()).st_size // self._width)

    def __len__(self) -> int:
        return self._count

    def cut(self, count: int) -> None:
        """Keeps the first `count` rows."""
        self._count = count
        self._file.truncate(count * self._width)

    def add(self, rows: Tensor) -> None:
        """Appends rows [N, dims]."""
        if rows.ndim != 2 or rows.shape[1] != self.dims:
            raise ValueError(f"rows of {self.dims} numbers are kept here, not {list(rows.shape)}")
        content = rows.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
        if self._file.write(content) != len(content):
            raise OSError(28, "no space left", str(self.path))
        self._count += len(rows)

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Tensor:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._read(start, max(stop - start, 0))
            rows = range(start, stop, step)
        numbers = [int(n) for n in rows]
        found = [self._read(n if n >= 0 else n + len(self), 1) for n in numbers]
        return torch.cat(found) if found else torch.empty(0, self.dims)

    def _read(self, start: int, count: int) -> Tensor:
        if not 0 <= start <= len(self) - count:
            raise IndexError(f"rows {start} to {start + count} of {len(self)}")
        content = os.pread(self._file.fileno(), count * self._width, start * self._width)
        pixels = np.frombuffer(content, np.float32).reshape(count, self.dims)
        return torch.from_numpy(pixels.copy())

    def close(self) -> None:
        self._file.close()
