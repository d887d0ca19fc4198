"""Features of many images as files: shards of a fixed number of images, and an index written last.

    OUT/shard-00000.safetensors, ...   one tensor per activation [images, C, H, W], and its facts
    OUT/index.json                     ids, shapes, the model's digest, selection, levels, seed

Shards are dealt to processes in turn. What is in a shard follows from the facts alone, so any
number of processes, and any kills and restarts between, leave the same bytes; a shard that is there
is not made again. Features keep their own resolution and are resized when they are used.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stillhouse.config import Config
from stillhouse.engine.world import World
from stillhouse.errors import UserError, one_line
from stillhouse.files import write_whole

INDEX, KEY = "index.json", "stillhouse"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Read = Callable[[range], dict[str, Tensor]]  # numbers of images -> features [B, C, H, W] by name
MakeRead = Callable[[], Read]  # loads the model: called where a shard is missing, and only there


class Part(Config):
    """What is read from one model at one noise level."""

    model: str
    """As it was named."""
    digest: str
    """SHA-256 of its files."""
    ids: tuple[str, ...]
    sigma: float
    condition: str = ""
    """What the model was told, in words."""
    precision: str = "float32"
    """In which it was evaluated."""


class Facts(Config):
    """All that features depend on."""

    parts: tuple[Part, ...]
    source: str
    """The images as they were named."""
    fingerprint: str
    """Changes when an image does."""
    reading: str
    """How images were made the size that the models take."""
    count: int
    seed: int = 0
    shard: int = 256
    """Images in a file."""
    batch: int = 8
    """Images in a run of the network, whose rounding may depend on it."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    def digest(self, ids: Sequence[str]) -> str:
        """Of all that is in the shards: other images of the same source are other features."""
        return hashlib.sha256(json.dumps([self.model_dump_json(), *ids]).encode()).hexdigest()

    def shards(self) -> list[range]:
        """The numbers of the images in each."""
        starts = range(0, self.count, self.shard)
        return [range(start, min(start + self.shard, self.count)) for start in starts]


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


# ---------------------------------------------------------------- writing


def extract_all(
    out: Path,
    facts: Facts,
    ids: Sequence[str],
    make: MakeRead,
    here: World,
    tell: Callable[[int], None] = lambda images: None,
) -> None:
    """Makes what is missing, this process its share; `ids` are the images' names.

    `tell` hears of images as they are finished, those of earlier runs included.
    """
    if len(ids) != facts.count:
        raise ValueError(f"{len(ids)} names for {facts.count} images")
    digest = facts.digest(ids)
    here.first(lambda: _prepare(out, digest))
    read: Read | None = None
    for number, images in list(enumerate(facts.shards()))[here.rank :: here.size]:
        if not (out / shard_name(number)).exists():
            read = make() if read is None else read
            write_whole(out / shard_name(number), _shard(facts, digest, images, read))
        tell(len(images))
    here.barrier()
    here.first(lambda: write_whole(out / INDEX, _index(out, facts, ids)))


def _prepare(out: Path, digest: str) -> None:
    """A folder of other features is refused; until all shards are there, there is no index."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be made ({error}): choose another --out") from error
    there = sorted(out.glob("shard-*.safetensors"))
    if strange := [file.name for file in there if _digest_of(file) != digest]:
        raise UserError(
            f"{out} holds other features ({strange[0]} and {len(strange) - 1} more): choose "
            "another --out, or remove it"
        )
    (out / INDEX).unlink(missing_ok=True)


def _shard(facts: Facts, digest: str, images: range, read: Read) -> bytes:
    from safetensors.torch import save

    parts: dict[str, list[Tensor]] = {}
    for start in range(images.start, images.stop, facts.batch):
        found = read(range(start, min(start + facts.batch, images.stop)))
        for name, value in found.items():
            parts.setdefault(name, []).append(_stored(name, value, facts.dtype))
    tensors = {name: torch.cat(values) for name, values in parts.items()}
    # One key: several would be written in any order.
    return save(tensors, metadata={KEY: digest})


def _stored(name: str, value: Tensor, dtype: str) -> Tensor:
    small = value.to("cpu", DTYPES[dtype]).contiguous()  # tokens and channels-last are not
    if not bool(torch.isfinite(small).all()):
        raise UserError(
            f"{name} has values that {dtype} cannot hold: store as --store bfloat16 or float32; "
            "if that does not help, run the model itself in float32"
        )
    return small


def _index(out: Path, facts: Facts, ids: Sequence[str]) -> bytes:
    shapes: dict[str, list[int]] = {}
    for number, images in enumerate(facts.shards()):
        found = _shapes(out / shard_name(number))
        if any(shape[0] != len(images) for shape in found.values()):
            raise UserError(f"{out / shard_name(number)} is damaged: remove it, and run again")
        shapes = {name: shape[1:] for name, shape in found.items()}
    content = {
        "version": 1,
        "facts": facts.model_dump(mode="json"),
        "shapes": shapes,
        "ids": list(ids),
    }
    return json.dumps(content, indent=1).encode()


def _digest_of(shard: Path) -> str:
    with _open(shard) as file:
        return (file.metadata() or {}).get(KEY, "")


def _shapes(shard: Path) -> dict[str, list[int]]:
    with _open(shard) as file:
        return {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def _open(shard: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(shard, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{shard} cannot be read ({one_line(error)}): remove it, and run the same command again"
        ) from error


# ---------------------------------------------------------------- reading


class StoredFeatures:
    """What `extract_all` has written, read an image at a time."""

    def __init__(self, folder: Path) -> None:
        try:
            found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            self.facts = Facts.model_validate(found["facts"])
            self.shapes = {name: tuple(shape) for name, shape in found["shapes"].items()}
            self.ids: list[str] = list(found["ids"])
        except FileNotFoundError as error:
            raise UserError(
                f"{folder} has no {INDEX}: its extraction is not finished, run the same command "
                "again, or name another folder"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / INDEX} cannot be read ({one_line(error)})") from error
        self.folder = folder
        self.number = {id: number for number, id in enumerate(self.ids)}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Features [C, H, W] of one image, by activation."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        shard, row = divmod(number, self.facts.shard)
        with _open(self.folder / shard_name(shard)) as file:
            return {name: file.get_slice(name)[row] for name in self.shapes}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[number] for number in range(len(self)))

    def of(self, id: str) -> dict[str, Tensor]:
        """By the image's name."""
        if id not in self.number:
            raise UserError(f"{self.folder} has no features of {id!r}")
        return self[self.number[id]]
