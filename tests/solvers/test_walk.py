"""What the one loop promises for every solver: evaluations, the cap, AFS, history, callbacks."""

import math
from functools import partial

import pytest
import torch
from oracles import spec_mixture

from stillhouse.process import SIGMA_CAP, Gaussian, GaussianField, KeyedNoise, levels
from stillhouse.process.noise import starting_noise
from stillhouse.solvers import SOLVERS, STOCHASTIC, Counted, sample_dpmpp_3m, sample_heun

TWO_EVALUATIONS = {"heun", "dpm2", "edm-churn", "dpmpp-sde"}


def start(count: int = 5, sigma: float = 80.0, dtype=torch.float64) -> torch.Tensor:
    return sigma * torch.linspace(-1.5, 1.7, count, dtype=dtype)[:, None]


def noise_for(count: int) -> KeyedNoise:
    return KeyedNoise(range(count), seed=0)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("afs", [False, True])
def test_evaluation_count(name, afs):
    grid = levels.polynomial(9, 0.006, 80.0)  # N = 9 timestamps
    counted = Counted(spec_mixture())
    SOLVERS[name](counted, start(), grid, afs=afs, generator=noise_for(5))
    per_step = 2 if name in TWO_EVALUATIONS else 1
    assert counted.evaluations == per_step * 8 - afs


@pytest.mark.parametrize("name", SOLVERS)
def test_a_last_sigma_of_zero_is_the_denoisers_own_answer(name):
    grid = levels.to_zero(levels.polynomial(6, 0.1, 80.0))
    counted = Counted(spec_mixture())
    seen = []
    y = SOLVERS[name](counted, start(), grid, callback=seen.append, generator=noise_for(5))
    assert torch.equal(y, seen[-1].denoised)
    per_step = 2 if name in TWO_EVALUATIONS else 1
    assert counted.evaluations == per_step * 5 + 1


@pytest.mark.parametrize("name", SOLVERS)
def test_capped_start_is_first_order_without_history(name):
    """Heun from 1e5 to 9 on unit Gaussian data gives 618 where the truth is 9.06."""
    data = Gaussian()
    grid = torch.tensor([SIGMA_CAP, 9.0], dtype=torch.float64)
    x = torch.full((1, 1), SIGMA_CAP, dtype=torch.float32)
    y = SOLVERS[name](data, x, grid, generator=noise_for(1))
    assert float(y) == pytest.approx(9.0, rel=1e-3)
    assert data.exact_flow(x, SIGMA_CAP, 9.0).item() == pytest.approx(9.055, abs=1e-3)
    if name in STOCHASTIC:
        return
    # Going on from there is the same as starting there: no history crossed the capped step.
    rest = torch.tensor([9.0, 3.0, 1.0, 0.3], dtype=torch.float64)
    whole = SOLVERS[name](data, x, torch.cat([grid[:1], rest]))
    assert torch.equal(whole, SOLVERS[name](data, y, rest))


@pytest.mark.parametrize("name", sorted(set(SOLVERS) - STOCHASTIC))
def test_fp32_keeps_the_answer_from_a_large_sigma(name):
    """A first step written as x + h d loses it."""
    grid = torch.cat([torch.tensor([SIGMA_CAP]).double(), levels.polynomial(30, 0.01, 20.0)])
    noise = torch.linspace(-2, 2, 9)[:, None]
    single = SOLVERS[name](spec_mixture(), SIGMA_CAP * noise, grid)
    double = SOLVERS[name](spec_mixture(), SIGMA_CAP * noise.double(), grid)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=0, atol=2e-4)


def test_afs_takes_the_slope_of_a_unit_gaussian_and_joins_the_history():
    grid = levels.polynomial(4, 0.006, 80.0)
    x = start(dtype=torch.float64)

    def with_slope_at_first(x, sigma, cond=None):
        if float(sigma) == 80.0:
            return x - sigma * x / math.sqrt(1 + 80.0**2)
        return spec_mixture()(x, sigma, cond)

    for name in sorted(set(SOLVERS) - STOCHASTIC):
        plain = SOLVERS[name](with_slope_at_first, x, grid)
        analytical = SOLVERS[name](spec_mixture(), x, grid, afs=True)
        torch.testing.assert_close(analytical, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SOLVERS)
