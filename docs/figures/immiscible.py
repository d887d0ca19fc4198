"""Draws docs/figures/immiscible.png and one-shot.png from benchmarks/results/immiscible.

python docs/figures/immiscible.py

Quality against images seen, by sampling steps: a line is the mean over seeds, a dot a run. And what
the denoiser says of pure noise after the same training.
"""

import json
from collections import defaultdict
from statistics import fmean
from typing import Any

from style import BLUE, GREY, HERE, INK, ORANGE, plots

RESULTS = HERE.parent.parent / "benchmarks" / "results" / "immiscible"
COLOURS = {"independent": INK, "assignment": ORANGE, "nearest": BLUE}
NAMES = {"fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}


def main() -> None:
    runs = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    shown = [data for data in NAMES if any(run["data"] == data for run in runs)]
    curves([run for run in runs if run["arm"] in COLOURS], shown)
    one_shot(shown)


def curves(runs: list[dict[str, Any]], shown: list[str]) -> None:
    plt = plots()
    steps = sorted({point["steps"] for run in runs for point in run["points"]})
    size = (3.1 * len(steps), 2.7 * len(shown))
    figure, axes = plt.subplots(len(shown), len(steps), figsize=size, squeeze=False, sharey="row")
    for row, data in zip(axes, shown, strict=True):
        here = [run for run in runs if run["data"] == data]
        metric = next(key for key in here[0]["points"][0] if key.startswith("FD-"))
        for axis, count in zip(row, steps, strict=True):
            draw_arms(axis, here, metric, count)
            axis.axhline(here[0]["floor"][metric], color=GREY, linestyle="--", linewidth=1)
            axis.set_title(f"{NAMES[data]}, {count} steps")
            axis.set_yscale("log")
        row[0].set_ylabel(f"{metric} (lower is better)")
    for axis in axes[-1]:
        axis.set_xlabel("thousand images seen")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(HERE / "immiscible.png")


def draw_arms(axis: Any, runs: list[dict[str, Any]], metric: str, steps: int) -> None:
    for arm, colour in COLOURS.items():
        found: dict[int, list[float]] = defaultdict(list)
        for run in (run for run in runs if run["arm"] == arm):
            for point in (p for p in run["points"] if p["steps"] == steps):
                found[point["images"]].append(point[metric])
        if not found:
            continue
        images = sorted(found)
        thousands = [i / 1000 for i in images]
        seeds = len(found[images[0]])
        means = [fmean(found[i]) for i in images]
        axis.plot(thousands, means, color=colour, label=f"{arm} ({seeds})")
        for i in images:
            axis.scatter([i / 1000] * len(found[i]), found[i], color=colour, s=8)


def one_shot(shown: list[str]) -> None:
    """The pictures that the runs of seed 0 left, side by side."""
    plt = plots()
    files = {
        (data, arm): RESULTS / f"{data}-{arm}-0.png"
        for data in shown
        for arm in COLOURS
        if (RESULTS / f"{data}-{arm}-0.png").exists()
    }
    size = (2.3 * len(files), 2.9)
    figure, axes = plt.subplots(1, len(files), figsize=size, squeeze=False, layout="constrained")
    for axis, ((data, arm), file) in zip(axes[0], files.items(), strict=True):
        axis.imshow(plt.imread(file))
        axis.set_title(f"{NAMES[data]}\n{arm}")
        axis.axis("off")
    figure.savefig(HERE / "one-shot.png")


if __name__ == "__main__":
    main()
