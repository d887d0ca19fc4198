"""Cost of control conditioning in a training step.

    STILLHOUSE_DATA=../shared/data python benchmarks/conditioning.py [--quick]

Last line, JSON, also in results/conditioning.json unless --quick:
`control_overhead` = a training step of the small DiT on CIFAR-10 with control (flip, crop, size;
dropped for one image in ten) / without, alternately, median over rounds.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from coupling import ENDLESS, Training
from timing import alternately

from stillhouse.data import ControlConfig
from stillhouse.recipes.train.catalogue import RECIPES
from stillhouse.recipes.train.networks import Backbone
from stillhouse.recipes.train.training import TrainRun

RESULTS = Path(__file__).parent / "results"
CONTROL = ControlConfig(composition=("flip", "crop_top", "crop_left"), detail=("height", "width"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    quick = parser.parse_args().quick
    result = {"quick": quick, **(overhead("tiny", 2, 8) if quick else overhead("small", 41))}
    result |= {"cores": os.cpu_count(), "torch": torch.__version__}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "conditioning.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def configure(size: Any, batch: int | None, control: ControlConfig) -> TrainRun:
    run = RECIPES["cifar10-dit"]("tiny")
    return run.model_copy(
        update={
            "network": Backbone(name="dit", size=size),
            "data": run.data.model_copy(update={"control": control}),
            "batch": batch or run.batch,
            "images": ENDLESS,
            "log_every": ENDLESS,
        }
    )


def overhead(size: Any, rounds: int, batch: int | None = None, block: int = 2) -> dict[str, Any]:
    """`batch`: of another size than the recipe's."""
    on, off = (Training(configure(size, batch, told)) for told in (CONTROL, ControlConfig()))
    try:
        arms = {"on": lambda: on.steps(block), "off": lambda: off.steps(block)}
        seconds = alternately(arms, repeats=rounds, warmup=1)
    finally:
        on.feed.close()
        off.feed.close()
    ratios = [a / b for a, b in zip(seconds["on"], seconds["off"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "control_overhead": round(middle, 4),
        "control_overhead_quartiles": [round(low, 4), round(high, 4)],
        "step_ms": round(1e3 * statistics.median(seconds["off"]) / block, 1),
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
