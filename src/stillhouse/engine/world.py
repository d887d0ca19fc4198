"""Which of how many processes this is, and what they agree on: plain Python or torchrun."""

import gc
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from stillhouse.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all. Every process must make the same calls in the same order."""

    rank: int
    size: int
    device: torch.device

    def barrier(self) -> None:
        """Waits for every process; a process that failed makes torchrun end the others."""
        if self.size > 1:
            dist.barrier()

    def first(self, work: Callable[[], None]) -> None:
        """Runs on the first process while the others wait; what it refuses ends them all.

        The sentence is said once: the others leave without a word.
        """
        sentence: list[str | None] = [None]
        if self.rank == 0:
            try:
                work()
            except UserError as error:
                sentence = [str(error)]
        if self.size > 1:
            dist.broadcast_object_list(sentence, src=0)
        if sentence[0] is not None:
            raise UserError(sentence[0]) if self.rank == 0 else SystemExit(1)

    def seed(self, number: int) -> None:
        """Seeds what is random inside networks.

        `torch.manual_seed` would format a traceback for each kind of device that is not in use,
        which takes a third of a millisecond.
        """
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(number)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes, on the host, in float64."""
        if self.size == 1:
            return values.double().cpu()
        shared = values.to("cpu", torch.float64, copy=True)  # over gloo: a GPU need not wait
        dist.all_reduce(shared)
        return shared.cpu()

    def total(self, value: float) -> float:
        """The sum of one number over processes."""
        if self.size == 1:
            return float(value)
        return float(self.sum(torch.tensor(value, dtype=torch.float64)))

    def collect(self, value: T) -> list[T]:
        """Every process's value, by rank, at the first process; nothing at the others."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found)
        return found or []

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank. For small things: it is pickled on the way."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found


# gloo waits five times its timeout for a connection, and under load one is lost now and then: so
# groups are made with a short timeout, and get a long one for their work.
CONNECT, WORK, MEETING = timedelta(seconds=20), timedelta(minutes=30), timedelta(minutes=10)


def gloo_group(timeout: timedelta) -> Any:
    """A further group of all processes. A connection that gets lost is tried again, by all."""
    for _ in range(3):
        dist.barrier()
        try:
            group: Any = dist.new_group(backend="gloo", timeout=CONNECT)
        except RuntimeError:
            group = None
        made: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(made, group is not None)
        if all(made):
            _set_pg_timeout(timeout, group)
            return group
    raise RuntimeError("processes cannot connect to each other over gloo")


def first_process() -> bool:
    """Whether this one speaks for all, also where they have not met."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def world(device: str = "auto") -> Iterator[World]:
    """Joins torchrun's processes where there are several: NCCL between GPUs, gloo otherwise."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    place = _device(device)
    if place.type == "cpu":
        _keep_memory()
    if size > 1:
        # Both back ends on GPUs: checkpoints and couplings exchange CPU tensors.
        back_end = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        start = _meet(rank, size)
        dist.init_process_group(
            back_end, store=start, rank=rank, world_size=size, timeout=6 * CONNECT
        )
        _set_pg_timeout(WORK)
    here = World(rank, size, place)
    try:
        yield here
        # Leave together: a process that tears down its connections early can hang the others.
        here.barrier()
    finally:
        if size > 1:
            # A group must not be kept by what was made within: its destructor waits for its
            # thread, which may wait for the interpreter's lock. So the last owner is torch's own
            # table, which lets go of the lock.
            gc.collect()
            dist.destroy_process_group()


def _meet(rank: int, size: int) -> dist.Store:
    """What this start of the processes agrees on, and no other.

    torchrun keeps one store for all its restarts (pytorch issue 135712), so the addresses in it may
    be those of processes that are dead. The first process therefore names this start. Each of the
    others says hello with a name of its own, to which only a living first process can answer.
    """
    shared, _, _ = next(rendezvous("env://", rank, size))
    mine, others = uuid.uuid4().hex, range(1, size)
    if rank:
        shared.set(f"hello/{rank}", mine)
        start = shared.get(f"welcome/{mine}").decode()
        shared.set(f"{start}/{rank}", "")
        return dist.PrefixStore(start, shared)
    deadline = time.monotonic() + MEETING.total_seconds()
    while not shared.check([f"{mine}/{other}" for other in others]):
        if time.monotonic() > deadline:
            raise UserError(f"not all of the {size} processes have come: were all started?")
        for other in others:
            if shared.check([f"hello/{other}"]):
                shared.set(f"welcome/{shared.get(f'hello/{other}').decode()}", mine)
        time.sleep(0.02)
    return dist.PrefixStore(mine, shared)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # before any tensor is made on GPU 0
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"device {name!r} cannot be used here ({reason}): leave --device out, or give "
            "--device cpu"
        ) from error
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _keep_memory() -> None:
    """glibc keeps what a step frees, for the next one.

    By default it gives large tensors back to the system and asks for them again at every step,
    which fills their pages with zeros each time; and it moves from one habit to the other while a
    run goes on, so that memory seems to grow for minutes.
    """
    import ctypes

    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # not glibc
        return
    most = 2**30
    for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: see mallopt(3)
        set_option(option, most)


def memory_gb(device: torch.device) -> float:
    """The most memory that this process has held, on its GPU or, without one, at all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
