"""One look for every figure of the docs."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from stillhouse.recipes.pictures import pyplot

HERE = Path(__file__).parent
INK, BLUE, ORANGE, GREY = "#22303c", "#1d5b8f", "#d1862f", "#c9ced6"
COUPLINGS = {"independent": INK, "assignment": ORANGE, "nearest": BLUE}


def plots() -> Any:
    """pyplot with the docs' settings."""
    plt = pyplot()
    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.edgecolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "legend.frameon": False,
            "figure.dpi": 130,
        }
    )
    return plt


def logarithmic(axis: Any) -> None:
    """A logarithmic height with plain numbers, not powers, beside it."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    ticks = [n * 10.0**k for k in range(-2, 4) for n in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
    ticks = [t for t in ticks if low <= t <= high]
    axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_yticks([], minor=True)


def spell(values: Sequence[float], digits: int) -> str:
    """A table's cell: the mean, with the standard deviation where there are several seeds."""
    spread = f" +- {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"
