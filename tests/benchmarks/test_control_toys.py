"""The two toys of control: what the weight of a size changes, and what telling a flip does."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def toys():
    """As a benchmark that is run finds its neighbours."""
    sys.path.insert(0, str(FOLDER))
    import control_toys

    yield control_toys
    sys.path.remove(str(FOLDER))


@pytest.mark.slow
def test_gamma_keeps_the_content_and_the_size_and_a_constant_weight_does_not(toys):
    constant, gamma = toys.GAMMAS[0], toys.GAMMAS[3]
    assert (constant.shape, gamma.shape, gamma.alpha) == ("constant", "cosine", 8.0)
    loud = toys.size_toy(constant, 0, 700)  # flips are there from the first hundreds of steps
    quiet = toys.size_toy(gamma, 0, toys.STEPS)
    assert loud["flips"] > 0.4
    assert quiet["flips"] < 0.05
    assert quiet["large"] / quiet["small"] > 3


@pytest.mark.slow
def test_red_is_on_the_left_where_flips_are_told_and_anywhere_where_they_are_not(toys):
    assert toys.flip_toy(told=True, seed=0, steps=600)["red left"] > 0.98
    assert 0.4 < toys.flip_toy(told=False, seed=0, steps=600)["red left"] < 0.6
