"""Where images come from: Parquet files, WebDataset tars, image folders; indexed or streamed.

Paths are local or fsspec URLs (s3://bucket/train-*.tar), globs and folders allowed. Hugging Face
`datasets` reads them. An indexed source is prepared once in datasets' cache and then read at
random; its sample ids are its row numbers. A streamed source is read shard by shard, never stored;
its sample ids are 63 bits of BLAKE2b over "shard name/row", where the shard's name is its path
below the folder that all shards share, so that a copy elsewhere keeps its ids.
"""

import hashlib
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data import shardfiles
from stillhouse.data.crops import Size
from stillhouse.data.faults import Corrupt, Fault
from stillhouse.data.named import check_named
from stillhouse.data.rows import (
    Columns,
    Row,
    check_columns,
    check_style,
    decoded,
    image_file,
    raw_images,
    read_row,
    style_codes,
    text_of,
    value_of,
)
from stillhouse.data.tars import read_tar
from stillhouse.data.transforms import upright_size
from stillhouse.errors import UserError

_CHUNK = 16  # rows of a Parquet file that are made Python objects at once
_SCAN = 256  # the same of a column that is read from end to end

Storage = dict[str, str | int | float | bool]


class FileSource(Config, ABC):
    """Files that hold many images each."""

    builder: ClassVar[str]
    suffix: ClassVar[str]

    files: tuple[str, ...] = ()
    """Paths, globs, folders or URLs."""
    storage: Storage = Field(default_factory=dict)
    """fsspec options such as endpoint_url. Keys belong in the environment, not in a config."""

    def shards(self) -> list[str]:
        """The files, sorted by path: the same list on every process."""
        if not self.files:
            raise UserError("the data source names no files: give them as --data.source.files")
        return shardfiles.find(self.files, self.suffix, self.storage)

    def fingerprint(self) -> str:
        """Changes when a file does."""
        return shardfiles.fingerprint(self.shards(), self.storage)

    def open_shards(self, columns: Columns) -> "ShardedImages":
        """For reading shard by shard."""
        shards = self.shards()
        return ShardedImages(self, shards, columns, self._features(shards))

    def open_indexed(self, columns: Columns) -> "IndexedImages":
        """For reading at random. Empty and unreadable files are left out, and told."""
        good, faults = [], []
        for path in self.shards():
            reason = shardfiles.trouble(path, self.builder, self.storage)
            if reason:
                faults.append(Fault(path, reason))
            else:
                good.append(path)
        if not good:
            raise UserError(f"none of the files can be read; the first: {faults[0]}")
        check_columns(self._features(good), columns, good[0])
        data = load(self.builder, good, self.storage)
        return IndexedImages(data, columns, tuple(faults))

    def columns_of(self, path: str) -> Any:
        """The columns of one shard, by name."""
        return load(self.builder, [path], self.storage, streaming=True).features

    @abstractmethod
    def read(self, path: str, start: int, features: Any) -> Iterator[dict[str, Any]]:
        """The rows of one shard from `start` on, with images still encoded."""

    def _features(self, shards: Sequence[str]) -> Any:
        """The columns, from the first shard that has any."""
        problems = []
        for path in shards:
            try:
                return self.columns_of(path)
            except Exception as error:
                fault = Fault(path, f"{type(error).__name__}: {error}")
                if shardfiles.passing(error):
                    raise UserError(f"the data cannot be reached; {fault}") from error
                problems.append(fault)  # an empty or damaged shard; the reader counts it later
        raise UserError(f"none of the {len(shards)} files can be read; the first: {problems[0]}")


class Parquet(FileSource):
    """Parquet files with a column of encoded images."""

    builder: ClassVar[str] = "parquet"
    suffix: ClassVar[str] = ".parquet"
    kind: Literal["parquet"] = "parquet"
    streaming: bool = False
    """Read shard by shard instead of preparing an index."""

    def read(self, path: str, start: int, features: Any) -> Iterator[dict[str, Any]]:
        # By default a whole row group is held at once, and an empty file is an error.
        data = load(
            self.builder,
            [path],
            self.storage,
            streaming=True,
            features=raw_images(features),
            batch_size=_CHUNK,
        )
        for table in data.skip(start).iter(batch_size=_CHUNK):
            for row in zip(*table.values(), strict=True):
                yield dict(zip(table, row, strict=True))


