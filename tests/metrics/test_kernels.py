"""Kernel distances: brute force, closed forms, no bias, and memory that is bounded."""

import itertools

import numpy as np
import pytest
import torch
from metrics.watched import Asked, Made

from stillhouse.errors import UserError
from stillhouse.metrics.bank import BLOCK, Bank
from stillhouse.metrics.kernels import (
    all_pairs_distance,
    kernel_distance,
    maximum_mean_discrepancy,
    polynomial_mmd,
    squared_distances,
)


def noise(count, dims=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dims, generator=generator)


def test_the_polynomial_distance_is_its_definition():
    x, y = noise(7), 0.5 + noise(9, seed=1)

    def kernel(a, b):
        return (float(a.double() @ b.double()) / 5 + 1) ** 3

    def within(rows):
        return np.mean([kernel(a, b) for a, b in itertools.permutations(rows, 2)])

    across = np.mean([kernel(a, b) for a, b in itertools.product(x, y)])
    assert polynomial_mmd(x, y) == pytest.approx(within(x) + within(y) - 2 * across, rel=1e-12)


def test_the_kernel_distance_has_no_bias():
    """Of equal distributions it is 0 on average, at any count: 20 rows already."""
    values = [polynomial_mmd(noise(20, seed=2 * s), noise(20, seed=2 * s + 1)) for s in range(300)]
    assert abs(np.mean(values)) < 3 * np.std(values) / np.sqrt(len(values))
    assert min(values) < 0
    assert polynomial_mmd(noise(300), 1 + noise(300, seed=1)) > 5 * np.std(values)


@pytest.mark.parametrize("counts", [(2, 3), (BLOCK, 7), (2 * BLOCK + 5, BLOCK + 1)])
def test_all_pairs_are_those_of_whole_matrices(counts, tmp_path):
    x, y = noise(counts[0]), 0.2 + noise(counts[1], seed=1)
    whole = polynomial_mmd(x, y)
    assert all_pairs_distance(x, y) == pytest.approx(whole, rel=1e-10, abs=1e-12)
    bank = Bank(tmp_path / "bank", 5)
    bank.add(x)
    watched = Asked(bank)
    assert all_pairs_distance(watched, y) == pytest.approx(whole, rel=1e-10, abs=1e-12)
    assert watched.most <= BLOCK


def test_all_pairs_are_the_mean_of_all_subsets():
    x, y = noise(5), 0.3 + noise(5, seed=1)
    subsets = [list(rows) for rows in itertools.combinations(range(5), 3)]
    values = [polynomial_mmd(x[a], y[b]) for a, b in itertools.product(subsets, subsets)]
    assert all_pairs_distance(x, y) == pytest.approx(np.mean(values), rel=1e-10)


def test_subsets_are_drawn_by_seed_and_without_replacement():
    x, y = noise(50), noise(40, seed=1)
    assert kernel_distance(x, y, size=20) == kernel_distance(x, y, size=20)
    assert kernel_distance(x, y, size=20) != kernel_distance(x, y, size=20, seed=1)
    everything = kernel_distance(x[:40], y, subsets=3)  # all rows, whatever the order
    assert everything.mean == pytest.approx(polynomial_mmd(x[:40], y), rel=1e-10)
    assert everything.std == pytest.approx(0, abs=1e-12)
    numbers = Asked(torch.arange(30.0)[:, None])
    assert kernel_distance(numbers, numbers, subsets=2, size=30).std == pytest.approx(0, abs=1e-6)


def test_a_bank_gives_what_a_matrix_gives(tmp_path):
    x, y = noise(60), noise(60, seed=1)
    bank = Bank(tmp_path / "features", 5)
    bank.add(x)
    assert kernel_distance(bank, y, subsets=3, size=20) == kernel_distance(x, y, subsets=3, size=20)
    assert maximum_mean_discrepancy(bank, y) == pytest.approx(maximum_mean_discrepancy(x, y))


