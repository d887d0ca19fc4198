"""Line charts as inline SVG, drawn in plain Python.

An SVG without a viewBox holds the words and the grid, placed in percent; one stretched inside it
holds the lines. So the charts fill any width and the words keep their size.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, groupby

Point = tuple[float, float]

UNITS = 1000  # the width and height of the stretched part
BUCKETS = 400
HEIGHT = 190  # pixels
LETTER = 7  # pixels, a little wider than most letters at this size


@dataclass(frozen=True)
class Series:
    """One line: its points in order of x, its name in the readout, its label at the right end."""

    points: Sequence[Point]
    name: str
    label: str = ""
    look: str = "c0"
    """A colour of `STYLE`: c0 to c5 for things that differ, m0 to m5 from early to late."""
    faint: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """Maps values to [0, 1]."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, target: int = 5) -> dict[float, str]:
        """Round values on the axis and what to write beside them."""
        if self.log and self.high > 3 * self.low:
            return {v: short(v) for v in log_ticks(self.low, self.high, most=target + 3)}
        values, step = linear_ticks(self.low, self.high, target)
        return {value: tick_label(value, step) for value in values}


@dataclass(frozen=True)
class Marks:
    """Moments to point out: restarts as dashed lines, skipped updates as ticks below the axis."""

    restarts: Sequence[float] = ()
    skips: Sequence[float] = ()


# ---------------------------------------------------------------- numbers