class Tars(FileSource):
    """WebDataset tars: members that share a name are one sample, the suffix is the column."""

    builder: ClassVar[str] = "webdataset"
    suffix: ClassVar[str] = ".tar"
    kind: Literal["tars"] = "tars"
    streaming: bool = True
    """Read shard by shard instead of preparing an index."""

    def columns_of(self, path: str) -> Any:
        for row in read_tar(path, self.storage):
            return dict.fromkeys(row)
        raise ValueError("an empty archive")

    def read(self, path: str, start: int, features: Any) -> Iterator[dict[str, Any]]:
        return read_tar(path, self.storage, start)


class Folder(Config):
    """A folder of images; sub-folders are classes, metadata.csv or .jsonl adds columns.

    Captions may also stand in a .txt beside each image: cat.txt says what cat.png shows.
    """

    kind: Literal["folder"] = "folder"
    path: str = ""
    """Where it is."""
    storage: Storage = Field(default_factory=dict)
    """fsspec options such as endpoint_url. Keys belong in the environment, not in a config."""
    streaming: Literal[False] = False
    """A folder is an index already."""

    def fingerprint(self) -> str:
        """Changes when a file does."""
        fs, path = shardfiles.filesystem(self.path, self.storage)
        return shardfiles.fingerprint(sorted(map(fs.unstrip_protocol, fs.find(path))), self.storage)

    def images_fingerprint(self, images: "IndexedImages") -> str:
        """Changes when an image does, or their order, but not when a caption does."""
        paths = list(images.column(f"{images.columns.image}.path"))  # none of pixels in a column
        return shardfiles.fingerprint(paths, self.storage) if all(paths) else self.fingerprint()

    def open_indexed(self, columns: Columns) -> "IndexedImages":
        if not self.path:
            raise UserError("the folder of images is missing: give it as --data.source.path")
        if not shardfiles.is_folder(self.path, self.storage):
            raise UserError(f"there is no folder {self.path!r}: check the path")
        patterns = [posixpath.join(self.path, "**")]
        try:
            data = load("imagefolder", patterns, self.storage, drop_labels=None)
        except (ValueError, FileNotFoundError) as error:  # datasets' way of saying that none match
            raise UserError(
                f"{self.path} holds no images (.jpg, .png, ...): check the path, or put some there"
            ) from error
        if columns.text and columns.text not in data.features:
            data = with_captions(data, columns)
        check_columns(data.features, columns, self.path)
        images = IndexedImages(data, columns, ())
        check_named(images.column("image.path"), self.path)  # datasets' own name of it
        return images


def with_captions(data: Any, columns: Columns) -> Any:
    """The images of a local folder with the text beside each; as they are where there is none."""
    if columns.image not in data.features:
        return data
    encoded = data.cast_column(columns.image, raw_images(data.features)[columns.image])
    images = [image["path"] for image in encoded[columns.image]]
    texts = [_text_beside(path) for path in images]
    missing = [path for path, text in zip(images, texts, strict=True) if text is None]
    if len(missing) == len(images):
        return data
    if missing:
        raise UserError(
            f"{len(missing)} of {len(images)} images have no caption beside them; the first is "
            f"{missing[0]}: put a .txt of the same name there, or take the image away"
        )
    return data.add_column(columns.text, texts)


def _text_beside(image: str | None) -> str | None:
    file = Path(image).with_suffix(".txt") if image else None
    if file is None or not file.is_file():
        return None
    try:
        return file.read_text(encoding="utf-8-sig").strip()  # editors may put a mark in front
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not text in UTF-8 ({error.reason}): save it as such") from error


Source = Annotated[Parquet | Tars | Folder, Field(discriminator="kind")]


# ---------------------------------------------------------------- opened sources


@dataclass(frozen=True, eq=False)
class Captions:
    """The captions of an indexed source, each once, to be encoded once."""

    texts: tuple[str, ...]
    of_row: Tensor  # [rows] int64

    def of(self, ids: Tensor) -> Tensor:
        """The places in `texts` of the captions of these images, by their `Batch.ids`."""
        return self.of_row[ids]


