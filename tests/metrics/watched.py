"""Rows and tensors that are watched: how many are asked for at once, and of what kind."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Asked:
    """Rows that remember the largest request."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.most = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, numbers: slice | Tensor) -> Tensor:
        found = self.rows[numbers]
        self.most = max(self.most, len(found))
        return found


class Made(TorchDispatchMode):
    """Every tensor that an operation gives: their kinds, and the size of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.kinds.add(x.dtype)
                self.largest = max(self.largest, x.numel())
        return out