def short(value: float, digits: int = 3) -> str:
    """A number for a small space: 10k, 1.2M, 0.021, 2e-4."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    rounded = float(f"{value:.{digits}g}")
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= unit:
            return f"{float(f'{rounded / unit:.{digits}g}'):.12g}{letter}"
    return _power(rounded, digits) if abs(rounded) < 1e-3 else f"{rounded:.12g}"


def tick_label(value: float, step: float) -> str:
    """A tick with as many decimals as tell it from its neighbours."""
    if value == 0:
        return "0"
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            text = f"{value / unit:.{_decimals(step / unit)}f}"
            return (text.rstrip("0").rstrip(".") if "." in text else text) + letter
    if step < 5e-4 and abs(value) < 0.01:
        return _power(value, 1 + _decimals(step) - _decimals(abs(value)))
    return f"{value:.{_decimals(step)}f}"


def _power(value: float, digits: int) -> str:
    base, _, exponent = f"{value:.{max(digits - 1, 0)}e}".partition("e")
    return f"{base.rstrip('0').rstrip('.') if '.' in base else base}e{int(exponent)}"


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def linear_ticks(low: float, high: float, target: int) -> tuple[list[float], float]:
    """About `target` multiples of a step in [low, high], and the step: 1, 2 or 5 times a power."""
    rough = (high - low) / target
    power = math.floor(math.log10(rough))
    digit = next(d for d in (1, 2, 5, 10) if rough <= d * 10.0**power * (1 + 1e-9))
    step = digit * 10.0**power
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # A division by a whole power is rounded once, so 3 * 0.1 is written 0.3.
    scale = 10 ** abs(power)
    counts = (i * digit for i in range(first, last + 1))
    return [n / scale if power < 0 else float(n * scale) for n in counts], step


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """1, 2, 5 times powers of ten in [low, high]; where these are too many, powers alone."""
    powers = range(math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9) + 1)
    for digits, every in [((1, 2, 5), 1), *(((1,), n) for n in range(1, len(powers) + 1))]:
        values = [float(f"{d}e{p}") for p in powers if p % every == 0 for d in digits]
        inside = [v for v in values if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if len(inside) <= most:
            return inside
    return []


# ---------------------------------------------------------------- axes and points


def axis_around(values: Iterable[float], *, log: bool = False, zero: bool = False) -> Axis:
    """An axis that ends on ticks and holds all values; with `zero`, 0 too."""
    values = list(values)
    low, high = min(values), max(values)
    if log:
        return Axis(*_rungs_around(low, high), log=True)
    low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # one value: some room about it
        room = abs(high) * 0.1 or 1.0
        low, high = low - room, high + room
    step = linear_ticks(low, high, 5)[1]
    return Axis(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step)


def _rungs_around(low: float, high: float) -> tuple[float, float]:
    power = math.floor(math.log10(low))
    below = max(d * 10.0**power for d in (1, 2, 5) if d * 10.0**power <= low * (1 + 1e-9))
    power = math.floor(math.log10(high))
    above = min(d * 10.0**power for d in (1, 2, 5, 10) if d * 10.0**power >= high * (1 - 1e-9))
    return (below, above) if above > below else (below / 2, above * 2)


def spans_decades(values: Iterable[float], ratio: float = 10.0) -> bool:
    """Whether a logarithmic axis shows these values better."""
    values = list(values)
    return bool(values) and min(values) > 0 and max(values) > ratio * min(values)


def thin_out(points: Sequence[Point], buckets: int = BUCKETS) -> list[Point]:
    """The lowest and the highest point of every bucket of x, and both ends: it looks the same."""
    if len(points) <= 2 * buckets:
        return list(points)
    first, width = points[0][0], (points[-1][0] - points[0][0]) / buckets or 1.0
    kept = {0, len(points) - 1}
    for _, group in groupby(range(len(points)), lambda i: int((points[i][0] - first) / width)):
        members = list(group)
        kept.add(min(members, key=lambda i: points[i][1]))
        kept.add(max(members, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def smooth(points: Sequence[Point], share: float = 0.02) -> list[Point]:
    """Centred means over `share` of the points to either side, fewer where the curve begins.

    The window grows with the distance from the start, as a fixed one would blur the first fall.
    """
    sums = [0.0, *accumulate(y for _, y in points)]
    count, reach = len(points), math.ceil(share * len(points))
    smoothed = []
    for i, (x, _) in enumerate(points):
        half = min(reach, i // 3)
        start, end = i - half, min(i + half + 1, count)
        smoothed.append((x, (sums[end] - sums[start]) / (end - start)))
    return smoothed


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places moved apart until neighbours are `gap` away, within [low, high] if they fit."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved, edge = list(places), low
    for i in order:
        moved[i] = max(moved[i], edge)
        edge = moved[i] + gap
    edge = high
    for i in reversed(order):
        moved[i] = min(moved[i], edge)
        edge = moved[i] - gap
    return moved


# ---------------------------------------------------------------- drawing


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x: Axis,
    y: Axis,
    x_name: str = "images",
    marks: Marks | None = None,
    legend: bool = False,
) -> str:
    """A figure with its readout's data, later series on top of earlier ones."""
    lines = [_fitting(line, x, y) for line in series]
    labels, room = _end_labels(lines, y)
    ticks = y.ticks()
    left = 12 + LETTER * max(map(len, ticks.values()), default=0)
    drawn = "".join(_line(line, x, y) for line in lines)
    inner = (
        f'<svg class="lines" viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" '
        f'width="100%" height="100%">{drawn}</svg>'
    )
    body = (
        _grid(x, y, ticks, x_name)
        + _marks(marks or Marks(), x)
        + inner
        + _dots(lines, x, y)
        + labels
    )
    return (
        f'<figure class="chart" style="--left:{left}px;--right:{room}px">'
        f"<figcaption>{escape(title)}</figcaption>"
        f'<div class="plot"><svg role="img" tabindex="0" height="{HEIGHT}" '
        f'aria-label="{escape(_told(title, lines, x_name))}" '
        f'data-chart="{escape(_readout(lines, x, y, x_name))}">{body}</svg></div>'
        f"{_legend(lines) if legend else ''}</figure>"
    )


def side_by_side(drawn: Iterable[str], kind: str = "") -> str:
    """Figures in a row, as many as fit; "small" ones are more."""
    figures = "".join(drawn)
    return f'<div class="charts {kind}">{figures}</div>' if figures else ""


def _fitting(line: Series, x: Axis, y: Axis) -> Series:
    """The series without what a logarithmic axis cannot hold, and with no more than can be seen."""
    fits = [p for p in line.points if (p[0] > 0 or not x.log) and (p[1] > 0 or not y.log)]
    return replace(line, points=thin_out(fits))


def _line(line: Series, x: Axis, y: Axis) -> str:
    places = [f"{x.place(a) * UNITS:.1f} {(1 - y.place(b)) * UNITS:.1f}" for a, b in line.points]
    faint = " faint" if line.faint else ""
    return f'<path class="{line.look}{faint}" d="M{"L".join(places)}"/>' if places else ""


