"""Images that features are read from: by number, as pictures of any size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stillhouse.data import Columns, Folder
from stillhouse.data.annotated import KEYPOINTS, MASKS, Keypoints, Masks
from stillhouse.data.faults import Corrupt
from stillhouse.data.loaded import open_image
from stillhouse.errors import UserError
from stillhouse.recipes.judge.galleries import find_data
from stillhouse.recipes.known_data import local_copy

Format = Literal["auto", "spair", "birds", "pets", "ade20k", "cityscapes"]
# What training and test splits are called.
SPLITS = {
    "spair": ("trn", "test"),
    "birds": ("train", "test"),
    "pets": ("train", "test"),
    "ade20k": ("training", "validation"),
    "cityscapes": ("train", "val"),
}


@dataclass(frozen=True)
class Pictures:
    """Images by number; `open` gives a PIL image in RGB."""

    name: str
    names: Sequence[str]
    open: Callable[[int], Any]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.names)


def open_pictures(name: str, columns: Columns, count: int = 0) -> Pictures:
    """A folder of images, a known data set, Parquet files or tars; the first `count`, 0: all."""
    data = find_data(name, columns) if name else None
    if data is None:
        raise UserError(
            f"{name or 'no --images'} cannot be read: give a folder of images, a data set "
            "(cifar10, pets:test), Parquet files or tars as --images"
        )
    images = data.source.open_indexed(data.columns)
    total = min(count, len(images)) if count else len(images)

    def open(number: int) -> Any:
        row = images.rows([number])[0]
        try:
            return open_image(row, "rgb")
        except Corrupt as error:
            raise UserError(
                f"{name}: {row.where} cannot be used ({error}). Repair or remove it"
            ) from error

    names = [str(number) for number in range(total)]
    if isinstance(data.source, Folder):
        root = Path(name).expanduser().resolve()
        column = f"{images.columns.image}.path"
        paths = [path for path, _ in zip(images.column(column), range(total), strict=False)]
        names = [Path(path).resolve().relative_to(root).as_posix() for path in paths]
    return Pictures(name, names, open, data.source.fingerprint())


# ---------------------------------------------------------------- annotated


@dataclass(frozen=True)
class Place:
    """A folder of annotated images in a known format."""

    name: str
    folder: Path
    format: str

    @property
    def fingerprint(self) -> str:
        return Folder(path=str(self.folder)).fingerprint()

    def keypoints(self) -> Keypoints:
        if self.format not in KEYPOINTS:
            raise UserError(
                f"{self.name} ({self.format}) has no keypoints: {', '.join(KEYPOINTS)} have"
            )
        return KEYPOINTS[self.format](self.folder, SPLITS[self.format][1])

    def masks(self, which: Literal["train", "test"]) -> Masks:
        if self.format not in MASKS:
            raise UserError(f"{self.name} ({self.format}) has no masks: {', '.join(MASKS)} have")
        return MASKS[self.format](self.folder, SPLITS[self.format][which == "test"])


def check_whole(fit: str) -> None:
    """Points and masks of a picture are looked up in what the network has seen of all of it."""
    if fit != "squash":
        raise UserError(f"annotations lie on whole pictures: leave out --fit {fit}")


def find_place(name: str, format: Format = "auto") -> Place:
    """By path, or by the name of a folder below $STILLHOUSE_DATA."""
    folder = Path(name).expanduser() if name else Path("nowhere")
    folder = folder if folder.is_dir() else local_copy(name) if name else None
    if folder is None:
        raise UserError(
            f"there is no folder {name or '--data'}: name the folder of a data set as --data, or "
            "one below $STILLHOUSE_DATA"
        )
    found = _format(folder) if format == "auto" else format
    if not found:
        raise UserError(
            f"the annotations in {folder} are of no known format: say which as --format, of "
            f"{', '.join(SPLITS)}"
        )
    return Place(name, folder, found)


def _format(folder: Path) -> str:
    marks = {
        "spair": ("pairs.json", "PairAnnotation"),
        "cityscapes": ("leftImg8bit",),
        "ade20k": ("annotations",),
    }
    for format, files in marks.items():
        if any((folder / file).exists() for file in files):
            return format
    return folder.name if folder.name in ("birds", "pets") else ""
