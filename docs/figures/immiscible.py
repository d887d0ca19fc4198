"""Draws docs/figures/immiscible.png and one-shot.png; prints tables of docs/results/immiscible.md.

python docs/figures/immiscible.py

From benchmarks/results/immiscible: quality against images seen, by sampling steps, a line for the
mean over seeds and a dot for a run; what differences the seeds' spread could show; and what the
denoiser says of pure noise after the same training.
"""

import json
import math
from collections.abc import Iterator
from itertools import product
from statistics import fmean, stdev
from typing import Any

from scipy.optimize import brentq
from scipy.stats import nct
from scipy.stats import t as student
from style import COUPLINGS, HERE, logarithmic, plots, spell

RESULTS = HERE.parent.parent / "benchmarks" / "results" / "immiscible"
NAMES = {"fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}  # in the pictures
TOLD = ("part", "classes")  # in tables alone

LOGGED = ("reduction", "leak", "chance")

Run = dict[str, Any]


def main() -> None:
    runs = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    found = {data: [run for run in runs if run["data"] == data] for data in (*NAMES, *TOLD)}
    curves({data: found[data] for data in NAMES})
    one_shot()
    for data, here in found.items():
        for name in metrics(here):
            print(f"\n{data}: {name}, floor {here[0]['floor'][name]:.4g}\n")
            print("\n".join(table(here, name)))
            print("\n" + "\n".join(compared(here, name)))
    print("\nclasses: what the coupling did\n")
    print("\n".join(leaks(found["classes"])))


def metrics(runs: list[Run]) -> list[str]:
    return [key for key in runs[0]["points"][0] if key[:3] in ("FD-", "KD-")]


def values(runs: list[Run], arm: str, metric: str, images: int, steps: int) -> dict[int, float]:
    """By seed."""
    return {
        run["seed"]: point[metric]
        for run in runs
        for point in run["points"]
        if (run["arm"], point["images"], point["steps"]) == (arm, images, steps)
    }


# ---------------------------------------------------------------- tables


def axes_of(runs: list[Run]) -> tuple[list[str], list[int], list[int]]:
    """The arms, images seen and steps of a table, in its order."""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    arms.sort(key=lambda arm: arm != "independent")
    points = runs[0]["points"]
    return arms, sorted({p["images"] for p in points}), sorted({p["steps"] for p in points})


def table(runs: list[Run], metric: str) -> Iterator[str]:
    """Means over seeds and their deviation, after half of the images and after all."""
    arms, images, steps = axes_of(runs)
    columns = [(i, n) for i in images[1::2] or images for n in steps]
    yield "| seeds |" + "".join(f" {i:,} images, {n} steps |" for i, n in columns)
    yield "|---|" + "---|" * len(columns)
    for arm in arms:
        found = [list(values(runs, arm, metric, *column).values()) for column in columns]
        yield f"| {arm} ({len(found[0])}) |" + "".join(f" {cell(each)} |" for each in found)


def cell(found: list[float]) -> str:
    return spell(found, 0 if fmean(found) > 5 else 3)


def compared(runs: list[Run], metric: str) -> Iterator[str]:
    """Each arm's change over independent noise, paired by seed, and what the spread can show."""
    arms, images, steps = axes_of(runs)
    logs = {
        (arm, n, i): changes(runs, arm, metric, i, n)
        for arm, n, i in product(arms[1:], steps, images)
    }
    yield "| |" + "".join(f" {i:,} images |" for i in images) + " as good after |"
    yield "|---|" + "---|" * (len(images) + 1)
    for arm, n in product(arms[1:], steps):
        cells = "".join(f" {change(logs[arm, n, i])} |" for i in images)
        yield f"| {arm}, {n} steps |{cells} {needed(runs, arm, metric, n)} |"
    for i in images:
        here = [logs[arm, n, i] for arm, n in product(arms[1:], steps) if len(logs[arm, n, i]) > 1]
        if here:
            yield f"\n{i:,} images: {visible(here)}"


def changes(runs: list[Run], arm: str, metric: str, images: int, steps: int) -> list[float]:
    """Logarithms of the arm's value over that of independent noise, of each seed that has both."""
    plain, other = (values(runs, a, metric, images, steps) for a in ("independent", arm))
    return [math.log(other[seed] / plain[seed]) for seed in plain if seed in other]


def change(logs: list[float]) -> str:
    """The mean, and in brackets each seed's."""
    each = ", ".join(percent(log) for log in logs) if len(logs) > 1 else ""
    return percent(fmean(logs)) + (f" ({each})" if each else "")


def percent(log: float) -> str:
    return f"{100 * math.expm1(log):+.0f}%"


def visible(logs: list[list[float]]) -> str:
    """From the seeds' spread, pooled over arms and steps: what a mean change must be to be seen.

    Arms share the run they are compared with, and steps their model, so degrees of freedom are
    counted as those of one arm: too few rather than too many.
    """
    seeds = min(map(len, logs))
    freedom = seeds - 1
    error = math.sqrt(fmean(stdev(each) ** 2 for each in logs) / seeds)
    bound = student.ppf(0.975, freedom)

    def missed(effect: float) -> float:
        return float(nct.cdf(bound, freedom, effect)) - 0.2  # of 1 in 5; effect in standard errors

    strong = float(brentq(missed, bound, 100.0))  # type: ignore[arg-type]
    return (
        f"chance shows {100 * math.expm1(bound * error):.0f}% one time in twenty; a change of "
        f"{100 * math.expm1(strong * error):.0f}% is seen four times in five ({seeds} seeds)"
    )


def leaks(runs: list[Run]) -> Iterator[str]:
    """How often a probe names the class from the noise, at the end of training."""
    for run in (run for run in runs if run["arm"] != "independent"):
        last = (fmean(value for _, value in run[f"coupling/{key}"]) for key in LOGGED)
        said = ", ".join(f"{key} {value:.3f}" for key, value in zip(LOGGED, last, strict=True))
        yield f"{run['arm']}: {said}"


def needed(runs: list[Run], arm: str, metric: str, steps: int) -> str:
    """The share of images after which the arm is what independent noise ends with, by seed."""
    _, images, _ = axes_of(runs)
    plain = values(runs, "independent", metric, images[-1], steps)
    others = [values(runs, arm, metric, i, steps) for i in images]
    shares = [
        reached(images, [other[seed] for other in others], goal)
        for seed, goal in plain.items()
        if seed in others[-1]
    ]
    return ", ".join(f"{100 * share:.0f}%" if share else "never" for share in shares)


def reached(images: list[int], curve: list[float], goal: float) -> float | None:
    """When the curve is at the goal for good, on straight lines between checkpoints."""
    if curve[-1] > goal:
        return None
    last = max((i for i, value in enumerate(curve) if value > goal), default=None)
    if last is None:
        return images[0] / images[-1]
    share = (curve[last] - goal) / (curve[last] - curve[last + 1])
    return (images[last] + share * (images[last + 1] - images[last])) / images[-1]


# ---------------------------------------------------------------- pictures


def curves(found: dict[str, list[Run]]) -> None:
    plt = plots()
    _, _, steps = axes_of(next(iter(found.values())))
    rows = [(data, here, metric) for data, here in found.items() for metric in metrics(here)]
    size = (3.1 * len(steps), 2.4 * len(rows))
    figure, axes = plt.subplots(len(rows), len(steps), figsize=size, squeeze=False, sharey="row")
    for row, (data, here, metric) in zip(axes, rows, strict=True):
        for axis, count in zip(row, steps, strict=True):
            draw_arms(axis, here, metric, count)
            axis.set_title(f"{NAMES[data]}, {count} steps")
            logarithmic(axis)
        # The floor, what two halves of real images have, is far below the axis.
        row[0].set_ylabel(f"{metric}\n(floor {here[0]['floor'][metric]:.2g})")
        row[-1].legend(title="seeds in brackets", fontsize=7.5, title_fontsize=7.5)
    for axis in axes[-1]:
        axis.set_xlabel("thousand images seen")
    figure.tight_layout()
    figure.savefig(HERE / "immiscible.png")


def draw_arms(axis: Any, runs: list[Run], metric: str, steps: int) -> None:
    arms, images, _ = axes_of(runs)
    for arm in (arm for arm in COUPLINGS if arm in arms):
        found = [list(values(runs, arm, metric, i, steps).values()) for i in images]
        thousands = [i / 1000 for i in images]
        colour, label = COUPLINGS[arm], f"{arm} ({len(found[0])})"
        axis.plot(thousands, [fmean(each) for each in found], color=colour, label=label)
        for x, each in zip(thousands, found, strict=True):
            axis.scatter([x] * len(each), each, color=colour, s=8)


def one_shot() -> None:
    """The pictures that the runs of seed 0 left, side by side."""
    plt = plots()
    files = {
        (data, arm): RESULTS / f"{data}-{arm}-0.png"
        for data in NAMES
        for arm in COUPLINGS
        if (RESULTS / f"{data}-{arm}-0.png").exists()
    }
    size = (2.3 * len(files), 2.9)
    figure, axes = plt.subplots(1, len(files), figsize=size, squeeze=False, layout="constrained")
    for axis, ((data, arm), file) in zip(axes[0], files.items(), strict=True):
        axis.imshow(plt.imread(file))
        axis.set_title(f"{NAMES[data]}\n{arm}")
        axis.axis("off")
    figure.savefig(HERE / "one-shot.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
