"""Multistep consistency sampling: exact where the consistency function is, and its conventions.

For N(0, s^2) data the exact consistency function is linear, so each state is a sum of independent
noises with known coefficients. Walking the coefficients themselves gives variances without draws.
"""

import math

import pytest
import torch
from oracles import spec_mixture
from torch import Tensor

from stillhouse.objectives import Consistent
from stillhouse.process import (
    SIGMA_CAP,
    Gaussian,
    GaussianField,
    KeyedNoise,
    levels,
    starting_noise,
)
from stillhouse.solvers import Counted, sample_euler, sample_renoise

STD = 0.7
X = 80 * torch.linspace(-1.5, 1.7, 5, dtype=torch.float64)[:, None]
NOISE = KeyedNoise(range(5), seed=0)


def grid_of(steps: int, end: float, first: float = 80.0) -> Tensor:
    """`steps` levels above `end`, which is the last."""
    if steps == 1:
        return torch.tensor([first, end], dtype=torch.float64)
    inner = levels.polynomial(steps, max(10 * end, 0.05), first)
    return torch.cat([inner, torch.tensor([end], dtype=torch.float64)])


class Exact:
    """The denoiser whose first-order step to `end` is the ODE's own, for N(0, STD^2) data."""

    def __init__(self, end: float) -> None:
        self.end = end

    def __call__(self, x: Tensor, sigma: Tensor, cond=None) -> Tensor:
        landed = Gaussian(std=STD).exact_flow(x, float(sigma), self.end)
        share = self.end / sigma
        return (landed - share * x) / (1 - share)


def coefficients(steps: int, end: float, first: float) -> Tensor:
    """Of the noises in the last state: column 0 is the start's, column j + 1 draw j's."""
    grid = grid_of(steps, end, first)
    x = torch.zeros(1, steps, dtype=torch.float64)
    x[0, 0] = math.sqrt(STD**2 + first**2)

    def draw(like: Tensor, number: int) -> Tensor:
        return torch.eye(steps, dtype=torch.float64)[number + 1][None]

    return sample_renoise(Exact(end), x, grid, generator=draw)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("end", [0.0, 0.006, 0.1])
@pytest.mark.parametrize("first", [80.0, SIGMA_CAP])
def test_the_exact_function_gives_the_datas_variance_at_every_number_of_steps(steps, end, first):
    """Also from pure noise: were the start's noise used again there, the variance would double."""
    found = coefficients(steps, end, first)
    assert float(found.square().sum()) == pytest.approx(STD**2 + end**2, rel=1e-12)
    assert (found != 0).all()  # every draw is new


@pytest.mark.parametrize("end", [0.0, 0.006])
def test_the_variance_of_samples_is_the_datas(end):
    generator = torch.Generator().manual_seed(0)
    start = math.sqrt(80**2 + STD**2) * torch.randn(40_000, 1, generator=generator)
    y = sample_renoise(Exact(end), start, grid_of(3, end), generator=generator)
    assert float(y.var()) == pytest.approx(STD**2, rel=4 * math.sqrt(2 / 40_000))


@pytest.mark.parametrize("end", [0.0, 0.1])
def test_a_walk_is_the_published_algorithm(end):
    """f, then noise of variance t^2 - end^2 by its number, then f again."""
    data, grid = spec_mixture(), grid_of(3, end)
    function = Consistent(data, end)
    x, later = X, grid[1:-1]
    for draw, sigma in enumerate(later):
        x = function(x, grid[draw]) + (sigma**2 - end**2).sqrt() * NOISE(x, draw)
    found = sample_renoise(data, X, grid, generator=NOISE)
    torch.testing.assert_close(found, function(x, grid[2]), rtol=1e-12, atol=1e-12)


def test_one_step_draws_no_noise_and_is_eulers():
    def never(like: Tensor, draw: int) -> Tensor:
        raise AssertionError

    for end in (0.0, 0.1):
        grid = grid_of(1, end)
        found = sample_renoise(spec_mixture(), X, grid, generator=never)
        assert torch.equal(found, sample_euler(spec_mixture(), X, grid))


@pytest.mark.parametrize("afs", [False, True])
def test_each_step_is_one_evaluation_but_an_analytical_first(afs):
    counted = Counted(spec_mixture())
    sample_renoise(counted, X, grid_of(4, 0.006), afs=afs, generator=NOISE)
    assert counted.evaluations == 4 - afs


def test_a_last_sigma_of_zero_is_the_denoisers_own_answer():
    seen = []
    grid = grid_of(4, 0.0)
    y = sample_renoise(spec_mixture(), X, grid, callback=seen.append, generator=NOISE)
    assert torch.equal(y, seen[-1].denoised)


def test_a_callback_sees_the_state_at_each_level_and_what_the_denoiser_said():
    data, grid, seen = spec_mixture(), grid_of(3, 0.1), []
    y = sample_renoise(data, X, grid, callback=seen.append, generator=NOISE)
    assert [p.step for p in seen] == [1, 2, 3]
    assert {p.steps for p in seen} == {3}
    assert [p.sigma for p in seen] == grid[1:].tolist()
    assert torch.equal(seen[-1].x, y)
    for before, after, sigma in zip(seen, seen[1:], grid[1:], strict=False):
        assert torch.equal(after.denoised, data(before.x, sigma))


def test_sample_i_is_the_same_at_any_batch_size():
    field, grid = GaussianField(8), levels.polynomial(6, 0.01, 20.0)

    def run(indices):
        noise = starting_noise((1, 8, 8), indices, seed=3)
        return sample_renoise(field, 20 * noise, grid, generator=KeyedNoise(indices, seed=3))

    whole = run(range(7))
    torch.testing.assert_close(torch.cat([run([i]) for i in range(7)]), whole, rtol=0, atol=1e-6)
    assert torch.equal(run([6, 0])[1], run([0, 6])[0])


def test_fp32_keeps_the_answer_from_pure_noise():
    grid, noise = grid_of(4, 0.01, SIGMA_CAP), torch.linspace(-2, 2, 5)[:, None]
    single = sample_renoise(spec_mixture(), SIGMA_CAP * noise, grid, generator=NOISE)
    double = sample_renoise(spec_mixture(), SIGMA_CAP * noise.double(), grid, generator=NOISE)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_states_end_in_float32(dtype):
    y = sample_renoise(spec_mixture(), X.to(dtype), grid_of(3, 0.1), generator=NOISE)
    assert y.dtype == torch.float32


def test_the_graph_is_kept_only_on_request():
    x, grid = X.clone().requires_grad_(), grid_of(3, 0.1)
    assert not sample_renoise(spec_mixture(), x, grid, generator=NOISE).requires_grad
    y = sample_renoise(spec_mixture(), x, grid, generator=NOISE, grad=True)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    moved = sample_renoise(spec_mixture(), X + 1e-3, grid, generator=NOISE)
    torch.testing.assert_close((moved - y.detach()) / 1e-3, gradient, rtol=1e-2, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "words"), [({"lower_order_fnal": True}, "fnal"), ({"generator": 0}, "KeyedNoise")]
)
def test_wrong_options_are_named(options, words):
    with pytest.raises(TypeError, match=words):
        sample_renoise(spec_mixture(), X, grid_of(2, 0.1), **options)


@pytest.mark.parametrize("grid", [[1.0], [1.0, 2.0], [1.0, 0.5, 0.5], [1.0, -0.1]])
def test_a_grid_that_is_no_walk_is_refused(grid):
    with pytest.raises(ValueError, match="noise level"):
        sample_renoise(spec_mixture(), X, torch.tensor(grid), generator=NOISE)
