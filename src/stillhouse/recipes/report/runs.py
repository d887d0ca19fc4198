"""A training run as its files tell it: facts, log, and numbers over images.

Any file may be torn or edited: what cannot be read is passed over and counted.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from stillhouse.engine.trackers import LOG, parse_line
from stillhouse.errors import UserError
from stillhouse.recipes.report.charts import Axis, Marks, Point

Line = Mapping[str, Any]
NETWORK = ("loss", "gradient_norm", "lr")  # what every network logs


@dataclass(frozen=True)
class Run:
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
        config = mapping(self.facts.get("config"))
        wishes = (config.get("images"), mapping(config.get("loop")).get("images"))
        return next((int(wish) for wish in wishes if is_number(wish)), 0)

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


def read_run(run: Path) -> Run:
    """Reads run.json and the log."""
    log_file = run / LOG
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
    return Run(run, mapping(facts), log, unread, written, _series(log))


def _read_log(path: Path) -> tuple[list[Line], int]:
    """The lines that can be read, and how many cannot: a kill tears the last one."""
    texts = [text for text in path.read_text("utf-8", "replace").split("\n") if text.strip()]
    lines = [line for text in texts if (line := parse_line(text)) and is_number(line["images"])]
    return [{**line, "images": max(0, line["images"])} for line in lines], len(texts) - len(lines)


def _series(log: Sequence[Line]) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = defaultdict(list)
    for line in log:
        for key, value in _scalars(line):
            put(series[key], (line["images"], value))
    return dict(series)


def _scalars(line: Line) -> Iterator[tuple[str, float]]:
    if "skipped" in line:
        return
    for key, value in line.items():
        if key not in ("images", "faults", "checkpoint") and is_number(value):
            yield key, float(value)
    for name, value in mapping(line.get("metrics")).items():
        if is_number(value):
            yield f"metrics/{name}", float(value)


def session_words(session: Line) -> tuple[str, str]:
    """Processes and device; when they started."""
    device, started = session.get("device"), str(session.get("started", ""))
    processes = f"{session.get('world', 1)}{f' × {device}' if device else ''}"
    return processes, f"started {started[:16].replace('T', ' ')}" if started else ""


def inside(folder: Path, name: Any) -> Path | None:
    """The PNG of that name; what leads out of the folder is none of the run's files."""
    if not isinstance(name, str) or "\0" in name or Path(name).is_absolute():
        return None
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        return None
    with file.open("rb") as stream:
        head = stream.read(24)
    return file if len(head) == 24 and head.startswith(b"\x89PNG\r\n\x1a\n") else None


def put(points: list[Any], point: Any) -> None:
    """A run that resumes goes over the images since its checkpoint again: the later try counts."""
    while points and points[-1][0] >= point[0]:
        points.pop()
    points.append(point)


def mapping(value: Any) -> Line:
    """The value, if it is one."""
    return value if isinstance(value, Mapping) else {}


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300  # neither nan, nor inf, nor a whole number that no float can hold
