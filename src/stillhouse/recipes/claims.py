"""A run's folder belongs to one run: what may change between tries, and who is using it now."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from stillhouse.errors import UserError

_held: set[IO[str]] = set()  # the locks of this process


def _let_go() -> None:
    """A forked reader of data outlives a killed run by seconds: it must not keep the folder."""
    for file in _held:
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def differences(
    old: dict[str, Any], new: dict[str, Any], ignored: Collection[str] = (), path: str = ""
) -> list[str]:
    """Dotted names whose values differ, with both values; an ignored name covers all below it."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        name, a, b = f"{path}{key}", old.get(key), new.get(key)
        if name in ignored:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, ignored, f"{name}.")
        elif a != b:
            found.append(f"{name}: {a} -> {b}")
    return found


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Refuses a second run in the same folder. The lock goes with its process, however it ends."""
    import fcntl

    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"another run is using {folder}: wait for it, or choose another --out"
            ) from error
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)
