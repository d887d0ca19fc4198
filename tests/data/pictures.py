"""Small data sets with known content, written by the tests."""

import io
import tarfile

import numpy as np
from PIL import Image

SIDE = 8


def pixels(number: int, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """An image that says which it is: red and green are its number."""
    array = np.zeros((height, width, 3), np.uint8)
    array[..., 0], array[..., 1] = number % 256, number // 256
    array[..., 2] = np.arange(width)
    return array


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "png")
    return buffer.getvalue()


def numbers(batch) -> list[int]:
    """The numbers of the images of a batch, read from their pixels."""
    values = ((batch.data + 1) * 127.5).round().long()
    return (values[:, 0, 0, 0] + 256 * values[:, 1, 0, 0]).tolist()


def encoded(first: int, count: int, broken=()) -> list[bytes]:
    return [b"not an image" if i in broken else png(pixels(i)) for i in range(first, first + count)]


def write_parquet(path, first: int, count: int, broken=()) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import ClassLabel, Features, Image, Value

    order = range(first, first + count)
    features = Features(
        {"image": Image(), "label": ClassLabel(names=list("abcde")), "caption": Value("string")}
    )
    rows = {
        "image": [{"bytes": b, "path": None} for b in encoded(first, count, broken)],
        "label": [i % 5 for i in order],
        "caption": [f"picture {i}" for i in order],
    }
    schema = features.arrow_schema
    table = pa.Table.from_pydict(rows, schema=schema)
    pq.write_table(table, path, row_group_size=4)


def write_tar(path, first: int, count: int, broken=()) -> None:
    with tarfile.open(path, "w") as tar:
        for i, image in zip(
            range(first, first + count), encoded(first, count, broken), strict=True
        ):
            members = {"png": image, "cls": str(i % 5).encode(), "txt": f"picture {i}".encode()}
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{i:06d}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_folder(path, count: int, broken=()) -> None:
    for i, image in enumerate(encoded(0, count, broken)):
        folder = path / "abcde"[i % 5]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:06d}.png").write_bytes(image)


def write_shards(folder, kind: str, sizes, broken=()):
    """Shards of the given numbers of rows; returns the glob."""
    folder.mkdir(parents=True, exist_ok=True)
    write, suffix = {"parquet": (write_parquet, "parquet"), "tars": (write_tar, "tar")}[kind]
    first = 0
    for shard, count in enumerate(sizes):
        write(folder / f"shard-{shard:03d}.{suffix}", first, count, broken)
        first += count
    return str(folder / f"*.{suffix}")
