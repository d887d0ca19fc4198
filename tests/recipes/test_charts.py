"""Charts: where points land, what ticks say, what is kept of a long series."""

import json
import math
import re
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillhouse.recipes.report.charts import (
    UNITS,
    Axis,
    Marks,
    Series,
    axis_around,
    line_chart,
    linear_ticks,
    log_ticks,
    short,
    smooth,
    spans_decades,
    spread,
    thin_out,
    tick_label,
)

finite = st.floats(-1e9, 1e9, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-9)
positive = st.floats(1e-9, 1e9)


def path(chart: str, look: str = "c0") -> list[tuple[float, float]]:
    """The corners of a drawn line."""
    (drawn,) = re.findall(rf'<path class="{look}" d="M([^"]+)"', chart)
    return [(float(a), float(b)) for a, b in (corner.split(" ") for corner in drawn.split("L"))]


def label_places(chart: str, anchor: str, place: str) -> dict[str, float]:
    """What the ticks of an axis say, and where, as a fraction."""
    found = re.findall(
        rf'<text x="([^"]+)" y="([^"]+)" dy="{place}" text-anchor="{anchor}">(.*?)<', chart
    )
    at = 0 if anchor == "middle" else 1
    return {item[2]: float(item[at].rstrip("%")) / 100 for item in found}


# ---------------------------------------------------------------- places


def test_points_land_where_the_affine_map_puts_them():
    points = [(0, 2.0), (250, 4.0), (1000, 3.0)]
    chart = line_chart("t", [Series(points, "s")], x=Axis(0, 1000), y=Axis(2, 4))
    assert path(chart) == [(0, UNITS), (0.25 * UNITS, 0), (UNITS, UNITS / 2)]


def test_logarithmic_axis_places_decades_evenly():
    points = [(1, 0.01), (10, 0.1), (100, 1.0)]
    chart = line_chart("t", [Series(points, "s")], x=Axis(1, 100, True), y=Axis(0.01, 1, True))
    assert path(chart) == [(0, UNITS), (UNITS / 2, UNITS / 2), (UNITS, 0)]


@given(st.lists(st.tuples(finite, finite), min_size=2, max_size=30))
def test_lines_and_tick_labels_share_one_scale(points):
    """Positions read back through the two outermost ticks give the data again."""
    x, y = axis_around(a for a, _ in points), axis_around(b for _, b in points)
    corners = path(line_chart("t", [Series(points, "s")], x=x, y=y))
    for axis, i in ((x, 0), (y, 1)):
        low, *_, high = axis.ticks(5)
        scale = (high - low) / (axis.place(high) - axis.place(low))
        for point, corner in zip(points, corners, strict=True):
            fraction = corner[i] / UNITS if i == 0 else 1 - corner[i] / UNITS
            assert low + (fraction - axis.place(low)) * scale == pytest.approx(
                point[i], abs=1e-4 * (axis.high - axis.low)
            )


def test_ticks_are_written_where_their_values_are():
    chart = line_chart(
        "t", [Series([(0, 0.0), (40_000, 1.0)], "s")], x=Axis(0, 40_000), y=Axis(0, 1)
    )
    assert label_places(chart, "middle", "18") == {
        "0": 0, "10k": 0.25, "20k": 0.5, "30k": 0.75, "40k": 1,
    }  # fmt: skip
    assert label_places(chart, "end", ".35em") == {
        "0": 1, "0.2": 0.8, "0.4": 0.6, "0.6": 0.4, "0.8": 0.2, "1.0": 0,
    }  # fmt: skip


def test_marks_stand_at_their_images_and_outside_ones_are_left_out():
    x = Axis(0, 1000)
    marks = Marks(restarts=[250, 2000], skips=[500])
    chart = line_chart("t", [Series([(0, 0), (1000, 1)], "s")], x=x, y=Axis(0, 1), marks=marks)
    assert re.findall(r'<line class="(restart|skip)" x1="([\d.]+%)"', chart) == [
        ("restart", "25.00%"),
        ("skip", "50.00%"),
    ]


def test_what_a_logarithmic_axis_cannot_hold_is_left_out():
    points = [(0, 0.0), (1, 0.1), (2, -1.0), (3, 1.0)]
    chart = line_chart("t", [Series(points, "s")], x=Axis(0, 3), y=Axis(0.1, 1, True))
    assert path(chart) == [(pytest.approx(UNITS / 3, abs=0.1), UNITS), (UNITS, 0)]


def test_readout_holds_the_points_and_the_axes():
    chart = line_chart("t", [Series([(1, 0.5), (3, 0.25)], "a<b")], x=Axis(0, 4), y=Axis(0, 1))
    (data,) = re.findall(r'data-chart="([^"]+)"', chart)
    assert json.loads(unescape(data)) == {
        "name": "images",
        "x": [0, 4, False],
        "y": [0, 1, False],
        "series": [{"name": "a<b", "look": "c0", "points": [[1, 0.5], [3, 0.25]]}],
    }


def test_names_and_titles_are_escaped():
    evil = '"><script>alert(1)</script>'
    line = Series([(0, 1.0), (1, 2.0)], evil, evil)
    chart = line_chart(evil, [line], x=Axis(0, 1), y=Axis(1, 2), x_name=evil, legend=True)
    assert "<script" not in chart
    assert chart.count("&lt;script&gt;") >= 4


