"""Draws docs/figures/plane.png and prints the tables of docs/results/emd.md.

python docs/figures/plane.py

One-step generators in the plane, from benchmarks/results/generators: points of every method's
first seed, at equal network evaluations, beside the target's; below each the density error and the
recall, means over seeds.
"""

import json
from statistics import fmean
from typing import Any

from style import BLUE, GREY, HERE, INK, plots, spell

RESULTS = HERE.parent.parent / "benchmarks" / "results" / "generators"
TARGETS = {"ring": "8 Gaussians", "checkerboard": "checkerboard", "rare": "a mode of 2%"}
SCORES = {
    "modes": "modes kept",
    "density": "density error",
    "recall": "recall",
    "precision": "precision",
}
BRIEF = ("density", "recall", "modes")
REACH = 1.6


def main() -> None:
    found = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    here = [target for target in TARGETS if target in found]
    for target in here:
        print(f"\n{TARGETS[target]}, equal network evaluations\n\n{table(found[target])}")
    print(f"\nequal iterations\n\n{errors([found[target] for target in here], here)}")
    arms = [arm for arm in found[here[0]]["points"] if arm != "real"]
    plt = plots()
    size = (1.15 * (len(arms) + 1), 1.45 * len(here))
    figure, axes = plt.subplots(len(here), len(arms) + 1, figsize=size, squeeze=False)
    for row, target in zip(axes, here, strict=True):
        scatter(row[0], found[target]["points"]["real"], INK)
        row[0].set_ylabel(TARGETS[target])
        for axis, arm in zip(row[1:], arms, strict=True):
            scatter(axis, found[target]["points"][arm], BLUE)
            runs = found[target]["runs"][f"{arm}/evaluations"]
            error, recall = (fmean(run[key] for run in runs) for key in ("density", "recall"))
            axis.set_xlabel(f"{error:.2f}   {recall:.2f}", fontsize=7)
    for axis, name in zip(axes[0], ["target", *arms], strict=True):
        axis.set_title(name, fontsize=8)
    axes[0][0].set_xlabel("error   recall", fontsize=7)
    figure.tight_layout(pad=0.4)
    figure.savefig(HERE / "plane.png")


def scatter(axis: Any, points: list[list[float]], colour: str) -> None:
    axis.scatter(*zip(*points, strict=True), s=0.6, color=colour, linewidths=0)
    axis.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), xticks=[], yticks=[], aspect="equal")
    for side in axis.spines.values():
        side.set_color(GREY)


def table(found: dict[str, Any]) -> str:
    """At equal evaluations: means, standard deviations over seeds; last as many real points."""
    heads = ["", "updates", *SCORES.values()]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, runs in found["runs"].items():
        arm, of = name.split("/")
        if of == "evaluations":
            cells = [spell([run[key] for run in runs], 2) for key in SCORES]
            lines.append(f"| {arm} | {runs[0]['updates']} | " + " | ".join(cells) + " |")
    floor = " | ".join(f"{found['floor'][key]:.2f}" for key in SCORES)
    return "\n".join([*lines, f"| real points | | {floor} |"])


def errors(found: list[dict[str, Any]], targets: list[str]) -> str:
    """At equal iterations: three scores on each target."""
    heads = ["", *(f"{TARGETS[target]}: {SCORES[key]}" for target in targets for key in BRIEF)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name in found[0]["runs"]:
        arm, of = name.split("/")
        if of == "iterations":
            cells = [spell([run[k] for run in f["runs"][name]], 2) for f in found for k in BRIEF]
            lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    floor = " | ".join(f"{f['floor'][key]:.2f}" for f in found for key in BRIEF)
    return "\n".join([*lines, f"| real points | {floor} |"])


if __name__ == "__main__":
    main()
