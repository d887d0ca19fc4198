"""Draws docs/figures/sfd.png and prints the tables of docs/results/sfd.md.

python docs/figures/sfd.py

Students of the reference models beside their teachers' solvers with as few evaluations, from
benchmarks/results/distill: distance to the teacher's 50 steps from the same noise, and the Fréchet
distance of features. A line is the mean over seeds, a dot a run.
"""

import json
from collections import defaultdict
from statistics import fmean
from typing import Any

from style import BLUE, HERE, INK, ORANGE, logarithmic, plots, spell

RESULTS = HERE.parent.parent / "benchmarks" / "results" / "distill"
MODELS = {"emoji": "text to emoji", "fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
COUNTS = range(1, 6)
QUIET = "#8a929b"  # darker than a grid, lighter than what it is about
WAYS = {
    "euler": ("teacher, Euler (DDIM)", QUIET, ":"),
    "dpmpp-3m": ("teacher, DPM++ 3M", QUIET, "--"),
    "gits": ("teacher, GITS", QUIET, "-"),
    "before": ("SFD's student before its first lesson", BLUE, "-."),
    "sfd": ("SFD, a student each", BLUE, "-"),
    "sfdv": ("SFD-v, one student", ORANGE, "-"),
    "more": ("SFD-v, four times the budget", ORANGE, ":"),
    "half": ("progressive", INK, ":"),
    "consistency": ("consistency", INK, "--"),
    "halfown": ("progressive, its paper's rate", INK, "-."),
    "consistencyown": ("consistency, its paper's rate", INK, "-"),
    "one": ("second stage, after SFD-v", ORANGE, "--"),
    "k1": ("SFD with K = 1", BLUE, ":"),
}

MARKERS = {"k1": "x", "one": "s"}  # of those that are one point

Found = dict[str, dict[int, list[float]]]  # way -> evaluations -> a number for each seed


def main() -> None:
    runs = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    by_model = {model: [run for run in runs if run["model"] == model] for model in MODELS}
    by_model = {model: here for model, here in by_model.items() if here}
    plt = plots()
    figure, axes = plt.subplots(2, len(by_model), figsize=(4.75 * len(by_model), 6.4), sharex=True)
    for column, (model, here) in enumerate(by_model.items()):
        long = teacher_at_length(here)
        quality = distance_of(long) if long else "FD"
        if long:  # first, so that the axis reaches down to it
            print(f"\nteacher, 50 steps: {frechet(long):.1f}")
            axes[1][column].axhline(frechet(long), color=INK, linewidth=0.6)
        measured = {"distance to 50 steps": distances(here), quality: qualities(here)}
        for row, (what, found) in enumerate(measured.items()):
            print(f"\n{MODELS[model]}: {what}\n\n{table(found)}")
            draw(axes[row][column], found)
            axes[row][column].set_ylabel(what)
        axes[0][column].set_title(MODELS[model])
        axes[-1][column].set_xlabel("evaluations")
    drawn = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes.flat]
    shown = {name: line for pairs in drawn for line, name in pairs}
    names = [name for name, *_ in WAYS.values() if name in shown]
    below = {"loc": "lower center", "ncols": 4, "fontsize": 7.5, "frameon": False}
    figure.legend([shown[name] for name in names], names, **below)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    figure.savefig(HERE / "sfd.png")


def way_of(run: dict[str, Any]) -> str:
    """The five students of SFD are one way."""
    return "sfd" if run["arm"][:-1] == "sfd" and run["arm"] != "sfdv" else run["arm"]


def distances(runs: list[dict[str, Any]]) -> Found:
    found: Found = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for who, values in run.get("distance", {}).items():
            if who != "student" and run["seed"]:
                continue  # the teacher's walks are those of the first seed's
            for count, value in values.items():
                found[way_of(run) if who == "student" else who][int(count)].append(value)
    return found


def qualities(runs: list[dict[str, Any]]) -> Found:
    found: Found = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run["arm"] == "teacher":
            rows = [(row, row["solver"]) for row in run["judged"]["few"]]
            rows += [(row, "gits") for row in run["judged"]["gits"]]
            for row, way in rows:
                found[way][row["steps"]].append(frechet(row["values"]))
        else:
            for count, values in run["judged"].items():
                found[way_of(run)][int(count)].append(frechet(values))
    return found


def distance_of(values: dict[str, Any]) -> str:
    """The Fréchet distance's full name, which says whose features they are."""
    (name,) = (name for name in values if name.startswith("FD"))
    return name


def frechet(values: dict[str, Any]) -> float:
    return fmean(values[distance_of(values)])  # over the evaluation's own seeds


def teacher_at_length(runs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the teacher's 50 steps score."""
    found = [run for run in runs if run["arm"] == "teacher"]
    return found[0]["judged"]["long"][0]["values"] if found else None


def table(found: Found) -> str:
    """Means, with the standard deviation where there are several seeds."""
    lines = ["| evaluations |" + "".join(f" {n} |" for n in COUNTS), "|---|" + "---|" * 5]
    for way, (name, *_) in WAYS.items():
        if found.get(way):
            lines.append(f"| {name} |" + "".join(f" {cell(found[way].get(n))} |" for n in COUNTS))
    return "\n".join(lines)


def cell(values: list[float] | None) -> str:
    return spell(values, 1 if fmean(values) > 5 else 3) if values else ""


def draw(axis: Any, found: Found) -> None:
    for way, (name, colour, line) in WAYS.items():
        counts = sorted(n for n in found.get(way, {}) if n in COUNTS)
        if not counts:
            continue
        means, marker = [fmean(found[way][n]) for n in counts], MARKERS.get(way, ".")
        look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.4}
        axis.plot(counts, means, linestyle=line, label=name, **look)
        for n in counts:
            axis.plot([n] * len(found[way][n]), found[way][n], ".", color=colour, markersize=4)
    logarithmic(axis)
    axis.set_xticks(list(COUNTS))


if __name__ == "__main__":
    main()
