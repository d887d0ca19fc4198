"""Draws docs/figures/couplings.png: what noise that lies near does in the plane.

python docs/figures/couplings.py

From the results of benchmarks/moons.py and benchmarks/consistency.py. Also prints their tables.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from style import BLUE, COUPLINGS, GREY, HERE, INK, ORANGE, plots

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ARMS = {
    "from 8 Gaussians to two moons": ("independent", "assignment"),
    "told which moon": ("told/independent", "told/assignment", "told/within-class"),
}
ROWS = {"one_step": "one Euler step", "adaptive": "adaptive solver"}
LINES = {**COUPLINGS, "assignment/4": "#7a4fa3"}
# Cheng & Schwing 2025, figure 1: mean and standard deviation over 10 runs.
PAPER = {
    "independent": ("6.232 ± 0.186", "0.120 ± 0.045"),
    "assignment": ("0.072 ± 0.025", "0.050 ± 0.040"),
    "told/independent": ("2.573 ± 0.112", "0.059 ± 0.029"),
    "told/assignment": ("0.483 ± 0.059", "0.462 ± 0.025"),
    "told/within-class": ("0.048 ± 0.010", "0.018 ± 0.006"),
}


def main() -> None:
    moons, consistency = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("moons", "consistency")
    )
    print_moons(moons)
    print_consistency(consistency)
    plt = plots()
    figure = plt.figure(figsize=(12.5, 4.3), layout="constrained")
    *left, right = figure.subfigures(1, 3, width_ratios=(2.13, 3, 2.2))
    for part, (title, arms) in zip(left, ARMS.items(), strict=True):
        part.suptitle(title, fontsize=10, color=INK)
        draw_moons(part.subplots(len(ROWS), len(arms)), moons, arms)
    right.suptitle("consistency training of a ring", fontsize=10, color=INK)
    draw_consistency(right.subplots(), consistency)
    figure.savefig(HERE / "couplings.png")


# ---------------------------------------------------------------- pictures


def draw_moons(axes: Any, moons: dict[str, Any], arms: Sequence[str]) -> None:
    for row, (sampler, title) in zip(axes, ROWS.items(), strict=True):
        for axis, name in zip(row, arms, strict=True):
            draw_samples(axis, moons["shown"][name], sampler, told=name.startswith("told"))
            axis.set_xlabel(f"W₂² {mean_and_spread(moons['arms'][name][sampler])}", labelpad=0)
        if "independent" in arms:
            row[0].set_ylabel(title)
    for axis, name in zip(axes[0], arms, strict=True):
        axis.set_title(name.removeprefix("told/").replace("-", " "), color=INK, fontsize=9, pad=2)


def draw_samples(axis: Any, shown: dict[str, str], sampler: str, *, told: bool) -> None:
    """Where samples land, over the source; where the network was told the moon, in its colour."""
    axis.scatter(*points(shown["source"]), s=2, color=GREY, lw=0)
    x, y = points(shown[sampler])
    for moon, colour in enumerate((BLUE, ORANGE if told else BLUE)):
        axis.scatter(x[moon::2], y[moon::2], s=3.5, color=colour, lw=0, alpha=0.8)
    axis.set(xlim=(-6.6, 6.6), ylim=(-6.6, 6.6), xticks=[], yticks=[], aspect="equal")
    axis.spines[:].set_visible(False)


def points(text: str) -> tuple[Sequence[float], Sequence[float]]:
    x, y = zip(*(map(float, pair.split(",")) for pair in text.split()), strict=True)
    return x, y


def draw_consistency(axis: Any, result: dict[str, Any]) -> None:
    images = [n / 1000 for n in result["images"]]
    for name, colour in LINES.items():
        curves = list(zip(*result["w2"][name], strict=True))
        axis.fill_between(
            images, [min(c) for c in curves], [max(c) for c in curves], color=colour, alpha=0.15
        )
        label = name.replace("/", ", pools of ")
        axis.plot(images, [statistics.mean(c) for c in curves], color=colour, lw=1.6, label=label)
    axis.axhline(statistics.mean(result["floor"]), color=GREY, lw=1, ls="--", label="floor")
    axis.set(
        xlabel="points seen, thousands",
        ylabel="W₂² of one-step samples and data",
        yscale="log",
        xlim=(0, images[-1]),
    )
    axis.grid(color=GREY, lw=0.4)
    axis.legend(fontsize=8)


# ---------------------------------------------------------------- tables


def mean_and_spread(values: Sequence[float]) -> str:
    """Over seeds, with the standard deviation."""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def print_moons(moons: dict[str, Any]) -> None:
    print("| arm | one step, paper | ours | of each moon | adaptive, paper | ours | of each moon |")
    print("|---|---|---|---|---|---|---|")
    for name, row in moons["arms"].items():
        cells = [
            (paper, mean_and_spread(row[each]), by_moon(row, each))
            for paper, each in zip(PAPER.get(name, ("", "")), ROWS, strict=True)
        ]
        print(f"| {name} | " + " | ".join(cell for three in cells for cell in three) + " |")
    floors = [mean_and_spread(moons[name]) for name in ("floor", "floor_by_class")]
    print(f"| floor | | {floors[0]} | {floors[1]} | | {floors[0]} | {floors[1]} |")


def by_moon(row: dict[str, list[float]], sampler: str) -> str:
    found = row.get(f"{sampler}_by_class")
    return mean_and_spread(found) if found else ""


def print_consistency(result: dict[str, Any]) -> None:
    shares = (len(result["images"]) // 4, len(result["images"]) // 2, len(result["images"]))
    seen = " | ".join(f"{result['images'][n - 1]:,}" for n in shares)
    titles = " | ".join(f"thousand points to {goal}" for goal in result["images_to"])
    print(f"\n| arm | {seen} | {titles} | to equal quality |")
    print("|---|" + "---|" * (4 + len(result["images_to"])))
    for name, curves in result["w2"].items():
        cells = " | ".join(mean_and_spread([curve[n - 1] for curve in curves]) for n in shares)
        goals = [*result["images_to"].values(), result["images_to_equal"]]
        passed = " | ".join(points_seen(seeds[name]) for seeds in goals)
        print(f"| {name} | {cells} | {passed} |")


def points_seen(seeds: Sequence[int | None]) -> str:
    """In thousands, by seed."""
    return ", ".join(f"{n // 1000}" if n else "never" for n in seeds)


if __name__ == "__main__":
    main()
