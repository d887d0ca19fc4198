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


ONE = torch.tensor([[1.3], [-0.4]], dtype=torch.float64)


def one_step(name: str, sigma: float, to: float, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """A step on unit Gaussian data, and the first noise that it drew."""
    grid = torch.tensor([sigma, to], dtype=torch.float64)
    source = KeyedNoise(range(2), seed=4)
    return SOLVERS[name](Gaussian(), ONE, grid, generator=source, **options), source(ONE, 0)


@pytest.mark.parametrize("eta", [0.3, 0.5, 1.0, 1.4])
def test_ancestral_step_at_any_eta(eta):
    """sigma_up = min(s', eta s' sqrt(s^2 - s'^2)/s), and sigma_down^2 = s'^2 - sigma_up^2."""
    sigma, to = 3.0, 1.0
    y, noise = one_step("euler-ancestral", sigma, to, eta=eta)
    up = min(to, eta * (to**2 * (sigma**2 - to**2) / sigma**2) ** 0.5)
    down = (to**2 - up**2) ** 0.5
    slope = (ONE - ONE / (1 + sigma**2)) / sigma
    torch.testing.assert_close(y, ONE + (down - sigma) * slope + up * noise)


@pytest.mark.parametrize("eta", [0.3, 1.0, 1.4])
def test_sde_step_at_any_eta(eta):
    """DPM-Solver++ SDE-1 with noise share eta, written in sigma."""
    sigma, to = 3.0, 1.0
    y, noise = one_step("dpmpp-2m-sde", sigma, to, eta=eta)
    ratio = to / sigma
    mean = ratio ** (1 + eta) * ONE + (1 - ratio ** (1 + eta)) * ONE / (1 + sigma**2)
    torch.testing.assert_close(y, mean + to * (1 - ratio ** (2 * eta)) ** 0.5 * noise)


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_two_evaluation_sde_step_at_any_eta(eta):
    """With D constant (data at one point) the step is the exact linear SDE: its variance."""
    x = torch.full((100_000, 1), 2.0, dtype=torch.float64)
    grid = torch.tensor([3.0, 1.0], dtype=torch.float64)
    y = SOLVERS["dpmpp-sde"](
        lambda x, s, c=None: torch.full_like(x, 0.7),
        x,
        grid,
        generator=torch.Generator().manual_seed(0),
        eta=eta,
    )
    decay = (1 / 3) ** (1 + eta)
    assert float(y.mean()) == pytest.approx(decay * 2.0 + (1 - decay) * 0.7, abs=0.01)
    assert float(y.var()) == pytest.approx(1 - (1 / 3) ** (2 * eta), rel=0.02)


@pytest.mark.parametrize(("churn", "raised_by"), [(0.2, 0.2), (40.0, math.sqrt(2) - 1)])
def test_churn_is_edms_algorithm_2(churn, raised_by):
    """One step of N = 1: gamma = min(churn/N, sqrt(2) - 1), then Heun from the raised level."""
    sigma, to, scale = 3.0, 1.0, 1.007
    y, noise = one_step("edm-churn", sigma, to, churn=churn, noise_scale=scale)
    raised = sigma * (1 + raised_by)
    x = ONE + (raised**2 - sigma**2) ** 0.5 * scale * noise
    d = (x - x / (1 + raised**2)) / raised
    euler = x + (to - raised) * d
    d2 = (euler - euler / (1 + to**2)) / to
    torch.testing.assert_close(y, x + (to - raised) * (d + d2) / 2)
    quiet, _ = one_step("edm-churn", sigma, to, churn=churn, sigma_to=2.0)
    assert torch.equal(quiet, one_step("heun", sigma, to)[0])  # outside its range: plain Heun


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