def _dots(lines: Sequence[Series], x: Axis, y: Axis) -> str:
    """Points of short series, and the last point of a labelled one."""
    dots = []
    for line in lines:
        many = len(line.points) > 60 or not line.dots
        for a, b in (line.points[-1:] if many else line.points) if line.dots or line.label else ():
            cx, cy = _percent(x.place(a)), _percent(1 - y.place(b))
            dots.append(f'<circle class="{line.look}" cx="{cx}" cy="{cy}" r="2.5"/>')
    return "".join(dots)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"


def _grid(x: Axis, y: Axis, y_ticks: dict[float, str], x_name: str) -> str:
    parts = []
    for value, text in y_ticks.items():
        at = _percent(1 - y.place(value))
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="-8" y="{at}" dy=".35em" text-anchor="end">{text}</text>')
    for value, text in x.ticks(4).items():
        at = _percent(x.place(value))
        parts.append(f'<line class="tick" x1="{at}" x2="{at}" y1="100%" y2="{HEIGHT + 4}"/>')
        parts.append(f'<text x="{at}" y="100%" dy="18" text-anchor="middle">{text}</text>')
    parts.append('<line class="base" x1="0" x2="100%" y1="100%" y2="100%"/>')
    name = f'<text x="50%" y="100%" dy="34" text-anchor="middle">{escape(x_name)}</text>'
    return "".join([*parts, name])


def _marks(marks: Marks, x: Axis) -> str:
    def lines(look: str, what: str, top: str, end: str, moments: Sequence[float]) -> str:
        places = {_percent(round(x.place(m), 3)): m for m in moments if x.low <= m <= x.high}
        return "".join(
            f'<line class="{look}" x1="{at}" x2="{at}" y1="{top}" y2="{end}">'
            f"<title>{what} at {moment:,.0f} images</title></line>"
            for at, moment in places.items()
        )

    restarts = lines("restart", "restart", "0", "100%", marks.restarts)
    return restarts + lines("skip", "skipped update", "100%", f"{HEIGHT + 7}", marks.skips)


def _end_labels(lines: Sequence[Series], y: Axis) -> tuple[str, int]:
    """Labels beside the lines' last points, moved apart; and the pixels that they need."""
    named = [line for line in lines if line.label and line.points]
    places = [(1 - y.place(line.points[-1][1])) * HEIGHT for line in named]
    words = [line.label if len(line.label) <= 14 else f"{line.label[:13]}…" for line in named]
    texts = [
        f'<text class="end {line.look}" x="100%" dx="8" y="{at:.1f}" dy=".35em">'
        f"{escape(word)}</text>"
        for line, word, at in zip(named, words, spread(places, 15, 0, HEIGHT), strict=True)
    ]
    return "".join(texts), 16 + LETTER * max(map(len, words), default=1)


def _legend(lines: Sequence[Series]) -> str:
    rows = (f'<li><i class="{line.look}"></i>{escape(line.name)}</li>' for line in lines)
    return f'<ul class="legend">{"".join(rows)}</ul>'


def _told(title: str, lines: Sequence[Series], x_name: str) -> str:
    """The chart in words, for those who do not see it."""
    ends = [
        f"{line.name} goes from {short(line.points[0][1])} to {short(line.points[-1][1])}"
        for line in lines
        if line.points and not line.faint
    ]
    return f"{title} over {x_name}: {'; '.join(ends) or 'no points'}."


def _readout(lines: Sequence[Series], x: Axis, y: Axis, x_name: str) -> str:
    def axis(axis: Axis) -> list[float | bool]:
        return [axis.low, axis.high, axis.log]

    rows = [
        {"name": line.name, "look": line.look, "points": [_digits(p) for p in line.points]}
        for line in lines
    ]
    content = {"name": x_name, "x": axis(x), "y": axis(y), "series": rows}
    return json.dumps(content, separators=(",", ":"))


def _digits(point: Point) -> list[float]:
    return [
        int(point[0]) if point[0] == int(point[0]) else float(f"{point[0]:.4g}"),
        float(f"{point[1]:.5g}"),
    ]


# ---------------------------------------------------------------- look and script

