"""Draws control_toys.png: what the weight of a size does to content, and what telling flips does.

    python docs/figures/control_toys.py

The numbers are those of benchmarks/results/control_toys.json.
"""

import json
from pathlib import Path
from typing import Any

import torch

from stillhouse.models.control import Gamma
from stillhouse.recipes.pictures import pyplot

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results" / "control_toys.json"
COLOURS = {"constant": "#b2442e", "cosine": "#1d5b8f", "late": "#4f8a5b"}


def main() -> None:
    found = json.loads(RESULTS.read_text())
    figure, axes = pyplot().subplots(1, 4, figsize=(13, 3.2), layout="constrained")
    draw_weights(axes[0], found["size"])
    draw_bars(axes[1], found["size"], "flips", "content changes with the size")
    draw_amplitudes(axes[2], found["size"])
    draw_flips(axes[3], found["flip"])
    figure.savefig(HERE / "control_toys.png", dpi=110)


def draw_weights(axis: Any, sizes: dict[str, Any]) -> None:
    time = torch.linspace(0, 1, 200)
    for name in sizes:
        shape, alpha = name.split()
        weight = Gamma(shape, float(alpha), 1.0)(time)  # type: ignore[arg-type]
        shade = 0.35 + 0.65 * min(1.0, float(alpha) / 8) if shape == "cosine" else 0.9
        axis.plot(time, weight, color=COLOURS[shape], alpha=shade, label=name)
    axis.set(xlabel="time, 1 is pure noise", ylabel="weight of the size", ylim=(-0.03, 1.08))
    axis.legend(fontsize=7)


def draw_bars(axis: Any, sizes: dict[str, Any], key: str, title: str) -> None:
    names, values = list(sizes), [row[key] for row in sizes.values()]
    colours = [COLOURS[name.split()[0]] for name in names]
    heights, errors = ([value[part] for value in values] for part in ("mean", "std"))
    axis.bar(names, heights, yerr=errors, color=colours, capsize=3)
    for place, height in enumerate(heights):
        axis.text(place, height + 0.04, f"{height:.2f}", ha="center", fontsize=8)
    axis.set(ylabel="share of samples", ylim=(0, 1), title=title)
    axis.tick_params(axis="x", rotation=35, labelsize=8)


def draw_amplitudes(axis: Any, sizes: dict[str, Any]) -> None:
    names = list(sizes)
    for key, true, marker in (("small", 0.3, "v"), ("large", 1.5, "^")):
        axis.axhline(true, color="#999999", lw=0.8, ls=":")
        axis.plot(names, [sizes[n][key]["mean"] for n in names], marker, color="#333333", label=key)
    axis.set(ylabel="amplitude of the detail", ylim=(0, 1.7), title="the size is still heard")
    axis.tick_params(axis="x", rotation=35, labelsize=8)
    axis.legend(fontsize=7, title="size", title_fontsize=7)


def draw_flips(axis: Any, flips: dict[str, Any]) -> None:
    arms = {f"constant {name}": row for name, row in flips.items()}
    draw_bars(axis, arms, "red left", "red on the left")
    axis.set_xticks([0, 1], ["flips are told", "not told"], rotation=0)
    axis.axhline(0.5, color="#999999", lw=0.8, ls=":")
    axis.set(ylim=(0, 1.15))


if __name__ == "__main__":
    main()
