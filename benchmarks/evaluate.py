"""Cost of an evaluation: beside drawing and looking, and in memory.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/evaluate.py [--quick]

Last line, JSON, also in results/evaluate.json unless --quick:
`overhead` = an evaluation (draw, look, keep features, fid + kid + prdc) / drawing the same samples
and a bare forward of the detector, alternately, median over rounds; the reference is in the cache.
`memory_ratio` = peak memory of a process that evaluates 10,000 samples / one that does 2,000.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from timing import alternately

from stillhouse.engine.world import World
from stillhouse.metrics.detectors import MobileNetV2Config
from stillhouse.recipes.judge.evaluating import Bench, EvaluateRun, Setting, evaluate, run

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
HERE = World(0, 1, torch.device("cpu"))
COUNT, STEPS, ROUNDS = 1024, 8, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    parser.add_argument("--peak", type=int, default=0, help="evaluate so many; print the peak")
    parser.add_argument("--reference", type=int, default=4000, help="images of the reference")
    parser.add_argument("--cache", help="where the reference is kept meanwhile, for --peak")
    options = parser.parse_args()
    quick = options.quick
    reference = 64 if quick else options.reference
    with tempfile.TemporaryDirectory(prefix="stillhouse-evaluate-") as folder:
        base = configure(Path(folder), options.cache or f"{folder}/references", reference)
        if options.peak:
            run(base.model_copy(update={"count": options.peak}))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            return
        size = (16, 2, 1) if quick else (COUNT, STEPS, ROUNDS)
        result = {"quick": quick, **overhead(base, *size)}
        result |= memory(base, *((16, 32) if quick else (2000, 10_000)))
    result |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "evaluate.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def configure(folder: Path, cache: str, reference: int) -> EvaluateRun:
    return EvaluateRun(
        model=str(ROOT / "reference" / "fashion"),
        reference="fashion:test",
        reference_count=reference,
        detector=MobileNetV2Config(),
        metrics=("fid", "kid", "prdc"),
        steps=(1,),
        cache=Path(cache),
        out=folder / "evaluation",
    )


def overhead(base: EvaluateRun, count: int, steps: int, rounds: int) -> dict[str, Any]:
    config = base.model_copy(update={"count": count, "steps": (steps,)})
    evaluate(config, HERE)  # fills the cache, warms up
    bench = Bench(config, HERE)
    gallery = bench.gallery(Setting(config.solvers[0], steps), 0)

    def ours() -> None:
        shutil.rmtree(config.out)
        evaluate(config, HERE)

    def bare() -> None:
        for shown in gallery.batches(HERE, 0, lambda _: None):
            bench.detector(shown.images)

    seconds = alternately({"ours": ours, "bare": bare}, repeats=rounds, warmup=0)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["bare"], strict=True)]
    return {
        "overhead": round(statistics.median(ratios), 4),
        "overhead_rounds": [round(ratio, 4) for ratio in ratios],
        "seconds": round(statistics.median(seconds["ours"]), 1),
        "count": count,
        "steps": steps,
    }


def memory(base: EvaluateRun, few: int, many: int) -> dict[str, Any]:
    """Each in a process of its own, with the reference in the cache."""
    peaks = [peak(base, count) for count in (few, many)]
    return {
        "memory_ratio": round(peaks[1] / peaks[0], 4),
        "peak_mb": [round(p) for p in peaks],
        "counts": [few, many],
    }


def peak(base: EvaluateRun, count: int) -> float:
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun's workers
    command = [python, __file__, "--peak", str(count), "--cache", str(base.cache)]
    command += ["--reference", str(base.reference_count)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
