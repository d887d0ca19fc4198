"""The oracles themselves: against each other, autograd and quadrature."""

import math

import pytest
import torch
from oracles import rk4_reference, spec_mixture

from stillhouse.process import TOYS, Condition, Gaussian, GaussianField, GaussianMixture


def test_a_mixture_of_one_is_the_gaussian():
    mean = torch.randn(3, 4, 4, dtype=torch.float64)
    mixture = GaussianMixture(mean[None], torch.tensor([0.6]).double(), torch.ones(1))
    x, sigma = torch.randn(5, 3, 4, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64) + 1
    torch.testing.assert_close(
        mixture(x, sigma), Gaussian(mean, 0.6)(x, sigma), rtol=1e-7, atol=1e-7
    )


@pytest.mark.parametrize("name", TOYS)
def test_tweedie(name):
    """D = x + sigma^2 grad log p(x; sigma), with the density written out independently."""
    toy, sigma = TOYS[name](), 0.4
    x = toy.sample(20, torch.Generator().manual_seed(0)).requires_grad_()
    distance = (x[:, None] - toy.means).square().sum(-1)
    total = toy.stds**2 + sigma**2
    density = (toy.weights / (2 * math.pi * total) * (-distance / (2 * total)).exp()).sum(1)
    (score,) = torch.autograd.grad(density.log().sum(), x)
    denoised = toy(x.detach(), torch.tensor(sigma, dtype=torch.float64))
    torch.testing.assert_close(denoised, x.detach() + sigma**2 * score)


def test_posterior_mean_by_quadrature():
    data, sigma, x = spec_mixture(), 0.5, 0.8
    grid = torch.linspace(-6, 6, 20_001, dtype=torch.float64)
    prior = (
        data.weights
        / data.stds
        * (-((grid[:, None] - data.means.T) ** 2) / (2 * data.stds**2)).exp()
    ).sum(1)
    joint = prior * (-((x - grid) ** 2) / (2 * sigma**2)).exp()
    expected = float((grid * joint).sum() / joint.sum())
    ours = data(torch.tensor([[x]], dtype=torch.float64), torch.tensor(sigma).double())
    assert float(ours) == pytest.approx(expected, abs=1e-9)


def test_exact_flows_solve_the_ode():
    gaussian = Gaussian(mean=0.3, std=0.6)
    x = torch.linspace(-9, 9, 5, dtype=torch.float64)[:, None]
    truth = rk4_reference(gaussian, x, 9.0, 0.05, steps=500)
    torch.testing.assert_close(gaussian.exact_flow(x, 9.0, 0.05), truth, rtol=1e-8, atol=1e-8)
    field = GaussianField(8)
    x = 9 * torch.randn(2, 1, 8, 8, dtype=torch.float64)
    truth = rk4_reference(field, x, 9.0, 0.05, steps=500)
    torch.testing.assert_close(field.exact_flow(x, 9.0, 0.05), truth, rtol=1e-7, atol=1e-7)


def test_field_has_its_variance_and_falling_spectrum():
    field = GaussianField(16, slope=1.5, std=0.5)
    noise = torch.randn(2000, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    images = field.sample(noise)
    assert float(images.var()) == pytest.approx(0.25, rel=0.05)
    power = torch.fft.fft2(images, norm="ortho").abs().square().mean((0, 1))
    assert float(power[0, 1] / power[0, 4]) == pytest.approx(4**3, rel=0.2)


def test_per_sample_levels_equal_single_ones():
    field, x = GaussianField(8), torch.randn(3, 2, 8, 8)
    sigma = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    apart = torch.cat([field(x[i : i + 1], sigma[i]) for i in range(3)])
    torch.testing.assert_close(field(x, sigma), apart)


def test_labels_keep_only_their_own_components():
    ring = TOYS["ring"]()
    x = torch.zeros(8, 2, dtype=torch.float64)
    far = torch.tensor(50.0, dtype=torch.float64)
    denoised = ring(x, far, Condition(label=torch.arange(8)))
    torch.testing.assert_close(denoised, ring.means, rtol=0, atol=1e-4)
    torch.testing.assert_close(ring(x, far), torch.zeros_like(x), rtol=0, atol=1e-3)


def test_component_counts_must_agree():
    with pytest.raises(ValueError, match="one row per component"):
        GaussianMixture(torch.zeros(3, 2), torch.ones(2), torch.ones(3))
