"""Files that appear whole or not at all, and what tells their contents apart."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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


def tensors_file(tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str]) -> bytes:
    """safetensors, which writes its metadata in random order: here the same is the same file."""
    from safetensors.torch import save

    kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
    file = save(kept, metadata=dict(metadata))
    start = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(file)[start:]])


def fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 over the files' contents, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"
