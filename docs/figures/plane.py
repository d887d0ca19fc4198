"""Draws docs/figures/plane.png and prints the tables of docs/results/emd.md.

python docs/figures/plane.py

One-step generators in the plane, from benchmarks/results/generators: points of every method's
first seed, at equal network evaluations, beside the target's; below each the share of modes that
it kept and its recall, means over seeds.
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
HOWS = {"evaluations": "equal network evaluations", "iterations": "equal iterations"}
REACH = 1.6


def main() -> None:
    found = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    for how, title in HOWS.items():
        for target in filter(found.get, TARGETS):
            print(f"\n{TARGETS[target]}, {title}\n\n{table(found[target], how)}")
    here = [target for target in TARGETS if target in found]
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
            modes, recall = (fmean(run[key] for run in runs) for key in ("modes", "recall"))
            axis.set_xlabel(f"{modes:.2f}   {recall:.2f}", fontsize=7)
    for axis, name in zip(axes[0], ["target", *arms], strict=True):
        axis.set_title(name, fontsize=8)
    axes[0][0].set_xlabel("modes   recall", fontsize=7)
    figure.tight_layout(pad=0.4)
    figure.savefig(HERE / "plane.png")


def scatter(axis: Any, points: list[list[float]], colour: str) -> None:
    axis.scatter(*zip(*points, strict=True), s=0.6, color=colour, linewidths=0)
    axis.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), xticks=[], yticks=[], aspect="equal")
    for side in axis.spines.values():
        side.set_color(GREY)


def table(found: dict[str, Any], how: str) -> str:
    """Means and standard deviations over seeds; last what as many real points score."""
    heads = ["", "updates", *SCORES.values()]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, runs in found["runs"].items():
        arm, of = name.split("/")
        if of == how:
            cells = [spell([run[key] for run in runs], 2) for key in SCORES]
            lines.append(f"| {arm} | {runs[0]['updates']} | " + " | ".join(cells) + " |")
    floor = " | ".join(f"{found['floor'][key]:.2f}" for key in SCORES)
    return "\n".join([*lines, f"| real points | | {floor} |"])


if __name__ == "__main__":
    main()
