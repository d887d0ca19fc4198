"""Files of the folder of shards, local or in an object store: each appears whole or not at all."""

import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from stillhouse.engine.storage import Folder

PARTIAL = ".partial"
_THREADS = 32
_AT_ONCE = 256  # small files that are held together


@contextmanager
def partial_file(folder: Folder, name: str) -> Iterator[Path]:
    """A path to write to; `publish` makes it appear. Its name is its own: two may try at once."""
    folder.make()
    if folder.local:
        path = Path(folder.path, f".{name}.{uuid.uuid4().hex}{PARTIAL}")
    else:
        handle, found = tempfile.mkstemp(suffix=PARTIAL)
        os.close(handle)
        path = Path(found)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def publish(folder: Folder, name: str, made: Path) -> None:
    """Under its name at once: by a rename on a disk, by one upload in an object store."""
    if folder.local:
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(Path(folder.path, name))
        folder.sync()
    else:
        folder.patiently(lambda: folder.fs.put_file(str(made), f"{folder.path}/{name}"))


def write(folder: Folder, name: str, data: bytes) -> None:
    with partial_file(folder, name) as path:
        path.write_bytes(data)
        publish(folder, name, path)


def exists(folder: Folder, name: str) -> bool:
    folder.fs.invalidate_cache()
    return folder.patiently(lambda: bool(folder.fs.exists(f"{folder.path}/{name}")))


def remove_partial(folder: Folder) -> None:
    """What a killed worker of an earlier try has left."""
    for name in folder.names() if folder.local else []:
        if name.endswith(PARTIAL):
            with suppress(FileNotFoundError):
                Path(folder.path, name).unlink()


def read_many(folder: Folder, names: Sequence[str]) -> Iterator[bytes]:
    """In order; several are asked for at once, since each answer of an object store takes long."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for at in range(0, len(names), _AT_ONCE):
            yield from list(pool.map(folder.read, names[at : at + _AT_ONCE]))


def sizes(folder: Folder) -> dict[str, int]:
    """Bytes of every file in it; nothing, if it does not exist."""
    folder.fs.invalidate_cache()
    try:
        found = folder.patiently(lambda: folder.fs.ls(folder.path, detail=True))
    except FileNotFoundError:
        return {}
    return {info["name"].rsplit("/", 1)[-1]: info["size"] for info in found}
