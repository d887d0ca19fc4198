"""`stillhouse report`: a training run as one HTML page that needs nothing but a browser.

Everything from files is escaped, and the page's own policy admits no script but ours and no
request at all. Without scripts the charts and the last samples are there, the readouts are not.
"""

import base64
import hashlib
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median

from stillhouse.recipes.claims import write_output
from stillhouse.recipes.pictures import data_uri
from stillhouse.recipes.report import charts
from stillhouse.recipes.report.charts import Point, Series, short
from stillhouse.recipes.report.levels import noise_levels
from stillhouse.recipes.report.page import SCRIPT, SHELL, STYLE
from stillhouse.recipes.report.runs import (
    NETWORK,
    Line,
    Run,
    inside,
    is_number,
    mapping,
    put,
    read_run,
    session_words,
)
from stillhouse.recipes.report.tables import facts, trouble

GRIDS = 40
GRID_BYTES = 12_000_000  # of all grids together, before base64 adds a third
SPEED = {
    "images_per_second": "images per second",
    "data_wait": "share of time waiting for data",
    "memory_gb": "memory, GB",
}
MEASURED, COUNT, ABOUT = "evaluation/", "evaluation/count", "evaluation/about"


def report(run: Path, out: Path | None = None) -> Path:
    """Writes the page and returns where it is: `RUN/report.html` if not told otherwise."""
    page = _page(read_run(run))
    target = run / "report.html" if out is None else out
    write_output(target, page.encode("utf-8", "replace"))  # JSON may hold half a character
    return target


# ---------------------------------------------------------------- the page


def _page(run: Run) -> str:
    sections = {
        "Loss": _losses(run),
        "Evaluation": _evaluation(run),
        "Samples": _samples(run),
        "Loss by noise level": noise_levels(run),
        "Optimiser": _optimiser(run),
        "Speed": _speed(run),
        **_others(run),
        "Trouble": trouble(run),
        "Config and versions": facts(run),
    }
    shown = {title: body for title, body in sections.items() if body}
    links = (f'<a href="#at-{i}">{escape(title)}</a>' for i, title in enumerate(shown))
    parts = (
        f'<section id="at-{i}"><h2>{escape(title)}</h2>{body}</section>'
        for i, (title, body) in enumerate(shown.items())
    )
    script = charts.SCRIPT + SCRIPT
    return SHELL.format(
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=STYLE + charts.STYLE,
        title=escape(run.folder.resolve().name),
        state=_state(run),
        summary=_summary(run),
        links=" ".join(links),
        sections="\n".join(parts),
        written=f"{run.written:%Y-%m-%d %H:%M}",
    )


def _state(run: Run) -> str:
    if not run.total:
        return f"at {run.images:,} images"
    if run.images >= run.total:
        return f"finished at {run.images:,} images"
    share = 100 * run.images / run.total
    return (
        f"at {run.images:,} of {run.total:,} images"
        f'<span class="bar" role="progressbar" aria-label="images trained on" aria-valuemin="0" '
        f'aria-valuemax="100" aria-valuenow="{share:.0f}"><i style="width:{share:.2f}%"></i></span>'
    )


def _summary(run: Run) -> str:
    """The figures that one looks for first."""
    tiles = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(small)}</dd></div>"
        for name, value, small in [*_scores(run), *_pace(run)]
    )
    return f'<dl class="figures">{"".join(tiles)}</dl>'


def _scores(run: Run) -> Iterator[tuple[str, str, str]]:
    """Name, value and small print: losses, metrics."""
    for network in run.networks:
        if points := run.series.get(f"{network}/loss"):
            latest = _noisy(points, "")[-1]
            yield f"{network} loss", latest.label, "" if latest.dots else "smoothed"
    if points := run.series.get("validation/loss"):
        images, lowest = min(points, key=lambda point: point[1])
        small = f"lowest {short(lowest)} at {short(images)} images"
        yield "validation loss", short(points[-1][1]), small
    for name, points in _measured(run).items():
        floor = _floor(run, name)
        small = "" if floor is None else f"real / real {short(floor)}"
        yield name, short(points[-1][1]), small
    for key, points in run.series.items():
        if key.startswith("metrics/"):
            small = f"at {short(points[-1][0])} images"
            yield key.removeprefix("metrics/"), short(points[-1][1]), small


