"""Flow matching: the velocity loss of the papers, which is a weighted denoising loss."""

import pytest
import torch
from torch import Tensor, nn

from stillhouse.objectives import Denoising, Draws, FlowMatching
from stillhouse.process import Condition, Flow, Gaussian, NetworkDenoiser, levels

DRAWS = Draws(seed=2)
DENSITIES = {"logit-normal": levels.LogitNormal(), "uniform": levels.UniformTime(Flow())}


class Velocity(nn.Module):
    """Any smooth function of x_t and t."""

    def forward(self, x: Tensor, time: Tensor, cond: Condition | None) -> Tensor:
        return (1.3 * x).sin() - (time / 1000)[:, None].to(x) * x


@pytest.mark.parametrize("density", DENSITIES)
def test_it_is_the_denoising_loss_weighted_for_flow(density, make_batch):
    batch, denoiser = make_batch(256), Gaussian(std=0.4)
    flow = FlowMatching(DENSITIES[density])(denoiser, batch, DRAWS)
    weighted = Denoising(DENSITIES[density], "flow")(denoiser, batch, DRAWS)
    assert torch.equal(flow.sigma, weighted.sigma)
    torch.testing.assert_close(flow.per_sample, weighted.per_sample, rtol=1e-9, atol=0)


@pytest.mark.parametrize("density", DENSITIES)
def test_it_is_the_papers_loss_in_the_papers_coordinates(density, make_batch):
    """mean (u((1 - t) x0 + t noise, t) - (noise - x0))^2, written without sigma."""
    objective = FlowMatching(DENSITIES[density])
    batch = objective.prepare(make_batch(64), DRAWS)
    t, noise = (batch.sigma / (1 + batch.sigma))[:, None], batch.noise.double()
    x_t = (1 - t) * batch.data + t * noise
    u = Velocity()(x_t, (1000 * t[:, 0]).float(), None)
    published = ((u - (noise - batch.data)) ** 2).mean(1)
    loss = objective(NetworkDenoiser(Velocity(), Flow(), "flow"), batch, DRAWS)
    torch.testing.assert_close(loss.per_sample, published, rtol=1e-6, atol=0)


def test_times_are_logit_normal_or_uniform(make_batch):
    batch = make_batch(4000, (1,))
    for name, density in DENSITIES.items():
        sigma = FlowMatching(density).prepare(batch, DRAWS).sigma
        t = sigma / (1 + sigma)
        assert float(t.mean()) == pytest.approx(0.5, abs=4 * 0.29 / 4000**0.5)
        # Half of a uniform time lies within [1/4, 3/4]; of a logit-normal 72.8%.
        inner = float(((t > 0.25) & (t < 0.75)).double().mean())
        assert inner == pytest.approx(0.728 if name == "logit-normal" else 0.5, abs=0.033)


def test_the_ends_of_time_are_finite_in_float32(make_batch):
    batch = make_batch(2, dtype=torch.float32)
    u = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    objective = FlowMatching(levels.UniformTime(Flow()))
    sigma = objective.sigmas(u, batch).clamp(min=1e-4)
    exact = Gaussian(std=0.7)
    loss = objective(exact, type(batch)(batch.data, key=batch.key, sigma=sigma), DRAWS)
    noise = objective.prepare(batch, DRAWS).noise
    # The best velocity at t = 0 is E noise - x0 = -x0, at t = 1 it is noise - E x0 = noise.
    best = torch.stack([(noise[0] ** 2).mean(), (batch.data[1] ** 2).mean()])
    torch.testing.assert_close(loss.per_sample, best, rtol=5e-3, atol=0)
