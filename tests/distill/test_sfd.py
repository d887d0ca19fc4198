"""SFD against closed forms: the best student of Gaussian data, and what one batch does."""

import math
from itertools import islice, pairwise

import pytest
import torch
from distill.toys import ExactFlow, Gains, Residual, distil, engine_of, three_on_a_circle
from torch import nn

from stillhouse.distill.grids import Polynomial
from stillhouse.distill.sfd import DISTANCES, SFD
from stillhouse.distill.trajectories import Starts, Teacher, frozen
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.process import Gaussian
from stillhouse.solvers import sample_euler

HERE, GRIDS, DATA = World(0, 1, torch.device("cpu")), Polynomial(), three_on_a_circle()
PLANE = Starts((2,), seed=0)


def best_gains(grid: list[float], std: float, afs: bool) -> list[float]:
    """c_i = 1 - t_i (q_i - 1)/(t_(i+1) - t_i), where q_i is what the ODE scales a state by.

    The step after an analytical one also mends what that one did.
    """
    scale = [math.sqrt((std**2 + b**2) / (std**2 + a**2)) for a, b in pairwise(grid)]
    if afs:
        scale[1] *= scale[0] / (1 + (grid[1] - grid[0]) / math.sqrt(1 + grid[0] ** 2))
    return [1 - a * (q - 1) / (b - a) for (a, b), q in zip(pairwise(grid), scale, strict=True)]


@pytest.mark.parametrize(("afs", "gain"), [(False, 0.05154), (True, 0.05196)])
def test_the_closed_form_is_that_of_the_specification(afs, gain):
    assert best_gains(GRIDS.student(4).tolist(), 1.0, afs)[1] == pytest.approx(gain, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("afs", "std"), [(False, 1.0), (True, 1.0), (False, 2.0)])
def test_a_linear_student_of_gaussian_data_finds_the_closed_form(afs, std):
    grid, data = GRIDS.student(4), Gaussian(std=std)
    student = Gains(grid, std)
    task = SFD(student, ExactFlow(data, GRIDS), GRIDS, (4,), HERE, afs=afs)
    distil(task, Starts((1,), seed=0), steps=1500, batch=128)
    found = [c.item() for c in student.gains][afs:]
    assert found == pytest.approx(best_gains(grid.tolist(), std, afs)[afs:], abs=1e-3)
    x = torch.full((1, 1), 80.0)
    end = sample_euler(student, x, grid, afs=afs)
    assert float(end / data.exact_flow(x, 80.0, 0.006)) == pytest.approx(1, abs=0.01)


# ---------------------------------------------------------------- one batch


class Steps:
    """The engine's optimiser steps, as they happen."""

    def __init__(self, engine) -> None:
        self.count = 0
        engine.networks["student"].optimiser.register_step_post_hook(self)

    def __call__(self, *_) -> None:
        self.count += 1


@pytest.mark.parametrize(("afs", "updates"), [(True, 5), (False, 6)])
def test_each_step_that_calls_the_student_is_one_update(afs, updates):
    task = SFD(Residual(DATA), Teacher(DATA, GRIDS), GRIDS, (7,), HERE, afs=afs)
    engine = engine_of(task, steps=3, batch=8)
    steps = Steps(engine)
    engine.run(PLANE.feed(0, 8, HERE))
    assert steps.count == 3 * updates


@pytest.mark.parametrize("afs", [True, False])
def test_no_gradient_crosses_steps(afs):
    """Each level's number has the gradient of its own step only, from the student's own state."""
    grid, starts = GRIDS.student(4), Starts((1,), seed=0)
    student, flow = Gains(grid), ExactFlow(Gaussian(std=1.0), GRIDS)
    seen: list[tuple[int, float]] = []
    for i, gain in enumerate(student.gains):
        gain.register_hook(lambda g, i=i: seen.append((i, float(g))))
    distil(SFD(student, flow, GRIDS, (4,), HERE, afs=afs), starts, steps=1, batch=8, lr=1e-9)
    x = 80 * starts.rows(torch.arange(8)).noise
    goals, expected = flow(x, 4, None), []
    for i, ((a, b), goal) in enumerate(zip(pairwise(grid.tolist()), goals, strict=True)):
        gain = 1 - a / math.sqrt(1 + a**2) if afs and i == 0 else Gains(grid).gains[i].item()
        reached = x + (b - a) * (1 - gain) / a * x
        expected.append((i, float(((reached - goal).sign() * (a - b) / a * x).mean())))
        x = reached
    assert [i for i, _ in seen] == [i for i, _ in expected[afs:]]
    assert [g for _, g in seen] == pytest.approx([g for _, g in expected[afs:]], rel=1e-3)


