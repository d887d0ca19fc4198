"""Frechet distances: closed forms, singular covariances, bias at a count, and the limit."""

import math

import numpy as np
import pytest
import torch
from metrics.watched import Asked, Made
from scipy.linalg import sqrtm

from stillhouse.errors import UserError
from stillhouse.metrics.bank import BLOCK
from stillhouse.metrics.frechet import expected_distance, frechet_distance, frechet_infinity
from stillhouse.metrics.moments import Moments

COUNT = 101


def gaussian(mean, covariance, count=COUNT):
    """Moments that are exactly these."""
    mean, covariance = (torch.as_tensor(x, dtype=torch.float64) for x in (mean, covariance))
    return Moments(count, mean, covariance * (count - 1))


def rotation(dims, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(dims, dims, generator=generator, dtype=torch.float64)).Q


def noise(count, dims, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dims, generator=generator, dtype=torch.float64)


def spectrum(dims):
    return 1.0 / torch.arange(1, dims + 1, dtype=torch.float64)


def commuting(a, b, shift):
    return float(shift.square().sum() + (a.sqrt() - b.sqrt()).square().sum())


@pytest.mark.parametrize("turned", [False, True])
def test_commuting_gaussians_have_the_closed_form(turned):
    a, b, shift = spectrum(12), spectrum(12).flip(0) * 3, noise(1, 12)[0]
    turn = rotation(12) if turned else torch.eye(12, dtype=torch.float64)
    one = gaussian(torch.zeros(12), turn @ a.diag() @ turn.T)
    two = gaussian(shift, turn @ b.diag() @ turn.T)
    assert frechet_distance(one, two) == pytest.approx(commuting(a, b, shift), rel=1e-12)
    assert frechet_distance(two, one) == pytest.approx(commuting(a, b, shift), rel=1e-12)


def test_other_gaussians_have_the_matrix_root():
    turn = rotation(12)
    s1, s2 = spectrum(12).diag(), turn @ (spectrum(12) + 0.1).diag() @ turn.T
    root = np.trace(sqrtm((s1 @ s2).numpy())).real
    expected = float(s1.trace() + s2.trace()) - 2 * root
    ours = frechet_distance(gaussian(torch.zeros(12), s1), gaussian(torch.zeros(12), s2))
    assert ours == pytest.approx(expected, rel=1e-10)


def test_one_dimension():
    ours = frechet_distance(gaussian([1.0], [[4.0]]), gaussian([3.0], [[9.0]]))
    assert ours == pytest.approx(5.0, rel=1e-14)


