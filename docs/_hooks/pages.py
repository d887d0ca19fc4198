"""Places in the repository, and the small pieces of Markdown that generated pages are made of."""

from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table; a cell may hold anything but an empty line."""
    lines = [head, ["---"] * len(head), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def heading(level: int, text: str, anchor: str = "") -> str:
    return f"{'#' * level} {text}" + (f" {{#{anchor}}}" if anchor else "")


def joined(blocks: Iterable[str]) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"
