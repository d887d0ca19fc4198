"""Files that appear whole or not at all."""

from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """A reader, or a run that resumes after a kill, never sees half of it."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)
