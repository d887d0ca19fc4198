"""Which of how many processes this is: plain Python, or one of torchrun's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among all."""

    rank: int
    size: int
    device: torch.device

    def barrier(self) -> None:
        """Waits for every process; a process that failed makes torchrun end the others."""
        if self.size > 1:
            dist.barrier()

    def total(self, count: int) -> int:
        """The sum over processes; all of them must call it."""
        if self.size == 1:
            return count
        value = torch.tensor(count)
        dist.all_reduce(value)
        return int(value)


@contextmanager
def world(device: str = "auto") -> Iterator[World]:
    """Joins torchrun's processes where there are several (gloo: only counts are exchanged)."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if size > 1:
        dist.init_process_group("gloo")
    try:
        yield World(rank, size, _device(device))
    finally:
        if size > 1:
            dist.destroy_process_group()


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")
