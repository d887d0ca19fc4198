"""The permutation is one, whatever n is, and looks random."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.data import permute


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 100))
def test_it_is_a_bijection(n, seed, epoch):
    assert sorted(permute(range(n), n, seed, epoch)) == list(range(n))


def test_it_does_not_depend_on_what_else_is_asked():
    whole = permute(range(1000), 1000, 3, 5)
    assert permute([17, 999, 4], 1000, 3, 5).tolist() == whole[[17, 999, 4]].tolist()


def test_epochs_and_seeds_differ():
    orders = {tuple(permute(range(50), 50, seed, epoch)) for seed in (0, 1) for epoch in range(20)}
    assert len(orders) == 40


@pytest.mark.parametrize("n", [2, 3, 5, 16])
def test_every_place_is_equally_likely(n):
    epochs = 800
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), permute(range(n), n, epoch)] += 1
    expected = epochs / n
    # five standard deviations of a binomial count
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected * (1 - 1 / n))


def test_pairs_are_mixed():
    """Neighbours end up anywhere: steps between them are uniform over the circle."""
    n = 1 << 16
    steps = np.diff(permute(range(n), n, 1)) % n
    histogram = np.histogram(steps, bins=16, range=(0, n))[0]
    assert np.abs(histogram - n / 16).max() < 6 * np.sqrt(n / 16)


def test_400_million_cost_no_memory():
    n = 400_000_000
    first = np.arange(20_000)
    images = permute(first, n, 0, 0)
    assert len(set(images.tolist())) == len(first)
    assert images.min() >= 0
    assert images.max() < n
    assert abs(images.mean() / n - 0.5) < 0.01


def test_outside_is_an_error():
    with pytest.raises(ValueError, match=r"0\.\.4"):
        permute([5], 5, 0)
