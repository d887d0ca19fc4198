"""One look for every figure of the docs."""

from pathlib import Path
from typing import Any

from stillhouse.recipes.pictures import pyplot

HERE = Path(__file__).parent
INK, BLUE, ORANGE, GREY = "#22303c", "#1d5b8f", "#d1862f", "#c9ced6"


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