def brute_force(x, y, bandwidth):
    def mean(a, b):
        return np.mean([np.exp(-np.sum((p - q) ** 2) / (2 * bandwidth**2)) for p in a for q in b])

    x, y = x.double().numpy(), y.double().numpy()
    return mean(x, x) + mean(y, y) - 2 * mean(x, y)


@pytest.mark.parametrize("bandwidth", [0.5, 2.0])
def test_the_discrepancy_is_its_definition(bandwidth):
    x, y = noise(8), 0.3 + noise(11, seed=1)
    ours = maximum_mean_discrepancy(x, y, bandwidth=bandwidth, scale=1.0, unit=False)
    assert ours == pytest.approx(brute_force(x, y, bandwidth), rel=1e-10)


def test_the_discrepancy_is_the_papers_by_default():
    x, y = noise(8, 64), 0.3 + noise(11, 64, seed=1)
    unit = [rows.double() / rows.double().norm(dim=1, keepdim=True) for rows in (x, y)]
    expected = 1000 * brute_force(*unit, 10.0)
    assert maximum_mean_discrepancy(x, y) == pytest.approx(expected, rel=1e-9)
    assert maximum_mean_discrepancy(8 * x, y) == pytest.approx(expected, rel=1e-9)


def test_the_discrepancy_of_gaussians_has_the_closed_form():
    """E k = (h / (h + 2 s^2))^(D/2) exp(-d^2 / (2 (h + 2 s^2))), h the squared bandwidth."""
    dims, shift, count = 3, 0.7, 3000

    def mean(apart):
        return (1 / 3) ** (dims / 2) * np.exp(-dims * apart**2 / 6)

    own = 1 / count + (1 - 1 / count) * mean(0)
    expected = 2 * own - 2 * mean(shift)
    x, y = noise(count, dims), shift + noise(count, dims, seed=1)
    ours = maximum_mean_discrepancy(x, y, bandwidth=1.0, scale=1.0, unit=False)
    assert ours == pytest.approx(expected, rel=0.05)


def test_the_discrepancy_is_block_by_block():
    x, y = Asked(noise(2 * BLOCK + 5, 2)), Asked(noise(BLOCK + 3, 2, seed=1))
    with Made() as made:
        ours = maximum_mean_discrepancy(x, y)
    assert max(x.most, y.most) <= BLOCK
    assert made.largest <= BLOCK**2
    swapped = maximum_mean_discrepancy(y, x)
    assert ours == pytest.approx(swapped, rel=1e-9)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert ours == pytest.approx(maximum_mean_discrepancy(x.rows[order], y), rel=1e-9)


def test_equal_sets_are_at_no_discrepancy():
    x = noise(100, 16)
    assert maximum_mean_discrepancy(x, x.clone()) == pytest.approx(0, abs=1e-10)
    assert maximum_mean_discrepancy(x, x) == pytest.approx(0, abs=1e-10)
    assert maximum_mean_discrepancy(x[:1], x[:1]) == 0


def test_distances_of_equal_rows_are_zero():
    x = noise(200, 2048).double() + 30
    squared = squared_distances(x, x[:100].clone())
    assert not squared.diagonal().any()
    exact = (x[:, None, :50] - x[None, :100, :50]).square().sum(-1)
    near = squared_distances(x[:, :50].contiguous(), x[:100, :50].contiguous())
    assert torch.allclose(near, exact, rtol=1e-10)


@pytest.mark.parametrize("metric", [kernel_distance, all_pairs_distance, maximum_mean_discrepancy])
def test_numbers_that_are_none_are_refused(metric):
    good, bad = noise(20), noise(20)
    bad[3, 1] = torch.nan
    for sides in ((good, bad), (bad, good)):
        with pytest.raises(UserError, match="1 of 20 rows of features are not finite"):
            metric(*sides)


def test_too_few_images_are_refused():
    with pytest.raises(UserError, match="2 images or more"):
        kernel_distance(noise(1), noise(5))
    with pytest.raises(UserError, match="2 images or more"):
        all_pairs_distance(noise(5), noise(1))
    with pytest.raises(UserError, match="no images"):
        maximum_mean_discrepancy(noise(0), noise(5))
