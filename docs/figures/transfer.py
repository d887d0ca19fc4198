"""Draws docs/figures/transfer.png from benchmarks/results/transfer.

python docs/figures/transfer.py

Held-out loss of a DiT carried from 16 to 32 pixels: per noise level before the first step and after
200 steps, and over all levels as it learns, beside one that began anew. A line is the mean over
seeds, a dot a run.
"""

import json
from collections import defaultdict
from itertools import pairwise
from math import sqrt
from statistics import fmean
from typing import Any

from style import BLUE, GREY, HERE, INK, ORANGE, plots

RESULTS = HERE.parent.parent / "benchmarks" / "results" / "transfer"
ARMS = {
    "resample-shifted": ("positions resampled, noise shifted", BLUE, "-"),
    "resample-still": ("resampled, not shifted", BLUE, "--"),
    "extrapolate-shifted": ("extrapolated, shifted", ORANGE, "-"),
    "extrapolate-still": ("extrapolated, not shifted", ORANGE, "--"),
    "local": ("after local crops, resampled, not shifted", INK, "-."),
    "scratch": ("from scratch, shifted", INK, ":"),
}
LOW, HIGH = 0.05, 10.0  # levels that count in the mean over levels, each bin as much
STEPS = 25_600  # images of 200 steps


def main() -> None:
    runs = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    plt = plots()
    figure, (first, later, course) = plt.subplots(1, 3, figsize=(10.5, 3.6))
    for arm, (name, colour, line) in ARMS.items():
        here = [run for run in runs if run["arm"] == arm]
        if not here:
            continue
        style = {"color": colour, "linestyle": line, "linewidth": 1.4}
        for axis, images in ((first, 0), (later, STEPS)):
            if arm != "scratch" or images:
                axis.plot(*per_level(here, images), **style)
        draw_course(course, here, style, f"{name} ({len(here)})")
    first.set_title("before the first step")
    later.set_title("after 200 steps")
    for axis in (first, later):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("noise level")
    first.set_ylabel("held-out loss of the noise")
    course.set_yscale("log")
    course.set_title(f"mean over levels {LOW:g} to {HIGH:g}")
    course.set_xlabel("thousand images at 32 pixels")
    course.grid(color=GREY, linewidth=0.4, which="both")
    figure.legend(*course.get_legend_handles_labels(), loc="lower center", ncol=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(HERE / "transfer.png")


def at(run: dict[str, Any], images: int) -> dict[float, float]:
    """Loss by the middle of each bin of levels that has one."""
    found = next(row for row in run["levels"] if row["images"] == images)
    edges = found["edges"]
    middles = [sqrt(a * b) for a, b in pairwise(edges)]
    return {m: v for m, v in zip(middles, found["loss"], strict=True) if v is not None}


def per_level(runs: list[dict[str, Any]], images: int) -> tuple[list[float], list[float]]:
    curves = [at(run, images) for run in runs]
    shared = [level for level in curves[0] if all(level in curve for curve in curves)]
    return shared, [fmean(curve[level] for curve in curves) for level in shared]


def over_levels(run: dict[str, Any], images: int) -> float:
    return fmean(v for level, v in at(run, images).items() if LOW <= level <= HIGH)


def draw_course(axis: Any, runs: list[dict[str, Any]], style: Any, name: str) -> None:
    found: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for row in run["levels"]:
            found[row["images"]].append(over_levels(run, row["images"]))
    images = sorted(found)
    axis.plot([i / 1000 for i in images], [fmean(found[i]) for i in images], label=name, **style)
    for i in images:
        axis.scatter([i / 1000] * len(found[i]), found[i], color=style["color"], s=5)


if __name__ == "__main__":
    main()
