"""Progressive distillation: closed forms of a stage and of a whole chain, and runs of SFD's peers.

On N(0, s^2) data two Euler steps of the exact denoiser scale a state by a known q, and the answer
x0* = c x of one step that does the same has c = (q - t''/t)/(1 - t''/t).
"""

import copy
import json
import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import loaded
import pytest
import torch
from distill import peers_run
from distill.peers_run import Drops, Measured, RowGains, RowResidual, train
from distill.test_runs import assert_close, numbers
from distill.toys import HERE, distil, engine_of, three_on_a_circle
from oracles import rk4_reference
from torch import Tensor, nn

from stillhouse.distill.grids import Native, Polynomial
from stillhouse.distill.progressive import (
    Nested,
    Progressive,
    Stretch,
    drawn_stretch,
    halvings,
    landing,
)
from stillhouse.distill.trajectories import Start, Starts, frozen, walk_from
from stillhouse.errors import UserError
from stillhouse.process import (
    EDM,
    VP,
    Condition,
    Flow,
    Gaussian,
    alphas_cumprod,
    betas,
    keyed_uniform,
)
from stillhouse.solvers import Counted, sample_euler
from stillhouse.solvers.walk import level

GRIDS, DATA = Polynomial(), three_on_a_circle()
PLANE, LINE = Starts((2,), seed=0), Starts((1,), seed=0)
KINDS = {
    "polynomial": GRIDS,
    "edm": Native(EDM()),
    "vp": Native(VP(alphas_cumprod(betas("scaled_linear")))),
    "flow": Native(Flow(3.0)),
}
each_kind = pytest.mark.parametrize("grids", KINDS.values(), ids=KINDS)


# ---------------------------------------------------------------- stages


@pytest.mark.parametrize(
    ("first", "last", "stages"),
    [(32, 1, [16, 8, 4, 2, 1]), (24, 3, [12, 6, 3]), (8, 4, [4]), (2, 1, [1]), (14, 7, [7])],
)
def test_a_chain_halves_down_to_its_last_stage(first, last, stages):
    assert halvings(first, last) == stages


@pytest.mark.parametrize(
    ("first", "last", "instead"),
    [(32, 3, 24), (12, 2, 16), (4, 4, 32), (2, 4, 32), (8, 0, 8), (0, -1, 8)],
)
def test_a_chain_that_does_not_come_down_is_refused_with_one_that_does(first, last, instead):
    with pytest.raises(UserError, match=f"such as {instead}"):
        halvings(first, last)
    assert halvings(instead, max(last, 1))


@each_kind
@pytest.mark.parametrize("last", [1, 3])
def test_in_nested_grids_a_student_becomes_a_teacher_at_its_own_levels(grids, last):
    nested = Nested(grids, last)
    for steps in halvings(8 * last, last):
        teacher = nested.teacher(steps + 1, 2)
        torch.testing.assert_close(teacher, nested.student(2 * steps + 1), rtol=1e-12, atol=0)
        assert torch.equal(teacher[::2], nested.student(steps + 1))
        assert len(teacher) == 2 * steps + 1
    assert torch.equal(nested.student(last + 1), grids.student(last + 1))
    assert torch.equal(nested.start(torch.ones(2), 3.0), grids.start(torch.ones(2), 3.0))


def test_polynomial_grids_are_nested_as_they_are():
    for steps in (2, 4, 8):
        nested = Nested(GRIDS, 2).student(steps + 1)
        torch.testing.assert_close(nested, GRIDS.student(steps + 1), rtol=1e-12, atol=0)


def test_steps_beside_the_chain_are_refused():
    with pytest.raises(UserError, match="no multiple of the last 3"):
        Nested(GRIDS, 3).student(5)


# ---------------------------------------------------------------- the target and its weight


def stretch_of(grids, steps: int, count: int, dtype=torch.float32) -> Stretch:
    """One step of each of `count` walks of the plane's own denoiser."""
    start = PLANE.rows(torch.arange(count))
    start = type(start)(start.noise.to(dtype), start.key)
    task = Progressive(RowResidual(DATA), DATA, grids, steps, HERE)
    states = walk_from(start, steps + 1, task.trajectories, grids, None, HERE)
    return drawn_stretch(states, grids.student(steps + 1), start, 0)


