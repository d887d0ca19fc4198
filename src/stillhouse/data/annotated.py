"""Images that somebody has annotated: pairs with keypoints, and masks of classes.

| reader | files |
|---|---|
| `read_spair` | `PairAnnotation/SPLIT/*.json` and `JPEGImages/`, or `pairs.json` and `images/` |
| `read_birds` | CUB-200 crops as Parquet with keypoints: two images of one species make a pair |
| `read_pets` | Oxford pets as Parquet with trimaps: background, pet; the border is not judged |
| `read_ade20k` | `images/SPLIT`, `annotations/SPLIT`: 150 classes; 0 (other) is not judged |
| `read_cityscapes` | `leftImg8bit/SPLIT`, `gtFine/SPLIT`: the 19 classes that are judged |

Sizes are (width, height), points (x, y), boxes (x1, y1, x2, y2), all in original pixels.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stillhouse.data.faults import Corrupt
from stillhouse.data.rows import raw_images
from stillhouse.data.sources import load
from stillhouse.data.transforms import decode, upright_size
from stillhouse.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

IGNORE = 255


def spread(total: int, count: int = 0) -> Sequence[int]:
    """Numbers of so many among all, evenly: files that lie side by side often show one place.

    All of them where there are no more, or where the count is 0.
    """
    return [n * total // count for n in range(count)] if 0 < count < total else range(total)


# ---------------------------------------------------------------- keypoints


class Side(NamedTuple):
    """One image of a pair."""

    image: str  # its name
    size: tuple[int, int]
    box: tuple[float, float, float, float]
    points: Tensor  # [P, 2] float64


class Pair(NamedTuple):
    """Point i of the source shows what point i of the target shows."""

    source: Side
    target: Side
    category: str


@dataclass(frozen=True)
class Keypoints:
    """Pairs of images, and the images by their names."""

    pairs: Sequence[Pair]
    names: Sequence[str]  # of all images, each once
    open: Callable[[str], "Image"]

    @classmethod
    def of(cls, pairs: Sequence[Pair], open: Callable[[str], "Image"]) -> "Keypoints":
        names = dict.fromkeys(side.image for pair in pairs for side in pair[:2])
        return cls(pairs, list(names), open)


def read_spair(folder: Path, split: str = "test") -> Keypoints:
    """SPair-71k as it is published, or a part of it in one `pairs.json`."""
    whole, single = folder / "PairAnnotation" / split, folder / "pairs.json"
    if single.is_file():
        found, images = _json(single), folder / "images"
    elif whole.is_dir():
        found, images = [_json(file) for file in sorted(whole.glob("*.json"))], None
    else:
        raise UserError(
            f"{folder} holds neither pairs.json nor PairAnnotation/{split}: name the folder of "
            "SPair-71k, or one with pairs.json and images"
        )
    try:
        pairs = [_spair_pair(entry, images is None) for entry in found]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"a pair in {folder} is not as SPair-71k has them ({type(error).__name__}: {error})"
        ) from error
    root = folder / "JPEGImages" if images is None else images
    return Keypoints.of(pairs, lambda name: _open(root / name))


def _spair_pair(entry: Mapping[str, Any], by_category: bool) -> Pair:
    category = str(entry["category"])
    folder = category if by_category else ""
    source, target = (_spair_side(entry, which, folder) for which in ("src", "trg"))
    if len(source.points) != len(target.points):
        raise ValueError(f"{source.image} and {target.image} have not as many points")
    return Pair(source, target, category)


def _spair_side(entry: Mapping[str, Any], which: str, folder: str) -> Side:
    width, height = map(int, entry[f"{which}_imsize"][:2])
    x1, y1, x2, y2 = map(float, entry[f"{which}_bndbox"])
    points = torch.tensor(entry[f"{which}_kps"], dtype=torch.float64).view(-1, 2)
    name = str(entry[f"{which}_imname"])
    name = f"{folder}/{name}" if folder else name
    return Side(name, (width, height), (x1, y1, x2, y2), points)


def read_birds(folder: Path, split: str = "test") -> Keypoints:
    """An image and the next of its species, with the points that are visible in both."""
    table = _parquet(folder, split, ("image", "keypoints", "visible", "box", "label"))
    notes = table.select_columns(["keypoints", "visible", "box", "label"])[:]
    sizes = [_size(image, str(n)) for n, image in enumerate(table["image"])]
    species: dict[int, list[int]] = {}
    for number, label in enumerate(notes["label"]):
        species.setdefault(label, []).append(number)
    neighbours = sorted(two for numbers in species.values() for two in pairwise(numbers))

    def side(number: int, shown: NDArray[np.bool_]) -> Side:
        points = torch.tensor(np.array(notes["keypoints"][number])[shown], dtype=torch.float64)
        x1, y1, x2, y2 = notes["box"][number]
        return Side(str(number), sizes[number], (x1, y1, x2, y2), points)

    def pair(one: int, other: int) -> Pair:
        visible = notes["visible"]
        both = np.array(visible[one], bool) & np.array(visible[other], bool)
        return Pair(side(one, both), side(other, both), str(notes["label"][one]))

    pairs = [pair(one, other) for one, other in neighbours]
    return Keypoints.of(pairs, lambda name: _decode(table[int(name)]["image"], name))


# ---------------------------------------------------------------- masks


@dataclass(frozen=True)
class Masks:
    """Images with a class for every pixel, by number; 255 is not judged."""

    classes: int
    names: Sequence[str]
    open: Callable[[int], "Image"]
    mask: Callable[[int], Tensor]  # [height, width] int64

    def some(self, numbers: Sequence[int]) -> "Masks":
        """These alone, numbered anew."""
        return Masks(
            self.classes,
            [self.names[number] for number in numbers],
            lambda n: self.open(numbers[n]),
            lambda n: self.mask(numbers[n]),
        )


def read_pets(folder: Path, split: str = "test") -> Masks:
    """0 background, 1 pet."""
    table = _parquet(folder, split, ("image", "trimap"))
    lookup = _lookup({2: 0, 1: 1})  # 3 is the border

    def mask(number: int) -> Tensor:
        return lookup[_levels(table[number]["trimap"]["bytes"], f"trimap {number}")]

    names = [str(number) for number in range(len(table))]
    return Masks(2, names, lambda number: _decode(table[number]["image"], str(number)), mask)


def read_ade20k(folder: Path, split: str = "validation") -> Masks:
    """The challenge's folders (ADEChallengeData2016)."""
    images = _files(folder / "images" / split, "*.jpg")
    notes = [folder / "annotations" / split / f"{file.stem}.png" for file in images]
    return _from_files(
        150, folder / "images" / split, images, notes, {n: n - 1 for n in range(1, 151)}
    )


