"""Images as a network takes them: cropped, resized, normalised, and the exact line that says how.

Downscaling must average what it leaves out. Resizing without antialias, as `interpolate` does when
it is not told otherwise, moves FID by more than many methods differ (Parmar et al. 2022).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Triple = tuple[float, float, float]
Filter = Literal["bilinear", "bicubic"]


def check_images(images: Tensor) -> None:
    """uint8 [B, 3, H, W], at least one."""
    if images.dtype != torch.uint8:
        raise ValueError(f"images are uint8, 0 to 255, not {images.dtype}")
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(f"images are RGB, [batch, 3, height, width], not {list(images.shape)}")


def centre_square(images: Tensor) -> Tensor:
    """The largest square in the middle."""
    height, width = images.shape[-2:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return images[..., top : top + side, left : left + side]


def resize(images: Tensor, size: int, how: Filter) -> Tensor:
    """To `size` x `size`, float32 of whole numbers, as PIL does: 8 bits after each pass.

    Rounding belongs to the published numbers: their images went through PIL.
    """
    pixels = images.float()
    for shape in ((images.shape[-2], size), (size, size)):
        if tuple(pixels.shape[-2:]) != shape:
            pixels = F.interpolate(pixels, size=shape, mode=how, antialias=True)
            pixels = pixels.add_(0.5).floor_().clamp_(0, 255)  # halves go up
    return pixels


@dataclass(frozen=True)
class Preprocessing:
    """(x / 255 - mean) / std of an image of `size` x `size`."""

    size: int
    how: Filter
    mean: Triple
    std: Triple
    crop: bool = (
        False  # the square in the middle; the whole image is squeezed to a square otherwise
    )

    def __call__(self, images: Tensor) -> Tensor:
        pixels = resize(centre_square(images) if self.crop else images, self.size, self.how)
        mean = pixels.new_tensor(self.mean).view(3, 1, 1)
        std = pixels.new_tensor(self.std).view(3, 1, 1)
        return (pixels / 255 - mean) / std

    def __str__(self) -> str:
        part = "centre square" if self.crop else "whole image"
        mean, std = (" ".join(f"{v:.9g}" for v in triple) for triple in (self.mean, self.std))
        return (
            f"{part} to {self.size}x{self.size} px, {self.how} with antialias, rounded to 8 bits; "
            f"(x / 255 - mean) / std, mean {mean}, std {std}"
        )


IMAGENET: tuple[Triple, Triple] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP: tuple[Triple, Triple] = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)
