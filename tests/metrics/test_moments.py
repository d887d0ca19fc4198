"""Moments: the same under any split, taking parts away, and far from the origin."""

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics.watched import Asked

from stillhouse.errors import UserError
from stillhouse.metrics.bank import BLOCK, Bank
from stillhouse.metrics.moments import Moments

BOUND = 1e-10


def features(count, dims=6, seed=0, mean=0.0, std=1.0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dims, dims, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, dims, generator=generator, dtype=torch.float64)
    return mean + std * noise @ mixing


def assert_same(a, b, bound=BOUND, whole=None):
    """Relative to the largest value, of the whole where b is what is left of one."""
    assert a.count == b.count
    size = (whole or b).scatter.abs().max()
    assert (a.scatter - b.scatter).abs().max() <= bound * size
    deviation = (size / (whole or b).count).sqrt()
    assert (a.mean - b.mean).abs().max() <= bound * max(b.mean.abs().max(), deviation)


def test_moments_are_numpys():
    x = features(50)
    moments = Moments.of(x)
    np.testing.assert_allclose(moments.mean, x.mean(0), rtol=1e-14)
    np.testing.assert_allclose(moments.covariance, np.cov(x.numpy(), rowvar=False), rtol=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(2, 200),
    parts=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 200),
    place=st.sampled_from([(0.0, 1.0), (1e3, 1e-2), (-5.0, 1e4), (0.0, 1e-6)]),
    seed=st.integers(0, 10**6),
)
def test_every_split_is_the_same(count, parts, batch, place, seed):
    x = features(count, seed=seed, mean=place[0], std=place[1])
    whole = Moments.of(x)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    processes = []
    for rank in range(parts):
        mine = x[order][rank::parts]
        batches = [Moments.of(b) for b in mine.split(batch)] if len(mine) else []
        processes.append(reduce(add, batches, Moments.none(6)))
    assert_same(reduce(add, processes), whole)
    assert_same(reduce(add, reversed(processes)), whole)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(4, 100),
    share=st.floats(0, 1),
    place=st.sampled_from([(0.0, 1.0), (1e3, 1e-2)]),
    seed=st.integers(0, 10**6),
)
def test_a_part_can_be_taken_away(count, share, place, seed):
    x = features(count, seed=seed, mean=place[0], std=place[1])
    taken, whole = round(share * count), Moments.of(x)
    rest = whole - Moments.of(x[:taken])
    assert_same(rest, Moments.of(x[taken:]), bound=1e-9, whole=whole)
    if count - taken < 2:
        assert not rest.scatter.any()


def test_an_offset_does_not_hurt():
    x = features(3000, mean=0.0, std=1e-2)
    exact = Moments.of(x).covariance
    shifted = reduce(add, map(Moments.of, (x + 1e3).split(7)))
    error = (shifted.covariance - exact).abs().max() / exact.diagonal().max()
    assert error < 1e-9  # float64 holds x + 1e3 to 1e-13, that is to 1e-11 of a deviation
    naive = (x + 1e3).T @ (x + 1e3) / len(x) - torch.outer((x + 1e3).mean(0), (x + 1e3).mean(0))
    assert (naive - exact).abs().max() / exact.diagonal().max() > 1e-8  # the test can fail


def test_one_row_and_none():
    none, one = Moments.none(3), Moments.of(torch.tensor([[1.0, 2.0, 3.0]]))
    assert (none.count, one.count) == (0, 1)
    assert one.mean.tolist() == [1, 2, 3]
    assert not one.covariance.any()
    assert not none.covariance.any()
    assert (none + one).mean.tolist() == (one + none).mean.tolist() == [1, 2, 3]
    assert Moments.of(torch.empty(0, 3)).count == 0
    assert (one - one).count == 0
    assert (one - none).count == 1
    two = one + Moments.of(torch.tensor([[3.0, 2.0, 1.0]]))
    assert two.covariance.tolist() == [[2, 0, -2], [0, 0, 0], [-2, 0, 2]]


def test_low_precision_is_summed_in_float64():
    x = features(500).to(torch.bfloat16)
    assert_same(Moments.of(x), Moments.of(x.double()), bound=0)
    assert Moments.of(x).scatter.dtype == torch.float64


def test_a_bank_is_read_in_blocks(tmp_path):
    x = features(2 * BLOCK + 100).float()
    bank = Bank(tmp_path / "features", 6)
    bank.add(x)
    watched = Asked(x)
    assert_same(Moments.of(bank), Moments.of(watched), bound=0)
    assert watched.most <= BLOCK
    assert_same(Moments.of(bank), Moments.of(x.double()[:100]) + Moments.of(x.double()[100:]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_are_refused(value):
    x = features(10)
    x[3, 2] = value
    with pytest.raises(UserError, match="1 of 10 rows of features are not finite"):
        Moments.of(x)


def test_misuse():
    with pytest.raises(UserError, match="same detector"):
        Moments.none(3) + Moments.none(4)
    with pytest.raises(ValueError, match="cannot be taken away"):
        Moments.of(features(3)) - Moments.of(features(4))
    with pytest.raises(ValueError, match="rows"):
        Moments.of(torch.zeros(3, 2, 2))
