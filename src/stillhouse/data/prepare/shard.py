"""One shard of latents: its columns, and a file that appears whole or not at all.

| column | what it holds |
|---|---|
| `id`, `name` | the source's stable sample id; shard and row, or path in the folder |
| `latent` | bytes of [`latent_channels`, `latent_height`, `latent_width`], little-endian |
| `flip`, `crop_top`, ... | where the crop comes from, as in `stillhouse.data.crops` |
| label, caption, styles | the source's columns, under the source's names |
| `tokens`, `token_count` | bytes of [`token_count`, width], without padding |
| `pooled` | bytes of [width] |
| `digest` | BLAKE2b (128 bits) over all of the above |
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stillhouse.data.crops import REPORTS
from stillhouse.data.loaded import Words
from stillhouse.data.prepare.samples import Sample
from stillhouse.data.rows import Columns
from stillhouse.errors import UserError

Precision = Literal["float32", "float16"]
_GROUP = 128  # rows of a row group: what a reader holds at once
_BULK = ("latent", "tokens", "pooled")  # numbers that no compression makes smaller
_SHAPE = ("latent_channels", "latent_height", "latent_width")


@dataclass(frozen=True)
class Form:
    """What the rows of a shard look like."""

    columns: Columns
    classes: tuple[str, ...] = ()
    """Names behind the labels, where they are known."""
    dtype: Precision = "float32"
    text_dtype: Precision | None = None
    """None: no text embeddings."""

    def __post_init__(self) -> None:
        taken = {*OWN, *TEXT} & {*self.carried}
        if taken:
            raise UserError(
                f"the shards have a column {sorted(taken)[0]!r} of their own: rename that of the "
                "source, or leave it out of --columns"
            )

    @property
    def carried(self) -> list[str]:
        """The source's columns."""
        styles = (style.column for style in self.columns.styles)
        return [name for name in (self.columns.label, self.columns.text, *styles) if name]

    def schema(self) -> Any:
        """Arrow's, with what `datasets` reads from it."""
        from datasets import ClassLabel, Features, Value

        found: dict[str, Any] = {name: Value(kind) for name, kind in OWN.items()}
        found |= {name: Value("string") for name in self.carried}
        if self.columns.label:
            names = list(self.classes)
            found[self.columns.label] = ClassLabel(names=names) if names else Value("int64")
        if self.text_dtype:
            found |= {name: Value(kind) for name, kind in TEXT.items()}
        digest = found.pop("digest")
        return Features(found | {"digest": digest}).arrow_schema

    def record(
        self, sample: Sample, latent: NDArray[np.float32], words: Words | None
    ) -> dict[str, Any]:
        """One row. Raises `OverflowError` where the numbers are not finite as they are stored."""
        row: dict[str, Any] = {"id": sample.id, "name": sample.name}
        row["latent"] = _stored(latent, self.dtype)
        row |= dict(zip(_SHAPE, latent.shape, strict=True))
        row |= {name: report(sample.layout) for name, report in REPORTS.items()}
        row |= self._carried(sample)
        if words is not None and self.text_dtype:
            row["tokens"] = _stored(words.tokens, self.text_dtype)
            row["token_count"] = len(words.tokens)
            row["pooled"] = _stored(words.pooled, self.text_dtype)
        return row | {"digest": digest_of(row)}

    def _carried(self, sample: Sample) -> dict[str, Any]:
        row = {style.column: value for style, value in self._styles(sample)}
        if self.columns.label:
            row[self.columns.label] = sample.label
        if self.columns.text:
            row[self.columns.text] = sample.text
        return row

    def _styles(self, sample: Sample) -> Iterator[Any]:
        return zip(self.columns.styles, sample.styles, strict=True)


_INTEGERS = (*_SHAPE, *(name for name in REPORTS if name not in ("flip", "aspect")))
OWN = {"id": "int64", "name": "string", "latent": "binary"}
OWN |= dict.fromkeys(_INTEGERS, "int32") | {"flip": "bool", "aspect": "float64", "digest": "string"}
TEXT = {"tokens": "binary", "token_count": "int32", "pooled": "binary"}


def _stored(values: NDArray[np.float32], dtype: Precision) -> bytes:
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
    if not np.isfinite(array).all():
        raise OverflowError(f"its encoding is not finite in {dtype}")
    return array.tobytes()


def digest_of(row: dict[str, Any]) -> str:
    """Over every column but the digest, by name and in the order of the names."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(row.keys() - {"digest"}):
        value = row[name]
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


# ---------------------------------------------------------------- the file


@dataclass(eq=False)
class ShardFile:
    """Rows on their way into a Parquet file; they are held for a row group only."""

    path: Path
    schema: Any
    rows: int = 0
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    _held: list[dict[str, Any]] = field(default_factory=list)
    _writer: Any = None

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            self._held.append(record)
            self.digest.update(bytes.fromhex(record["digest"]))
        self.rows += len(records)
        while len(self._held) >= _GROUP:
            self._write(_GROUP)

    def close(self) -> None:
        if self._held:
            self._write(len(self._held))
        if self._writer is not None:
            self._writer.close()

    def _write(self, count: int) -> None:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter

        if self._writer is None:
            names = self.schema.names
            options: Any = {
                "compression": {n: "NONE" if n in _BULK else "ZSTD" for n in names},
                "use_dictionary": [n for n in names if n not in (*_BULK, "digest", "name")],
            }
            self._writer = ParquetWriter(self.path, self.schema, **options)
        held, self._held = self._held[:count], self._held[count:]
        self._writer.write_table(pa.Table.from_pylist(held, schema=self.schema))
