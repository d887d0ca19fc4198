"""Adapters: a perfect network in each process's own coordinates is the exact denoiser."""

import math

import pytest
import torch
from torch import nn

from stillhouse.process import (
    EDM,
    SIGMA_CAP,
    VP,
    Flow,
    Gaussian,
    NetworkDenoiser,
    alphas_cumprod,
    betas,
)

STD = 0.7
VP_SD = VP(alphas_cumprod(betas("scaled_linear", 1000, 0.00085, 0.012)))
ZERO_SNR = VP(alphas_cumprod(betas("scaled_linear", 1000, 0.00085, 0.012), zero_terminal_snr=True))


class NativeGaussian(nn.Module):
    """The exact network for N(0, STD^2) data, written in native coordinates x_t = a x0 + s noise.

    It knows sigma only through the time it is told, so a wrong time or input scale shows.
    """

    def __init__(self, process: str, prediction: str, table: torch.Tensor | None = None) -> None:
        super().__init__()
        self.process, self.prediction, self.table = process, prediction, table

    def signal_and_noise(self, time):
        if self.process == "flow":
            t = time.double() / 1000
            return 1 - t, t
        if self.process == "vp":
            abar = self.table[time.round().long()]
            return abar.sqrt(), (1 - abar).sqrt()
        sigma = (4 * time.double()).exp()  # EDM: input already divided by sqrt(s^2 + sigma^2)
        scale = (sigma**2 + 0.25).rsqrt()
        return scale, sigma * scale

    def forward(self, x, time, cond):
        a, s = (v.view(-1, 1) for v in self.signal_and_noise(time))
        x0 = STD**2 * a / (STD**2 * a**2 + s**2) * x
        if self.prediction == "x0":
            return x0
        noise = (x - a * x0) / s
        if self.prediction == "eps":
            return noise
        if self.prediction == "flow":
            return noise - x0
        if self.prediction == "v":
            return a * noise - s * x0
        sigma = s / a
        root = (sigma**2 + 0.25).sqrt()
        return sigma * x0 / (0.5 * root) - 0.5 * noise / root  # EDM's F


