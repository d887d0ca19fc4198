"""The metric can fail: the worse the images, the larger the distance, step by step."""

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from metrics.shared import cifar, weights_folder

from stillhouse.metrics.detectors import ResNet56Config

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
DISTANCES = ("FD", "KD")
REFERENCE, POOL, COUNT = 1500, 2200, 400


@pytest.fixture(scope="module")
def figure():
    """The script of the docs: what is drawn there and what is tested here is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FIGURES)
        spec = importlib.util.spec_from_file_location("figure_of_metrics", FIGURES / "metrics.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def rises(values: list[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


@pytest.fixture(scope="module")
def scene(figure):
    """A judge with real images behind it, samples as they are, and what each of them shows."""
    weights = weights_folder() / "resnet56_cifar10.safetensors"
    detector = ResNet56Config(weights=str(weights)).build("cpu")
    images, labels = cifar("train", REFERENCE + POOL)
    features = figure.see(detector, images)
    judge = figure.Judge(features[:REFERENCE], neighbours=False)
    return detector, judge, images[REFERENCE:], features[REFERENCE:], labels[REFERENCE:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "strengths"),
    [("noise", (0.02, 0.05, 0.12)), ("blur", (0.5, 0.8, 1.3)), ("JPEG", (90, 60, 20))],
)
def test_distances_grow_with_the_damage(figure, scene, damage, strengths):
    detector, judge, images, features, _ = scene
    spoil = figure.DAMAGES[damage].apply
    parts = [features[:COUNT]]
    parts += [figure.see(detector, spoil(images[:COUNT], strength)) for strength in strengths]
    found = [judge(part) for part in parts]
    for name in DISTANCES:
        assert rises([one[name] for one in found]), (name, found)


@pytest.mark.slow
def test_distances_grow_with_missing_classes(figure, scene):
    _, judge, _, features, labels = scene
    found = []
    for missing in (0, 2, 4, 6, 8):
        left = features[figure.keeps(labels, missing, seed=0)]
        assert len(left) >= COUNT
        found.append(judge(left[:COUNT]))
    for name in DISTANCES:
        assert rises([one[name] for one in found]), (name, found)


def test_the_published_numbers_rise_too():
    """Every curve of the picture, from the floor on; means over the subsets."""
    content = json.loads((FIGURES / "metrics.json").read_text())
    assert set(content) == {"ResNet56", "MobileNetV2"}
    for detector, found in content.items():
        rows = found["values"]
        floor = next(row for row in rows if row["damage"] == "floor")
        for damage in ("noise", "blur", "JPEG", "missing classes"):
            curve = [floor, *(row for row in rows if row["damage"] == damage)]
            assert len(curve) == 6
            for name in DISTANCES:
                means = [fmean(row[name]) for row in curve]
                assert rises(means), (detector, damage, name, means)