# ---------------------------------------------------------------- ticks


@given(finite, st.floats(1e-6, 1e9), st.integers(2, 8))
def test_linear_ticks_are_few_even_and_inside(low, span, target):
    high = low + span
    if not high - low > 1e-6 * abs(low):  # no room for floats in between
        return
    ticks, step = linear_ticks(low, high, target)
    digit = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(digit - d) for d in (1, 2, 5)) < 1e-6
    assert target / 2.6 - 1 <= len(ticks) <= target + 1
    assert all(low - 1e-6 * step <= tick <= high + 1e-6 * step for tick in ticks)
    assert ticks == sorted(ticks)
    for tick in ticks:
        assert tick / step == pytest.approx(round(tick / step), abs=1e-4)


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0.1, 1, 6, [0.1, 0.2, 0.5, 1]),
        (0.002, 80, 6, [0.01, 0.1, 1, 10]),
        (1e-9, 1e3, 6, [1e-8, 1e-6, 1e-4, 1e-2, 1, 100]),
        (3, 4, 6, []),
    ],
)
def test_log_ticks(low, high, most, expected):
    assert log_ticks(low, high, most) == expected


@given(st.lists(positive, min_size=1, max_size=20), st.booleans())
def test_an_axis_holds_its_values_and_has_ticks_with_different_labels(values, log):
    axis = axis_around(values, log=log)
    assert all(-1e-6 <= axis.place(value) <= 1 + 1e-6 for value in values)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    assert len(set(ticks.values())) == len(ticks)
    assert all(-1e-6 <= axis.place(tick) <= 1 + 1e-6 for tick in ticks)


def test_an_axis_with_zero_starts_there():
    assert axis_around([3.0, 4.2], zero=True) == Axis(0, 5)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (10_000, "10k"), (1_200_000, "1.2M"), (999_999, "1M"), (999.9, "1k"), (2e9, "2B"),
     (0.02134, "0.0213"), (2e-4, "2e-4"), (1.234e-5, "1.23e-5"), (412.3, "412"), (-1500, "-1.5k"),
     (1e-3, "0.001")],
)  # fmt: skip
def test_short_numbers(value, text):
    assert short(value) == text


@pytest.mark.parametrize(
    ("value", "step", "text"),
    [(0, 1, "0"), (1_500_000, 500_000, "1.5M"), (1_200_500, 500, "1.2005M"), (2e4, 2e4, "20k"),
     (0.1, 0.05, "0.10"), (1.5e-4, 5e-5, "1.5e-4"), (1e-4, 5e-5, "1e-4"), (1.0002, 2e-4, "1.0002"),
     (300, 100, "300"), (-2, 1, "-2")],
)  # fmt: skip
def test_tick_labels(value, step, text):
    assert tick_label(value, step) == text


def test_a_wide_range_asks_for_a_logarithmic_axis():
    assert spans_decades([0.1, 2.0])
    assert not spans_decades([0.1, 0.5])
    assert not spans_decades([0.0, 5.0])
    assert not spans_decades([])


# ---------------------------------------------------------------- long series


def test_thinning_keeps_ends_and_extremes_of_every_bucket():
    points = [(i, math.sin(i * 0.7) + (50 if i == 7_777 else 0) - (9 if i == 31 else 0))
              for i in range(20_000)]  # fmt: skip
    kept = thin_out(points, 100)
    assert len(kept) <= 202
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert set(kept) <= set(points)
    width = points[-1][0] / 100
    for b in range(100):
        inside = [y for x, y in points if b * width <= x < (b + 1) * width]
        left = [y for x, y in kept if b * width <= x < (b + 1) * width]
        assert min(left) == min(inside)
        assert max(left) == max(inside)


def test_short_series_are_not_thinned():
    points = [(i, float(i % 7)) for i in range(50)]
    assert thin_out(points, 25) == points


def test_smoothing_keeps_a_straight_line_but_for_its_end():
    """A centred mean is exact on straight lines; only the last points have one side alone."""
    points = [(i, 3.0 + 0.5 * i) for i in range(1000)]
    smoothed = smooth(points, share=0.02)
    assert smoothed[:-20] == [(x, pytest.approx(y)) for x, y in points[:-20]]
    assert smoothed[-1] == (999, pytest.approx(3.0 + 0.5 * (979 + 999) / 2))


def test_smoothing_does_not_blur_the_first_fall():
    """The mean of 1 / i from a third below to a third above is log(2) / (2 / 3) = 1.04 of it."""
    points = [(i, 1 / i) for i in range(1, 1001)]
    smoothed = smooth(points, share=0.3)
    assert smoothed[:3] == [(x, pytest.approx(y)) for x, y in points[:3]]
    assert all(y / raw < 1.05 for (_, y), (_, raw) in zip(smoothed[:700], points, strict=False))


def test_smoothing_damps_noise_by_the_root_of_its_window():
    points = [(i, float((-1) ** i)) for i in range(1000)]
    assert max(abs(y) for _, y in smooth(points, share=0.05)[200:]) <= 1 / 51 + 1e-9


def test_labels_are_moved_apart_and_stay_inside():
    assert spread([10, 12, 100], 15, 0, 190) == [10, 25, 100]
    assert spread([185, 190, 188], 15, 0, 190) == [160, 190, 175]
    assert spread([-5], 15, 0, 190) == [0]
