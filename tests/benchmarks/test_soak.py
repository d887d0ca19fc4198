"""What the soak concludes from what it has seen; the soak itself is too long for CI."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

EPOCH, LINE = 4096, 256
FILE = Path(__file__).parents[2] / "benchmarks" / "soak_report.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak_report", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lives(growth: float, jitter: float, levels=(400.0, 900.0, 650.0)):
    """Readings every 2 seconds over two minutes of lives with levels of their own."""
    noise = np.random.default_rng(0)
    for level in levels:
        seconds = np.arange(0, 120, 2.0) + noise.uniform(0, 1000)
        growing = level + growth * (seconds - seconds[0]) / 60
        yield list(zip(seconds, growing + noise.normal(0, jitter, 60), strict=True))


def test_the_slope_is_that_within_lives(soak):
    """A common line through all readings would follow the levels instead."""
    assert soak.slope(lives(3.0, 0.0)).value == pytest.approx(3.0)
    found = soak.slope(lives(0.0, 1.0))
    assert abs(found.value) < 3 * found.error
    assert 0.02 < found.error < 0.5


def test_what_a_step_takes_and_returns_does_not_hide_a_leak(soak):
    """Readings at random places of a step: 50 MB up and down, and 2 MB per minute below them."""
    noise = np.random.default_rng(0)
    process = soak.Process(1, 0, 0, "0", "worker")
    seen = soak.Seen(saved={"images-1": 20.0})
    for seconds in np.arange(0, 120, 0.1):
        mb = 500 + 2 * seconds / 60 + 50 * (noise.random() > 0.2)
        seen.readings.append(soak.Reading(float(seconds), process, float(mb)))
    found = soak.memory(seen, "worker")
    assert found["slope_mb_per_minute"] == pytest.approx(2.0, abs=0.1)
    assert found["warm_minutes"] == pytest.approx(1.5)
    assert soak.growth("worker", found)


def lines(ids, every: int = LINE):
    return [
        {"images": end, "ids": ids[end - every : end], "denoiser/loss": 1.0}
        for end in range(every, len(ids) + 1, every)
    ]


def epochs(count: int) -> list[int]:
    order = np.random.default_rng(0)
    return [int(i) for _ in range(count) for i in order.permutation(EPOCH)]


def test_a_whole_log_is_accounted_for(soak):
    ids = epochs(3)[: 5 * EPOCH // 2]
    assert soak.account(lines(ids), len(ids), EPOCH) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids: [ids[1], *ids[1:]],  # one seen twice, another never
        lambda ids: ids[:-256],  # the last line is lost
        lambda ids: [*ids[:256], *ids[512:], *ids[:256]],  # trained on again after a resume
        lambda ids: [*ids[:4096], *(i + 1 for i in ids[4096:])],  # not in the data
    ],
)
def test_what_is_lost_repeated_or_strange_is_found(soak, spoil):
    ids = epochs(2)
    assert soak.account(lines(spoil(ids)), len(ids), EPOCH)


def test_a_line_that_lacks_samples_is_found(soak):
    ids = epochs(1)
    log = lines(ids)
    log[3]["ids"] = log[3]["ids"][32:]
    assert "224 samples" in soak.account(log, len(ids), EPOCH)[0]
