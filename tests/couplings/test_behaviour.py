"""What couplings do to a trained model: flow matching from 8 Gaussians to two moons, in short.

The benchmark's own arms, with a tenth of its training, one seed.
"""

import sys
from pathlib import Path

import pytest

SEED = 0
FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def found():
    """W2^2 by arm."""
    sys.path.insert(0, str(FOLDER))
    import moons

    effort = moons.Effort(iterations=400, points=512)
    yield {name: moons.run(name, SEED, effort).distances for name in moons.ARMS}
    sys.path.remove(str(FOLDER))


pytestmark = pytest.mark.slow


def test_assignment_straightens_paths_so_that_one_step_is_enough(found):
    assert found["assignment"]["one_step"] < found["independent"]["one_step"] / 4
