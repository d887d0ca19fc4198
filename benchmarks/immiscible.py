"""Does noise that lies near save images? Real data, equal images seen, several seeds.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/immiscible.py [NAME ...] [--plan] [--work runs/immiscible]

A name is DATA-ARM-SEED, or the beginning of one: `fashion-nearest` is three runs. What has a file
in results/immiscible is not run again, and a run that was broken off goes on where it was, so the
same command works through the plan over any number of sittings. `--plan` prints the commands.
CIFAR-10 is the whole of it (benchmarks/cifar10.py); the results named part-* are of the same runs
with a random part, 20,000 images, and are shown as such.

Every run is `stillhouse train` in four legs, with `stillhouse evaluate` after each (with classes
after the last), and a picture of what the denoiser says of pure noise.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments import last_values, read_lines, work_through

RESULTS = Path(__file__).parent / "results" / "immiscible"
NUMBERS = (1, 2, 3, 4)  # of the legs
SAMPLES, STEPS = 2000, (5, 10, 20)
SHOWN = 16  # images of the picture

# What all arms share: flow matching with times drawn evenly, so that pure noise is trained on too.
COMMON = """--process flow --objective flow --objective.density uniform-time --batch 128
    --spread.precision fp32 --optim.lr 1e-3 --optim.warmup 4000 --optim.schedule constant
    --averages '[{"kind": "half-life", "images": 4000}]' --log-every 1280"""
NO_CLASSES = "--data.columns.label '' --classes 0"


class Data(NamedTuple):
    """A data set, its network, and how it is judged."""

    train: str
    leg: int  # images
    reference: str
    detector: str
    judged: tuple[int, ...] = NUMBERS  # after which legs


DATA = {
    "fashion": Data(
        f"fashion-unet --network.channels 32 64 96 {COMMON} {NO_CLASSES}",
        25_600,
        "fashion:test",
        "mobilenet-v2",
    ),
    "cifar10": Data(
        "cifar10-unet --network.channels 32 64 128 --network.layers 1 --network.attention 2 "
        f"--network.head-width 16 --network.dropout 0 {COMMON} {NO_CLASSES}",
        16_000,  # a smaller share: what 25 minutes of two cores allow
        "cifar10:test",
        "resnet56-cifar10",
    ),
    "classes": Data(
        f"fashion-unet --network.channels 32 64 96 {COMMON}",
        25_600,
        "fashion:test",
        "mobilenet-v2",
        judged=NUMBERS[-1:],  # leak and quality, no curve
    ),
}

ARMS = {
    "independent": "",
    "assignment": "--coupling assignment",
    "nearest": "--coupling nearest",
    "within": "--coupling conditional --coupling.mode within-class",
    "soft": "--coupling conditional --coupling.mode soft",
}

PLAN = [
    *(("fashion", arm, seed) for seed in range(3) for arm in list(ARMS)[:3]),
    *(("classes", arm, 0) for arm in ("independent", "assignment", "within", "soft")),
    *(("cifar10", arm, seed) for seed in range(2) for arm in ("independent", "assignment")),
]


def main() -> None:
    names = ["-".join(map(str, run)) for run in PLAN]
    work_through(__doc__, names, commands, summary, RESULTS, one_shot)


# ---------------------------------------------------------------- one run


def commands(name: str, work: Path) -> Iterator[tuple[Path, list[str]]]:
    """Train and evaluate leg by leg, then the picture; with the file that says it is done."""
    kind, arm, seed = name.split("-")
    data, run = DATA[kind], work / name
    every = f"--checkpoint-every {data.leg} --validation.every {data.leg}"
    every += f" --preview.every {data.leg}"
    for leg in data.judged:
        judged = run / f"leg-{leg}" / "evaluation.json"
        train = f"train {data.train} {ARMS[arm]} --seed {seed} {every} --images {leg * data.leg}"
        yield judged, shlex.split(f"{train} --out {run}")
        evaluate = f"evaluate {run}/model --reference {data.reference} --detector {data.detector}"
        evaluate += f" --metrics fid,kid --count {SAMPLES} --solvers euler --batch 100"
        evaluate += f" --out {judged.parent} --steps {' '.join(map(str, STEPS))}"
        yield judged, shlex.split(evaluate)
    drawn = one_shot(run)
    sample = f"sample {run}/model --count {SHOWN} --steps 1 --solver euler --out {drawn.parent}"
    yield drawn, shlex.split(sample)


def one_shot(run: Path) -> Path:
    """What the denoiser says of pure noise."""
    return run / "one-shot" / "grid.png"


def summary(name: str, run: Path) -> dict[str, Any]:
    """Distances by images seen and steps, with their floor; and what the coupling did."""
    kind, arm, seed = name.split("-")
    numbers = DATA[kind].judged
    legs = [json.loads((run / f"leg-{n}" / "evaluation.json").read_text()) for n in numbers]
    points = [
        {"images": number * DATA[kind].leg, "steps": row["steps"]}
        | {metric: round(values[0], 5) for metric, values in row["values"].items()}
        for number, found in zip(numbers, legs, strict=True)
        for row in found["settings"]
    ]
    lines = read_lines(run)
    logged = ("validation/loss", "coupling/reduction", "coupling/leak", "coupling/chance")
    logged += ("coupling/seconds",)
    rates = [line["images_per_second"] for line in lines if "images_per_second" in line]
    return {
        "data": kind,
        "arm": arm,
        "seed": int(seed),
        "parameters": json.loads((run / "run.json").read_text())["network"]["parameters"],
        "samples": SAMPLES,
        "points": points,
        "floor": legs[-1]["floor"],
        "expected_of_a_perfect_model": legs[-1]["expected_of_a_perfect_model"],
        "images_per_second": round(sorted(rates)[len(rates) // 2], 1) if rates else None,
        **{key: last_values(lines, key, len(NUMBERS)) for key in logged},
    }


if __name__ == "__main__":
    main()