@each_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_a_student_that_answers_the_target_lands_where_two_steps_of_the_teacher_do(grids, steps):
    """x0* is between its answers: w D(t) + (1 - w) D(t') with w = t''(t - t')/(t'(t - t''))."""
    taken, fine = stretch_of(grids, steps, 12, torch.float64), grids.teacher(steps + 1, 2)
    for row in range(12):
        one = slice(row, row + 1)
        a, b, c = fine[2 * taken.index[row] :][:3]
        middle = sample_euler(DATA, taken.x[one], torch.stack([a, b]))
        weight = c * (a - b) / (b * (a - c))
        between = weight * DATA(taken.x[one], a) + (1 - weight) * DATA(middle, b)
        torch.testing.assert_close(landing(taken[one]), between, rtol=1e-5, atol=1e-9)
        jump = sample_euler(lambda *_, x0=between: x0, taken.x[one], torch.stack([a, c]))
        torch.testing.assert_close(jump, taken.x_next[one], rtol=1e-12, atol=1e-12)


def test_to_a_last_level_of_zero_the_target_is_the_teachers_second_answer():
    taken = stretch_of(KINDS["vp"], 1, 12, torch.float64)
    assert torch.equal(landing(taken), taken.x_next)
    assert not taken.sigma_next.any()


@each_kind
def test_fp32_keeps_the_target_in_many_steps(grids):
    """Differences of large states. Measured: 1.4e-4 at most."""
    single, double = (stretch_of(grids, 32, 200, d) for d in (torch.float32, torch.float64))
    torch.testing.assert_close(landing(single).double(), landing(double), rtol=0, atol=3e-4)


@each_kind
def test_the_loss_is_that_of_the_paper(grids):
    """max(1/t^2, 1) |D - x0*|^2, from the teacher's walk, at a step that (seed, key) decides."""
    steps, count = 3, 24
    task = Progressive(RowResidual(DATA).double(), DATA, grids, steps, HERE, seed=5)
    engine, start = engine_of(task, steps=1, batch=count), PLANE.rows(torch.arange(count))
    task.step(type(start)(start.noise.double(), start.key), engine)
    fine = grids.teacher(steps + 1, 2).tolist()
    x, states = grids.start(start.noise.double(), fine[0]), []
    for a, b in pairwise(fine):
        states.append(x)
        x = sample_euler(DATA, x, torch.tensor([a, b], dtype=torch.float64))
    states.append(x)
    drawn = keyed_uniform(range(count), seed=5, purpose="distill/stretch")
    losses: list[list[float]] = [[] for _ in range(steps)]
    for row in range(count):
        i = math.floor(steps * float(drawn[row]))
        here, there = (states[k][row : row + 1] for k in (2 * i, 2 * i + 2))
        t, r = fine[2 * i], fine[2 * i + 2] / fine[2 * i]
        miss = DATA(here, level(t)) - (there - r * here) / (1 - r)
        losses[i].append(max(1 / t**2, 1) * float(miss.square().sum()))
    assert all(losses)
    mean = sum(map(sum, losses)) / count
    assert engine.updates["student"][0].loss == pytest.approx(mean, rel=1e-5)
    by_step = {f"timestamps4/step{i}": sum(part) / len(part) for i, part in enumerate(losses)}
    assert task.report() == pytest.approx(by_step, rel=1e-5)
    assert task.report() == {}


def drawn_steps(start: Start, seed: int = 0) -> list[int]:
    """Of walks with four."""
    states = [start.noise] * 5
    return drawn_stretch(states, GRIDS.student(5), start, seed).index.tolist()


def test_a_walk_that_comes_again_shows_every_step_as_often():
    keys, turns = torch.arange(8), 1000
    by_turn = [drawn_steps(PLANE.rows(keys, torch.full_like(keys, turn))) for turn in range(turns)]
    for steps in zip(*by_turn, strict=True):
        assert all(abs(steps.count(i) - turns / 4) <= 3 for i in range(4))
        assert all(len(set(steps[turn : turn + 8])) == 4 for turn in range(turns - 8))
    assert len(set(by_turn[0])) > 1  # not the same step of all at a time


def test_which_step_is_trained_depends_on_seed_and_key_alone_and_each_is_as_likely():
    def drawn(keys: Tensor, seed: int = 0) -> list[int]:
        return drawn_steps(PLANE.rows(keys), seed)

    whole = drawn(torch.arange(2000))
    assert drawn(torch.tensor([17, 3])) == [whole[17], whole[3]]
    assert drawn(torch.arange(2000), seed=1) != whole
    assert [whole.count(i) / 2000 for i in range(4)] == pytest.approx([0.25] * 4, abs=0.04)


# ---------------------------------------------------------------- closed forms


