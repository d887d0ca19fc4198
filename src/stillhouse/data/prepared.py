"""Shards of latents that `stillhouse prepare` has written, as a source like any other.

A row is its own image: latents, where they were cropped from, and the tokens of the caption if it
was encoded. Nothing is decoded, cropped or flipped any more.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data.crops import Layout, Size
from stillhouse.data.faults import Corrupt
from stillhouse.data.loaded import Maker, Picture, Words
from stillhouse.data.rows import WHOLE_ROW, Columns, Row, label_number, text_of
from stillhouse.data.shardfiles import filesystem
from stillhouse.data.sources import IndexedImages, Parquet, ShardedImages, Storage
from stillhouse.errors import UserError
from stillhouse.process import Condition

INDEX = "index.json"


class Index(NamedTuple):
    """What training needs to know of a folder of shards."""

    shape: tuple[int, int, int]  # of one image's latents
    dtype: str
    codec: str  # its digest
    text: dict[str, Any] | None  # digest, length, width, ... of the encoder
    text_dtype: str
    encoder: str  # as the job was given it


class Prepared(Config):
    """Latents that `stillhouse prepare` has written."""

    kind: Literal["prepared"] = "prepared"
    path: str = ""
    """The folder with index.json, local or a URL."""
    storage: Storage = Field(default_factory=dict)
    """fsspec options such as endpoint_url. Keys belong in the environment, not in a config."""
    streaming: bool = False
    """Read shard by shard instead of preparing an index."""

    def fingerprint(self) -> str:
        """Changes when a file does."""
        return self._parquet.fingerprint()

    def open_indexed(self, columns: Columns) -> IndexedImages:
        return self._parquet.open_indexed(_whole(columns))

    def open_shards(self, columns: Columns) -> ShardedImages:
        return self._parquet.open_shards(_whole(columns))

    @property
    def index(self) -> Index:
        if not self.path:
            raise UserError("name the folder of shards as --data.source.path")
        return _index(self.path, tuple(sorted(self.storage.items())))

    def null(self) -> Condition:
        """The empty caption, as the job has encoded it: one row."""
        from safetensors.torch import load

        text = self.index.text
        if text is None:
            raise UserError(
                f"{self.path} was prepared without captions: prepare it with --text, or leave "
                "--text stored out"
            )
        if "/" in text["null"] or "\\" in text["null"]:
            raise UserError(f"{self.path}/{INDEX} names {text['null']}, which is not in its folder")
        found = load(_read(self.path, dict(self.storage), text["null"]))
        return words_condition(
            [Words(found["tokens"].numpy(), found["pooled"].numpy())], self.index
        )

    def captions(self, columns: Columns, count: int) -> tuple[list[str], Condition]:
        """Some, from the beginning, as the job has encoded them."""
        found = islice(self.open_shards(columns).rows(0), count)
        rows = {text_of(row.text) or row.image["name"]: row.image for row in found}
        words = [stored_words(values, self.index) for values in rows.values()]
        return list(rows), words_condition(words, self.index)

    @property
    def _parquet(self) -> Parquet:
        files = (f"{self.path.rstrip('/')}/shard-*.parquet",)
        return Parquet(files=files, storage=self.storage, streaming=self.streaming)


def _whole(columns: Columns) -> Columns:
    return columns.model_copy(update={"image": WHOLE_ROW})


@lru_cache(maxsize=8)
def _index(path: str, storage: tuple[tuple[str, Any], ...]) -> Index:
    try:
        found = json.loads(_read(path, dict(storage), INDEX))
    except FileNotFoundError as error:
        raise UserError(
            f"{path} holds no {INDEX}: either it is no folder of prepared shards, or the job was "
            "not finished; the same `stillhouse prepare` command again goes on with it"
        ) from error
    config, text = found["config"], found["text"]
    if found["latent"]["shape"] is None:
        raise UserError(
            f"{path} holds no latents, since no image was kept: prepare it again with another "
            "--min-size or --max-aspect, or look at its failures.jsonl"
        )
    return Index(
        tuple(found["latent"]["shape"]),
        config["dtype"],
        found["codec"]["digest"],
        text,
        config["text_dtype"],
        config["text"],
    )


def _read(path: str, storage: dict[str, Any], name: str) -> bytes:
    fs, folder = filesystem(path, storage)
    return fs.cat_file(f"{folder}/{name}")


# ---------------------------------------------------------------- rows


@dataclass(frozen=True)
class LatentMaker(Maker):
    """Rows of shards into latents with their condition."""

    index: Index | None = None

    def picture(self, row: Row, key: int, size: Size | None = None) -> Picture:
        values, index = row.image, self.index
        assert index is not None
        shape = tuple(values[f"latent_{name}"] for name in ("channels", "height", "width"))
        if shape != index.shape:
            raise Corrupt(f"latents of shape {shape} among those of {index.shape}")
        layout = Layout(
            (values["height"], values["width"]),
            (values["resized_height"], values["resized_width"]),
            (values["crop_top"], values["crop_left"]),
            bool(values["flip"]),
        )
        styles = zip(self.columns.styles, row.styles, strict=True)
        return Picture(
            numbers(values["latent"], index.dtype).reshape(shape),
            layout,
            label_number(row.label) if self.columns.label else 0,
            text_of(row.text),
            row.id,
            self.control.values(layout, [s.number(v, row.where) for s, v in styles]),
            stored_words(values, index) if index.text and self.columns.text else None,
        )

    def floats(self, pixels: NDArray[Any]) -> Tensor:
        return torch.from_numpy(pixels.astype(np.float32))

    def spoken(self, words: list[Words | None]) -> Condition:
        """The captions' tokens, zero where there are none; with the mask."""
        assert self.index is not None
        return words_condition([w for w in words if w is not None], self.index)


def numbers(data: bytes, dtype: str) -> NDArray[Any]:
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))


def stored_words(values: dict[str, Any], index: Index) -> Words:
    tokens = numbers(values["tokens"], index.text_dtype).reshape(values["token_count"], -1)
    return Words(tokens, numbers(values["pooled"], index.text_dtype))


def words_condition(words: list[Words], index: Index) -> Condition:
    """Rows of tokens, as an encoder gives them."""
    if not words or index.text is None:
        return Condition()
    length = index.text["length"]
    rows = [torch.from_numpy(w.tokens.astype(np.float32)) for w in words]
    counts = torch.tensor([len(row) for row in rows])
    return Condition(
        text=torch.stack([F.pad(row, (0, 0, 0, length - len(row))) for row in rows]),
        text_mask=torch.arange(length) < counts[:, None],
        pooled=torch.from_numpy(np.stack([w.pooled for w in words]).astype(np.float32)),
    )
