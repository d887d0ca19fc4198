"""Draws docs/figures/plane.png and prints the tables of docs/results/emd.md.

python docs/figures/plane.py

One-step generators in the plane, from benchmarks/results/generators: points of every method's
first seed, at equal network evaluations, beside the target's; below, the scores of all seeds.
"""

import json
from typing import Any

from matplotlib.lines import Line2D
from style import BLUE, GREY, HERE, INK, ORANGE, plots, spell

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
# What all methods have as many of: how it is called, its colour, and how far beside the other.
HOWS = {
    "evaluations": ("equal network evaluations", BLUE, -0.14),
    "iterations": ("equal updates", ORANGE, 0.14),
}


def main() -> None:
    found = {file.stem: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    here = {target: found[target] for target in TARGETS if target in found}
    for target, of in here.items():
        print(f"\n{TARGETS[target]}, equal network evaluations\n\n{table(of)}")
    print(f"\nequal iterations\n\n{errors(here)}")
    for name in sorted(set(found) - set(here)):  # TARGET-N: a longer run of some methods
        target, updates = name.split("-")
        print(f"\n{TARGETS[target]}, {updates} updates\n\n{seeds([found[target], found[name]])}")
    plt = plots()
    figure = plt.figure(figsize=(11.5, 1.25 * len(here) + 5), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.25 * len(here), 5))
    draw_points(upper, here)
    draw_scores(lower, here)
    figure.savefig(HERE / "plane.png")


def draw_points(figure: Any, here: dict[str, Any]) -> None:
    arms = list(next(iter(here.values()))["points"])
    axes = figure.subplots(len(here), len(arms), squeeze=False)
    for row, (target, found) in zip(axes, here.items(), strict=True):
        for axis, arm in zip(row, arms, strict=True):
            scatter(axis, found["points"][arm], INK if arm == "real" else BLUE)
        row[0].set_ylabel(TARGETS[target], fontsize=8)
    for axis, arm in zip(axes[0], arms, strict=True):
        axis.set_title("target" if arm == "real" else arm, fontsize=8)


def draw_scores(figure: Any, here: dict[str, Any]) -> None:
    """A dot for every seed, methods side by side; the line is what as many real points score."""
    arms = [arm for arm in next(iter(here.values()))["points"] if arm != "real"]
    axes = figure.subplots(len(BRIEF), len(here), sharex=True, sharey="row", squeeze=False)
    for column, (target, found) in zip(axes.T, here.items(), strict=True):
        for axis, key in zip(column, BRIEF, strict=True):
            axis.axhline(found["floor"][key], color=GREY, linestyle="--", linewidth=1)
            for how, (_, colour, shift) in HOWS.items():
                for place, arm in enumerate(arms):
                    values = [run[key] for run in found["runs"][f"{arm}/{how}"]]
                    axis.plot([place + shift] * len(values), values, ".", color=colour, alpha=0.7)
        column[0].set_title(TARGETS[target], fontsize=9)
        column[-1].set_xticks(range(len(arms)), arms, rotation=45, ha="right", fontsize=8)
    for axis, key in zip(axes[:, 0], BRIEF, strict=True):
        axis.set_ylabel(SCORES[key])
    dots = {title: Line2D([], [], color=c, marker=".", ls="") for title, c, _ in HOWS.values()}
    axes[0][-1].legend(dots.values(), dots.keys(), fontsize=8, loc="upper left")


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


def errors(here: dict[str, Any]) -> str:
    """At equal iterations: three scores on each target."""
    heads = ["", *(f"{TARGETS[target]}: {SCORES[key]}" for target in here for key in BRIEF)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    each = list(here.values())
    for name in each[0]["runs"]:
        arm, of = name.split("/")
        if of == "iterations":
            cells = [spell([run[k] for run in f["runs"][name]], 2) for f in each for k in BRIEF]
            lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    floor = " | ".join(f"{f['floor'][key]:.2f}" for f in each for key in BRIEF)
    return "\n".join([*lines, f"| real points | {floor} |"])


def seeds(found: list[dict[str, Any]]) -> str:
    """What was judged after as many updates as the longer runs, seed by seed."""
    updates = found[-1]["settings"]["iterations"]
    lines = ["| " + " | ".join(["", *SCORES.values()]) + " |", "|" + "---|" * (len(SCORES) + 1)]
    every = [pair for each in found for pair in each["runs"].items()]
    long = {name.split("/")[0]: runs for name, runs in every if runs[0]["updates"] == updates}
    for arm, runs in long.items():
        cells = [", ".join(f"{run[key]:.2f}" for run in runs) for key in SCORES]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
