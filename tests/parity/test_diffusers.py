"""Parity with diffusers' schedulers: the same network, noise levels and starting state.

DDIM, DPM-Solver and UniPC keep their state in variance-preserving coordinates,
x_vp = x / sqrt(1 + sigma^2); Euler and Heun keep it as here. Timesteps are whole numbers: some
schedulers round them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from small_models import (
    build_network,
    network_config,
    random_condition,
    relative_error,
    small_unet,
    unit_noise,
)
from torch import Tensor

from stillhouse.models import DiffusersNetwork
from stillhouse.pipelines.schedules import Trained, read_schedule
from stillhouse.process import (
    SIGMA_CAP,
    VP,
    Flow,
    NetworkDenoiser,
    alphas_cumprod,
    betas,
    levels,
)
from stillhouse.solvers import (
    sample_dpmpp_2m,
    sample_dpmpp_3m,
    sample_euler,
    sample_heun,
    sample_unipc,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")

BOUND = 1e-4  # of whole walks, relative to the largest value
STABLE_DIFFUSION = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
NOISE = unit_noise((2, 3, 8, 8))

unet = cache(small_unet)


def trained_as(scheduler: Any) -> Trained:
    """What our reader makes of a scheduler's own config."""
    return read_schedule({**scheduler.config, "_class_name": type(scheduler).__name__})


def denoiser_for(scheduler: Any) -> NetworkDenoiser:
    trained = trained_as(scheduler)
    network = DiffusersNetwork(unet())
    denoiser = NetworkDenoiser(network, trained.scaling, trained.prediction, clip=trained.clip)
    return denoiser.eval()


@torch.no_grad()
def native_walk(scheduler: Any, x: Tensor) -> Tensor:
    """diffusers' own loop, over the timesteps already set."""
    for t in scheduler.timesteps:
        output = unet()(scheduler.scale_model_input(x, t), t).sample
        x = scheduler.step(output, t, x).prev_sample
    return x


# ---------------------------------------------------------------- whole walks, discrete VP


@dataclass(frozen=True)
class Case:
    """A scheduler of diffusers and the solver here that it should equal."""

    scheduler: Any
    solver: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    in_vp: bool = True  # its state is in variance-preserving coordinates

    def build(self, prediction: str, steps: int) -> Any:
        # Trailing spacing is whole for these step counts; linspace would give Euler fractions.
        common = {**STABLE_DIFFUSION, "timestep_spacing": "trailing"}
        scheduler = self.scheduler(**common, prediction_type=prediction, **self.options)
        scheduler.set_timesteps(steps)
        return scheduler


def unipc(order: int, b: Any, *, lower_order_final: bool, last: str = "zero") -> Case:
    options = {
        "solver_order": order,
        "solver_type": b,
        "lower_order_final": lower_order_final,
        "final_sigmas_type": last,
    }
    solver = partial(sample_unipc, order=order, b=b, lower_order_final=lower_order_final)
    return Case(diffusers.UniPCMultistepScheduler, solver, options)


def multistep(order: int, kind: str, solver: Callable[..., Tensor]) -> Case:
    # With lower_order_final diffusers would lower the order below 15 steps only. Its last step, to
    # sigma = 0, is first order in any case: x = D.
    options = {
        "algorithm_type": "dpmsolver++",
        "solver_order": order,
        "solver_type": kind,
        "lower_order_final": False,
        "final_sigmas_type": "zero",
    }
    return Case(diffusers.DPMSolverMultistepScheduler, solver, options)


CASES = {
    "ddim": Case(diffusers.DDIMScheduler, sample_euler, {"clip_sample": False}),
    "euler": Case(diffusers.EulerDiscreteScheduler, sample_euler, in_vp=False),
    "heun": Case(diffusers.HeunDiscreteScheduler, sample_heun, in_vp=False),
    "dpmpp-2m": multistep(2, "midpoint", sample_dpmpp_2m),
    "dpmpp-2m exact": multistep(2, "heun", partial(sample_dpmpp_2m, variant="exact")),
    "dpmpp-3m": multistep(3, "midpoint", sample_dpmpp_3m),
    # To sigma = 0 diffusers' UniPC must lower its order, or its step is not a number; with bh1 it
    # is not one at any order, so these walks end at the model's own lowest level.
    "unipc-2 bh2": unipc(2, "bh2", lower_order_final=True),
    "unipc-3 bh2": unipc(3, "bh2", lower_order_final=True),
    "unipc-2 bh1": unipc(2, "bh1", lower_order_final=True, last="sigma_min"),
    "unipc-3 bh1": unipc(3, "bh1", lower_order_final=False, last="sigma_min"),
}


