"""What couplings do to a trained model: flow matching from 8 Gaussians to two moons, in short.

The benchmark's own arms, with a tenth of its training, one seed.
"""

import math
import sys
from pathlib import Path

import pytest

SEED = 0
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def moons():
    sys.path.insert(0, str(FOLDER))
    import moons

    yield moons
    sys.path.remove(str(FOLDER))


@pytest.mark.slow
def test_assignment_straightens_paths_so_that_one_step_is_enough(moons):
    effort = moons.Effort(iterations=400, points=512)
    straight, crossed = (
        moons.run(name, SEED, effort).distances["one_step"]
        for name in ("assignment", "independent")
    )
    assert straight < crossed / 4


@pytest.mark.slow
def test_with_a_condition_plain_assignment_draws_the_wrong_points_however_exactly_it_is_solved(
    moons,
):
    """Of each moon by itself: points of the one among those of the other are no small matter."""
    effort = moons.Effort(iterations=400, points=512)
    plain, within = (
        moons.run(name, SEED, effort).distances for name in ("told/assignment", "told/within-class")
    )
    assert plain["adaptive_by_class"] > 3 * within["adaptive_by_class"]
    assert plain["adaptive"] > within["adaptive"]


def test_every_arm_is_trained_and_judged(moons):
    for name, arm in moons.ARMS.items():
        found = moons.run(name, SEED, moons.QUICK).distances
        assert len(found) == (4 if arm.told else 2)
        assert all(0 < distance < math.inf for distance in found.values()), name