def _pace(run: Run) -> Iterator[tuple[str, str, str]]:
    """Name, value and small print: size, speed, time, processes."""
    if is_number(parameters := mapping(run.facts.get("network")).get("parameters")):
        yield "parameters", short(parameters), ""
    laps = [(x, speed) for x, speed in run.series.get("images_per_second", ()) if speed > 0]
    if laps:
        speed = median(speed for _, speed in laps[-20:])
        yield "images per second", short(speed), "lately"
        starts = [run.log[0]["images"], *(x for x, _ in laps)]
        spent = sum((x - start) / lap for start, (x, lap) in zip(starts, laps, strict=False))
        left = max(0, run.total - run.images) / speed
        yield "training time", _duration(spent), f"about {_duration(left)} left" if left else ""
    if sessions := [mapping(line["session"]) for line in run.events("session")]:
        yield "processes", session_words(sessions[-1])[0], session_words(sessions[0])[1]
    if saved := run.events("checkpoint"):
        yield "last checkpoint", short(saved[-1]["images"]), "images"


def _duration(seconds: float) -> str:
    for unit, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} {seconds % unit // part:.0f} {part_name}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


# ---------------------------------------------------------------- charts over images


def _losses(run: Run) -> str:
    """One chart per network, and a tick box for the axis of all: this needs no script."""
    lines = {
        f"{name} loss": _noisy(points, _look(i))
        for i, name in enumerate(run.networks)
        if (points := run.series.get(f"{name}/loss"))
    }
    if points := run.series.get("validation/loss"):
        line = Series(points, "validation", short(points[-1][1]), "c3", dots=True)
        lines["validation loss"] = [line]
    if not lines:
        return ""
    wide = any(charts.spans_decades(_values(found)) for found in lines.values())
    box = f'<input id="log" type="checkbox"{" checked" if wide else ""}>'
    drawn = charts.side_by_side(_either_axis(run, title, found) for title, found in lines.items())
    return f'{box}<label for="log"> logarithmic axis</label>{drawn}{_key(run)}'


def _either_axis(run: Run, title: str, lines: Sequence[Series]) -> str:
    linear = _chart(run, title, lines, log=False)
    if min(_values(lines)) <= 0:
        return linear
    return f'<div class="either">{linear}{_chart(run, title, lines, log=True)}</div>'


def _values(lines: Iterable[Series]) -> list[float]:
    return [y for line in lines for _, y in line.points]


def _look(network: int) -> str:
    return ("c0", "c1", "c2", "c4", "c5")[network % 5]


def _key(run: Run) -> str:
    told = ["Thin: each line of the log; thick: smoothed."]
    told += ["Dashed: a restart."] if run.marks.restarts else []
    told += ["Red ticks below the axis: skipped updates."] if run.marks.skips else []
    return f'<p class="note">{" ".join(told)}</p>'


def _optimiser(run: Run) -> str:
    rates: list[Series] = []
    norms: list[Series] = []
    for i, name in enumerate(run.networks):
        label = name if len(run.networks) > 1 else ""
        if points := run.series.get(f"{name}/lr"):
            rates.append(Series(points, name, label or short(points[-1][1]), _look(i)))
        if points := run.series.get(f"{name}/gradient_norm"):
            norms += _noisy(points, _look(i), label)
    drawn = (
        _chart(run, "learning rate", rates, log=False, zero=True),
        _chart(run, "gradient norm", norms),
    )
    return charts.side_by_side(drawn)


def _speed(run: Run) -> str:
    """Not smoothed: what matters is when it was slow, and for how long."""
    found = {title: points for key, title in SPEED.items() if (points := run.series.get(key))}
    drawn = (
        _chart(run, title, [Series(points, title, short(points[-1][1]))], log=False, zero=True)
        for title, points in found.items()
    )
    return charts.side_by_side(drawn, "small")


def _others(run: Run) -> dict[str, str]:
    """Numbers that no other section knows, by the word before the slash."""
    known = {*SPEED, "validation/loss"} | {f"{n}/{end}" for n in run.networks for end in NETWORK}
    known |= {key for key in run.series if key.startswith(MEASURED)}
    groups: dict[str, list[str]] = defaultdict(list)
    for key in sorted(run.series.keys() - known):
        prefix, slash, _ = key.partition("/")
        groups[_words(prefix).capitalize() if slash else "Other numbers"].append(key)
    return {
        title: charts.side_by_side(
            (
                _chart(run, _words(key.split("/", 1)[-1]), _noisy(run.series[key], "c0"))
                for key in keys
            ),
            "small",
        )
        for title, keys in groups.items()
    }


def _words(name: str) -> str:
    """timestamps5 -> timestamps 5"""
    return re.sub(r"(?<=[a-z])(?=\d+$)", " ", name)


def _chart(run: Run, title: str, lines: Sequence[Series], **axis: bool) -> str:
    """A chart over images; the values choose a logarithmic axis where `log` is not given."""
    values = _values(lines)
    if not values:
        return ""
    y = charts.axis_around(values, **{"log": charts.spans_decades(values), **axis})
    return charts.line_chart(title, lines, x=run.axis, y=y, marks=run.marks)


def _noisy(points: Sequence[Point], look: str, name: str = "") -> list[Series]:
    """A thick smoothed line, labelled with its name or last value, over a thin one of all."""
    if len(points) < 30:
        return [Series(points, name or "value", name or short(points[-1][1]), look, dots=True)]
    smoothed = charts.smooth(points)
    return [
        Series(points, f"{name} each line".strip(), look=look, faint=True),
        Series(smoothed, f"{name} smoothed".strip(), name or short(smoothed[-1][1]), look),
    ]


# ---------------------------------------------------------------- evaluations


def _evaluation(run: Run) -> str:
    """A chart per metric beside what real images get, and what a reader must know."""
    measured = _measured(run)
    drawn = [
        _chart(run, name, [_dotted(points), *_floor_line(run, name)])
        for name, points in measured.items()
    ]
    told = "".join(f'<p class="note">{escape(note)}</p>' for note in _notes(run))
    return charts.side_by_side(drawn, "small" if len(drawn) > 2 else "") + told if drawn else ""


def _measured(run: Run) -> dict[str, Sequence[Point]]:
    """Points by the names of metrics, which are also the names of their detectors."""
    keys = (key for key in run.series if key.startswith(MEASURED) and key != COUNT)
    return {key.removeprefix(MEASURED): run.series[key] for key in keys}


def _dotted(points: Sequence[Point]) -> Series:
    return Series(points, "value", short(points[-1][1]), dots=True)


def _about(run: Run) -> Line:
    """How it was measured, as the last session has said."""
    found = [mapping(line[ABOUT]) for line in run.events(ABOUT)]
    return found[-1] if found else {}


def _floor(run: Run, name: str) -> float | None:
    value = mapping(_about(run).get("floor")).get(name)
    return value if is_number(value) else None


def _floor_line(run: Run, name: str) -> list[Series]:
    floor = _floor(run, name)
    ends = [] if floor is None else [(end, floor) for end in (run.axis.low, run.axis.high)]
    return [Series(ends, "real / real", "real / real", "c5")] if ends else []


def _notes(run: Run) -> Iterator[str]:
    about = _about(run)
    if about:
        yield (
            f"{about.get('count')} samples ({about.get('drawing')}) against "
            f"{about.get('reference_count')} images of {about.get('reference')}. Real / real: "
            f"{about.get('floor_count')} of these against the others."
        )
    counts = sorted({int(count) for _, count in run.series.get(COUNT, ())})
    if len(counts) > 1:
        both = ", ".join(map(str, counts))
        yield f"The number of samples has changed ({both}), which by itself moves distances."
    notes = about.get("notes")
    told = map(str, notes if isinstance(notes, list) else [])
    yield from (f"{note[:1].upper()}{note[1:]}." for note in told)


# ---------------------------------------------------------------- samples


def _samples(run: Run) -> str:
    """A time line of grids: a slider where scripts run, else the last one."""
    found: list[tuple[int, Path]] = []
    for line in run.events("samples"):
        if (file := inside(run.folder, line["samples"])) is not None:
            put(found, (line["images"], file))
    if not found:
        return ""
    chosen = _chosen(found)
    last = len(chosen) - 1
    pictures = (_picture(images, file, shown=i == last) for i, (images, file) in enumerate(chosen))
    return (
        f'<div class="samples"><p><output for="moment">after {chosen[-1][0]:,} images</output>'
        f'<input id="moment" type="range" min="0" max="{last}" value="{last}" '
        f'aria-label="moment of training" hidden></p>{"".join(pictures)}'
        '<p class="note">Drawn from the same seeds at every moment.</p></div>'
    )


def _picture(images: int, file: Path, *, shown: bool) -> str:
    content = file.read_bytes()
    width, height = struct.unpack(">II", content[16:24])  # where a PNG has its size
    zoom = max(1, 560 // max(1, width))
    return (
        f'<img alt="Samples after {images:,} images" data-told="after {images:,} images" '
        f'width="{width * zoom}" height="{height * zoom}"{"" if shown else " hidden"} '
        f'src="{data_uri(content)}">'
    )


def _chosen(grids: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """At most `GRIDS`, fewer where they are large, evenly; always the first and the last."""
    sizes = [file.stat().st_size for _, file in grids]
    for count in range(min(GRIDS, len(grids)), 0, -1):
        places = [round(k * (len(grids) - 1) / max(1, count - 1)) for k in range(count)]
        if count <= 2 or sum(sizes[i] for i in places) <= GRID_BYTES:
            return [grids[i] for i in places]
    return []