def whole_grid(scheduler: Any, scaling: VP) -> Tensor:
    """The scheduler's whole timesteps as levels (Heun lists each twice), down to its last one."""
    times = scheduler.timesteps.unique().flip(0).double()
    assert torch.equal(times, times.round())
    grid = scaling.sigma_at(times)
    if scheduler.config.get("final_sigmas_type") == "sigma_min":
        return torch.cat([grid, torch.tensor([scaling.sigma_min])])
    return levels.to_zero(grid)


def signal(sigma: Tensor) -> Tensor:
    return (1 + sigma**2).rsqrt()


class Setting(NamedTuple):
    """What a solver is called with, and where the scheduler's own walk from there ends."""

    denoiser: NetworkDenoiser
    start: Tensor
    grid: Tensor
    theirs: Tensor


def setting(case: Case, prediction: str, steps: int) -> Setting:
    scheduler = case.build(prediction, steps)
    denoiser = denoiser_for(scheduler)
    assert isinstance(denoiser.scaling, VP)
    grid = whole_grid(scheduler, denoiser.scaling)
    # Unit noise in variance-preserving coordinates is sqrt(1 + sigma^2) noise in these.
    start = NOISE / signal(grid[0])
    theirs = native_walk(scheduler, start * signal(grid[0]) if case.in_vp else start)
    theirs = theirs / signal(grid[-1]) if case.in_vp else theirs
    return Setting(denoiser, start, grid, theirs)


@pytest.mark.parametrize("steps", [10, 20, 50])
@pytest.mark.parametrize("name", CASES)
def test_walks_equal_the_scheduler(name, steps):
    *given, theirs = setting(CASES[name], "epsilon", steps)
    ours = CASES[name].solver(*given)
    assert relative_error(ours, theirs) < BOUND


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
@pytest.mark.parametrize("name", CASES)
def test_walks_equal_the_scheduler_for_other_predictions(name, prediction):
    *given, theirs = setting(CASES[name], prediction, 10)
    ours, euler = CASES[name].solver(*given), CASES["euler"].solver(*given)
    assert relative_error(ours, theirs) < BOUND
    # The bound can tell one solver from another.
    assert name in ("ddim", "euler") or relative_error(euler, theirs) > 100 * BOUND


# ---------------------------------------------------------------- whole walks, EDM and flow


@pytest.mark.parametrize("steps", [10, 20, 50])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_edm_walks_equal_the_scheduler(prediction, steps):
    scheduler = diffusers.EDMEulerScheduler(prediction_type=prediction)
    scheduler.set_timesteps(steps)
    start = 80 * NOISE
    ours = sample_euler(denoiser_for(scheduler), start, scheduler.sigmas)
    assert relative_error(ours, native_walk(scheduler, start)) < BOUND


def flow_scheduler(shift: float, steps: int) -> Any:
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.scale_model_input = lambda x, t: x  # pipelines of flow models do not call it
    scheduler.set_timesteps(steps)
    return scheduler


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 50])
@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
def test_capped_flow_walks_equal_the_scheduler_from_pure_noise(shift, steps):
    scheduler = flow_scheduler(shift, steps)
    denoiser = denoiser_for(scheduler)
    grid = denoiser.scaling.native_grid(steps)
    assert (float(grid[0]), float(scheduler.sigmas[0])) == (SIGMA_CAP, 1)
    ours = sample_euler(denoiser, SIGMA_CAP * NOISE, grid)
    assert relative_error(ours, native_walk(scheduler, NOISE)) < BOUND


# ---------------------------------------------------------------- zero terminal SNR

ZERO_SNR = VP(
    alphas_cumprod(betas("scaled_linear", 1000, 0.00085, 0.012), zero_terminal_snr=True),
    spacing="trailing",
)


@torch.no_grad()
def native_zero_snr(prediction: str, times: list[int], x: Tensor) -> Tensor:
    """DDIM (Song et al. 2021, eq. 12) in native time, from unit noise where abar is 0."""
    table = [*ZERO_SNR.alphas_cumprod[times].tolist(), 1.0]
    for t, (abar, after) in zip(times, itertools.pairwise(table), strict=True):
        output = unet()(x, torch.tensor(t)).sample
        x0 = output if prediction == "x0" else abar**0.5 * x - (1 - abar) ** 0.5 * output
        noise = (x - abar**0.5 * x0) / (1 - abar) ** 0.5
        x = after**0.5 * x0 + (1 - after) ** 0.5 * noise
    return x


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10, 50])
@pytest.mark.parametrize("prediction", ["v", "x0"])
def test_capped_zero_snr_walks_equal_native_time(prediction, steps):
    times = [round(1000 - i * 1000 / steps) - 1 for i in range(steps)]
    theirs = native_zero_snr(prediction, times, NOISE)
    denoiser = NetworkDenoiser(DiffusersNetwork(unet()), ZERO_SNR, prediction)
    ours = sample_euler(denoiser, SIGMA_CAP * NOISE, ZERO_SNR.native_grid(steps))
    assert relative_error(ours, theirs) < BOUND


