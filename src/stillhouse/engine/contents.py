"""What a checkpoint holds: a manifest, tensors by name, plain values, and DCP's description.

The manifest is checked before anything is believed, and the description, which is a pickle, is
read by an unpickler that resolves nothing but DCP's own records.
"""

import hashlib
import io
import json
import pickle
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem  # its records are looked up in sys.modules
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from stillhouse.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
VALUES = "values.json"


def folder_name(images: int) -> str:
    return f"images-{images:012d}"


def rank_file(rank: int) -> str:
    return f"values-{rank:05d}.json"


class CheckpointError(UserError):
    """A checkpoint could not be written or read."""


# ---------------------------------------------------------------- the manifest


@dataclass(frozen=True)
class FileRecord:
    """What a file must be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    world_size: int
    files: dict[str, FileRecord]


def spell_manifest(images: int, world_size: int, files: dict[str, FileRecord]) -> bytes:
    entries = {name: asdict(files[name]) for name in sorted(files)}
    body = {"format": FORMAT, "images": images, "world_size": world_size, "files": entries}
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1).encode()


def read_manifest(data: bytes, images: int) -> Manifest:
    """The manifest of the checkpoint at `images`; whatever is amiss with it raises."""
    try:
        body = json.loads(data)
        checksum, version = body.pop("checksum", None), body["format"]
        if version != FORMAT:
            raise CheckpointError(f"its format is {version}, and this Stillhouse reads {FORMAT}")
        files = {name: FileRecord(**entry) for name, entry in body["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"its {MANIFEST} is damaged") from error
    if checksum != _checksum(body) or body["images"] != images:
        raise CheckpointError(f"its {MANIFEST} is damaged")
    if any("/" in name or "\\" in name or name == ".." for name in files):
        raise CheckpointError(f"its {MANIFEST} names files outside the folder")
    return Manifest(body["world_size"], files)


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def outdated(
    whole: Collection[int], newest: int, keep_last: int, keep_every: int | None
) -> set[int]:
    """Which complete checkpoints may go.

    Those ahead of `newest` are not touched: they are what an earlier run had reached.
    For good stays the first one at or after each multiple of `keep_every`, since saves need not
    fall on multiples.
    """
    past = sorted(i for i in whole if i <= newest)
    kept = set(past[-keep_last:])
    if keep_every is not None:
        first = {i // keep_every: i for i in reversed(past)}
        kept |= {i for period, i in first.items() if period > 0}
    return set(past) - kept


# ---------------------------------------------------------------- the state


def split(tensors: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by dotted name, as DCP names them, and the plain values among them likewise."""
    flat: dict[str, Tensor] = {}
    leaves: dict[str, Any] = {}
    for name, _, _, value in _walk(tensors):
        if name in flat or name in leaves:
            raise CheckpointError(f"two entries of the state are called {name}")
        if isinstance(value, Tensor):
            flat[name] = value.detach()
        else:
            leaves[name] = plain(value, name)
    return flat, leaves


def put_back(tensors: dict[str, Any], leaves: dict[str, Any]) -> None:
    """Plain values to where they came from; a place that the checkpoint lacks keeps its value."""
    for name, container, key, value in list(_walk(tensors)):
        if name in leaves:
            saved = leaves[name]
            container[key] = tuple(saved) if isinstance(value, tuple) else saved


