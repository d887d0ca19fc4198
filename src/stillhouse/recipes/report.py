"""`stillhouse report`: a training run as one HTML page that needs nothing but a browser.

Everything from files is escaped, and the page's own policy admits no script but ours and no
request at all. Without scripts the charts and the last samples are there, the readouts are not.
"""

import base64
import hashlib
import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeGuard

from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.recipes import charts
from stillhouse.recipes.charts import Axis, Marks, Point, Series, short
from stillhouse.recipes.page import SCRIPT, SHELL, STYLE

Line = Mapping[str, Any]

GRIDS = 40
GRID_BYTES = 12_000_000  # of all grids together, before base64 adds a third
ROWS = 60  # events that are listed
MOMENTS = 6  # curves over noise levels, a colour each
NETWORK = ("loss", "gradient_norm", "lr")  # what every network logs
SPEED = {
    "images_per_second": "images per second",
    "data_wait": "share of time waiting for data",
    "memory_gb": "memory, GB",
}


def report(run: Path, out: Path | None = None) -> Path:
    """Writes the page and returns where it is: `RUN/report.html` if not told otherwise."""
    page = _page(_read_run(run))
    target = run / "report.html" if out is None else out
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, page.encode("utf-8", "replace"))  # JSON may hold half a character
    except OSError as error:
        raise UserError(f"{target} cannot be written to ({error}): choose another --out") from error
    return target


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Run:
    """A run as its files tell it; `series` are its numbers over images."""

    folder: Path
    facts: Line
    log: Sequence[Line]
    unread: int
    written: datetime
    series: Mapping[str, Sequence[Point]]

    @cached_property
    def images(self) -> int:
        """How far it came; a session is announced before its first step."""
        steps = [line["images"] for line in self.log if "session" not in line]
        return steps[-1] if steps else self.log[-1]["images"]

    @cached_property
    def total(self) -> int:
        """How far it shall go; 0 where that is not known."""
        config = _table(self.facts.get("config"))
        wishes = (config.get("images"), _table(config.get("loop")).get("images"))
        return next((int(wish) for wish in wishes if _is_number(wish)), 0)

    @cached_property
    def networks(self) -> list[str]:
        keys = (key.rpartition("/") for key in self.series)
        names = dict.fromkeys(name for name, slash, end in keys if slash and end in NETWORK)
        return [name for name in names if name != "validation"]

    @cached_property
    def axis(self) -> Axis:
        """Images, the same in every chart."""
        return Axis(0, max(1, *(line["images"] for line in self.log)))

    @cached_property
    def marks(self) -> Marks:
        restarts = [line["images"] for line in self.events("session")[1:]]
        return Marks(restarts, [line["images"] for line in self.events("skipped")])

    def events(self, key: str) -> list[Line]:
        return [line for line in self.log if key in line]


def _read_run(run: Path) -> _Run:
    log_file = run / "log.jsonl"
    try:
        facts = json.loads((run / "run.json").read_text("utf-8"))
        log, unread = _read_log(log_file)
        written = datetime.fromtimestamp(log_file.stat().st_mtime)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run} is not the folder of a training run ({error}): give the one that holds its "
            "run.json and log.jsonl"
        ) from error
    if not log:
        raise UserError(f"{log_file} has no lines yet: try again once training has begun to log")
    return _Run(run, _table(facts), log, unread, written, _series(log))


def _read_log(path: Path) -> tuple[list[Line], int]:
    """The lines that can be read, and how many cannot: a kill tears the last one."""
    texts = [text for text in path.read_bytes().split(b"\n") if text.strip()]
    lines = [line for text in texts if (line := _read_line(text)) is not None]
    return lines, len(texts) - len(lines)


def _read_line(text: bytes) -> Line | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not _is_number(line.get("images")):
        return None
    return {**line, "images": max(0, int(line["images"]))}