@pytest.mark.parametrize("count", [2, 5, 40, 400])
@pytest.mark.parametrize("dims", [1, 40])
def test_identical_sets_are_at_no_distance(count, dims):
    x = noise(count, dims) * spectrum(dims) + 3
    moments, other = Moments.of(x), Moments.of(x[: count // 2]) + Moments.of(x[count // 2 :])
    trace = float(moments.covariance.trace())
    assert 0 <= frechet_distance(moments, moments) <= 1e-8 * trace
    assert 0 <= frechet_distance(moments, other) <= 1e-8 * trace


@pytest.mark.parametrize("count", [2, 3, 30])
def test_fewer_samples_than_dimensions(count):
    real, fake = Moments.of(noise(500, 64)), Moments.of(noise(count, 64, seed=1))
    value = frechet_distance(real, fake)
    assert math.isfinite(value)
    assert value > 0
    # On the subspace of the few samples alone, by the matrix root: the same.
    basis = torch.linalg.eigh(fake.covariance).eigenvectors[:, 64 - (count - 1) :]
    s1, s2 = (basis.T @ m.covariance @ basis for m in (real, fake))
    root = np.trace(sqrtm((s1 @ s2).numpy())).real
    apart = (real.mean - fake.mean).square().sum()
    expected = float(apart + real.covariance.trace() + fake.covariance.trace()) - 2 * root
    assert value == pytest.approx(expected, rel=1e-9)


def test_singular_covariances():
    one = torch.zeros(8, 8, dtype=torch.float64)
    one[0, 0] = 1.0
    two = torch.zeros(8, 8, dtype=torch.float64)
    two[1, 1] = 4.0
    zero, mean = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    assert frechet_distance(gaussian(mean, one), gaussian(mean, two)) == pytest.approx(5.0)
    assert frechet_distance(gaussian(mean, one), gaussian(mean, zero)) == pytest.approx(1.0)
    assert frechet_distance(gaussian(mean, zero), gaussian(mean + 1, zero)) == pytest.approx(8.0)


def test_constant_and_repeated_features():
    x = noise(100, 10)
    x[:, 3], x[:, 4] = 7.0, x[:, 5]
    assert frechet_distance(Moments.of(x), Moments.of(x[:50])) > 0
    assert frechet_distance(Moments.of(x), Moments.of(x.flip(0))) < 1e-12


def test_nothing_is_complex():
    with Made() as made:
        frechet_distance(Moments.of(noise(9, 12)), Moments.of(noise(30, 12, seed=1)))
        expected_distance(Moments.of(noise(30, 12)), 10)
        frechet_infinity(noise(60, 4), Moments.of(noise(30, 4)))
    assert torch.float64 in made.kinds
    assert not any(kind.is_complex for kind in made.kinds)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["mean", "scatter"])
def test_moments_that_are_no_numbers_are_refused(part, value):
    good, bad = Moments.of(noise(9, 3)), Moments.of(noise(9, 3))
    getattr(bad, part)[..., 0] = value
    for sides in ((good, bad), (bad, good)):
        with pytest.raises(UserError, match="not finite"):
            frechet_distance(*sides)
    with pytest.raises(UserError, match="not finite"):
        expected_distance(bad, 10)


def test_too_few_and_unlike_samples_are_refused():
    good = Moments.of(noise(9, 3))
    for bad in (Moments.of(noise(1, 3)), Moments.none(3)):
        with pytest.raises(UserError, match="2 images or more"):
            frechet_distance(good, bad)
    with pytest.raises(UserError, match="2 images or more"):
        expected_distance(good, 1)
    with pytest.raises(UserError, match="same detector"):
        frechet_distance(good, Moments.of(noise(9, 4)))
    with pytest.raises(UserError, match="30 samples or more"):
        frechet_infinity(noise(29, 3), good)


def test_the_expected_distance_has_its_first_order():
    """tr L / n + (sum_ij l_i l_j / (l_i + l_j) + sum_i l_i / 2) / (2 (n - 1)) for n >> D."""
    values, count = spectrum(16), 20000
    reference = gaussian(torch.zeros(16), values.diag())
    pairs = (values[:, None] * values / (values[:, None] + values)).sum() + values.sum() / 2
    first = float(values.sum() / count + pairs / (2 * (count - 1)))
    assert expected_distance(reference, count, draws=400) == pytest.approx(first, rel=0.02)


@pytest.mark.parametrize("count", [2, 5, 16, 17, 18, 40, 500])
def test_the_expected_distance_is_the_mean_of_measured_ones(count):
    dims, repeats = 16, 500
    turn = rotation(dims) * spectrum(dims).sqrt()
    reference = gaussian(torch.ones(dims), turn @ turn.T)
    samples = [1 + noise(count, dims, seed=s) @ turn.T for s in range(repeats)]
    measured = np.array([frechet_distance(Moments.of(x), reference) for x in samples])
    error = measured.std() / math.sqrt(repeats)
    assert abs(expected_distance(reference, count, draws=1000) - measured.mean()) < 4 * error


def test_the_expected_distance_of_real_halves():
    """Half of Gaussian data against the moments of much more of it."""
    x = noise(40400, 32) * spectrum(32).sqrt()
    value = frechet_distance(Moments.of(x[:400]), Moments.of(x[400:]))
    assert expected_distance(Moments.of(x[400:]), 400) == pytest.approx(value, rel=0.1)


def test_the_expected_distance_is_reproducible_and_falls():
    reference = Moments.of(noise(300, 20))
    values = [expected_distance(reference, n) for n in (5, 10, 20, 40, 80, 1000)]
    assert values == sorted(values, reverse=True)
    assert values[2] == expected_distance(reference, 20)
    assert values[2] != expected_distance(reference, 20, seed=1)
    assert expected_distance(gaussian(torch.zeros(3), torch.zeros(3, 3)), 10) == 0


@pytest.mark.parametrize("dims", [8, 16])
def test_the_limit_of_equal_distributions_is_zero(dims):
    reference = gaussian(torch.zeros(dims), torch.eye(dims))
    limits = [frechet_infinity(noise(2000, dims, seed=s), reference, seed=s) for s in range(16)]
    plain = np.mean([limit.distances[-1] for limit in limits])
    assert abs(np.mean([limit.value for limit in limits])) < 0.15 * plain
    assert np.std([limit.value for limit in limits]) < 0.6 * plain
    assert all(abs(limit.value) < 5 * limit.error for limit in limits)
    first = dims + dims * (dims + 1) / 4  # of the distance times N: the slope
    assert np.mean([limit.slope for limit in limits]) == pytest.approx(first, rel=0.15)


def test_the_limit_of_others_is_the_closed_form():
    dims, shift = 12, 0.1
    values = 1 + 0.5 * spectrum(dims)
    expected = commuting(torch.ones(dims), values, torch.full((dims,), shift))
    reference = gaussian(torch.zeros(dims), torch.eye(dims))
    limits = [
        frechet_infinity(shift + noise(600, dims, seed=s) * values.sqrt(), reference)
        for s in range(16)
    ]
    miss = np.mean([limit.value for limit in limits]) - expected
    plain = np.mean([limit.distances[-1] for limit in limits]) - expected
    error = np.std([limit.value for limit in limits]) / math.sqrt(len(limits))
    assert abs(miss) < 3 * error
    assert abs(miss) < 0.3 * plain


def test_the_points_of_the_limit():
    rows = Asked(noise(2 * BLOCK, 4))
    reference = Moments.of(noise(500, 4, seed=1))
    limit = frechet_infinity(rows, reference, points=4)
    assert limit.sizes == [205, 819, 1434, 2048]
    assert rows.most <= BLOCK
    whole = frechet_distance(Moments.of(rows), reference)
    assert limit.distances[-1] == pytest.approx(whole, rel=1e-10)
    x = 1 / np.array(limit.sizes)
    slope, value = np.polyfit(x, limit.distances, 1)
    assert (limit.value, limit.slope) == pytest.approx((value, slope))
    assert limit == frechet_infinity(rows, reference, points=4)
    assert limit != frechet_infinity(rows, reference, points=4, seed=1)


def test_the_error_of_a_line_is_known():
    from scipy.stats import linregress

    limit = frechet_infinity(noise(400, 3), Moments.of(noise(500, 3, seed=1)))
    fit = linregress(1 / np.array(limit.sizes), limit.distances)
    assert limit.error == pytest.approx(fit.intercept_stderr)
