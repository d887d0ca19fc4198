"""Denoising against closed forms: for Gaussian data the best denoiser and its loss are known."""

import pytest
import torch
from torch import Tensor, nn

from stillhouse.objectives import WEIGHTINGS, Constants, Denoising, Draws
from stillhouse.process import (
    EDM,
    PREDICTIONS,
    VP,
    Condition,
    Flow,
    Gaussian,
    NetworkDenoiser,
    alphas_cumprod,
    betas,
    levels,
    predictions,
)

MEAN, STD = 0.3, 0.7
DRAWS = Draws(seed=1)
CONSTANTS = Constants(sigma_data=0.5, gamma=5.0)
VP_PROCESS = VP(alphas_cumprod(betas("linear")))
SCALINGS = {"x0": EDM(), "edm": EDM(), "eps": VP_PROCESS, "v": VP_PROCESS, "flow": Flow()}


class Affine(nn.Module):
    """output = gain * input + bias."""

    def __init__(self, gain: float = 0.0, bias: float = 0.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain, dtype=torch.float64))
        self.bias = nn.Parameter(torch.tensor(bias, dtype=torch.float64))

    def forward(self, x: Tensor, time: Tensor, cond: Condition | None) -> Tensor:
        return self.gain * x + self.bias


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_the_weight_in_x0_is_a_unit_weight_on_the_networks_own_output(kind, make_batch):
    scaling = SCALINGS[kind]
    denoiser = NetworkDenoiser(Affine(0.8, 0.2), scaling, kind)
    objective = Denoising(weighting=kind, constants=Constants(denoiser.scaling.sigma_data))
    batch = objective.prepare(make_batch(64, (3, 2)), DRAWS)
    noise = batch.noise.double()
    x = batch.data + predictions.rows(batch.sigma, batch.data) * noise
    output = 0.8 * predictions.rows(scaling.input_scale(batch.sigma), x) * x + 0.2
    target = predictions.target(kind, batch.data, noise, batch.sigma, denoiser.scaling.sigma_data)
    native = ((output - target) ** 2).flatten(1).mean(1)
    loss = objective(denoiser, batch, DRAWS)
    torch.testing.assert_close(loss.per_sample, native, rtol=1e-9, atol=1e-12)


def test_v_and_edm_differ_by_sigma_data_alone():
    sigma = torch.logspace(-2, 2, 9, dtype=torch.float64)
    assert torch.equal(
        WEIGHTINGS["v"](sigma, Constants(1.0)), WEIGHTINGS["edm"](sigma, Constants(1.0))
    )
    published = (sigma**2 + 0.5**2) / (sigma * 0.5) ** 2  # Karras et al. 2022, table 1
    torch.testing.assert_close(WEIGHTINGS["edm"](sigma, CONSTANTS), published)


def test_min_snr_is_x0_weight_at_low_noise_and_eps_weight_at_high():
    sigma = torch.logspace(-2, 2, 41, dtype=torch.float64)
    weight = WEIGHTINGS["min-snr"](sigma, CONSTANTS)
    high = sigma > 5**-0.5
    torch.testing.assert_close(weight[high], WEIGHTINGS["eps"](sigma, CONSTANTS)[high])
    assert (weight[~high] == 5.0).all()


def gained(factor: float, gaussian: Gaussian):
    """The exact denoiser with its gain multiplied."""

    def denoiser(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        return MEAN + factor * (gaussian(x, sigma) - MEAN)

    return denoiser


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_losses_have_their_closed_form_and_the_exact_denoiser_the_least(weighting, make_batch):
    """E loss of a gain a: w ((1 - a)^2 s^2 + a^2 sigma^2), least at a = s^2/(s^2 + sigma^2)."""
    objective = Denoising(levels.LogNormal(-0.5, 1.0), weighting, CONSTANTS)
    batch, gaussian = make_batch(2000, (64,), mean=MEAN, std=STD), Gaussian(MEAN, STD)
    losses = {}
    for factor in (0.9, 1.0, 1.1):
        loss = objective(gained(factor, gaussian), batch, DRAWS)
        gain = factor * STD**2 / (STD**2 + loss.sigma**2)
        expected = (1 - gain) ** 2 * STD**2 + gain**2 * loss.sigma**2
        if factor == 1.0:
            exact = loss.sigma**2 * STD**2 / (STD**2 + loss.sigma**2)
            torch.testing.assert_close(expected, exact)
        ratio = loss.per_sample / (objective.weight(loss.sigma) * expected)
        assert float(ratio.mean()) == pytest.approx(1.0, abs=4 * (2 / batch.data.numel()) ** 0.5)
        losses[factor] = float(loss.total)
    assert losses[1.0] < losses[0.9]
    assert losses[1.0] < losses[1.1]


@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("sigma", [0.3, 2.0])
def test_training_an_affine_network_reaches_the_exact_denoiser(kind, sigma, make_batch):
    torch.manual_seed(0)
    denoiser = NetworkDenoiser(Affine(), SCALINGS[kind], kind)
    objective = Denoising(
        levels.LogUniform(sigma, sigma), kind, Constants(denoiser.scaling.sigma_data)
    )  # one level
    optimiser = torch.optim.Adam(denoiser.parameters(), lr=0.15)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 100)
    for step in range(100):
        batch = make_batch(32, (64,), mean=MEAN, std=STD, first=32 * step)
        optimiser.zero_grad()
        objective(denoiser, batch, DRAWS).total.backward()
        optimiser.step()
        schedule.step()
    x = torch.linspace(-2, 2, 5, dtype=torch.float64)[:, None]
    level = torch.tensor(sigma, dtype=torch.float64)
    exact = Gaussian(MEAN, STD)(x, level)
    torch.testing.assert_close(denoiser(x, level).detach(), exact, rtol=0, atol=0.02)


def test_the_gaussian_is_the_optimum_for_images_too(make_batch):
    batch = make_batch(200, (3, 4, 4), mean=MEAN, std=STD)
    loss = Denoising()(Gaussian(MEAN, STD), batch, DRAWS)
    assert loss.per_sample.shape == loss.sigma.shape == (200,)
    worse = Denoising()(Gaussian(MEAN, 1.3 * STD), batch, DRAWS)
    assert worse.total > loss.total


def test_levels_follow_the_density(make_batch):
    sigma = Denoising(levels.LogNormal(-1.2, 1.2)).prepare(make_batch(4000, (1,)), DRAWS).sigma
    assert float(sigma.log().mean()) == pytest.approx(-1.2, abs=4 * 1.2 / 4000**0.5)
    assert float(sigma.log().std()) == pytest.approx(1.2, rel=4 / 8000**0.5)