# ---------------------------------------------------------------- the clean image


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DDIMScheduler", {"clip_sample": False}),
        ("DDIMScheduler", {"clip_sample": True}),
        ("DDPMScheduler", {"clip_sample": False, "timestep_spacing": "trailing"}),
        ("EulerDiscreteScheduler", {"timestep_spacing": "trailing"}),
    ],
)
def test_denoised_equals_pred_original_sample(name, options, prediction):
    scheduler = getattr(diffusers, name)(**STABLE_DIFFUSION, prediction_type=prediction, **options)
    scheduler.set_timesteps(10)
    denoiser = denoiser_for(scheduler)
    for t in scheduler.timesteps[[0, 3, 6, 9]]:
        sigma = denoiser.scaling.sigma_at(t.double())
        x = NOISE / signal(sigma)
        native = x if name == "EulerDiscreteScheduler" else NOISE
        with torch.no_grad():
            scheduler._step_index = None  # Euler counts steps; these are not in its order
            output = unet()(scheduler.scale_model_input(native, t), t).sample
            theirs = scheduler.step(output, t, native).pred_original_sample
            assert relative_error(denoiser(x, sigma), theirs) < 1e-5


def test_flow_denoised_equals_the_native_formula():
    """x0 = x_t - t v, with SD3's network in its own coordinates."""
    network = DiffusersNetwork(build_network(network_config("sd3", reduced=True)))
    denoiser = NetworkDenoiser(network, Flow(3.0), "flow")
    cond = random_condition(network.condition_shapes, 2)
    x_t = unit_noise((2, *network.data_shape))
    for t in (0.98, 0.7, 0.3, 0.02):
        sigma = torch.tensor(t / (1 - t), dtype=torch.float64)
        with torch.no_grad():
            time = torch.full((2,), 1000 * t)
            velocity = network.model(x_t, cond.text, cond.pooled, time).sample
            x0 = x_t - t * velocity
            assert relative_error(denoiser(x_t / (1 - t), sigma, cond), x0) < 1e-5


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_edm_denoised_equals_the_schedulers_preconditioning(prediction):
    scheduler = diffusers.EDMEulerScheduler(prediction_type=prediction)
    denoiser = denoiser_for(scheduler)
    for sigma in (80.0, 5.0, 0.5, 0.01):
        x = sigma * NOISE
        with torch.no_grad():
            time = scheduler.precondition_noise(torch.tensor(sigma))
            output = unet()(scheduler.precondition_inputs(x, sigma), time).sample
            theirs = scheduler.precondition_outputs(x, output, sigma)
            assert relative_error(denoiser(x, torch.tensor(sigma)), theirs) < 1e-5


# ---------------------------------------------------------------- variance schedules

NAMED = ["linear", "scaled_linear", "squaredcos_cap_v2"]
TABLED = [
    "DDIMScheduler",
    "DDPMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerDiscreteScheduler",
    "UniPCMultistepScheduler",
]


def assert_same_table(ours: Tensor, theirs: Tensor) -> None:
    """diffusers' tables are float32, whose 1 - beta has an absolute precision: hence the 1e-9."""
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("ends", [(1e-4, 0.02), (0.00085, 0.012)], ids=str)
@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize("name", TABLED)
def test_variance_schedules(name, schedule, ends):
    start, end = ends
    scheduler = getattr(diffusers, name)(beta_schedule=schedule, beta_start=start, beta_end=end)
    table = betas(schedule, 1000, start, end)
    torch.testing.assert_close(table, scheduler.betas.double(), rtol=1e-6, atol=0)
    assert_same_table(alphas_cumprod(table), scheduler.alphas_cumprod)


def test_sigmoid_schedule():
    scheduler = diffusers.DDPMScheduler(beta_schedule="sigmoid")
    assert_same_table(alphas_cumprod(betas("sigmoid")), scheduler.alphas_cumprod)