def _series(log: Sequence[Line]) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = defaultdict(list)
    for line in log:
        for key, value in _scalars(line):
            _put(series[key], (line["images"], value))
    return dict(series)


def _scalars(line: Line) -> Iterator[tuple[str, float]]:
    if "skipped" in line:
        return
    for key, value in line.items():
        if key not in ("images", "faults", "checkpoint") and _is_number(value):
            yield key, float(value)
    for name, value in _table(line.get("metrics")).items():
        if _is_number(value):
            yield f"metrics/{name}", float(value)


def _put(points: list[Any], point: Any) -> None:
    """A run that resumes goes over the images since its checkpoint again: the later try counts."""
    while points and points[-1][0] >= point[0]:
        points.pop()
    points.append(point)


def _table(value: Any) -> Line:
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300  # neither nan, nor inf, nor a whole number that no float can hold


# ---------------------------------------------------------------- the page


def _page(run: _Run) -> str:
    sections = {
        "Loss": _losses(run),
        "Samples": _samples(run),
        "Loss by noise level": _noise_levels(run),
        "Optimiser": _optimiser(run),
        "Speed": _speed(run),
        **_others(run),
        "Trouble": _trouble(run),
        "Config and versions": _facts(run),
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


def _state(run: _Run) -> str:
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


def _summary(run: _Run) -> str:
    """The figures that one looks for first."""
    tiles = (
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(small)}</dd></div>"
        for name, value, small in [*_scores(run), *_pace(run)]
    )
    return f'<dl class="figures">{"".join(tiles)}</dl>'


def _scores(run: _Run) -> Iterator[tuple[str, str, str]]:
    """Name, value and small print: losses, metrics."""
    for network in run.networks:
        if points := run.series.get(f"{network}/loss"):
            latest = _noisy(points, "")[-1]
            yield f"{network} loss", latest.label, "" if latest.dots else "smoothed"
    if points := run.series.get("validation/loss"):
        images, lowest = min(points, key=lambda point: point[1])
        small = f"lowest {short(lowest)} at {short(images)} images"
        yield "validation loss", short(points[-1][1]), small
    for key, points in run.series.items():
        if key.startswith("metrics/"):
            small = f"at {short(points[-1][0])} images"
            yield key.removeprefix("metrics/"), short(points[-1][1]), small


def _pace(run: _Run) -> Iterator[tuple[str, str, str]]:
    """Name, value and small print: size, speed, time, processes."""
    if _is_number(parameters := _table(run.facts.get("network")).get("parameters")):
        yield "parameters", short(parameters), ""
    laps = [(x, speed) for x, speed in run.series.get("images_per_second", ()) if speed > 0]
    if laps:
        speed = median(speed for _, speed in laps[-20:])
        yield "images per second", short(speed), "lately"
        starts = [run.log[0]["images"], *(x for x, _ in laps)]
        spent = sum((x - start) / lap for start, (x, lap) in zip(starts, laps, strict=False))
        left = max(0, run.total - run.images) / speed
        yield "training time", _duration(spent), f"about {_duration(left)} left" if left else ""
    if sessions := [_table(line["session"]) for line in run.events("session")]:
        yield "processes", _session(sessions[-1])[0], _session(sessions[0])[1]
    if saved := run.events("checkpoint"):
        yield "last checkpoint", short(saved[-1]["images"]), "images"


def _session(session: Line) -> tuple[str, str]:
    """Processes and device; when they started."""
    device, started = session.get("device"), str(session.get("started", ""))
    processes = f"{session.get('world', 1)}{f' × {device}' if device else ''}"
    return processes, f"started {started[:16].replace('T', ' ')}" if started else ""


