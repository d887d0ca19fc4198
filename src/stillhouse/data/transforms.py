"""From the bytes of an image to a square of pixels, and what was done to it on the way.

Decode, resize, flip, crop, in this order: the crop is taken from the flipped image, so that its
coordinates mean the same whether the image was flipped or not, and `source_points` can go back.
Random choices are keyed by (seed, image key, purpose): any worker of any process makes the same.

Pixels stay uint8 until they are in the training process: a quarter of the bytes through the
workers' pipes. `to_float` then gives [-1, 1].
"""

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data.faults import Corrupt
from stillhouse.process import Record, keyed_uniform

if TYPE_CHECKING:
    from PIL.Image import Image

# ---------------------------------------------------------------- what was done


class Layout(NamedTuple):
    """Where a crop comes from."""

    source: tuple[int, int]  # height, width of the upright source image
    resized: tuple[int, int]  # height, width after resizing
    crop: tuple[int, int]  # top, left of the crop in the resized and flipped image
    flipped: bool


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


# ---------------------------------------------------------------- what to do


class Squash(Config):
    """No crop: the whole image, squeezed to a square."""

    kind: Literal["none"] = "none"

    def sizes(self, size: int, source: tuple[int, int]) -> tuple[int, int]:
        return (size, size)

    def place(self, room: tuple[int, int], key: int, seed: int) -> tuple[int, int]:
        return (0, 0)


class CentreCrop(Config):
    """The middle of the image, its short side made to fit."""

    kind: Literal["centre"] = "centre"

    def sizes(self, size: int, source: tuple[int, int]) -> tuple[int, int]:
        return _short_side(size, source)

    def place(self, room: tuple[int, int], key: int, seed: int) -> tuple[int, int]:
        return (room[0] // 2, room[1] // 2)


class RandomCrop(Config):
    """A square anywhere in the image."""

    kind: Literal["random"] = "random"
    zoom: Annotated[float, Field(ge=1)] = 1.0
    """The short side is made this many times the crop's."""

    def sizes(self, size: int, source: tuple[int, int]) -> tuple[int, int]:
        return _short_side(round(size * self.zoom), source)

    def place(self, room: tuple[int, int], key: int, seed: int) -> tuple[int, int]:
        # + 1: the last possible place counts too
        top, left = (_uniform(key, seed, f"crop/{side}") for side in ("top", "left"))
        return (int(top * (room[0] + 1)), int(left * (room[1] + 1)))


Crop = Annotated[Squash | CentreCrop | RandomCrop, Field(discriminator="kind")]


class ImageConfig(Config):
    """How an image becomes a square of pixels."""

    size: PositiveInt = 32
    """Side of the square."""
    mode: Literal["rgb", "grey"] = "rgb"
    crop: Crop = CentreCrop()
    flip: bool = False
    """Mirror every other image, at random."""
    filter: Literal["lanczos", "bicubic", "bilinear", "box"] = "lanczos"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        return (3 if self.mode == "rgb" else 1, self.size, self.size)

    def apply(self, image: "Image", key: int, seed: int) -> tuple[NDArray[np.uint8], Layout]:
        """The pixels [C, H, W] of a decoded image, and where they come from."""
        from PIL.Image import Resampling, Transpose

        source = (image.height, image.width)
        resized = self.crop.sizes(self.size, source)
        if resized != source:  # at the right size already, the pixels stay as they are
            image = image.resize((resized[1], resized[0]), Resampling[self.filter.upper()])
        flipped = self.flip and _uniform(key, seed, "flip") < 0.5
        if flipped:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        room = (resized[0] - self.size, resized[1] - self.size)
        top, left = self.crop.place(room, key, seed)
        if room != (0, 0):
            image = image.crop((left, top, left + self.size, top + self.size))
        pixels = np.asarray(image).reshape(self.size, self.size, self.shape[0])
        return pixels.transpose(2, 0, 1), Layout(source, resized, (top, left), flipped)


def _short_side(size: int, source: tuple[int, int]) -> tuple[int, int]:
    short = min(source)
    height, width = (max(size, round(side * size / short)) for side in source)
    return (height, width)


def _uniform(key: int, seed: int, purpose: str) -> float:
    return float(keyed_uniform([key], seed=seed, purpose=purpose))


def to_float(pixels: Tensor) -> Tensor:
    """uint8 pixels as float32 in [-1, 1]."""
    return pixels.to(torch.float32).div_(127.5).sub_(1)


# ---------------------------------------------------------------- decoding


def decode(raw: bytes, mode: Literal["rgb", "grey"]) -> "Image":
    """The upright image in RGB or grey. Raises `Corrupt` for whatever the decoder refuses."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(raw), formats=_formats(raw))
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        image, wanted = _flatten(image), "RGB" if mode == "rgb" else "L"
        return image if image.mode == wanted else image.convert(wanted)
    except UnidentifiedImageError as error:
        raise Corrupt("not an image in a known format") from error
    except Exception as error:  # decoders raise whatever the damaged bytes lead them to
        raise Corrupt(f"{type(error).__name__}: {error}".replace("\n", " ")[:200]) from error


# What training images come in. Others that the library reads are slow to try, and some of them
# (EPS, PSD) start interpreters that files from the internet should not reach.
_MAGIC = {b"\xff\xd8": "JPEG", b"\x89PNG": "PNG", b"RIFF": "WEBP", b"GIF8": "GIF", b"BM": "BMP"}
_MAGIC |= {b"II": "TIFF", b"MM": "TIFF", b"P": "PPM"}


def _formats(raw: bytes) -> list[str]:
    return [name for magic, name in _MAGIC.items() if raw.startswith(magic)]


def _flatten(image: "Image") -> "Image":
    """Transparent images on white; 16-bit ones at 8 bits, which `convert` would clip."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)


def array_image(pixels: Any, mode: Literal["rgb", "grey"]) -> "Image":
    """An image from a column of pixel arrays, [H, W] or [H, W, C] in 0..255."""
    from PIL import Image

    try:
        image = Image.fromarray(np.asarray(pixels, dtype=np.uint8))
    except (TypeError, ValueError) as error:
        raise Corrupt(f"not an array of pixels: {error}") from error
    return image.convert("RGB" if mode == "rgb" else "L")
