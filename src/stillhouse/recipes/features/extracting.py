"""`stillhouse features extract MODEL --images DIR`: features of many images as sharded files.

Run the same command again to go on after a stop; under torchrun every process takes its shards.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from stillhouse.data import Columns
from stillhouse.engine.world import World, world
from stillhouse.errors import UserError
from stillhouse.features.store import Facts, StoredFeatures, extract_all
from stillhouse.recipes.features.images import Pictures, open_pictures
from stillhouse.recipes.features.reading import Reader, Reading
from stillhouse.recipes.progress import progress_bar

Store = Literal["float16", "bfloat16", "float32"]


class ExtractRun(Reading):
    """An extraction."""

    images: str = ""
    """A folder of images, a data set (cifar10, pets:test), Parquet files or tars."""
    columns: Columns = Columns()
    """Of data sets that are given as files."""
    count: NonNegativeInt = 0
    """The first so many images; 0: all."""
    shard: PositiveInt = 64
    """Images in a file; a process holds a file's features some three times in memory."""
    store: Store = "float16"
    """Precision of what is stored."""
    out: Path = Path("features")
    """The folder to write."""


def run(config: ExtractRun) -> StoredFeatures | None:
    """What was stored (at the first process)."""
    with world(config.device) as here:
        pictures = open_pictures(config.images, config.columns, config.count)
        return extract(config, pictures, here, config.out, shard=config.shard, store=config.store)


def extract(
    config: Reading,
    pictures: Pictures,
    here: World,
    out: Path,
    *,
    shard: int = 64,
    store: Store = "float16",
) -> StoredFeatures | None:
    """Features of pictures in a folder, made where they are missing."""
    reader = Reader(config, here.device)
    facts = Facts(
        parts=reader.facts(),
        source=pictures.name,
        fingerprint=pictures.fingerprint,
        reading=reader.reading,
        count=len(pictures),
        seed=config.seed,
        shard=shard,
        batch=config.batch,
        dtype=store,
    )
    if not facts.count:
        raise UserError(f"{pictures.name} holds no images")
    mine = sum(map(len, facts.shards()[here.rank :: here.size]))
    label = f"features of {pictures.name}"
    with progress_bar(label, mine, "images", shown=here.rank == 0) as advance:
        extract_all(out, facts, pictures.names, lambda: _read(reader, pictures), here, advance)
    return StoredFeatures(out) if here.rank == 0 else None


def _read(reader: Reader, pictures: Pictures) -> Callable[[range], dict[str, Tensor]]:
    return lambda numbers: reader.read([pictures.open(number) for number in numbers], numbers)
