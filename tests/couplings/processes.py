"""What two real processes do, each with its rows of a whole batch; started by test_pooled."""

import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.couplings import Assignment, Conditional, GroupExchange, Pooled
from stillhouse.errors import UserError
from stillhouse.objectives import Draws, pair_noise
from stillhouse.process import Batch, Condition, keyed_normal

DRAWS = Draws(seed=5)
COUPLINGS = {
    "plain": Assignment(),
    "blocks": Assignment(block=7),
    "averaged": Assignment(side=2),
    "standardised": Assignment(standardise=True),
    "within-class": Conditional(),
    "soft": Conditional(mode="soft"),
}
# How many rows each process has, and whether rows are dealt out in turn.
SPLITS = {"even": (12, 12), "ragged": (17, 7), "empty": (24, 0), "empty first": (0, 24)}


def whole_batch(first: int = 0, shape: tuple[int, ...] = (2, 4, 4), count: int = 24) -> Batch:
    key = torch.arange(first, first + count)
    data = keyed_normal(shape, key, seed=1, purpose="data") + (key % 3).view(-1, 1, 1, 1)
    return Batch(data, Condition(label=key % 3), key=key)


def rows_of(split: str, rank: int) -> Tensor:
    if split == "in turn":
        return torch.arange(rank, 24, 2)
    first, second = SPLITS[split]
    return torch.arange(first) if rank == 0 else torch.arange(first, first + second)


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    exchange = GroupExchange(group)
    found = {
        f"{name}/{split}": met(Pooled(coupling, exchange), whole_batch()[rows_of(split, rank)])
        for name, coupling in COUPLINGS.items()
        for split in [*SPLITS, "in turn"]
    }
    found["shapes"] = met(Pooled(Assignment(), exchange), mixed_shapes(rank))
    found["refusal"] = refusal(rank, Pooled(Assignment(), exchange))
    found["after"] = met(Pooled(Assignment(), exchange), whole_batch()[rows_of("even", rank)])
    found["read ahead"] = read_ahead(rank, Pooled(Assignment(), exchange))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    del group, exchange
    dist.destroy_process_group()


def met(coupling: Pooled, batch: Batch) -> dict[str, Tensor]:
    batch, pairing = pair_noise(batch, coupling, DRAWS)
    costs = torch.tensor([pairing.cost_before, pairing.cost_after], dtype=torch.float64)
    return {"noise": batch.noise, "index": pairing.index, "key": pairing.key, "costs": costs}


def mixed_shapes(rank: int) -> Batch:
    return whole_batch(24 * rank, (2, 4, 4) if rank == 0 else (2, 3, 5))


def refusal(rank: int, coupling: Pooled) -> str:
    """One process has a NaN: both hear of it, and nobody waits."""
    batch = whole_batch()[rows_of("even", rank)]
    if rank == 1:
        batch.data[3] = float("nan")
    try:
        pair_noise(batch, coupling, DRAWS)
    except UserError as error:
        return str(error)
    return ""


def read_ahead(rank: int, coupling: Pooled) -> int:
    """Threads that stand at different steps when the run ends: how many steps this one made."""
    steps = 0

    def read() -> None:
        nonlocal steps
        for step in range(2 if rank == 0 else 5):
            pair_noise(whole_batch(24 * step)[rows_of("even", rank)], coupling, DRAWS)
            steps += 1

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(None if rank == 0 else 3)  # the second waits in its third step by now

    def highest(number: int) -> int:
        numbers = [0, 0]
        dist.all_gather_object(numbers, number)
        return max(numbers)

    coupling.close(highest)
    thread.join(20)
    assert not thread.is_alive()
    return steps
