"""Polynomial exactness on random uneven grids, and the identities between solvers (items 3, 4)."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from oracles import spec_mixture

from stillhouse import solvers
from stillhouse.process import levels
from stillhouse.solvers.adams import adams_predict, slope_weights
from stillhouse.solvers.dpmpp import dpmpp_predict
from stillhouse.solvers.exponential import deis_predict, unipc_correct, unipc_predict
from stillhouse.solvers.quadrature import exponential_weights, lagrange_weights, phi
from stillhouse.solvers.walk import Point, level_gap

TOLERANCE = 1e-12


def tensor(value) -> torch.Tensor:
    return torch.tensor([float(value)], dtype=torch.float64)


def random_sigmas(seed: int, count: int) -> list[float]:
    """Uneven and decreasing, steps in ln sigma between .3 and 1.2."""
    steps = np.random.default_rng(seed).uniform(0.3, 1.2, count)
    return list(np.exp(1.0 - np.cumsum(steps)))


def slope_error(predict, k: int, degree: int, seed: int) -> float:
    """Miss of one step when d is a polynomial in sigma of this degree, with exact history."""
    sigmas = random_sigmas(seed, k + 1)
    slope = np.polynomial.Polynomial(np.random.default_rng(seed + 99).normal(size=degree + 1))
    path = slope.integ()
    points = [Point(s, tensor(path(s)), tensor(path(s) - s * slope(s))) for s in sigmas[:-1]]
    return abs(float(predict(points, sigmas[-1])) - path(sigmas[-1]))


def exponential_path(coefficients: np.ndarray):
    """x(lambda) and D(lambda) with D a polynomial: dx/dlambda = D - x, solved in closed form."""
    denoised = np.polynomial.Polynomial(coefficients)
    particular, derivative = denoised, denoised
    for sign in (-1, 1, -1, 1):  # x_p = D - D' + D'' - ...
        derivative = derivative.deriv()
        particular = particular + sign * derivative
    return (lambda lam: particular(lam) + 0.7 * np.exp(-lam)), denoised


def denoised_error(predict, k: int, degree: int, seed: int) -> float:
    """Miss of one step when D is a polynomial in lambda of this degree, with exact history."""
    sigmas = random_sigmas(seed, k + 1)
    x, denoised = exponential_path(np.random.default_rng(seed + 99).normal(size=degree + 1))
    points = [Point(s, tensor(x(-np.log(s))), tensor(denoised(-np.log(s)))) for s in sigmas]
    return abs(float(predict(points[:-1], points[-1])) - x(-np.log(sigmas[-1])))


def to_sigma(predict):
    return lambda points, new: predict(points, new.sigma)


SEEDS = range(5)
EXACT_IN_LAMBDA = {
    **{f"deis-{k}": (to_sigma(deis_predict), k) for k in (1, 2, 3, 4)},
    "exact 2m": (to_sigma(partial(dpmpp_predict, variant="exact")), 2),
    "exact 3m": (to_sigma(partial(dpmpp_predict, variant="exact")), 3),
    "unipc-3 predictor": (to_sigma(partial(unipc_predict, b="bh2")), 3),
}


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_rho_ab_is_exact_for_slopes_below_its_order(k, seed):
    exact = partial(adams_predict, exact=True)
    assert slope_error(exact, k, k - 1, seed) < TOLERANCE
    assert slope_error(exact, k, k, seed) > 1e4 * TOLERANCE  # and no further


@pytest.mark.parametrize("k", [2, 3, 4])
def test_ipndm_is_not_exact_on_uneven_grids(k):
    fixed = partial(adams_predict, exact=False)
    assert min(slope_error(fixed, k, k - 1, seed) for seed in SEEDS) > 1e-4


@pytest.mark.parametrize("name", EXACT_IN_LAMBDA)
@pytest.mark.parametrize("seed", SEEDS)
def test_exact_for_denoised_polynomials_below_the_order(name, seed):
    predict, k = EXACT_IN_LAMBDA[name]
    assert denoised_error(predict, k, k - 1, seed) < TOLERANCE
    assert denoised_error(predict, k, k, seed) > 1e4 * TOLERANCE


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("b", ["bh1", "bh2"])
def test_corrector_of_order_k_is_exact_to_degree_k(k, b):
    correct = partial(unipc_correct, b=b)
    for seed in SEEDS:
        assert denoised_error(correct, k, k, seed) < TOLERANCE
        assert denoised_error(correct, k, k + 1, seed) > 1e4 * TOLERANCE


@pytest.mark.parametrize(
    ("predict", "k"),
    [
        (partial(dpmpp_predict, variant="compat"), 2),  # -phi1/2 stands for phi2
        (partial(dpmpp_predict, variant="compat"), 3),  # its second-derivative term is halved
        (partial(unipc_predict, b="bh1"), 2),  # the customary 0.5
        (partial(unipc_predict, b="bh2"), 2),
    ],
)
def test_published_shortcuts_are_inexact_by_design(predict, k):
    misses = [denoised_error(to_sigma(predict), k, k - 1, seed) for seed in SEEDS]
    assert min(misses) > 1e-4
    assert max(denoised_error(to_sigma(predict), k, k - 2, seed) for seed in SEEDS) < TOLERANCE


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_weights_sum_to_the_step(k):
    sigmas = random_sigmas(3, k + 1)
    points = [Point(s, tensor(0), tensor(0)) for s in sigmas[:-1]]
    for exact in (True, False):
        weights = slope_weights(points, sigmas[-1], exact=exact)
        assert sum(weights) / (sigmas[-1] - sigmas[-2]) == pytest.approx(1, abs=TOLERANCE)
    lams = [p.lam for p in points]
    end = -np.log(sigmas[-1])
    total = sum(exponential_weights(lams, lams[-1], end))
    assert total / -np.expm1(lams[-1] - end) == pytest.approx(1, abs=TOLERANCE)


def test_quadrature_equals_the_closed_forms():
    assert lagrange_weights([0.0, 1.0, 2.0], 2.0, 3.0) == pytest.approx([5 / 12, -16 / 12, 23 / 12])
    h = 0.7
    phi1, phi2, phi3 = phi(h)
    nodes = [-h, 0.0]  # even step before
    weights = exponential_weights(nodes, 0.0, h)
    assert weights == pytest.approx([-phi2, -phi1 + phi2], abs=1e-14)
    # D = D0 + D1 (s/h) + D2 (s/h)^2: the integral's coefficient of D2 is -2 phi3.
    weights = exponential_weights([-h, 0.0, h], 0.0, h)
    assert weights[0] + weights[2] == pytest.approx(-2 * phi3, abs=1e-14)
    # Small steps, where repeated division loses digits: int_0^h e^(s-h) ds = -expm1(-h).
    assert exponential_weights([0.0], 0.0, 1e-6)[0] == pytest.approx(-np.expm1(-1e-6), rel=1e-14)


GRIDS = {
    "rho": levels.polynomial(12, 0.006, 80.0),
    "even": torch.linspace(5, 0.5, 12, dtype=torch.float64),
}


def run(solver, grid="rho", **options):
    x = GRIDS[grid][0] * torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    return solver(spec_mixture(), x, GRIDS[grid], **options)


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_first_order_members_are_euler():
    euler = run(solvers.sample_euler)
    assert_same(run(solvers.sample_ipndm, order=1), euler)
    assert_same(run(solvers.sample_rho_ab, order=1), euler)
    assert_same(run(solvers.sample_deis, order=1), euler)
    assert_same(run(solvers.sample_unipc, order=1, corrector=False), euler)
    assert_same(run(solvers.sample_euler_ancestral, eta=0.0), euler)
    # The sum x + h d, where it is safe to write it so.
    grid = GRIDS["rho"].tolist()
    x = grid[0] * torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    for s, t in itertools.pairwise(grid):
        x = x + (t - s) * (x - spec_mixture()(x, tensor(s), None)) / s
    assert_same(x, euler)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_ipndm_is_rho_ab_on_an_even_grid(k):
    fixed, exact = (run(s, "even", order=k) for s in (solvers.sample_ipndm, solvers.sample_rho_ab))
    assert_same(fixed, exact)
    uneven = run(solvers.sample_ipndm, order=k) - run(solvers.sample_rho_ab, order=k)
    assert uneven.abs().max() > 1e-4


def test_exact_3m_is_deis_3_and_compat_is_not():
    deis = run(solvers.sample_deis, order=3)
    assert_same(run(solvers.sample_dpmpp_3m, variant="exact"), deis)
    assert (run(solvers.sample_dpmpp_3m) - deis).abs().max() > 1e-4
    assert_same(run(solvers.sample_dpmpp_2m, variant="exact"), run(solvers.sample_deis, order=2))


def test_unipc_2_without_corrector_is_2m():
    unipc = run(solvers.sample_unipc, order=2, b="bh2", corrector=False)
    assert_same(unipc, run(solvers.sample_dpmpp_2m))


def test_level_gap_is_the_difference_of_lambdas():
    assert level_gap(2.0, 0.5) == pytest.approx(np.log(4))
