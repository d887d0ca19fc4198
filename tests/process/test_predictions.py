"""Predictions: reading and target are inverse, and equal to the papers' native formulas."""

import pytest
import torch

from stillhouse.process import PREDICTIONS
from stillhouse.process.predictions import from_x0, target, to_x0

GENERATOR = torch.Generator().manual_seed(0)
X0, NOISE = torch.randn(2, 5, 3, 4, 4, generator=GENERATOR, dtype=torch.float64).unbind(0)
SIGMA = torch.tensor([1e-3, 0.1, 1.0, 14.6, 1e5], dtype=torch.float64)
X = X0 + SIGMA.view(-1, 1, 1, 1) * NOISE


@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("sigma_data", [1.0, 0.5])
def test_a_perfect_output_reads_back_as_x0(kind, sigma_data):
    output = target(kind, X0, NOISE, SIGMA, sigma_data)
    x0 = to_x0(kind, X, output, SIGMA, sigma_data)
    # Where sigma is 1e5 the state itself keeps only eleven digits of x0.
    torch.testing.assert_close(x0, X0, rtol=0, atol=1e-9)
    if kind != "eps":
        torch.testing.assert_close(x0, X0, rtol=0, atol=2e-11)


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_from_x0_inverts_to_x0(kind):
    output = from_x0(kind, X[:4], X0[:4], SIGMA[:4])
    torch.testing.assert_close(
        output, target(kind, X0[:4], NOISE[:4], SIGMA[:4]), rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(to_x0(kind, X[:4], output, SIGMA[:4]), X0[:4])


def test_native_formulas():
    abar = 1 / (1 + SIGMA[1:4].view(-1, 1, 1, 1) ** 2)
    x0, noise, x, sigma = X0[1:4], NOISE[1:4], X[1:4], SIGMA[1:4]
    velocity = abar.sqrt() * noise - (1 - abar).sqrt() * x0
    torch.testing.assert_close(target("v", x0, noise, sigma), velocity)
    t = (sigma / (1 + sigma)).view(-1, 1, 1, 1)
    torch.testing.assert_close(x / (1 + sigma.view(-1, 1, 1, 1)), (1 - t) * x0 + t * noise)
    torch.testing.assert_close(target("flow", x0, noise, sigma), noise - x0)
    assert torch.equal(target("eps", x0, noise, sigma), noise)
    # EDM (Karras et al. 2022, eq. 8): the target is (x0 - c_skip x)/c_out.
    s = sigma.view(-1, 1, 1, 1)
    skip, out = 0.25 / (s**2 + 0.25), s * 0.5 / (s**2 + 0.25).sqrt()
    torch.testing.assert_close(target("edm", x0, noise, sigma, 0.5), (x0 - skip * x) / out)


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_a_scalar_level_equals_a_level_per_sample(kind):
    each = torch.full((5,), 0.3, dtype=torch.float64)
    a, b = (to_x0(kind, X, NOISE, sigma) for sigma in (each, each[0]))
    torch.testing.assert_close(a, b, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_dtype_of_the_state_is_kept(kind):
    for sigma in (SIGMA, SIGMA[1]):
        assert to_x0(kind, X.float(), NOISE.float(), sigma).dtype == torch.float32
        assert target(kind, X0.float(), NOISE.float(), sigma).dtype == torch.float32


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match="known: x0, eps, v, edm, flow"):
        to_x0("epsilon", X, NOISE, SIGMA)  # pyright: ignore[reportArgumentType]
