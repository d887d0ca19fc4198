"""Grids, densities and the shift by resolution."""

import math

import pytest
import torch
from torch.nn.functional import avg_pool2d, interpolate

from stillhouse.process import EDM, SIGMA_CAP, VP, Flow, alphas_cumprod, betas, levels

PROCESSES = {"edm": EDM(), "vp": VP(alphas_cumprod(betas("scaled_linear"))), "flow": Flow()}


def test_polynomial_grid_has_the_published_values():
    four = levels.polynomial(4, 0.006, 80.0)
    assert four.tolist() == pytest.approx([80, 10.929, 0.66989, 0.006], rel=5e-5)
    seven = levels.polynomial(7, 0.006, 80.0)
    published = [80, 31.73, 10.929, 3.1071, 0.66989, 0.093615, 0.006]
    assert seven.tolist() == pytest.approx(published, rel=5e-5)
    assert seven.dtype == torch.float64


def test_refined_grid_strided_is_the_grid():
    grid = levels.polynomial(5, 0.006, 80.0)
    fine = levels.refine(grid, 4)
    assert torch.equal(fine[::4], grid)
    torch.testing.assert_close(fine, levels.polynomial(17, 0.006, 80.0), rtol=1e-12, atol=0)


GRIDS = {
    "polynomial": lambda n: levels.polynomial(n, 0.01, 30.0),
    "log-snr": lambda n: levels.uniform_log_snr(n, 0.01, 30.0),
    **{
        f"time of {name}": lambda n, p=p: levels.uniform_time(n, p, 0.05, 12.0)
        for name, p in PROCESSES.items()
    },
}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("count", [1, 2, 5, 33])
def test_grids_fall_from_end_to_end(name, count):
    grid = GRIDS[name](count)
    assert grid.dtype == torch.float64
    assert len(grid) == count
    assert (grid[1:] < grid[:-1]).all()
    first, last = (12.0, 0.05) if "time" in name else (30.0, 0.01)
    assert float(grid[0]) == first
    assert count == 1 or float(grid[-1]) == last


def test_even_spacing_in_each_grids_own_variable():
    ramp = GRIDS["log-snr"](9).log().diff()
    torch.testing.assert_close(ramp, ramp[0].expand(8))
    for name, process in PROCESSES.items():
        times = process.time_at(GRIDS[f"time of {name}"](9)).diff()
        torch.testing.assert_close(times, times[0].expand(8), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("arguments", [(0, 0.1, 1.0), (3, 0.0, 1.0), (3, 2.0, 1.0)])
def test_bad_grids_are_refused(arguments):
    with pytest.raises(ValueError, match=r"grid needs|need 0 <"):
        levels.polynomial(*arguments)


def test_shift_divides_the_snr_and_composes():
    sigma = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64)
    torch.testing.assert_close(
        levels.shift(sigma, 3.0) ** 2 / sigma**2, torch.full((3,), 9.0).double()
    )
    assert torch.equal(levels.shift(levels.shift(sigma, 2), 2), levels.shift(sigma, 4))
    assert torch.equal(levels.shift(sigma, 1), sigma)


def test_shift_is_the_flow_shift_and_the_abar_rescale():
    t, s = torch.linspace(0.05, 0.95, 7, dtype=torch.float64), 3.0
    flow = Flow()
    shifted = flow.time_at(levels.shift(flow.sigma_at(1000 * t), s)) / 1000
    torch.testing.assert_close(shifted, s * t / (1 + (s - 1) * t))
    abar = torch.linspace(0.05, 0.95, 7, dtype=torch.float64)
    sigma = levels.shift(((1 - abar) / abar).sqrt(), s)
    torch.testing.assert_close(1 / (1 + sigma**2), abar / (abar + s**2 * (1 - abar)))


def test_shifted_noise_averages_back_to_the_low_resolution_level():
    """Upsample by s, add s * sigma noise, average s x s pixels: the residual's std is sigma."""
    sigma, s = 0.7, 4
    low = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    high = interpolate(low, scale_factor=s, mode="nearest")
    noise = torch.randn(high.shape, generator=torch.Generator().manual_seed(1))
    noisy = high + levels.shift(torch.tensor(sigma), s) * noise
    residual = avg_pool2d(noisy, s) - low
    assert float(residual.std()) == pytest.approx(sigma, rel=4 / math.sqrt(2 * low.numel()))


DENSITIES = {
    "log-normal": levels.LogNormal(),
    "log-uniform": levels.LogUniform(),
    "logit-normal": levels.LogitNormal(0.5, 0.8),
    "uniform flow time": levels.UniformTime(Flow()),
    "shifted": levels.Shifted(levels.LogNormal(), 2.0),
}


@pytest.mark.parametrize("name", DENSITIES)
def test_cdf_inverts_the_quantile(name):
    u = torch.linspace(0.01, 0.99, 33, dtype=torch.float64)
    sigma = DENSITIES[name].quantile(u)
    assert (sigma.diff() > 0).all()
    torch.testing.assert_close(DENSITIES[name].cdf(sigma), u, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", DENSITIES)
def test_densities_stay_finite_and_positive_at_the_ends(name):
    sigma = DENSITIES[name].quantile(torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert torch.isfinite(sigma).all()
    assert (sigma > 0).all()
    assert (sigma <= SIGMA_CAP).all()


def test_log_normal_has_its_mean_and_spread():
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    logs = levels.LogNormal(-1.2, 1.2).quantile(u).log()
    assert float(logs.mean()) == pytest.approx(-1.2, abs=1e-6)
    assert float(logs.std()) == pytest.approx(1.2, abs=1e-3)


def test_a_discrete_flow_time_never_draws_zero_noise():
    sigma = levels.UniformTime(Flow(), discrete=True).quantile(torch.tensor([0.0, 0.5]))
    assert (sigma > 0).all()


def test_discrete_uniform_time_draws_whole_timesteps_equally():
    process = PROCESSES["vp"]
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    times = process.time_at(levels.UniformTime(process, discrete=True).quantile(u))
    torch.testing.assert_close(times, times.round(), rtol=0, atol=1e-6)
    assert times.round().long().bincount().tolist() == [4] * 1000