def _duration(seconds: float) -> str:
    for unit, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} {seconds % unit // part:.0f} {part_name}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


# ---------------------------------------------------------------- charts over images


def _losses(run: _Run) -> str:
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
    drawn = _side_by_side(_either_axis(run, title, found) for title, found in lines.items())
    return f'{box}<label for="log"> logarithmic axis</label>{drawn}{_key(run)}'


def _either_axis(run: _Run, title: str, lines: Sequence[Series]) -> str:
    linear = _chart(run, title, lines, log=False)
    if min(_values(lines)) <= 0:
        return linear
    return f'<div class="either">{linear}{_chart(run, title, lines, log=True)}</div>'


def _values(lines: Iterable[Series]) -> list[float]:
    return [y for line in lines for _, y in line.points]


def _look(network: int) -> str:
    return ("c0", "c1", "c2", "c4", "c5")[network % 5]


def _key(run: _Run) -> str:
    told = ["Thin: each line of the log; thick: smoothed."]
    told += ["Dashed: a restart."] if run.marks.restarts else []
    told += ["Red ticks below the axis: skipped updates."] if run.marks.skips else []
    return f'<p class="note">{" ".join(told)}</p>'


def _optimiser(run: _Run) -> str:
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
    return _side_by_side(drawn)


def _speed(run: _Run) -> str:
    """Not smoothed: what matters is when it was slow, and for how long."""
    found = {title: points for key, title in SPEED.items() if (points := run.series.get(key))}
    drawn = (
        _chart(run, title, [Series(points, title, short(points[-1][1]))], log=False, zero=True)
        for title, points in found.items()
    )
    return _side_by_side(drawn, "small")


def _others(run: _Run) -> dict[str, str]:
    """Numbers that no other section knows, by the word before the slash."""
    known = {*SPEED, "validation/loss"} | {f"{n}/{end}" for n in run.networks for end in NETWORK}
    groups: dict[str, list[str]] = defaultdict(list)
    for key in sorted(run.series.keys() - known):
        prefix, slash, _ = key.partition("/")
        groups[prefix.capitalize() if slash else "Other numbers"].append(key)
    return {
        title: _side_by_side(
            (_chart(run, key.split("/", 1)[-1], _noisy(run.series[key], "c0")) for key in keys),
            "small",
        )
        for title, keys in groups.items()
    }


def _chart(run: _Run, title: str, lines: Sequence[Series], **axis: bool) -> str:
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


def _side_by_side(drawn: Iterable[str], kind: str = "") -> str:
    figures = "".join(drawn)
    return f'<div class="charts {kind}">{figures}</div>' if figures else ""


# ---------------------------------------------------------------- charts over noise levels


@dataclass(frozen=True)
class _Levels:
    """Mean losses between neighbouring noise levels, at one moment."""

    images: int
    edges: list[Any]
    loss: list[Any]


def _noise_levels(run: _Run) -> str:
    training, validation = _levels(run, "levels"), _levels(run, "validation/levels")
    drawn = (
        _levels_chart("training", _curves(training, reach=0.25)),
        _levels_chart("validation", _curves(validation, reach=0)),
    )
    return _side_by_side(drawn)


def _levels(run: _Run, key: str) -> list[_Levels]:
    found: list[tuple[int, _Levels]] = []
    for line in run.events(key):
        edges, loss = (_table(line[key]).get(name) for name in ("edges", "loss"))
        if isinstance(edges, list) and isinstance(loss, list) and len(edges) == len(loss) + 1:
            _put(found, (line["images"], _Levels(line["images"], edges, loss)))
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
        sigmas = [math.log(edge) for edge in ends if _is_number(edge) and edge > 0]
        losses = [level.loss[k] for level in levels if _is_number(level.loss[k])]
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


# ---------------------------------------------------------------- samples


def _samples(run: _Run) -> str:
    """A time line of grids: a slider where scripts run, else the last one."""
    found: list[tuple[int, Path]] = []
    for line in run.events("samples"):
        if (file := _inside(run.folder, line["samples"])) is not None:
            _put(found, (line["images"], file))
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
        f'src="data:image/png;base64,{base64.b64encode(content).decode()}">'
    )