STYLE = """
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); }
.c4 { --c: var(--c4); } .c5 { --c: var(--c5); } .m0 { --c: var(--m0); } .m1 { --c: var(--m1); }
.m2 { --c: var(--m2); } .m3 { --c: var(--m3); } .m4 { --c: var(--m4); } .m5 { --c: var(--m5); }
.charts { display: grid; gap: 20px 28px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
.charts.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 300px), 1fr)); }
.chart { margin: 0; min-width: 0; }
.chart figcaption { font-size: 14px; font-weight: 600; margin-bottom: 10px; }
.plot { position: relative; margin: 0 var(--right) 42px var(--left); }
.plot > svg { display: block; width: 100%; overflow: visible; touch-action: pan-y; }
.plot > svg:focus-visible { outline: 2px solid var(--c0); outline-offset: 6px; }
.plot text { fill: var(--quiet); font-size: 12px; }
.plot text.end { fill: var(--c); font-weight: 600; }
.plot .grid { stroke: var(--hair); } .plot .base, .plot .tick { stroke: var(--quiet); }
.plot .restart { stroke: var(--quiet); stroke-dasharray: 3 3; opacity: .7; }
.plot .skip { stroke: var(--bad); stroke-width: 2; }
.plot .cursor { stroke: var(--quiet); }
.lines { overflow: visible; }
.lines path { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.lines .faint { stroke-width: 1; opacity: .35; }
.plot circle { fill: var(--c); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 0 0 0 var(--left); padding: 0;
  list-style: none; font-size: 13px; color: var(--quiet); }
.legend i, .tip i { display: inline-block; width: 14px; height: 3px; margin-right: 6px;
  vertical-align: middle; background: var(--c); }
.tip { position: absolute; top: 0; z-index: 1; padding: 4px 8px; pointer-events: none;
  font-size: 12px; white-space: nowrap; background: var(--paper); border: 1px solid var(--hair);
  border-radius: 4px; }
.tip div { display: flex; align-items: center; } .tip b { margin-left: auto; padding-left: 12px; }
"""

SCRIPT = """
"use strict";
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const { name, x, y, series } = JSON.parse(svg.dataset.chart);
  const tip = document.createElement("div"), marks = [];
  const place = ([low, high, log], v) =>
    log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
  const number = v => Math.abs(v) >= 1e-3 || v === 0
    ? (+v.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 })
    : v.toExponential(2);
  const draw = (tag, attributes) => {
    const mark = document.createElementNS(svg.namespaceURI, tag);
    for (const [key, value] of Object.entries(attributes)) mark.setAttribute(key, value);
    marks.push(svg.appendChild(mark));
  };
  const row = (text, look, value) => {
    const line = tip.appendChild(document.createElement("div"));
    if (look) line.appendChild(document.createElement("i")).className = look;
    line.append(text);
    if (look) line.appendChild(document.createElement("b")).textContent = value;
  };
  const hide = () => { tip.remove(); marks.splice(0).forEach(mark => mark.remove()); };
  const percent = fraction => `${100 * fraction}%`;
  let at = 1;
  const show = fraction => {
    hide();
    tip.className = "tip";
    tip.replaceChildren();
    const far = point => Math.abs(place(x, point[0]) - fraction);
    const near = series.filter(line => line.points.length).map(line =>
      [line, line.points.reduce((best, point) => far(point) < far(best) ? point : best)]);
    if (!near.length) return;
    const first = near[0][1][0];
    at = place(x, first);
    row(name === "images" ? `${first.toLocaleString("en")} images` : `${name} ${number(first)}`);
    draw("line", { class: "cursor", x1: percent(at), x2: percent(at), y1: 0, y2: "100%" });
    for (const [line, point] of near) {
      row(line.name, line.look, number(point[1]));
      draw("circle", { class: line.look, r: 3.5, cx: percent(place(x, point[0])),
        cy: percent(1 - place(y, point[1])) });
    }
    tip.style[at < .5 ? "left" : "right"] = `calc(${percent(at < .5 ? at : 1 - at)} + 10px)`;
    tip.style[at < .5 ? "right" : "left"] = "auto";
    svg.after(tip);
  };
  const step = by => {
    const places = series[0].points.map(point => place(x, point[0]));
    const i = places.findIndex(p => p >= at - 1e-9);
    show(places[Math.min(places.length - 1, Math.max(0, (i < 0 ? places.length - 1 : i) + by))]);
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    show((event.clientX - box.left) / box.width);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("focus", () => { if (svg.matches(":focus-visible")) show(at); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) step(by);
  });
}
"""
