"""Stochastic solvers: moments against the exact answer, and the identities among them."""

import math

import pytest
import torch
from oracles import spec_mixture

from stillhouse.process import Gaussian, KeyedNoise, levels
from stillhouse.solvers import SOLVERS, STOCHASTIC, sample_dpmpp_2m_sde, sample_euler_ancestral

COUNT = 20_000
MORE_STEPS = {"euler-ancestral": 4}  # the one first-order member


def final(name: str, denoiser, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = 20.0 * torch.randn(COUNT, 1, dtype=torch.float64, generator=generator)
    grid = levels.polynomial(steps * MORE_STEPS.get(name, 1), 0.006, 20.0)
    options = {"churn": 40.0, "noise_scale": 1.0} if name == "edm-churn" else {}
    return SOLVERS[name](denoiser, x, grid, generator=generator, **options)


@pytest.mark.parametrize("name", sorted(STOCHASTIC))
def test_moments_of_a_gaussian(name):
    y = final(name, Gaussian(mean=0.4, std=0.7), 150)
    # The start lacks the data's own variance: sqrt(20^2 + .7^2) against 20 shifts the std by 6e-4.
    assert float(y.mean()) == pytest.approx(0.4, abs=4 * 0.7 / math.sqrt(COUNT) + 0.003)
    assert float(y.std()) == pytest.approx(0.7, abs=4 * 0.7 / math.sqrt(2 * COUNT) + 0.006)


@pytest.mark.parametrize("name", sorted(STOCHASTIC))
def test_moments_of_the_mixture(name):
    data = spec_mixture()
    y = final(name, data, 100)
    truth = data.sample(200_000, torch.Generator().manual_seed(5))
    for power in (1, 2, 3):
        assert float((y**power).mean()) == pytest.approx(float((truth**power).mean()), abs=0.04)


@pytest.mark.parametrize("name", sorted(STOCHASTIC))
def test_noise_is_really_drawn(name):
    x = 20.0 * torch.ones(4, 1, dtype=torch.float64)
    grid = levels.polynomial(8, 0.006, 20.0)
    y = SOLVERS[name](Gaussian(), x, grid, generator=KeyedNoise(range(4), seed=0))
    assert y.std() > 0.05
    other = SOLVERS[name](Gaussian(), x, grid, generator=KeyedNoise(range(4), seed=1))
    assert not torch.equal(y, other)


def test_ancestral_step_is_the_first_sde_step():
    """At eta = 1 the ancestral split and the exact linear SDE are one formula."""
    x = torch.linspace(-20, 20, 6, dtype=torch.float64)[:, None]
    grid = torch.tensor([20.0, 6.0], dtype=torch.float64)
    a, b = (
        solver(spec_mixture(), x, grid, generator=KeyedNoise(range(6), seed=2))
        for solver in (sample_euler_ancestral, sample_dpmpp_2m_sde)
    )
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_both_halves_of_a_step_see_one_brownian_path():
    """With D = 0 the two-evaluation step is linear in its noise: variance s'^2 (1 - (s'/s)^2)."""
    x = torch.zeros(200_000, 1, dtype=torch.float64)
    grid = torch.tensor([8.0, 2.0], dtype=torch.float64)
    seen = []

    def zero(x, sigma, cond=None):
        seen.append(x)
        return torch.zeros_like(x)

    y = SOLVERS["dpmpp-sde"](zero, x, grid, generator=torch.Generator().manual_seed(0))
    assert float(y.var()) == pytest.approx(4 * (1 - 1 / 16), rel=0.02)
    # The middle state (sigma 4) and the end share the first half's noise: cov = (2/4)^2 var_mid.
    middle = seen[1]
    covariance = float((middle * y).mean())
    assert covariance == pytest.approx(0.25 * 16 * (1 - 1 / 4), rel=0.03)
