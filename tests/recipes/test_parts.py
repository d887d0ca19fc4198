"""Configs of the parts: every solver has one, with its own options, and builds what it says."""

import inspect
from collections.abc import Callable

import pytest
import torch
from oracles import spec_mixture
from pydantic import TypeAdapter, ValidationError

from stillhouse import levels, starting_noise
from stillhouse.process import (
    EDM,
    SIGMA_CAP,
    TOYS,
    VP,
    Condition,
    Flow,
    KeyedNoise,
    alphas_cumprod,
    betas,
)
from stillhouse.recipes.parts import Dpmpp3M, Grid, Guidance, Heun, Solver
from stillhouse.solvers import SOLVERS

SOLVER = TypeAdapter(Solver)
GRID = TypeAdapter(Grid)
GUIDANCE = TypeAdapter(Guidance)


def test_every_solver_has_a_config_and_no_other():
    members = Solver.__origin__.__args__
    assert {m.model_fields["kind"].default for m in members} == set(SOLVERS)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_config_has_exactly_its_solvers_options_and_defaults(name):
    config = SOLVER.validate_python({"kind": name})
    given = config.model_dump(exclude={"kind", "afs", "lower_order_final"})
    signature = inspect.signature(SOLVERS[name]).parameters.values()
    own = {p.name: p.default for p in signature if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert given == own
    grid = torch.tensor([5.0, 1.0, 0.2, 0.0], dtype=torch.float64)
    x = torch.ones(2, 1, dtype=torch.float64)
    built = config.build()(spec_mixture(), x, grid, generator=KeyedNoise([0, 1], seed=0))
    common = {"generator": KeyedNoise([0, 1], seed=0), "lower_order_final": True}
    direct = SOLVERS[name](spec_mixture(), x, grid, **common)
    assert torch.equal(built, direct)


def test_a_flow_models_last_wide_step_is_not_extrapolated():
    """From .126 to .001 in one step: third order to the end goes astray, however exact the model.

    On a grid of even ratios the default costs next to nothing.
    """
    moons = TOYS["moons"]()
    x = starting_noise((2,), range(128), seed=0).double()

    def walk(solver: Solver, grid: torch.Tensor) -> torch.Tensor:
        return solver.build()(moons, x * grid[0], grid)

    def compared(levels_of: Callable[[int], torch.Tensor]) -> float:
        goal, grid = walk(Heun(), levels_of(200)), levels_of(10)
        solvers = (Dpmpp3M(), Dpmpp3M(lower_order_final=False))
        usual, kept = (float((walk(s, grid) - goal).square().mean().sqrt()) for s in solvers)
        return usual / kept

    assert compared(Flow(1.0).native_grid) < 0.4
    assert compared(lambda n: levels.to_zero(levels.polynomial(n, 0.002, 80.0))) < 1.1


def test_unknown_keys_and_values_are_refused():
    with pytest.raises(ValidationError, match="rho"):
        SOLVER.validate_python({"kind": "euler", "rho": 7})
    with pytest.raises(ValidationError, match="less than or equal to 4"):
        SOLVER.validate_python({"kind": "ipndm", "order": 5})


@pytest.mark.parametrize("kind", ["native", "polynomial", "log-snr", "time"])
@pytest.mark.parametrize(
    "scaling", [EDM(), VP(alphas_cumprod(betas("linear"))), Flow(3.0)], ids=["edm", "vp", "flow"]
)
def test_grids_have_as_many_steps_as_asked_for(kind, scaling):
    grid = GRID.validate_python({"kind": kind}).build(scaling, 6)
    assert len(grid) == 7
    assert float(grid[-1]) == 0
    assert float(grid[0]) == pytest.approx(scaling.sigma_max)


def test_a_time_grid_is_even_in_time_up_to_the_cap():
    grid = GRID.validate_python({"kind": "time"}).build(Flow(), 6)
    times = Flow().time_at(grid[:-1]).diff()
    torch.testing.assert_close(times, times[0].expand(5))


@pytest.mark.parametrize("kind", ["polynomial", "log-snr"])
def test_a_capped_start_is_a_level_by_itself(kind):
    grid = GRID.validate_python({"kind": kind}).build(Flow(), 20)
    assert grid[0] == SIGMA_CAP
    assert float(grid[1]) == 80.0


def test_a_grid_may_end_above_zero():
    config = {"kind": "polynomial", "to_zero": False, "sigma_min": 0.006, "sigma_max": 80.0}
    grid = GRID.validate_python(config).build(EDM(), 3)
    assert grid.tolist() == pytest.approx([80, 10.929, 0.66989, 0.006], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "none"},
        {"kind": "classifier-free"},
        {"kind": "classifier-free", "weight": 1},
        {"kind": "autoguidance", "model": "worse"},
        {"kind": "two-term"},
        {"kind": "two-term", "control": 0},
        {"kind": "two-term", "control": 0.5},
        {"kind": "two-term", "control": 2, "weight": 1},
        {"kind": "two-term", "weight": 1},
    ],
    ids=str,
)
def test_guidance_says_how_often_it_calls_a_network(settings):
    """Rows, as several conditions may share one batch."""
    rows = 0

    def denoiser(x, sigma, cond=None):
        nonlocal rows
        rows += len(x)
        return x

    cond = Condition(label=torch.tensor([3]), control=torch.ones(1, 2))
    null = Condition(label=torch.tensor([9]), control=torch.zeros(1, 2))
    config = GUIDANCE.validate_python(settings)
    config.build(denoiser, null, lambda _: denoiser)(torch.ones(1, 2), torch.tensor(1.0), cond)
    assert rows == config.calls
