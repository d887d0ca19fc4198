"""The benchmarks' last line is JSON with what it should have; their figures are not judged here."""

import json
from pathlib import Path

import loaded
import pytest
from metrics.shared import SHARED, weights_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("evaluate", {"overhead", "memory_ratio"}),
        ("coupling", {"n", "step_share", "reduction"}),
        ("conditioning", {"control_overhead"}),
        ("sfd", {"overhead"}),
        ("emd", {"overhead"}),
        ("generators", {"ring", "checkerboard", "rare"}),
        ("features", {"early_stop_error", "hook_overhead", "memory_ratio"}),
    ],
)
def test_a_quick_benchmark_prints_its_figures(name, keys, tmp_path):
    weights = weights_folder()
    shared = {"STILLHOUSE_DATA": str(SHARED / "data"), "STILLHOUSE_WEIGHTS": str(weights)}
    script = str(ROOT / "benchmarks" / f"{name}.py")
    places = shared | {"STILLHOUSE_CACHE": str(tmp_path)}
    done = loaded.run(script, "--quick", cwd=tmp_path, timeout=None, **places)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert keys <= result.keys()
    assert result["quick"] is True
