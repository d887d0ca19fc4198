"""Which part of an image is taken, and what is told of it.

An image is resized, flipped and then cropped, in this order. The crop is taken from the flipped
image, so that its place means the same whether the image was flipped or not, and `source_points`
can go back. Random choices are keyed by (seed, image key, purpose): any worker of any process makes
the same.

| reported | meaning |
|---|---|
| `flip` | 1 where mirrored left to right, else 0 |
| `crop_top`, `crop_left` | pixels of the resized and flipped image above and left of the crop |
| `height`, `width` | pixels of the upright source image, before resizing |
| `resized_height`, `resized_width` | pixels of the resized image, of which the crop is a part |
| `aspect` | width / height of the source image |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from stillhouse.config import Config
from stillhouse.process import Record, keyed_uniform

Size = tuple[int, int]  # height, width

# ---------------------------------------------------------------- what was done


class Layout(NamedTuple):
    """Where a crop comes from."""

    source: Size  # of the upright source image
    resized: Size  # after resizing
    crop: tuple[int, int]  # top, left of the crop in the resized and flipped image
    flipped: bool

    @classmethod
    def whole(cls, size: Size) -> "Layout":
        """Of an image that is neither resized, flipped nor cropped: what to ask a model for."""
        return cls(size, size, (0, 0), False)


@dataclass(frozen=True, eq=False)
class Frame(Record):
    """The layouts of a batch, one row per image."""

    source: Tensor  # [B, 2] height, width
    resized: Tensor  # [B, 2] height, width
    crop: Tensor  # [B, 2] top, left
    flipped: Tensor  # [B] true where mirrored left to right

    @classmethod
    def of(cls, layouts: list[Layout]) -> "Frame":
        return cls(*(torch.tensor(column) for column in zip(*layouts, strict=True)))


def source_points(frame: Frame, points: Tensor) -> Tensor:
    """Pixel positions (y, x) in the crops, [B, P, 2], as positions in the source images.

    Positions count pixel centres: (0, 0) is the centre of the first pixel. Resizing keeps the
    outer edges in place, so half a pixel is added before scaling and taken off after.
    """
    at = points.double() + frame.crop[:, None]
    mirrored = frame.resized[:, None, 1] - 1 - at[..., 1]
    at = torch.stack([at[..., 0], torch.where(frame.flipped[:, None], mirrored, at[..., 1])], -1)
    scale = frame.source.double() / frame.resized
    return (at + 0.5) * scale[:, None] - 0.5


# ---------------------------------------------------------------- what is told of it

Reported = Literal[
    "flip",
    "crop_top",
    "crop_left",
    "height",
    "width",
    "resized_height",
    "resized_width",
    "aspect",
]

REPORTS: dict[Reported, Callable[[Layout], float]] = {
    "flip": lambda layout: layout.flipped,
    "crop_top": lambda layout: layout.crop[0],
    "crop_left": lambda layout: layout.crop[1],
    "height": lambda layout: layout.source[0],
    "width": lambda layout: layout.source[1],
    "resized_height": lambda layout: layout.resized[0],
    "resized_width": lambda layout: layout.resized[1],
    "aspect": lambda layout: layout.source[1] / layout.source[0],
}


def usual_control(
    names: Sequence[str],
    styles: Sequence[tuple[str, Sequence[str]]],
    size: tuple[int, int],
    turn: int,
) -> dict[str, float | str]:
    """What a sample of this size is told, by name: whole, upright, and of each style in turn."""
    said: dict[str, float | str] = {
        name: report(Layout.whole(size)) for name, report in REPORTS.items() if name in names
    }
    for name, values in styles:
        said[name] = values[turn % len(values)]
        turn //= len(values)
    return said


class ControlConfig(Config):
    """What each image tells the network of its making. The numbers stand in `Condition.control`:
    composition, then the styles of `Columns`, then detail."""

    composition: tuple[Reported, ...] = ()
    """What decides where things are, such as flip, crop_top, crop_left, aspect."""
    detail: tuple[Reported, ...] = ()
    """What decides how fine they are, such as height, width."""

    @model_validator(mode="after")
    def _each_once(self) -> "ControlConfig":
        names = [*self.composition, *self.detail]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is named twice")
        return self

    def values(self, layout: Layout, styles: Sequence[float] = ()) -> tuple[float, ...]:
        """The numbers of one image; `styles` are those of its columns."""
        composition = (float(REPORTS[name](layout)) for name in self.composition)
        detail = (float(REPORTS[name](layout)) for name in self.detail)
        return (*composition, *styles, *detail)


# ---------------------------------------------------------------- what to do


class Squash(Config):
    """No crop: the whole image, squeezed to the shape of the crop."""

    kind: Literal["none"] = "none"

    def sizes(self, size: Size, source: Size) -> Size:
        return size

    def place(self, room: Size, key: int, seed: int) -> tuple[int, int]:
        return (0, 0)


class CentreCrop(Config):
    """The middle of the image, made just large enough to fill the crop."""

    kind: Literal["centre"] = "centre"

    def sizes(self, size: Size, source: Size) -> Size:
        return _covering(size, source)

    def place(self, room: Size, key: int, seed: int) -> tuple[int, int]:
        return (room[0] // 2, room[1] // 2)


class RandomCrop(Config):
    """A part anywhere in the image."""

    kind: Literal["random"] = "random"
    zoom: Annotated[float, Field(ge=1)] = 1.0
    """The image is made this many times as large as it need be to fill the crop."""

    def sizes(self, size: Size, source: Size) -> Size:
        return _covering(_zoomed(size, self.zoom), source)

    def place(self, room: Size, key: int, seed: int) -> tuple[int, int]:
        return _anywhere(room, key, seed)


class GlobalCrop(Config):
    """For pre-training at a low resolution: the image is made just large enough, then cropped.

    The network sees nearly the whole of it, in fewer pixels than it will have later.
    """

    kind: Literal["global"] = "global"

    def sizes(self, size: Size, source: Size) -> Size:
        return _covering(size, source)

    def place(self, room: Size, key: int, seed: int) -> tuple[int, int]:
        return _anywhere(room, key, seed)


class LocalCrop(Config):
    """For pre-training at a low resolution: a small crop at the scale of the target.

    The network sees pixels as it will have them later, but never the whole image.
    """

    kind: Literal["local"] = "local"
    scale: Annotated[float, Field(ge=1)] = 2.0
    """Side of the images to be made after pre-training, over the side of these."""

    def sizes(self, size: Size, source: Size) -> Size:
        return _covering(_zoomed(size, self.scale), source)

    def place(self, room: Size, key: int, seed: int) -> tuple[int, int]:
        return _anywhere(room, key, seed)


Crop = Annotated[
    Squash | CentreCrop | RandomCrop | GlobalCrop | LocalCrop, Field(discriminator="kind")
]


def _zoomed(size: Size, by: float) -> Size:
    return (round(size[0] * by), round(size[1] * by))


def _covering(size: Size, source: Size) -> Size:
    """The smallest image of the source's aspect ratio that `size` fits into."""
    by_height = size[0] * source[1] >= size[1] * source[0]  # which side is the scarcer
    wanted, there = (size[0], source[0]) if by_height else (size[1], source[1])
    height, width = (
        max(least, round(side * wanted / there)) for least, side in zip(size, source, strict=True)
    )
    return (height, width)


def _anywhere(room: Size, key: int, seed: int) -> tuple[int, int]:
    # + 1: the last possible place counts too
    top, left = (uniform(key, seed, f"crop/{side}") for side in ("top", "left"))
    return (int(top * (room[0] + 1)), int(left * (room[1] + 1)))


def uniform(key: int, seed: int, purpose: str) -> float:
    """A number in [0, 1) that belongs to an image of the run."""
    return float(keyed_uniform([key], seed=seed, purpose=purpose))
