"""A pool over processes equals one process with the whole batch, and never hangs."""

import socket
from dataclasses import replace

import pytest
import torch
from couplings.processes import (
    COUPLINGS,
    DRAWS,
    SPLITS,
    met,
    mixed_shapes,
    rows_of,
    whole_batch,
    work,
)

from stillhouse.couplings import Assignment, Independent, Pooled
from stillhouse.errors import UserError
from stillhouse.objectives import pair_noise


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes answered, by rank."""
    folder = tmp_path_factory.mktemp("pool")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("split", [*SPLITS, "in turn"])
@pytest.mark.parametrize("name", COUPLINGS)
def test_two_processes_equal_one_to_the_bit(found, name, split):
    batch, alone = pair_noise(whole_batch(), COUPLINGS[name], DRAWS)
    for rank in range(2):
        rows, part = rows_of(split, rank), found[rank][f"{name}/{split}"]
        assert torch.equal(part["index"], alone.index[rows])
        assert torch.equal(part["key"], batch.key[alone.index[rows]])
        assert torch.equal(part["noise"], batch.noise[rows])
        if len(rows):
            assert part["costs"].tolist() == [alone.cost_before, alone.cost_after]


def test_a_pool_is_more_than_its_parts(found):
    """The mistake it would be to solve per process and call it global."""
    for rank in range(2):
        rows = rows_of("even", rank)
        alone = pair_noise(whole_batch()[rows], Assignment(), DRAWS).batch.noise
        assert not torch.equal(found[rank]["plain/even"]["noise"], alone)


def test_processes_with_other_shapes_swap_nothing(found):
    for rank in range(2):
        alone = pair_noise(mixed_shapes(rank), Assignment(), DRAWS).batch.noise
        assert torch.equal(found[rank]["shapes"]["noise"], alone)


def test_what_one_refuses_all_hear_and_the_next_step_works(found):
    assert "row 3 of the batch's data holds NaN" in found[1]["refusal"]
    assert found[0]["refusal"].startswith("process 1: row 3")
    assert torch.equal(found[0]["after"]["noise"], found[0]["plain/even"]["noise"])


def test_threads_that_read_ahead_are_let_go(found):
    assert found[0]["read ahead"] == 2
    assert found[1]["read ahead"] == 5


class Alone:
    """One process that talks to itself, and counts what it sends."""

    rank = 0

    def __init__(self):
        self.sent = []

    def collect(self, value):
        self.sent.append(value)
        return [value]

    def share(self, value):
        return value


def test_vectors_and_keys_are_sent_never_noise():
    exchange = Alone()
    met(Pooled(Assignment(side=2), exchange), whole_batch())
    (part,) = exchange.sent
    assert part.view.shape == (24, 2 * 2 * 2)
    assert torch.equal(part.key, whole_batch().key)
    tensors = [value for value in part if isinstance(value, torch.Tensor)]
    assert sum(value.numel() for value in tensors) == 24 * 8 + 24


def test_what_the_solver_refuses_is_told_to_all():
    pooled = Pooled(COUPLINGS["within-class"], Alone())
    with pytest.raises(UserError, match="needs labels"):
        pair_noise(replace(whole_batch(), condition=None), pooled, DRAWS)

    class Broken(Assignment):
        def match(self, x, noise, condition=None):
            raise RuntimeError("no memory")

    with pytest.raises(UserError, match="pool of 1 processes: no memory"):
        pair_noise(whole_batch(), Pooled(Broken(), Alone()), DRAWS)


def test_after_the_end_batches_keep_their_noise():
    exchange = Alone()
    pooled = Pooled(Assignment(), exchange)
    pooled.close(lambda number: number + 2)
    assert exchange.sent == [None, None]
    plain = pair_noise(whole_batch(), Independent(), DRAWS).batch.noise
    assert torch.equal(pair_noise(whole_batch(), pooled, DRAWS).batch.noise, plain)


def test_it_needs_keys_and_no_mask():
    batch = whole_batch()
    with pytest.raises(ValueError, match="keyed draws"):
        Pooled(Assignment(), Alone())(batch.data, batch.data)
