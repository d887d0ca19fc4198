"""Charts of the report over noise levels, from early in training to late."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from stillhouse.recipes.report import charts
from stillhouse.recipes.report.charts import Point, Series, short
from stillhouse.recipes.report.runs import Run, is_number, mapping, put

MOMENTS = 6  # curves over noise levels, a colour each


@dataclass(frozen=True)
class _Levels:
    """Mean losses between neighbouring noise levels, at one moment."""

    images: int
    edges: list[Any]
    loss: list[Any]


def noise_levels(run: Run) -> str:
    """The losses of training and validation."""
    training, validation = _levels(run, "levels"), _levels(run, "validation/levels")
    drawn = (
        _levels_chart("training", _curves(training, reach=0.25)),
        _levels_chart("validation", _curves(validation, reach=0)),
    )
    return charts.side_by_side(drawn)


def _levels(run: Run, key: str) -> list[_Levels]:
    found: list[tuple[int, _Levels]] = []
    for line in run.events(key):
        edges, loss = (mapping(line[key]).get(name) for name in ("edges", "loss"))
        if isinstance(edges, list) and isinstance(loss, list) and len(edges) == len(loss) + 1:
            put(found, (line["images"], _Levels(line["images"], edges, loss)))
    # Levels divided in another way cannot share a curve with the latest ones.
    return [levels for _, levels in found if levels.edges == found[-1][1].edges]


def _curves(levels: Sequence[_Levels], reach: float) -> list[Series]:
    """Early to late, closer early on, where more changes; means of `reach` to either side."""
    last, count = MOMENTS - 1, len(levels)
    moments = sorted({round(count ** (k / last)) - 1 for k in range(MOMENTS)}) if count else []
    curves = []
    for rank, i in enumerate(reversed(moments)):
        near, shade = int(reach * i), last - round(rank * last / max(1, len(moments) - 1))
        points, name = _curve(levels[i - near : i + near + 1]), f"{short(levels[i].images)} images"
        curves.append(Series(points, name, look=f"m{shade}", dots=True))
    return curves[::-1]


def _curve(levels: Sequence[_Levels]) -> list[Point]:
    edges, points = levels[0].edges, []
    for k, ends in enumerate(pairwise(edges)):
        sigmas = [math.log(edge) for edge in ends if is_number(edge) and edge > 0]
        losses = [level.loss[k] for level in levels if is_number(level.loss[k])]
        if sigmas and losses:
            points.append((math.exp(fmean(sigmas)), fmean(losses)))
    return points


def _levels_chart(title: str, curves: Sequence[Series]) -> str:
    sigmas, losses = ([p[i] for curve in curves for p in curve.points] for i in (0, 1))
    if not sigmas:
        return ""
    x = charts.axis_around(sigmas, log=True)
    y = charts.axis_around(losses, log=charts.spans_decades(losses))
    return charts.line_chart(title, curves, x=x, y=y, x_name="noise level σ", legend=True)