def test_trained_betas():
    table = torch.linspace(0.02, 0.3, 12).tolist()
    scheduler = diffusers.DDIMScheduler(trained_betas=table, num_train_timesteps=12)
    scaling = trained_as(scheduler).scaling
    assert isinstance(scaling, VP)
    assert_same_table(scaling.alphas_cumprod, scheduler.alphas_cumprod)


@pytest.mark.parametrize("schedule", NAMED)
@pytest.mark.parametrize("name", TABLED)
def test_zero_terminal_snr(name, schedule):
    scheduler = getattr(diffusers, name)(beta_schedule=schedule, rescale_betas_zero_snr=True)
    ours = alphas_cumprod(betas(schedule), zero_terminal_snr=True)
    assert float(ours[-1]) == 0
    # Schedulers that divide by the last value put the smallest half-precision number there.
    assert float(scheduler.alphas_cumprod[-1]) in (0.0, 2.0**-24)
    assert_same_table(ours[:-1], scheduler.alphas_cumprod[:-1])


# ---------------------------------------------------------------- native grids


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize(
    "name",
    [
        "DDIMScheduler",
        "DPMSolverMultistepScheduler",
        "DEISMultistepScheduler",
        "UniPCMultistepScheduler",
    ],
)
def test_native_vp_grid(name, spacing, offset):
    scheduler = getattr(diffusers, name)(
        **STABLE_DIFFUSION, timestep_spacing=spacing, steps_offset=offset
    )
    scaling = trained_as(scheduler).scaling
    for steps in (2, 4, 5, 7, 10, 15, 20, 25, 28, 30, 50, 100, 500):
        scheduler.set_timesteps(steps)
        grid = scaling.native_grid(steps)
        times = scaling.time_at(grid[:-1])
        torch.testing.assert_close(times, scheduler.timesteps.double(), rtol=0, atol=1e-6)
        assert float(grid[-1]) == 0


def test_native_grid_of_the_one_scheduler_without_a_spacing():
    scheduler = diffusers.DPMSolverSinglestepScheduler(**STABLE_DIFFUSION)
    scheduler.set_timesteps(10)
    scaling = trained_as(scheduler).scaling
    times = scaling.time_at(scaling.native_grid(10)[:-1])
    torch.testing.assert_close(times, scheduler.timesteps.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
def test_native_flow_grid(shift):
    for steps in (1, 2, 5, 10, 28, 50):
        grid = trained_as(flow_scheduler(shift, steps)).scaling.native_grid(steps)
        theirs = flow_scheduler(shift, steps).sigmas.double()
        assert (float(grid[0]), float(theirs[0])) == (SIGMA_CAP, 1)
        torch.testing.assert_close(grid[1:] / (1 + grid[1:]), theirs[1:], rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"sigma_max": 14.0, "rho": 5.0}], ids=str)
def test_native_edm_grid(options):
    scheduler = diffusers.EDMEulerScheduler(**options)
    scaling = trained_as(scheduler).scaling
    for steps in (2, 10, 18, 50):
        scheduler.set_timesteps(steps)
        torch.testing.assert_close(
            scaling.native_grid(steps), scheduler.sigmas.double(), rtol=1e-6, atol=0
        )


# Their lowest level is sqrt((1 - abar)/abar) in float32: 6e-8 of 1 is 3.5e-5 of its 8.5e-4.
KARRAS = 4e-5


@pytest.mark.parametrize("steps", [5, 10, 50])
def test_fractional_timesteps_are_those_of_eulers_karras_levels(steps):
    """Between whole timesteps, time is linear in log sigma."""
    scheduler = diffusers.EulerDiscreteScheduler(**STABLE_DIFFUSION, use_karras_sigmas=True)
    scheduler.set_timesteps(steps)
    scaling = trained_as(scheduler).scaling
    grid = scaling.native_grid(steps)
    torch.testing.assert_close(grid, scheduler.sigmas.double(), rtol=KARRAS, atol=0)
    theirs = scheduler.timesteps.double()
    assert (theirs != theirs.round()).sum() > steps // 2
    torch.testing.assert_close(scaling.time_at(grid[:-1]), theirs, rtol=0, atol=0.02)


@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler"])
def test_karras_levels_of_open_ended_schedulers(name):
    scheduler = getattr(diffusers, name)(**STABLE_DIFFUSION, use_karras_sigmas=True)
    scheduler.set_timesteps(10)
    grid = trained_as(scheduler).scaling.native_grid(10)
    torch.testing.assert_close(grid, scheduler.sigmas.double(), rtol=KARRAS, atol=0)
