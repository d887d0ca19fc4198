"""Draws docs/figures/one_step.png and prints the tables of docs/results/emd.md.

python docs/figures/one_step.py

Students of the reference models beside their 50 steps, from benchmarks/results/one_step, a row for
each model: quality and variety against evaluations per image, and both against each other for one
evaluation. A circle is the mean over seeds, a dot a run; generators after as many network
evaluations as each other.
"""

import json
from collections import defaultdict
from itertools import pairwise
from statistics import fmean
from typing import Any

from style import BLUE, HERE, INK, ORANGE, logarithmic, plots, spell

RESULTS = HERE.parent.parent / "benchmarks" / "results" / "one_step"
MODELS = {"fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
ARMS = {  # names and colours; without a colour an arm is in the tables only
    "teacher": ("teacher, 50 steps", INK),
    "sfd1": ("SFD", BLUE),
    "sfdv": ("SFD-v", BLUE),
    "second": ("SFD's second stage", BLUE),
    "instruct": ("Diff-Instruct", ORANGE),
    "dmd": ("DMD", ORANGE),
    "emd4": ("EMD-4", ORANGE),
    "emd8": ("EMD-8", ORANGE),
    "emd16": ("EMD-16", ORANGE),
    "full8": ("EMD-8, noise not cancelled", INK),
    "instructlow": ("Diff-Instruct, rate 3e-5", None),
    "emd8low": ("EMD-8, rate 3e-5", None),
    "full8low": ("EMD-8, noise not cancelled, rate 3e-5", None),
    "emd8far": ("EMD-8, longer steps of the latent", None),
}
SHARES = ("precision", "recall", "density", "coverage")
EQUAL = {"evaluations": "equal network evaluations", "updates": "equal updates"}

Row = tuple[str, int]  # an arm and its evaluations per image
Found = dict[Row, dict[str, list[float]]]  # measure -> a number for each seed
LINE = 9.5  # points from name to name
PAID = "paid"  # beside the measures: network evaluations that training took, in thousands


def main() -> None:
    runs = defaultdict[str, list[dict[str, Any]]](list)
    for file in sorted(RESULTS.glob("*.json")):
        run = json.loads(file.read_text())
        runs[run["model"]].append(run)
    here = [model for model in MODELS if model in runs]
    for model in here:
        for equal, title in EQUAL.items():
            rows = table(measured(runs[model], equal), floor_of(runs[model]))
            print(f"\n{MODELS[model]}, {title}\n\n" + "\n".join(rows))
    plt = plots()
    size = (12, 3.8 * len(here))
    figure, axes = plt.subplots(len(here), 3, figsize=size, layout="constrained", squeeze=False)
    for model, row in zip(here, axes, strict=True):
        distance = next(name for name in floor_of(runs[model]) if name.startswith("FD"))
        found = measured(runs[model], "evaluations")
        panels(row, {at: found[at] for at in found if ARMS[at[0]][1]}, distance)
        row[0].set_title(MODELS[model], loc="left")
    figure.savefig(HERE / "one_step.png")


def panels(axes: Any, found: Found, distance: str) -> None:
    """One model."""
    left, middle, right = axes
    for axis, key in ((left, distance), (middle, "recall")):
        for (arm, evaluations), values in found.items():
            spot(axis, [evaluations] * len(values[key]), values[key], ARMS[arm][1])
        axis.set_xscale("log")
        axis.set(xlabel="evaluations per image", ylabel=key, xlim=(0.8, 70))
        axis.set_xticks([1, 2, 3, 4, 5, 50], ["1", "2", "3", "4", "5", "50"], minor=False)
        axis.minorticks_off()
    logarithmic(left)
    fewest = dict(reversed(found))
    ones = [row for row in found if row[1] in (1, 50)]
    for row in ones:
        spot(right, found[row]["recall"], found[row]["precision"], ARMS[row[0]][1])
    right.set(xlabel="recall", ylabel="precision", title="one evaluation, and the teacher")
    right.margins(0.2)
    left.figure.draw_without_rendering()  # from here on it is known how far places are apart
    for axis, key in ((left, distance), (middle, "recall")):
        tell(axis, {arm: (n, fmean(found[arm, n][key])) for arm, n in fewest.items()})
    places = {row[0]: tuple(fmean(found[row][k]) for k in ("recall", "precision")) for row in ones}
    tell(right, places, ("teacher", "second", "emd4", "emd8", "emd16"))


def floor_of(runs: list[dict[str, Any]]) -> dict[str, float]:
    """What real images score."""
    return judged(runs[0], "evaluations")[0]["floor"]


def judged(run: dict[str, Any], equal: str) -> list[dict[str, Any]]:
    """What was found of a run's samples, a row for each number of evaluations.

    Generators alone can have had as many updates as each other.
    """
    if "legs" in run:
        return [run["legs"][equal]]
    return run["judged"] if equal == "evaluations" else []


def measured(runs: list[dict[str, Any]], equal: str) -> Found:
    found: Found = defaultdict(lambda: defaultdict(list))
    for arm in ARMS:
        for run in (run for run in runs if run["arm"] == arm):
            for row in judged(run, equal):
                here = found[arm, row["steps"]]
                share = row["images"] / run["images"] if "legs" in run else 1
                here[PAID].append(share * run.get("evaluations", 0) / 1e3)
                for key, values in row["values"].items():  # of the evaluation's own seeds
                    here[key].append(fmean(values))
    return found


def spot(axis: Any, x: list[float], y: list[float], colour: str) -> None:
    axis.plot(x, y, ".", color=colour, markersize=4)
    axis.plot(fmean(x), fmean(y), "o", color=colour, markersize=7, fillstyle="none")


def tell(
    axis: Any, places: dict[str, tuple[float, ...]], before: tuple[str, ...] = ("teacher",)
) -> None:
    """Names behind their circles, or before where there is room, none over another."""
    dots = axis.figure.dpi / 72
    heights = {arm: axis.transData.transform(at)[1] / dots for arm, at in places.items()}
    spread = dict(heights)
    for _ in range(100):  # neighbours push each other apart, alike
        order = sorted(spread, key=lambda arm: spread[arm])
        for lower, upper in pairwise(order):
            short = max(0.0, LINE - (spread[upper] - spread[lower])) / 2
            spread[lower], spread[upper] = spread[lower] - short, spread[upper] + short
    for arm, at in places.items():
        side = -7 if arm in before else 9
        how = {
            "textcoords": "offset points",
            "fontsize": 7.5,
            "ha": "right" if side < 0 else "left",
        }
        axis.annotate(ARMS[arm][0], at, xytext=(side, spread[arm] - heights[arm] - 3), **how)


def table(found: Found, floor: dict[str, float]) -> list[str]:
    """Means, with the standard deviation where there are several seeds; last real images."""
    keys = [key for key in floor if key[:2] in ("FD", "KD")] + list(SHARES)
    heads = ["", "evaluations", "thousands to train", *keys]
    lines = ["|" + "".join(f" {head} |" for head in heads), "|" + "---|" * len(heads)]
    for (arm, evaluations), values in found.items():
        paid = f"{fmean(values[PAID]):.0f}" if any(values[PAID]) else ""
        cells = [ARMS[arm][0], str(evaluations), paid]
        cells += [spell(values[k], digits(k)) for k in keys]
        lines.append("|" + "".join(f" {cell} |" for cell in cells))
    cells = ["real images", "", "", *(f"{floor[key]:.{digits(key)}f}" for key in keys)]
    return [*lines, "|" + "".join(f" {cell} |" for cell in cells)]


def digits(key: str) -> int:
    return 1 if key.startswith("FD") else 2


if __name__ == "__main__":
    main()