@pytest.mark.parametrize("afs", [True, False])
def test_a_student_that_equals_its_euler_teacher_has_nothing_to_learn(afs):
    teacher = Teacher(DATA, GRIDS, 1, sample_euler, afs=afs)
    task = SFD(Residual(DATA), teacher, GRIDS, (5,), HERE, afs=afs)
    engine = engine_of(task, steps=1, batch=8)
    task.step(PLANE.rows(torch.arange(8)), engine)
    assert [update.loss for update in engine.updates["student"]] == [0.0] * (4 - afs)


def test_an_analytical_step_of_one_side_only_is_a_difference():
    teacher = Teacher(DATA, GRIDS, 1, sample_euler)
    engine = engine_of(SFD(Residual(DATA), teacher, GRIDS, (5,), HERE), steps=1, batch=8)
    engine.task.step(PLANE.rows(torch.arange(8)), engine)
    assert engine.updates["student"][0].loss > 0


class Drops(nn.Module):
    """A denoiser with a weight, a dropout and a running mean: nothing of it may move."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(2)), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x, sigma, cond=None):
        return self.weight * DATA(x, sigma) + 0.1 * self.dropout(self.norm(x / sigma.to(x)))


def test_the_teacher_is_bit_identical_after_training():
    network = frozen(Drops())
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    student = Drops().eval()
    task = SFD(student, Teacher(network, GRIDS), GRIDS, (4,), HERE)
    distil(task, PLANE, steps=5, batch=8)
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
    assert not network.training
    assert student.training
    assert not torch.equal(student.weight, network.weight)


def test_the_learning_rate_falls_to_a_tenth_at_half_the_images():
    task = SFD(Residual(DATA), Teacher(DATA, GRIDS), GRIDS, (4,), HERE)
    engine, rates = engine_of(task, steps=8, batch=8, lr=1e-3), []
    for item in islice(PLANE.feed(0, 8, HERE), 8):
        task.step(item.batch, engine)
        rates.append(engine.numbers()["student/lr"])
        engine.images += 8
    assert rates == pytest.approx([1e-3] * 3 + [1e-4] * 5)


# ---------------------------------------------------------------- losses


def test_distances_are_summed_over_elements():
    difference = torch.tensor([[[3.0, -4.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])
    assert DISTANCES["l1"](difference).tolist() == [7, 4]
    assert DISTANCES["l2"](difference).tolist() == [25, 4]
    assert DISTANCES["huber"](difference).tolist() == pytest.approx([5, 2], abs=2e-3)


@pytest.mark.parametrize("name", DISTANCES)
def test_the_loss_is_the_mean_distance_of_a_batch_and_is_reported_by_step(name):
    teacher = Teacher(DATA, GRIDS)
    task = SFD(Residual(DATA), teacher, GRIDS, (3,), HERE, distance=DISTANCES[name])
    engine, start = engine_of(task, steps=1, batch=8), PLANE.rows(torch.arange(8))
    task.step(start, engine)
    x, grid = 80 * start.noise, GRIDS.student(3)
    reached = sample_euler(DATA, x, grid, afs=True)
    expected = float(DISTANCES[name](reached - teacher(x, 3, None)[-1]).mean())
    assert [u.loss for u in engine.updates["student"]] == pytest.approx([expected])
    assert task.report() == pytest.approx({"timestamps3/step1": expected})
    assert task.report() == {}


def test_a_perceptual_distance_counts_once_for_every_element_of_the_last_step():
    def losses(perceptual):
        teacher = Teacher(DATA, GRIDS)
        task = SFD(Residual(DATA), teacher, GRIDS, (4,), HERE, perceptual=perceptual)
        engine = engine_of(task, steps=1, batch=8, lr=1e-12)
        task.step(PLANE.rows(torch.arange(8)), engine)
        return [update.loss for update in engine.updates["student"]]

    plain = losses(None)
    added = losses(lambda reached, goal: torch.full((len(reached),), 0.25) + 0 * reached.sum(1))
    assert added == pytest.approx([plain[0], plain[1] + 2 * 0.25])


# ---------------------------------------------------------------- trouble


def test_what_follows_a_state_that_is_not_finite_is_left_out():
    """One bad batch is one skipped update, not one for every step that is left."""
    starts = PLANE.rows(torch.arange(8))
    starts.noise[3] = torch.nan
    task = SFD(Residual(DATA), Teacher(DATA, GRIDS), GRIDS, (7,), HERE)
    engine = engine_of(task, steps=2, batch=8)
    task.step(starts, engine)
    assert engine.skips_in_a_row == 1
    task.step(PLANE.rows(torch.arange(8)), engine)
    assert engine.skips_in_a_row == 0
    assert len(engine.updates["student"]) == 5


@pytest.mark.parametrize(("timestamps", "said"), [((), "name one"), ((4, 2), "nothing to train")])
def test_timestamps_that_train_nothing_are_refused(timestamps, said):
    with pytest.raises(UserError, match=said):
        SFD(Residual(DATA), Teacher(DATA, GRIDS), GRIDS, timestamps, HERE)