CASES = {
    "edm": (EDM(), "edm", NativeGaussian("edm", "edm")),
    "vp eps": (VP_SD, "eps", NativeGaussian("vp", "eps", VP_SD.alphas_cumprod)),
    "vp v": (VP_SD, "v", NativeGaussian("vp", "v", VP_SD.alphas_cumprod)),
    "vp x0": (VP_SD, "x0", NativeGaussian("vp", "x0", VP_SD.alphas_cumprod)),
    "zero-snr v": (ZERO_SNR, "v", NativeGaussian("vp", "v", ZERO_SNR.alphas_cumprod)),
    "flow": (Flow(), "flow", NativeGaussian("flow", "flow")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_perfect_network_is_the_exact_denoiser(name):
    scaling, prediction, network = CASES[name]
    denoiser = NetworkDenoiser(network, scaling, prediction)
    if isinstance(scaling, VP):
        sigmas = scaling.sigma_at(torch.tensor([999.0, 700, 300, 40, 0]).double())
    else:
        sigmas = torch.tensor([scaling.sigma_max, 10.0, 1.0, 0.1, 0.01], dtype=torch.float64)
    unit = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None].expand(5, 3)
    x = unit * (STD**2 + sigmas**2).sqrt()[:, None]
    exact = Gaussian(std=STD)(x, sigmas)
    # The network is told its time in float32, which is where the last digits go.
    torch.testing.assert_close(denoiser(x, sigmas), exact, rtol=1e-4, atol=3e-4)
    for i, sigma in enumerate(sigmas):
        torch.testing.assert_close(denoiser(x, sigma)[i], denoiser(x, sigmas)[i])


@pytest.mark.parametrize("scaling", [EDM(), VP_SD, ZERO_SNR, Flow()], ids=str)
def test_time_and_sigma_are_inverse(scaling):
    sigma = torch.logspace(
        math.log10(scaling.sigma_min * 1.01), math.log10(50), 40, dtype=torch.float64
    )
    sigma = sigma[sigma < scaling.sigma_max]
    torch.testing.assert_close(scaling.sigma_at(scaling.time_at(sigma)), sigma, rtol=1e-9, atol=0)
    last = torch.tensor(scaling.time_max, dtype=torch.float64)
    assert float(scaling.sigma_at(last)) == pytest.approx(scaling.sigma_max, rel=1e-12)


def test_vp_levels_are_the_native_ones_and_fractions_are_linear_in_log_sigma():
    abar = VP_SD.alphas_cumprod
    times = torch.arange(1000, dtype=torch.float64)
    native = ((1 - abar) / abar).sqrt()
    torch.testing.assert_close(VP_SD.sigma_at(times), native, rtol=1e-12, atol=0)
    torch.testing.assert_close(VP_SD.time_at(native), times, rtol=0, atol=1e-8)
    middle = (native[200] * native[201]).sqrt()
    assert float(VP_SD.time_at(middle)) == pytest.approx(200.5, abs=1e-9)
    outside = VP_SD.time_at(torch.tensor([1e-9, 1e9], dtype=torch.float64))
    assert outside.tolist() == [0, 999]


def test_vanished_signal_is_capped_and_recognised():
    assert ZERO_SNR.sigma_max == SIGMA_CAP
    assert Flow().sigma_max == SIGMA_CAP
    assert float(ZERO_SNR.time_at(torch.tensor(SIGMA_CAP).double())) == 999
    assert float(ZERO_SNR.native_grid(10)[0]) >= SIGMA_CAP
    assert float(Flow(3.0).native_grid(10)[0]) >= SIGMA_CAP
    assert VP_SD.sigma_max == pytest.approx(14.6146, abs=1e-3)


def test_eps_prediction_at_zero_terminal_snr_is_refused():
    with pytest.raises(ValueError, match="v- or x0-prediction"):
        NetworkDenoiser(nn.Identity(), ZERO_SNR, "eps")


@pytest.mark.parametrize("bad", [[0.5, 0.9], [0.9, -0.1], [[0.9, 0.5]], [1.0, 0.5]])
def test_a_table_that_is_no_schedule_is_refused(bad):
    with pytest.raises(ValueError, match="decreasing"):
        VP(torch.tensor(bad))


def test_clip_bounds_the_clean_image():
    scaling, prediction, network = CASES["vp x0"]
    denoiser = NetworkDenoiser(network, scaling, prediction, clip=0.1).eval()
    x = torch.full((2, 3), 5.0, dtype=torch.float64)
    assert float(denoiser(x, torch.tensor(0.5).double()).max()) == pytest.approx(0.1)


def test_in_training_the_clip_leaves_the_gradient_alone():
    scaling, prediction, network = CASES["vp x0"]
    denoiser = NetworkDenoiser(network, scaling, prediction, clip=0.1)
    x = torch.full((2, 3), 5.0, dtype=torch.float64, requires_grad=True)
    denoiser.train()
    (gradient,) = torch.autograd.grad(denoiser(x, torch.tensor(0.5).double()).sum(), x)
    assert float(gradient.min()) > 0.1


def test_gradients_reach_the_network_under_autocast():
    """Against finite differences of the exact linear network, in bfloat16's precision."""

    class Linear(nn.Linear):
        def forward(self, x, time, cond):
            return super().forward(x)

    torch.manual_seed(0)
    network = Linear(3, 3)
    denoiser = NetworkDenoiser(network, VP_SD, "v")
    x, sigma = torch.randn(4, 3), torch.tensor([0.1, 1.0, 5.0, 14.0]).double()
    denoiser(x, sigma).square().mean().backward()
    exact = network.weight.grad.clone()
    assert exact.abs().max() > 0.01
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = denoiser(x, sigma)
        assert out.dtype == torch.float32
        out.square().mean().backward()
    torch.testing.assert_close(network.weight.grad, exact, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("scaling", [EDM(), VP_SD, Flow()], ids=["edm", "vp", "flow"])
def test_no_noise_at_all_is_a_finite_question(scaling):
    """denoise(x, 0) = x wherever the prediction's own formula says so."""
    kind = {"EDM": "edm", "VP": "v", "Flow": "flow"}[type(scaling).__name__]

    class Told(nn.Module):
        def forward(self, x, time, cond):
            assert torch.isfinite(time).all()
            return torch.ones_like(x)

    x = torch.randn(2, 3)
    zero = torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(NetworkDenoiser(Told(), scaling, kind)(x, zero), x)


def test_scalar_levels_compile_without_a_graph_break():
    """Indexing by a scalar tensor would be one, and a wait for the device."""
    sigma = torch.tensor(2.0, dtype=torch.float64)
    compiled = torch.compile(VP_SD.time_at, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(sigma), VP_SD.time_at(sigma))


def test_network_runs_in_its_own_dtype_and_the_state_keeps_its():
    class Half(nn.Linear):
        def forward(self, x, time, cond):
            assert x.dtype == torch.bfloat16
            assert time.dtype == torch.float32
            return super().forward(x)

    denoiser = NetworkDenoiser(Half(3, 3).bfloat16(), VP_SD, "eps")
    assert denoiser(torch.randn(2, 3), torch.tensor(1.0).double()).dtype == torch.float32
    denoiser.to(torch.bfloat16)  # casting the module must not touch the table of levels
    assert float(denoiser.scaling.sigma_max) == pytest.approx(14.6146, abs=1e-3)


def test_native_steps_beyond_the_table_are_refused():
    with pytest.raises(ValueError, match="1000 timesteps cannot take 1001"):
        VP_SD.native_grid(1001)