def best_gains(grids, steps: int, std: float) -> list[float]:
    """c = (q - r)/(1 - r), with q what two Euler steps scale by and r = t''/t."""
    fine, found = grids.teacher(steps + 1, 2).tolist(), []

    def scale(a: float, b: float) -> float:
        return b / a + (1 - b / a) * std**2 / (std**2 + a**2)

    for a, b, c in zip(fine[::2], fine[1::2], fine[2::2], strict=False):
        found.append((scale(a, b) * scale(b, c) - c / a) / (1 - c / a))
    return found


@pytest.mark.parametrize("kind", ["polynomial", "edm"])
def test_a_linear_student_of_gaussian_data_finds_the_closed_form(kind):
    """Measured: at most 1.1e-7 beside it, from .03 and .02; the end is its teacher's to 1e-6."""
    steps, grids, data = 3, KINDS[kind], Gaussian(std=1.5)
    student, best = RowGains(grids.student(steps + 1), 1.5), best_gains(grids, steps, 1.5)
    assert [c.item() for c in student.gains] != pytest.approx(best, abs=0.01)
    distil(Progressive(student, data, grids, steps, HERE), LINE, steps=300, batch=16)
    assert [c.item() for c in student.gains] == pytest.approx(best, abs=1e-6)
    x = torch.full((1, 1), 80.0, dtype=torch.float64)
    end = sample_euler(student, x, grids.student(steps + 1))
    taught = sample_euler(data, x, grids.teacher(steps + 1, 2))
    assert float(end / taught) == pytest.approx(1, abs=1e-4)


def one_step_after_a_chain(grids, first: int) -> float:
    """Where the last student's one step ends, over where the first teacher's `first` steps do."""
    teacher = data = Gaussian(std=1.0)
    for steps in halvings(first, 1):
        student = RowGains(grids.student(steps + 1))
        distil(Progressive(student, teacher, grids, steps, HERE), LINE, steps=400, batch=24)
        teacher = frozen(student)
    x = torch.full((1, 1), 80.0, dtype=torch.float64)
    taught = sample_euler(data, x, Native(EDM()).teacher(2, first))
    return float(sample_euler(teacher, x, Native(EDM()).student(2)) / taught)


@pytest.mark.slow
def test_a_chain_of_stages_ends_where_its_first_teacher_does():
    """8 -> 4 -> 2 -> 1, to sigma 0. The ratio is .025 untrained, 1 + 1e-7 after the chain, and .27
    after one on native grids, where each teacher walks levels that it does not know."""
    assert one_step_after_a_chain(Nested(Native(EDM()), 1), 8) == pytest.approx(1, abs=1e-4)
    assert one_step_after_a_chain(Native(EDM()), 8) < 0.5


# ---------------------------------------------------------------- students in the plane


@cache
def unseen() -> tuple[Tensor, Tensor]:
    """Starts that training does not meet, and where the ODE takes them."""
    x = 80 * Starts((2,), seed=999).rows(torch.arange(1000)).noise
    return x, rk4_reference(DATA, x.double(), 80.0, 0.006, steps=300).float()


def end_of(denoiser, steps: int) -> Tensor:
    return sample_euler(denoiser, unseen()[0], GRIDS.student(steps + 1))


def apart(one: Tensor, other: Tensor) -> float:
    """Root mean square over samples."""
    return float((one - other).square().sum(1).mean().sqrt())


def test_a_short_stage_already_brings_a_student_nearer_to_its_teachers_end():
    """Two steps for four. Measured: .58 -> .33 to the teacher's end, .82 -> .54 to the ODE's."""
    student, goal = RowResidual(DATA), end_of(DATA, 4)
    before = apart(end_of(student, 2), goal), apart(end_of(student, 2), unseen()[1])
    distil(Progressive(student, DATA, GRIDS, 2, HERE), PLANE, steps=150, batch=64)
    assert apart(end_of(student, 2), goal) <= 0.75 * before[0]
    assert apart(end_of(student, 2), unseen()[1]) <= 0.75 * before[1]


@pytest.mark.slow
def test_a_chain_brings_one_step_near_the_ode():
    """8 -> 4 -> 2 -> 1. Measured: 1.01 -> .40; eight steps of the first teacher miss by .18."""
    teacher, student = DATA, RowResidual(DATA)
    before = apart(end_of(student, 1), unseen()[1])
    assert before == pytest.approx(1.006, abs=0.01)
    for steps in halvings(8, 1):
        distil(Progressive(student, teacher, GRIDS, steps, HERE), PLANE, steps=300, batch=128)
        teacher = frozen(copy.deepcopy(student))
    assert apart(end_of(student, 1), unseen()[1]) <= 0.5 * before


# ---------------------------------------------------------------- one batch


def test_the_teacher_is_bit_identical_after_training():
    network, student = frozen(Drops()), Drops().eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    distil(Progressive(student, network, GRIDS, 2, HERE), PLANE, steps=5, batch=8)
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
    assert not network.training
    assert student.training
    assert not torch.equal(student.weight, network.weight)