def _inside(folder: Path, name: Any) -> Path | None:
    """The PNG of that name; what leads out of the folder is none of the run's files."""
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute():
        return None
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        return None
    with file.open("rb") as stream:
        head = stream.read(24)
    return file if len(head) == 24 and head.startswith(b"\x89PNG\r\n\x1a\n") else None


def _chosen(grids: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """At most `GRIDS`, fewer where they are large, evenly; always the first and the last."""
    sizes = [file.stat().st_size for _, file in grids]
    for count in range(min(GRIDS, len(grids)), 0, -1):
        places = [round(k * (len(grids) - 1) / max(1, count - 1)) for k in range(count)]
        if count <= 2 or sum(sizes[i] for i in places) <= GRID_BYTES:
            return [grids[i] for i in places]
    return []


# ---------------------------------------------------------------- trouble, config, versions


def _trouble(run: _Run) -> str:
    rows = list(_events(run))
    faults = [line["faults"] for line in run.events("faults") if _is_number(line["faults"])]
    told = [
        f"Restarts: {len(run.marks.restarts):,}. Skipped updates: {len(run.marks.skips):,}. "
        f"Faults in the data: {sum(faults):,}."
    ]
    told += [f"Lines of the log that cannot be read: {run.unread:,}."] if run.unread else []
    told += [f"The latest {ROWS} of {len(rows):,} events are below."] if len(rows) > ROWS else []
    cells = (
        f"<tr><td>{images:,}</td><td>{what}</td><td>{escape(text)}</td></tr>"
        for images, what, text in rows[-ROWS:]
    )
    head = "<tr><th>images</th><th>event</th><th>details</th></tr>"
    table = f'<table class="events">{head}{"".join(cells)}</table>' if rows else ""
    return f"<p>{' '.join(told)}</p>{table}"


def _events(run: _Run) -> Iterator[tuple[int, str, str]]:
    sessions = 0
    for line in run.log:
        images = line["images"]
        if "session" in line:
            sessions += 1
            if sessions > 1:
                yield images, "restart", ", ".join(_session(_table(line["session"])))
        if "skipped" in line:
            yield images, "skipped update", _skip(line)
        if "faults" in line:
            yield images, "faults", f"{line['faults']} new: {_listed(line.get('fault_examples'))}"
        if "message" in line:
            yield images, "message", str(line["message"])
        if "samples" in line and _inside(run.folder, line["samples"]) is None:
            yield images, "samples", f"not shown: {line['samples']} is no PNG in the run's folder"


def _skip(line: Line) -> str:
    values = (f"{key.replace('_', ' ')} {_spelled(line.get(key))}" for key in NETWORK[:2])
    return f"{line['skipped']}: {', '.join(values)}; samples {_listed(line.get('ids'))}"


def _listed(items: Any, most: int = 16) -> str:
    items = items if isinstance(items, list) else []
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(_spelled, items[:most])) + more or "not named"


def _spelled(value: Any) -> str:
    if value is None:
        return "not finite"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _facts(run: _Run) -> str:
    return f'<div class="facts">{_rows(run.facts, opened=("config",))}</div>'


def _rows(facts: Line, opened: Sequence[str] = ()) -> str:
    """A table of a mapping; a mapping in it is a table that folds."""
    rows = []
    for key, value in facts.items():
        name, parts = escape(str(key)), _parts(value)
        if parts:
            kind = f' <span class="note">{escape(str(parts.get("kind", "")))}</span>'
            rows.append(
                f'<tr><td colspan="2"><details{" open" if key in opened else ""}>'
                f"<summary>{name}{kind}</summary>{_rows(parts)}</details></td></tr>"
            )
        else:
            text = "null" if value is None else _spelled(value)
            rows.append(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _parts(value: Any) -> Line:
    if isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        return {str(i): part for i, part in enumerate(value)}
    return _table(value)
