"""Files that appear whole or not at all."""

from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """A reader, or a run that resumes after a kill, never sees half of it."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # half a file would take the last room of a full disk
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