class IndexedImages:
    """Rows by number."""

    def __init__(self, data: Any, columns: Columns, faults: tuple[Fault, ...]) -> None:
        features = raw_images(data.features)
        changed = {name: f for name, f in features.items() if f != data.features[name]}
        for name, feature in changed.items():
            data = data.cast_column(name, feature)
        self.data, self.columns, self.faults = data, columns, faults
        self.classes = class_names(features, columns)
        self.codes = style_codes(features, columns)
        if not len(data):
            raise UserError("the data set has no rows")
        for style in columns.styles:
            check_style(style, self._distinct(style.column))

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Several rows in one read."""
        table = self.data[list(indices)]
        rows = (dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True))
        return [
            read_row(row, self.columns, self.codes, index, f"image {index}")
            for row, index in zip(rows, indices, strict=True)
        ]

    def column(self, name: str) -> Iterator[Any]:
        """All values of one column, without reading the others."""
        top = name if name in self.data.features else name.split(".")[0]
        if top not in self.data.features:
            there = ", ".join(self.data.features)
            raise UserError(f"there is no column {name!r}; the columns are: {there}")
        for table in self.data.select_columns([top]).iter(batch_size=_SCAN):
            for value in table[top]:
                yield value_of({top: value}, name)

    def _distinct(self, name: str) -> set[Any]:
        """Values of a column, each once."""
        found = self.data.unique(name) if name in self.data.features else self.column(name)
        return {decoded(value, self.codes.get(name)) for value in found}

    def captions(self) -> Captions:
        """One pass over the column of text."""
        texts = [text_of(value) for value in self.column(self.columns.text)]
        distinct = sorted({*texts})
        place = {text: at for at, text in enumerate(distinct)}
        return Captions(tuple(distinct), torch.tensor([place[text] for text in texts]))

    def sizes(self) -> NDArray[np.int64]:
        """[rows, 2] height and width of the upright images, from their headers; 0 if unknown."""
        return np.array([_size(image) for image in self.column(self.columns.image)], np.int64)


class ShardedImages:
    """Rows by shard, in the order of the file."""

    def __init__(
        self, source: FileSource, shards: list[str], columns: Columns, features: Any
    ) -> None:
        check_columns(features, columns, shards[0])
        self.source, self.shards, self.columns, self.features = source, shards, columns, features
        for style in columns.styles:
            check_style(style)
        self.classes = class_names(features, columns)
        self.codes = style_codes(features, columns)
        self.names = short_names(shards)

    def __len__(self) -> int:
        return len(self.shards)

    def rows(self, shard: int, start: int = 0) -> Iterator[Row]:
        """The rows of one shard, from row `start` on."""
        read = self.source.read(self.shards[shard], start, self.features)
        for at, values in enumerate(read, start):
            yield self.row(shard, at, values)

    def row(
        self, shard: int, at: int, values: dict[str, Any], columns: Columns | None = None
    ) -> Row:
        """Row `at` of a shard, of its values; `columns` where it has its own."""
        id, where = sample_id(self.names[shard], at), f"row {at} of {self.shards[shard]}"
        return read_row(values, columns or self.columns, self.codes, id, where)


def _size(image: Any) -> Size:
    try:
        file = image_file(image)
        if file is None:
            height, width = np.shape(image)[:2]
            return (height, width)
        with file:
            return upright_size(file)
    except (Corrupt, ValueError):
        return (0, 0)


def sample_id(shard: str, row: int) -> int:
    """A stable id of a streamed sample: 63 bits of BLAKE2b over "shard/row"."""
    digest = hashlib.blake2b(f"{shard}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def short_names(shards: Sequence[str]) -> list[str]:
    """Paths below the folder that all of them share."""
    parts = [path.split("/") for path in shards]
    shared = 0
    for level in zip(*(p[:-1] for p in parts), strict=False):
        if len(set(level)) > 1:
            break
        shared += 1
    return ["/".join(p[shared:]) for p in parts]


def class_names(features: Any, columns: Columns) -> tuple[str, ...]:
    """Names of the classes, where the label column knows them."""
    return tuple(getattr(features.get(columns.label), "names", None) or ())


def load(
    builder: str,
    files: Sequence[str],
    storage: Storage,
    *,
    streaming: bool = False,
    features: Any = None,
    **options: Any,
) -> Any:
    """`datasets.load_dataset` over files, without its progress bars."""
    import datasets
    import datasets.config
    from datasets.exceptions import DatasetGenerationError

    # It would tell the hub of every file we open: a request per shard, seconds where it is out of
    # reach.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    with nullcontext() if streaming else _quiet(datasets), _beyond_the_hub(datasets, files):
        try:
            return datasets.load_dataset(
                builder,
                data_files=list(files),
                split="train",
                streaming=streaming,
                features=features,
                storage_options=dict(storage) or None,  # it writes into what it is given
                **options,
            )
        except DatasetGenerationError as error:
            cause = error.__cause__ or error
            raise UserError(f"the {builder} files cannot be read: {cause}") from error


@contextmanager
def _beyond_the_hub(datasets: Any, files: Sequence[str]) -> Iterator[None]:
    """HF_HUB_OFFLINE is about the hub, but datasets (5.2) then reads no object store either."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before and any(map(_of_the_hub, files))
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _of_the_hub(file: str) -> bool:
    return file.startswith(("hf://", "https://huggingface.co"))


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    before = datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            datasets.utils.enable_progress_bars()
