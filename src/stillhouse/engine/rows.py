"""Micro-batches: nested tuples, lists, dicts and records of tensors, cut and joined by rows.

A record is anything with `len`, slicing and a `cat` class method, as `Batch` and `Condition` have.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def count_rows(tree: Any) -> int:
    """Rows of the first tensor or record in the tree."""
    if isinstance(tree, dict):
        return count_rows(next(iter(tree.values())))
    if isinstance(tree, (tuple, list)):
        return count_rows(tree[0])
    return len(tree)


def cut(tree: Any, size: int) -> Iterator[Any]:
    """Consecutive pieces of `size` rows, the last may be smaller."""
    for start in range(0, count_rows(tree), size):
        yield take(tree, slice(start, start + size))


def take(tree: Any, rows: slice) -> Any:
    """The same tree with some of its rows; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: take(value, rows) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(take(value, rows) for value in tree)
    return tree[rows]


def join(parts: Sequence[Any]) -> Any:
    """The inverse of `cut`, detached from the graph."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: join([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(join(values) for values in zip(*parts, strict=True))
    if isinstance(first, Tensor):
        return torch.cat([part.detach() for part in parts])
    return type(first).cat(parts)
