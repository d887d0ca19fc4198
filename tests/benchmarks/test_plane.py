"""What the benchmarks in the plane conclude from points; their figures are not judged here."""

import math
import sys
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stillhouse.process import NetworkDenoiser

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def moons(benchmarks):
    import moons

    return moons


@pytest.fixture(scope="module")
def consistency(benchmarks):
    import consistency

    return consistency


@pytest.fixture(scope="module")
def generators(benchmarks):
    import generators

    return generators


@pytest.fixture(scope="module")
def benchmarks():
    """As a benchmark that is run finds its neighbours."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------- distances


def test_the_distance_is_that_of_the_best_of_all_matchings(moons):
    x, y = normal(6), normal(6, seed=1)
    best = min(float(((x - y[list(p)]) ** 2).sum(1).mean()) for p in permutations(range(6)))
    assert moons.wasserstein(x, y) == pytest.approx(best, rel=1e-6)
    shift = torch.tensor([0.3, -0.4])
    assert moons.wasserstein(x, x[[3, 1, 5, 0, 2, 4]] + shift) == pytest.approx(0.25, rel=1e-6)


def test_what_lands_in_the_other_class_counts_by_class_only(moons):
    label = torch.arange(40) % 2
    y = normal(40) + 4 * label[:, None]
    swapped = y[torch.arange(40) ^ 1]
    assert moons.wasserstein(swapped, y) == pytest.approx(0, abs=1e-9)
    assert moons.by_class(swapped, y, label) > 20
    assert moons.by_class(y, y, label) == pytest.approx(0, abs=1e-9)


# ---------------------------------------------------------------- points


@pytest.mark.parametrize("even", [False, True])
def test_source_and_moons_have_the_published_moments(moons, even):
    generator = torch.Generator().manual_seed(0)
    source = moons.eight_gaussians(40_000, generator, even=even)
    nearest = torch.atan2(source[:, 1], source[:, 0]).div(math.pi / 4).round() * math.pi / 4
    centre = 5 * torch.stack([nearest.cos(), nearest.sin()], 1)
    # Of a Gaussian that its neighbours cut off at 3.4 deviations.
    assert (source - centre).var().item() == pytest.approx(math.sqrt(0.1), rel=0.02)
    x, moon = moons.two_moons(40_000, generator, even=even)
    for which, y in ((0, 2 / math.pi), (1, 0.5 - 2 / math.pi)):
        mean = torch.tensor([3 * (which + 0.1) - 1, 3 * (y + 0.1) - 1])
        torch.testing.assert_close(x[moon == which].mean(0), mean, rtol=0, atol=0.06)


def test_an_even_source_says_nothing_of_the_moon(moons):
    generator = torch.Generator().manual_seed(0)
    source = moons.eight_gaussians(1600, generator, even=True)
    moon = moons.two_moons(1600, generator, even=True)[1]
    sector = torch.atan2(source[:, 1], source[:, 0]).div(math.pi / 4).round().remainder(8)
    counts = torch.stack([sector[moon == m].histc(8, 0, 8) for m in (0, 1)])
    assert (counts - 100).abs().max() <= 2  # a few stray into the next sector


# ---------------------------------------------------------------- samplers


class Velocity(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, time, cond):
        return self.function(x, time[:, None])


def test_samplers_solve_flows_whose_end_is_known(moons):
    """u = x + t: from x at t = 1 to (x + 2)/e - 1 at t = 0; one Euler step ends at -1."""
    denoiser = NetworkDenoiser(Velocity(lambda x, t: x + t), moons.PROCESS, "flow")
    x = normal(50)
    exact = (x + 2) / math.e - 1
    torch.testing.assert_close(moons.adaptive(denoiser, x, None), exact, rtol=0, atol=1e-4)
    end = moons.one_step(denoiser, x, None)
    torch.testing.assert_close(end, torch.full_like(x, -1), rtol=0, atol=1e-3)


# ---------------------------------------------------------------- images to equal quality


def test_images_to_equal_quality_are_those_of_the_first_checkpoint_that_is_as_good(consistency):
    images = [100, 200, 300, 400]
    curves = {
        "independent": [[0.9, 0.7, 0.6, 0.5], [0.9, 0.7, 0.5, 0.6], [0.9, 0.4, 0.5, 0.45]],
        "assignment": [[0.6, 0.5, 0.2, 0.1], [0.6, 0.7, 0.8, 0.8], [0.5, 0.3, 0.5, 0.6]],
        "nearest": [[0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, 0.65], [0.4, 0.3, 0.2, 0.1]],
    }
    found = consistency.savings(curves, images)
    assert found["images_to_equal"] == {
        "independent": [400, 300, 200],
        "assignment": [200, 100, 200],
        "nearest": [None, None, 100],
    }
    assert found["saving"] == {"independent": 1.0, "assignment": 1.5, "nearest": 0.0}


@pytest.mark.parametrize("name", ["independent", "assignment", "assignment/4", "nearest"])
def test_arms_differ_in_their_noise_alone(consistency, name):
    objective = consistency.ImprovedConsistency(total_images=1e6)

    def drawn(arm: str):
        data, noise = (torch.Generator().manual_seed(n) for n in (0, 1))
        return consistency.draw(consistency.ARMS[arm], objective, 512, data, noise)

    one, other = drawn("independent"), drawn(name)
    assert torch.equal(one.data, other.data)
    assert torch.equal(one.sigma, other.sigma)
    assert torch.equal(one.key, other.key)
    apart = [float((batch.data - batch.noise).norm(dim=1).mean()) for batch in (one, other)]
    assert apart[1] < apart[0] - 0.2 or name == "independent"


# ---------------------------------------------------------------- generators


@pytest.mark.parametrize("name", ["ring", "checkerboard", "rare"])
def test_real_points_keep_every_mode(generators, name):
    target = generators.TARGETS[name]()
    points = target.sample(generators.POINTS, torch.Generator().manual_seed(3))
    found = generators.scores(target, points, seed=0)
    assert found["modes"] == 1
    assert found["density"] < 0.3
    assert found["recall"] > 0.9
    assert found["precision"] > 0.9


def test_a_lost_mode_is_seen(generators):
    """Of two modes the one with 2% of the mass: the other scores do not see it."""
    target = generators.rare()
    points = target.sample(2 * generators.POINTS, torch.Generator().manual_seed(3)).double()
    away = torch.cdist(points, target.means.double()) / target.stds.double()
    kept = points[away.argmin(1) == 0][: generators.POINTS]
    found = generators.scores(target, kept, seed=0)
    assert found["modes"] == 0.5
    assert found["precision"] > 0.9
    assert found["recall"] > 0.9


def test_results_of_other_settings_are_not_gone_on_with(generators, tmp_path):
    kept = generators.Kept(tmp_path / "ring.json")
    kept.write()
    assert generators.Kept(tmp_path / "ring.json").found == kept.found
    kept.found["settings"] = generators.SETTINGS | {"start": 3.0}
    kept.write()
    with pytest.raises(SystemExit, match="other settings"):
        generators.Kept(tmp_path / "ring.json")


def test_squares_of_the_checkerboard_are_its_modes(generators):
    target = generators.TARGETS["checkerboard"]()
    points = target.sample(4000, torch.Generator().manual_seed(0))
    masses = generators.mode_masses(target, points)
    assert len(masses) == len(target.means) // generators.LATTICE
    assert masses.tolist() == pytest.approx([1 / len(masses)] * len(masses), abs=0.03)
    left = points[points[:, 0] < 0]
    assert 0.3 < generators.scores(target, left, seed=0)["modes"] < 0.7


def test_points_in_one_place_have_no_density_in_common_with_those_elsewhere(generators):
    first, second = (generators.histogram(torch.full((50, 2), at)) for at in (-9.0, 9.0))
    assert 0.5 * float((first - second).abs().sum()) == 1
    assert float(first.sum()) == 1
