"""Files that appear whole or not at all, and what tells their contents apart."""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """A reader, or a run that resumes after a kill, never sees half of it.

    `durable`: nor after a power cut, which costs a wait for the disk.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # half a file would take the last room of a full disk
            partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 over the files' contents, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"