def plain(value: Any, name: str) -> Any:
    """The value, if JSON gives it back as it is (but for tuples); anything else is named."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}.{i}") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item, f"{name}.{key}") for key, item in value.items()}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}; a checkpoint holds tensors, and numbers, strings, "
        "lists and dicts with string keys"
    )


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Every leaf with its dotted name and where it hangs; lists of plain values are leaves."""
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        if isinstance(value, Mapping) or (isinstance(value, list) and _branches(value)):
            yield from _walk(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", node, key, value


def _branches(items: list[Any]) -> bool:
    return any(
        isinstance(item, Tensor | Mapping) or (isinstance(item, list) and _branches(item))
        for item in items
    )


def check_names(metadata: Metadata, flat: dict[str, Tensor], partial: bool) -> None:
    """DCP would stop at the first misfit, and say nothing of what the checkpoint has too much."""
    saved: dict[str, Any] = metadata.state_dict_metadata
    missing, unused = sorted(flat.keys() - saved.keys()), sorted(saved.keys() - flat.keys())
    if missing:
        raise CheckpointError(f"it has no {_some(missing)}")
    if unused and not partial:
        raise CheckpointError(f"nothing here takes its {_some(unused)}")
    for name, tensor in flat.items():
        if (size := tuple(saved[name].size)) != tuple(tensor.shape):
            raise CheckpointError(f"{name} has shape {size} in it and {tuple(tensor.shape)} here")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


# ---------------------------------------------------------------- DCP's description
#
# Unpickling calls whatever the file names. Here that can only be DCP's records and the plain torch
# values inside them, none of which does anything when called.

_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}
_VALUES = {"torch": ("Size",), "torch.serialization": ("_get_layout",)}


class UntrustedPickle(CheckpointError):
    """A file holds more than the description of tensors that it should be."""


def read_metadata(data: bytes, files: set[str]) -> Metadata:
    """The description of tensors that lie in `files`, and nothing but that."""
    with _unchanged_records():
        try:
            metadata = _MetadataUnpickler(io.BytesIO(data)).load()
            _check(metadata, files)
        except UntrustedPickle:
            raise
        except Exception as error:
            raise UntrustedPickle(f"its .metadata cannot be read: {error}") from error
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if name in (*_RECORDS.get(module, ()), *_VALUES.get(module, ())):
            return getattr(sys.modules[module], name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UntrustedPickle(
            f"its .metadata asks for {module}.{name}, which no checkpoint needs: nothing of it "
            "was run. It was not written by Stillhouse, or it was tampered with"
        )


@contextmanager
def _unchanged_records():
    """A pickle may also assign attributes of a class it was given: this is undone and named."""
    classes = [getattr(sys.modules[m], name) for m, names in _RECORDS.items() for name in names]
    before = [dict(vars(cls)) for cls in classes]
    try:
        yield
    finally:
        for cls, attributes in zip(classes, before, strict=True):
            _restore(cls, attributes)


def _restore(cls: type, attributes: dict[str, object]) -> None:
    now = dict(vars(cls))
    changed = [n for n in {**now, **attributes} if now.get(n, cls) is not attributes.get(n, cls)]
    for name in changed:
        if name in attributes:
            setattr(cls, name, attributes[name])
        else:
            delattr(cls, name)
    if changed:
        raise UntrustedPickle(f"its .metadata rewrites {cls.__name__}.{changed[0]}")


def _check(metadata: Any, files: set[str]) -> None:
    """Only tensors, each in a file of the manifest: no pickled objects, no other folders."""
    if not isinstance(metadata, Metadata):
        raise UntrustedPickle(f"its .metadata holds a {type(metadata).__name__}")
    for name, entry in _items(metadata.state_dict_metadata):
        if not isinstance(entry, TensorStorageMetadata):
            raise UntrustedPickle(f"{name} is not a tensor; pickled objects are never loaded")
    for index, place in _items(metadata.storage_data):
        if not isinstance(index, MetadataIndex) or _path(place) not in files:
            raise UntrustedPickle("its .metadata points outside the files of its manifest")
        if getattr(place, "transform_descriptors", None):
            raise UntrustedPickle(f"{index.fqn} is stored through a transform; none is expected")


def _items(table: object):
    if not isinstance(table, dict):
        raise UntrustedPickle(f"its .metadata has a {type(table).__name__} where a table should be")
    return table.items()


def _path(place: object) -> str:
    path = getattr(place, "relative_path", None)
    return path if isinstance(path, str) else ""
