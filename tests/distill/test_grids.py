"""Grids of students and teachers: the paper's values, nesting, and what a step costs."""

import pytest
import torch

from stillhouse.distill.grids import Native, Polynomial, evaluations_of, timestamps_for
from stillhouse.errors import UserError
from stillhouse.process import EDM, SIGMA_CAP, VP, Flow, alphas_cumprod, betas, levels

VP_1000 = VP(alphas_cumprod(betas("scaled_linear")))
GRIDS = {
    "paper": Polynomial(),
    "stable-diffusion": Polynomial.of(VP_1000, 0.1),
    "edm": Native(EDM()),
    "vp": Native(VP_1000),
    "flow": Native(Flow(3.0)),
}


@pytest.mark.parametrize(
    ("timestamps", "values"),
    [
        (4, [80, 10.929, 0.66989, 0.006]),
        (7, [80, 31.73, 10.929, 3.1071, 0.66989, 0.093615, 0.006]),
    ],
)
def test_the_students_grid_has_the_papers_values(timestamps, values):
    assert Polynomial().student(timestamps).tolist() == pytest.approx(values, rel=5e-5)


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("timestamps", [2, 4, 7])
@pytest.mark.parametrize("refinement", [1, 3, 4])
def test_the_teachers_grid_contains_the_students(grids, timestamps, refinement):
    student, teacher = grids.student(timestamps), grids.teacher(timestamps, refinement)
    assert len(student) == timestamps
    assert len(teacher) == refinement * (timestamps - 1) + 1
    assert torch.equal(teacher[::refinement], student)
    assert bool((teacher[1:] < teacher[:-1]).all())


def test_the_papers_refinement_is_its_own_finer_grid():
    fine = levels.polynomial(13, 0.006, 80.0)
    torch.testing.assert_close(Polynomial().teacher(4, 4), fine, rtol=1e-12, atol=0)


def test_a_second_stage_passes_through_the_timestamps_of_its_seven_step_teacher():
    """Spec: the 7-timestamp teacher strided equals the student's grid {3.1071, 0.006}."""
    torch.testing.assert_close(
        Polynomial().teacher(3, 3), Polynomial().student(7), rtol=1e-12, atol=0
    )
    assert Polynomial().student(7)[::3][1:].tolist() == pytest.approx([3.1071, 0.006], rel=5e-5)


def test_a_native_grid_is_walked_as_its_scheduler_would_and_ends_at_0():
    grid = Native(VP_1000).student(4)
    assert torch.equal(grid, VP_1000.native_grid(3))
    assert grid[-1] == 0


def test_refined_flow_time_does_not_waste_steps_on_pure_noise():
    """Evenly in sigma^(1/7) three of four first sub-steps would stay above t = 0.997."""
    fine = Native(Flow()).teacher(4, 4)
    assert fine[0] == SIGMA_CAP
    time = (fine / (1 + fine))[:5]
    gaps = time[:-1] - time[1:]
    assert float(gaps.max() / gaps.min()) < 2


def test_walks_start_as_their_process_does():
    noise = torch.ones(2, 3)
    assert float(Polynomial().start(noise, 80.0)[0, 0]) == 80
    assert float(Native(VP_1000).start(noise, 2.0)[0, 0]) == pytest.approx(5**0.5)


@pytest.mark.parametrize(
    ("timestamps", "afs", "evaluations"), [(4, True, 2), (7, True, 5), (4, False, 3), (3, True, 1)]
)
def test_timestamps_and_evaluations_are_counted_as_in_the_paper(timestamps, afs, evaluations):
    assert evaluations_of(timestamps, afs=afs) == evaluations
    assert timestamps_for(evaluations, afs=afs) == timestamps


def test_a_grid_without_an_evaluation_is_refused():
    with pytest.raises(UserError, match="nothing to train"):
        evaluations_of(2, afs=True)
    with pytest.raises(UserError, match="once or more"):
        timestamps_for(0, afs=False)


def test_a_polynomial_grid_from_pure_noise_is_refused():
    with pytest.raises(UserError, match="native grid"):
        Polynomial.of(Flow())


def test_a_polynomial_grid_keeps_within_the_process():
    assert Polynomial.of(VP_1000) == Polynomial(VP_1000.sigma_min, VP_1000.sigma_max)
    assert Polynomial.of(EDM()) == Polynomial()
