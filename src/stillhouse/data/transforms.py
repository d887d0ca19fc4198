"""From the bytes of an image to the pixels of a crop: decode, resize, flip, crop, in this order.

Pixels stay uint8 until they are in the training process: a quarter of the bytes through the
workers' pipes. `to_float` then gives [-1, 1].
"""

import io
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data.crops import CentreCrop, Crop, Layout, Size, uniform
from stillhouse.data.faults import Corrupt

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageConfig(Config):
    """How an image becomes a square of pixels, or one of the shapes of buckets."""

    size: PositiveInt = 32
    """Side of the square; buckets have its area."""
    mode: Literal["rgb", "grey"] = "rgb"
    """Colours, or one channel."""
    crop: Crop = CentreCrop()
    flip: bool = False
    """Mirror every other image, at random."""
    filter: Literal["lanczos", "bicubic", "bilinear", "box"] = "lanczos"
    """Of the resize."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width of one image."""
        return (3 if self.mode == "rgb" else 1, self.size, self.size)

    def apply(
        self, image: "Image", key: int, seed: int, size: Size | None = None
    ) -> tuple[NDArray[np.uint8], Layout]:
        """The pixels [C, H, W] of a decoded image, and where they come from.

        `size` is the shape of the crop where it is not the square.
        """
        from PIL.Image import Resampling, Transpose

        source = (image.height, image.width)
        height, width = size = size or (self.size, self.size)
        resized = self.crop.sizes(size, source)
        if resized != source:  # at the right size already, the pixels stay as they are
            image = image.resize((resized[1], resized[0]), Resampling[self.filter.upper()])
        flipped = self.flip and uniform(key, seed, "flip") < 0.5
        if flipped:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        room = (resized[0] - height, resized[1] - width)
        top, left = self.crop.place(room, key, seed)
        if room != (0, 0):
            image = image.crop((left, top, left + width, top + height))
        pixels = np.asarray(image).reshape(height, width, self.shape[0])
        return pixels.transpose(2, 0, 1), Layout(source, resized, (top, left), flipped)


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


def upright_size(file: BinaryIO) -> Size:
    """Height and width of the upright image, from its header alone. Raises `Corrupt`."""
    from PIL import Image

    try:
        head = file.read(8)
        file.seek(0)
        with Image.open(file, formats=_formats(head)) as image:
            # A PNG that tells of its camera after the pixels would be decoded to hear it.
            known = image.format != "PNG" or "exif" in image.info
            turned = known and image.getexif().get(_ORIENTATION, 1) >= 5
            return (image.width, image.height) if turned else (image.height, image.width)
    except Exception as error:  # decoders raise whatever the damaged bytes lead them to
        raise Corrupt("its size cannot be read") from error


_ORIENTATION = 0x0112  # of EXIF; from 5 on the camera was held sideways

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
