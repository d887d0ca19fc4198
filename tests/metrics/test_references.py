"""Stored statistics say where they come from, and are refused where they do not fit."""

import pytest
import torch
from metrics.shared import planted

from stillhouse.errors import UserError
from stillhouse.metrics.moments import Moments
from stillhouse.metrics.references import (
    DetectorFacts,
    Facts,
    Reference,
    load_reference,
    mismatches,
)

DETECTOR = DetectorFacts(name="ResNet56", digest="sha256:1", preprocessing="as it is")
FACTS = Facts(
    name="pictures",
    count=50,
    fingerprint="sha256:2",
    reading="32 px, rgb, as they are",
    size=32,
    mode="rgb",
    detector=DETECTOR,
)


@pytest.fixture
def reference() -> Reference:
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    return Reference(FACTS, Moments.of(rows), rows[:20], ("a cat", "a dog"))


def test_a_reference_is_read_as_it_was_written(tmp_path, reference):
    reference.save(tmp_path / "deep" / "stats.safetensors")
    again = load_reference(tmp_path / "deep" / "stats.safetensors")
    assert again.facts == FACTS
    assert again.moments.count == 50
    assert torch.equal(again.moments.scatter, reference.moments.scatter)
    assert torch.equal(again.features, reference.features)
    assert again.texts == ("a cat", "a dog")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"fingerprint": "sha256:3"}, "files have changed"),
        ({"count": 51}, "number of images is 50, now 51"),
        ({"size": 64}, "size in pixels is 32, now 64"),
        ({"mode": "grey"}, "colour is rgb, now grey"),
        (
            {"detector": DETECTOR.model_copy(update={"digest": "sha256:9"})},
            "detector is another: digest 'sha256:1', now 'sha256:9'",
        ),
        (
            {"detector": DETECTOR.model_copy(update={"preprocessing": "upside down"})},
            "preprocessing 'as it is', now 'upside down'",
        ),
    ],
)
def test_what_differs_is_named(wanted, said):
    (reason,) = mismatches(FACTS, **wanted)
    assert said in reason


def test_what_is_equal_is_no_reason():
    assert mismatches(FACTS, detector=DETECTOR, count=50, fingerprint="sha256:2") == []


def test_other_files_are_refused_with_what_to_do(tmp_path, reference):
    path = tmp_path / "stats.safetensors"
    with pytest.raises(UserError, match="Name the data itself"):
        load_reference(path)
    reference.save(path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:7], b"", planted(tmp_path / "mark")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="does not hold the statistics"):
            load_reference(path)
    assert not (tmp_path / "mark").exists()


def test_statistics_that_are_no_numbers_are_refused(tmp_path, reference):
    scatter = reference.moments.scatter.clone()
    scatter[0, 0] = torch.nan
    broken = Reference(FACTS, Moments(50, reference.moments.mean, scatter), reference.features)
    broken.save(tmp_path / "stats.safetensors")
    with pytest.raises(UserError, match="not finite"):
        load_reference(tmp_path / "stats.safetensors")
