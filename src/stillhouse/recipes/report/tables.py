"""Tables of the report: what went wrong, and what the run was."""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from stillhouse.recipes.report.runs import (
    NETWORK,
    Line,
    Run,
    inside,
    is_number,
    mapping,
    session_words,
)

ROWS = 60  # events that are listed


def trouble(run: Run) -> str:
    """Restarts, skipped updates, faults, messages."""
    rows = list(_events(run))
    faults = [line["faults"] for line in run.events("faults") if is_number(line["faults"])]
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


def _events(run: Run) -> Iterator[tuple[int, str, str]]:
    sessions = 0
    for line in run.log:
        images = line["images"]
        if "session" in line:
            sessions += 1
            if sessions > 1:
                yield images, "restart", ", ".join(session_words(mapping(line["session"])))
        if "skipped" in line:
            yield images, "skipped update", _skip(line)
        if "faults" in line:
            yield images, "faults", f"{line['faults']} new: {_listed(line.get('fault_examples'))}"
        if "message" in line:
            yield images, "message", str(line["message"])
        if "samples" in line and inside(run.folder, line["samples"]) is None:
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


def facts(run: Run) -> str:
    """Config and versions."""
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
    return mapping(value)