def test_a_teacher_in_training_mode_is_refused():
    task = Progressive(Drops(), Drops(), GRIDS, 2, HERE)
    with pytest.raises(ValueError, match="frozen"):
        task.step(PLANE.rows(torch.arange(8)), engine_of(task, steps=1, batch=8))


@pytest.mark.parametrize("steps", [1, 4])
def test_an_image_costs_what_the_task_says(steps):
    teacher, student = Counted(DATA), RowResidual(DATA)
    task, measured = Progressive(student, teacher, GRIDS, steps, HERE), Measured(student)
    distil(task, PLANE, steps=3, batch=8)
    found = teacher.evaluations, measured.forwards, measured.backwards
    assert found == tuple(3 * n for n in task.evaluations_per_image)


def test_a_batch_that_is_not_finite_is_one_skipped_update_and_is_not_reported():
    starts = PLANE.rows(torch.arange(8))
    starts.noise[3] = torch.nan
    task = Progressive(RowResidual(DATA), DATA, GRIDS, 2, HERE)
    engine = engine_of(task, steps=2, batch=8)
    task.step(starts, engine)
    assert engine.skips_in_a_row == 1
    assert task.report() == {}
    task.step(PLANE.rows(torch.arange(8)), engine)
    assert engine.skips_in_a_row == 0
    assert set(task.report()) == {"timestamps3/step0", "timestamps3/step1"}


def test_a_student_without_a_step_is_refused():
    with pytest.raises(UserError, match="nothing to train"):
        Progressive(RowResidual(DATA), DATA, GRIDS, 0, HERE)


# ---------------------------------------------------------------- runs of both peers

SCRIPT = Path(peers_run.__file__)
each_method = pytest.mark.parametrize("method", ["progressive", "consistency"])


@cache
def alone(method: str) -> list[dict[str, Any]]:
    return numbers(train(HERE, method))


class Hears(nn.Module):
    """A denoiser that notes whom it is asked to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.heard: list[list[int]] = []

    def forward(self, x, sigma, cond):
        self.heard.append(cond.label.tolist())
        return self.weight * x / (1 + sigma.to(x).expand(len(x))[:, None] ** 2)


def told(method: str, **network) -> tuple[list[list[int]], list[list[int]]]:
    """What teacher and student are told in one batch of five rows, labelled by their keys."""
    teacher, student = frozen(Hears()), Hears()
    task = peers_run.task_of(method, student, HERE, teacher)
    starts = Starts((2,), seed=0, conditions=lambda key: Condition(label=key))
    distil(task, starts, steps=1, batch=5, **network)
    return teacher.heard, student.heard


@each_method
def test_teacher_and_student_are_told_what_each_row_is(method):
    forwards = {"progressive": 1, "consistency": 2}[method]
    assert told(method) == ([[0, 1, 2, 3, 4]] * 8, [[0, 1, 2, 3, 4]] * forwards)
    pieces = [[0, 1, 2]] * forwards + [[3, 4]] * forwards
    assert told(method, micro_batch=3)[1] == pieces


@each_method
def test_a_log_line_has_the_loss_of_the_steps_that_were_drawn(method):
    steps = {key for line in alone(method) for key in line if key.startswith("timestamps")}
    assert steps == {f"timestamps5/step{i}" for i in range(4)}
    assert len(alone(method)) == peers_run.STEPS


@each_method
def test_a_resumed_run_has_bit_equal_losses(method, tmp_path):
    options = {"dropout": True, "save_every": 5}
    whole = numbers(train(HERE, method, **options))
    first = numbers(train(HERE, method, **options, store=str(tmp_path), stop_at=8))
    rest = numbers(train(HERE, method, **options, store=str(tmp_path)))
    assert len(first) < peers_run.STEPS
    assert rest[0]["images"] == first[-1]["images"] + peers_run.BATCH
    assert first + rest == whole


@each_method
@pytest.mark.parametrize("micro", [3, 5])
def test_accumulation_equals_the_large_batch(method, micro):
    assert_close(numbers(train(HERE, method, micro=micro)), alone(method))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sharding"),
    [("progressive", "ddp"), ("consistency", "ddp"), ("consistency", "fsdp")],
)
def test_two_processes_equal_one(method, sharding):
    options = json.dumps({"method": method, "sharding": sharding})
    done = loaded.run(str(SCRIPT), options, processes=2, PYTHONPATH=str(SCRIPT.parents[1]))
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close(numbers(json.loads(done.stdout)), alone(method))
