"""A run's folder belongs to one run: what may change between tries, and who is using it now."""

import json
import os
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import IO, Any

from pydantic import ValidationError

from stillhouse.config import Config
from stillhouse.errors import UserError
from stillhouse.files import write_whole

PATIENCE = 120.0  # seconds that a restart waits for the lock of the run before it
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


def changes(config: Config, old: dict[str, Any], free: Collection[str]) -> list[str]:
    """What differs from the settings of an earlier try, but for the free ones."""
    with suppress(ValidationError):  # settings that are newer than the run have their defaults
        old = type(config).model_validate(old).model_dump(mode="json")
    return differences(old, config.model_dump(mode="json"), free)


def listed(changed: Sequence[str], most: int = 5) -> str:
    """Differences as part of a sentence; a run of another kind has dozens."""
    more = [f"and {len(changed) - most} more"] if len(changed) > most else []
    return "; ".join([*(shorten(text, 120) for text in changed[:most]), *more])


def without_places(value: Any) -> Any:
    """The same facts with local paths cut to their last two names: they are nobody's business."""
    if isinstance(value, dict):
        return {key: without_places(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_places(inner) for inner in value]
    if isinstance(value, str) and value.startswith("/"):
        return "/".join(Path(value).parts[-2:])
    return value


@contextmanager
def claimed(
    folder: Path, config: Config, seen: dict[str, Any], free: Collection[str]
) -> Iterator[None]:
    """The folder for this evaluation alone: one with the same settings, but for the free ones.

    `seen` is what it has found outside, by what to call it: it must not have changed. As long as
    nothing was measured, anything may: whoever was refused tries again.
    """
    with locked(folder):
        claim = folder / "run.json"
        if claim.exists() and (changed := _changes(claim, config, seen, free)):
            raise UserError(
                f"{folder} holds another run ({listed(changed)}). Choose another --out, "
                "or remove it"
            )
        facts = {"run": config.model_dump(mode="json"), "seen": seen}
        write_whole(claim, json.dumps(facts, indent=2).encode())
        yield


def _changes(claim: Path, config: Config, seen: dict[str, Any], free: Collection[str]) -> list[str]:
    try:
        old = json.loads(claim.read_text())
        other = [what for what in seen if old["seen"][what] != seen[what]]
        changed = changes(config, old["run"], free) + [f"{what} has changed" for what in other]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ["its run.json is of another kind"]
    begun = any(any((claim.parent / part).glob("*")) for part in ("results", "parts"))
    return changed if begun else []


def make_folder(folder: Path, advice: str = "choose another --out") -> None:
    """With all that lead to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error}): {advice}") from error


def write_output(target: Path, content: bytes) -> None:
    """A file that a command was asked for as --out."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content)
    except OSError as error:
        raise UserError(f"{target} cannot be written to ({error}): choose another --out") from error


@contextmanager
def locked(
    folder: Path, advice: str = "choose another --out", patience: float = 0
) -> Iterator[None]:
    """Refuses a second run in the same folder, after so many seconds of waiting for the first.

    The lock goes with its process, however it ends.
    """
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{folder} cannot be written to ({error}): {advice}") from error
    with file:
        _lock(file, folder, advice, patience)
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)


def _lock(file: IO[str], folder: Path, advice: str, patience: float) -> None:
    """A file server may hold a dead machine's lock for a while, so restarts are patient."""
    import fcntl

    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    deadline = time.monotonic() + max(patience, PATIENCE if restarted else 0)
    said = False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"another run is using {folder}: wait for it, or {advice}"
                ) from error
            if not said:
                print(f"waiting for another run that is using {folder}", file=sys.stderr)
                said = True
            time.sleep(1)
        except OSError as error:
            warnings.warn(f"{folder} cannot be locked ({error}): start no second run", stacklevel=4)
            return None