# What the labels of Cityscapes are called in training; others are not judged.
CITYSCAPES = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)


def read_cityscapes(folder: Path, split: str = "val") -> Masks:
    """`*_labelIds.png` beside `*_leftImg8bit.png`, by city."""
    root = folder / "leftImg8bit" / split
    images = _files(root, "*/*_leftImg8bit.png")
    notes = [
        folder / "gtFine" / split / file.parent.name
        / file.name.replace("_leftImg8bit.png", "_gtFine_labelIds.png")
        for file in images
    ]  # fmt: skip
    return _from_files(19, root, images, notes, {label: n for n, label in enumerate(CITYSCAPES)})


def _from_files(
    classes: int,
    root: Path,
    images: Sequence[Path],
    notes: Sequence[Path],
    meaning: Mapping[int, int],
) -> Masks:
    missing = [note for note in notes if not note.is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(notes)} images have no labels; the first missing is "
            f"{missing[0]}: check the folder"
        )
    lookup = _lookup(meaning)

    def mask(number: int) -> Tensor:
        return lookup[_levels(notes[number].read_bytes(), str(notes[number]))]

    names = [file.relative_to(root).with_suffix("").as_posix() for file in images]
    return Masks(classes, names, lambda number: _open(images[number]), mask)


# ---------------------------------------------------------------- files


WHOLE = "check the folder, in which the whole data set should be"

KEYPOINTS: dict[str, Callable[[Path, str], Keypoints]] = {"spair": read_spair, "birds": read_birds}
MASKS: dict[str, Callable[[Path, str], Masks]] = {
    "pets": read_pets,
    "ade20k": read_ade20k,
    "cityscapes": read_cityscapes,
}


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON ({error})") from error


def _parquet(folder: Path, split: str, columns: Sequence[str]) -> Any:
    """The rows of a split, images still encoded."""
    files = sorted(map(str, folder.glob(f"{split}*.parquet")))
    if not files:
        raise UserError(f"{folder} holds no {split}*.parquet: {WHOLE}")
    table = load("parquet", files, {})
    missing = [name for name in columns if name not in table.features]
    if missing:
        there = ", ".join(table.features)
        raise UserError(f"{folder} has no column {missing[0]!r}; the columns are: {there}")
    features = raw_images(table.features)
    for name in columns:
        if features[name] != table.features[name]:
            table = table.cast_column(name, features[name])
    return table


def _files(folder: Path, pattern: str) -> list[Path]:
    found = sorted(folder.glob(pattern))
    if not found:
        raise UserError(f"{folder} holds no {pattern}: {WHOLE}")
    return found


def _open(file: Path) -> "Image":
    try:
        return _decode({"bytes": file.read_bytes()}, str(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error})") from error


def _decode(image: Mapping[str, Any], name: str) -> "Image":
    try:
        return decode(image["bytes"], "rgb")
    except Corrupt as error:
        raise UserError(f"image {name} cannot be used ({error}): repair or remove it") from error


def _size(image: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Width and height, from the header alone."""
    try:
        height, width = upright_size(io.BytesIO(image["bytes"]))
    except Corrupt as error:
        raise UserError(f"image {name} cannot be used ({error}): repair or remove it") from error
    return width, height


def _levels(raw: bytes, name: str) -> Tensor:
    """The numbers of a mask [height, width], which no change of colours may touch."""
    from PIL import Image

    try:
        pixels = np.array(Image.open(io.BytesIO(raw)))
    except OSError as error:
        raise UserError(f"{name} cannot be used ({error}): repair or remove it") from error
    if pixels.ndim != 2 or pixels.dtype != np.uint8:
        raise UserError(f"{name} is no mask: one channel of 8 bits is expected")
    return torch.from_numpy(pixels).long()


def _lookup(meaning: Mapping[int, int]) -> Tensor:
    """[256] class of each number in a mask."""
    table = torch.full((256,), IGNORE, dtype=torch.int64)
    for number, label in meaning.items():
        table[number] = label
    return table
