"""Images of mixed sizes, a small codec, and a process that prepares them: run as a script."""

import io
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from stillhouse.data import Columns, ImageConfig, Parquet, prepare
from stillhouse.data.prepare import Fate, Form, Job, Pool, Rules, Words
from stillhouse.data.prepare.duplicates import HASHES, Hasher, find_duplicates
from stillhouse.data.prepare.worker import Worker

SIDE = 32


def picture(number: int) -> np.ndarray:
    """Noise of a size of its own."""
    random = np.random.default_rng(number)
    height, width = random.integers(24, 72, 2)
    coarse = random.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((int(width), int(height))))


def stored(number: int, broken=(), repeated=()) -> bytes:
    """A JPEG or PNG; every third broken one is cut short, the others are not images at all."""
    if number in repeated:
        number = repeated[number]
    buffer = io.BytesIO()
    Image.fromarray(picture(number)).save(buffer, "png" if number % 2 else "jpeg")
    data = buffer.getvalue()
    if number not in broken:
        return data
    return data[: len(data) // 2] if number % 3 else b"not an image"


def write_mixed(folder: Path, sizes, broken=(), repeated=()) -> str:
    """Parquet files of the given numbers of rows; returns the glob."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import ClassLabel, Features, Value
    from datasets import Image as Encoded

    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"image": Encoded(), "label": ClassLabel(names=list("abc")), "caption": Value("string")}
    schema, first = Features(kinds).arrow_schema, 0
    for file, count in enumerate(sizes):
        numbers = range(first, first + count)
        rows = {
            "image": [{"bytes": stored(n, broken, repeated), "path": None} for n in numbers],
            "label": [n % 3 for n in numbers],
            "caption": [f"picture {n}" for n in numbers],
        }
        table = pa.Table.from_pydict(rows, schema=schema)
        pq.write_table(table, folder / f"part-{file:03d}.parquet", row_group_size=8)
        first += count
    return str(folder / "*.parquet")


# ---------------------------------------------------------------- encoders


@dataclass(frozen=True)
class SmallCodec:
    """A fixed convolution; it can be slow, and it can say which process it is in."""

    delay: float = 0.0
    pids: str = ""

    def __call__(self, device: str):
        if self.pids:
            Path(self.pids, str(os.getpid())).touch()
        weight = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) / 14

        def encode(images):
            time.sleep(self.delay)
            return F.conv2d(images, weight, stride=8)

        return encode


@dataclass(frozen=True)
class SmallText:
    """A token per letter: its number, and its place."""

    def __call__(self, device: str):
        def encode(texts):
            found = []
            for text in texts:
                tokens = [[ord(letter), place] for place, letter in enumerate(text)]
                array = np.array(tokens, np.float32).reshape(-1, 2)
                found.append(Words(array, array.sum(0) / 7))
            return found

        return encode


def job(files: str, out: Path, **options) -> Job:
    """Everything told, small batches, several shards of a file."""
    columns = Columns(label="label", text="caption")
    rows = prepare.open_rows(Parquet(files=(files,)), columns)
    settings = {
        "rules": Rules(ImageConfig(size=SIDE), min_size=30, max_aspect=2.0),
        "form": Form(rows.images.columns, rows.images.classes, text_dtype="float16"),
        "codec": SmallCodec(),
        "text": SmallText(),
        "batch": 4,
    }
    return Job(rows=rows, out=str(out), **(settings | options))


def alone(files: str, out: Path) -> None:
    """The same job in this process, without Ray."""
    work = job(files, out)
    plan = prepare.make_plan(work, 16)
    for unit in plan.units:
        Hasher(work).do(unit, frozenset())
    drop = find_duplicates(work.folder() / HASHES, plan.units)
    worker = Worker(work)
    for unit in plan.units:
        worker.do(unit, drop.get(unit.number, frozenset()))
    prepare.conclude(work, plan, {"made": "here"})


def main(files: str, out: str, delay: float, pids: str, workers: int, python: str) -> None:
    """With Ray: the cluster of $RAY_ADDRESS, or one of this process, whose workers are `python`."""
    sys.executable = python
    work = job(files, Path(out), codec=SmallCodec(delay, pids))
    plan, pool = prepare.make_plan(work, 16), Pool(workers)

    def tell(fate: Fate) -> None:
        print(json.dumps(fate._asdict()), flush=True)

    with prepare.cluster(workers=workers):
        drop = prepare.hash_all(work, plan, pool, lambda _: None)
        prepare.encode_all(work, plan, pool, drop, tell)
    prepare.conclude(work, plan, {"made": "here"})


if __name__ == "__main__":
    files, out, delay, pids, workers, python = sys.argv[1:]
    main(files, out, float(delay), pids, int(workers), python)