def test_history_starts_empty_at_every_call(name):
    """Multistep history that survives into the next call is a known bug elsewhere."""
    grid = levels.polynomial(6, 0.006, 80.0)
    first, second = (
        SOLVERS[name](spec_mixture(), start(), grid, generator=noise_for(5)) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_lower_order_final_helps_at_very_few_steps():
    """RMSE on the one-dimensional mixture falls at 5 steps; the last step is then first order."""
    from oracles import rk4_reference

    x = start(64)
    truth = rk4_reference(spec_mixture(), x, 80.0, 0.006, steps=4000)

    def rmse(steps, **options):
        grid = levels.polynomial(steps + 1, 0.006, 80.0)
        y = sample_dpmpp_3m(spec_mixture(), x, grid, **options)
        return float((y - truth).square().mean().sqrt())

    assert rmse(5, lower_order_final=True) < 0.5 * rmse(5)
    grid = levels.polynomial(3, 0.006, 80.0)
    seen = []
    y = sample_dpmpp_3m(spec_mixture(), x, grid, lower_order_final=True, callback=seen.append)
    ratio = float(grid[2] / grid[1])
    last = ratio * seen[0].x + (1 - ratio) * seen[1].denoised
    torch.testing.assert_close(y, last, rtol=1e-14, atol=1e-14)


def test_callback_reports_every_step():
    seen = []
    grid = levels.to_zero(levels.polynomial(4, 0.1, 80.0))
    y = sample_heun(spec_mixture(), start(), grid, callback=seen.append)
    assert [p.step for p in seen] == [1, 2, 3, 4]
    assert [p.sigma for p in seen] == pytest.approx(grid[1:].tolist())
    assert seen[0].steps == 4
    assert torch.equal(seen[-1].x, y)


def test_the_graph_is_kept_only_on_request():
    grid = levels.polynomial(3, 0.1, 8.0)
    x = start(sigma=8.0).requires_grad_()
    assert not sample_heun(spec_mixture(), x, grid).requires_grad
    y = sample_heun(spec_mixture(), x, grid, grad=True)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    step = 1e-6
    moved = sample_heun(spec_mixture(), x.detach() + step, grid)
    torch.testing.assert_close((moved - y.detach()) / step, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SOLVERS)
def test_unknown_options_are_refused(name):
    with pytest.raises(TypeError, match="lower_order_fnal"):
        SOLVERS[name](spec_mixture(), start(), torch.tensor([1.0, 0.5]), lower_order_fnal=True)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dpmpp-3m", {"variant": "Exact"}, "compat or exact"),
        ("unipc", {"b": "bh9"}, "bh1 or bh2"),
        ("deis", {"order": 0}, "counts from 1"),
        ("euler-ancestral", {"generator": 0}, "torch.Generator"),
    ],
)
def test_wrong_values_are_named(name, options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        SOLVERS[name](spec_mixture(), start(), torch.tensor([1.0, 0.5]), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_states_end_in_float32_everywhere(dtype):
    grid = levels.polynomial(4, 0.1, 80.0)
    for name in SOLVERS:
        y = SOLVERS[name](spec_mixture(), start().to(dtype), grid, generator=noise_for(5))
        assert y.dtype == torch.float32, name


@pytest.mark.parametrize(
    "grid",
    [
        [1.0],
        [1.0, 2.0],
        [1.0, 1.0, 0.5],
        [1.0, -0.1],
        [math.inf, 1.0],
        [math.nan, 1.0],
        [[1.0, 0.5]],
    ],
)
def test_a_grid_that_is_no_walk_is_refused(grid):
    with pytest.raises(ValueError, match="noise level"):
        sample_heun(spec_mixture(), start(), torch.tensor(grid))


@pytest.mark.parametrize("name", SOLVERS)
def test_sample_i_is_the_same_at_any_batch_size(name):
    """Bit-identical here: the analytic denoiser's arithmetic does not depend on the batch."""
    field, grid = GaussianField(8), levels.polynomial(6, 0.01, 20.0)

    def run(indices):
        noise = starting_noise((1, 8, 8), indices, seed=3)
        source = KeyedNoise(indices, seed=3)
        return SOLVERS[name](field, 20.0 * noise, grid, generator=source)

    whole = run(range(7))
    parts = torch.cat([run([i]) for i in range(7)])
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    assert torch.equal(run(range(7)), whole)
    assert torch.equal(run([6, 0])[1], run([0, 6])[0])


def test_image_sized_gaussian_field_follows_its_exact_flow():
    field = GaussianField(16, slope=1.0, std=0.5)
    x = 20.0 * starting_noise((3, 16, 16), range(2), seed=0).double()
    y = partial(sample_dpmpp_3m, variant="exact")(field, x, levels.polynomial(200, 0.01, 20.0))
    torch.testing.assert_close(y, field.exact_flow(x, 20.0, 0.01), rtol=0, atol=2e-5)
