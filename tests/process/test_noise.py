"""Randomness keyed per sample."""

import pytest
import torch

from stillhouse.process import KeyedNoise, keyed_normal, keyed_uniform, starting_noise


@pytest.mark.parametrize("shape", [(3, 4, 4), (3,)])  # of odd size: half a word is left over
def test_row_depends_on_its_index_only(shape):
    whole = starting_noise(shape, range(64), seed=5)
    for size in (1, 7, 64):
        parts = [
            starting_noise(shape, range(i, min(i + size, 64)), seed=5) for i in range(0, 64, size)
        ]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(starting_noise(shape, [9, 2], seed=5), whole[[9, 2]])
    assert torch.equal(starting_noise(shape, torch.tensor([9, 2]), seed=5), whole[[9, 2]])


def test_seed_index_and_purpose_all_matter():
    base = keyed_normal((100,), [1], seed=1, purpose="a")
    for other in (
        keyed_normal((100,), [2], seed=1, purpose="a"),
        keyed_normal((100,), [1], seed=2, purpose="a"),
        keyed_normal((100,), [1], seed=1, purpose="b"),
    ):
        assert abs(float(torch.corrcoef(torch.cat([base, other]))[0, 1])) < 0.4


def test_noise_is_standard_normal():
    noise = keyed_normal((1000,), range(100), seed=0).double()
    count = noise.numel()
    assert abs(float(noise.mean())) < 4 / count**0.5
    assert abs(float(noise.var()) - 1) < 4 * (2 / count) ** 0.5
    assert float((noise.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.006)


def test_indices_beyond_32_bits_do_not_collide():
    """torch's CPU generator keeps 32 bits of its seed: i and i + 2^32 would be the same."""
    a, b = keyed_normal((4,), [3, 3 + 2**32], seed=0)
    assert not torch.equal(a, b)


def test_the_stream_is_pinned():
    """Old records must repeat: a change of keys or of numpy's stream shows here."""
    noise = starting_noise((2,), [0, 7], seed=3)
    expected = torch.tensor(
        [[0.4526386260986328, -0.6427631378173828], [0.3167819082736969, -1.8025050163269043]]
    )
    assert torch.equal(noise, expected)


def test_a_solvers_draws_are_not_its_starting_noise():
    like = torch.zeros(1, 64)
    start = starting_noise((64,), [0], seed=0)
    for draw in range(3):
        assert abs(float((KeyedNoise([0], seed=0)(like, draw) * start).mean())) < 0.5


def test_uniform_numbers_are_keyed_and_uniform():
    u = keyed_uniform(range(4000), seed=0, purpose="sigma")
    assert torch.equal(keyed_uniform([17], seed=0, purpose="sigma"), u[17:18])
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert float(u.mean()) == pytest.approx(0.5, abs=4 / (12 * 4000) ** 0.5)


def test_keyed_noise_counts_its_draws_and_checks_the_batch():
    source, like = KeyedNoise([4, 5], seed=0), torch.zeros(2, 3)
    assert not torch.equal(source(like, 0), source(like, 1))
    with pytest.raises(ValueError, match="2 keys for a batch of 3"):
        source(torch.zeros(3, 3), 0)
