"""Semantic correspondence: where in one image is what a point of another shows (as in DIFT).

    similarity(pixel) = mean over activations of cos(f_source(point), f_target(pixel))

with features bilinear at the target's own size; the answer is the pixel of largest similarity, or,
with a window around it, the mean place weighted by softmax(similarity / temperature).
Points are (x, y) in an image's own pixels: (0, 0) is the middle of the first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from stillhouse.features.probe import features_at

CHANNELS = 64  # at the target's size at a time: all of them would take gigabytes

Size = tuple[int, int]  # width, height in pixels


class Window(NamedTuple):
    """A soft answer among the pixels of a square around the best one."""

    reach: int  # pixels to each side
    temperature: float = 0.02


def similarity(
    source: Sequence[Tensor], target: Sequence[Tensor], points: Tensor, sizes: tuple[Size, Size]
) -> Tensor:
    """[P, height, width] of the target image; maps [C, h, w] of any resolution, in pairs.

    `sizes`: of the source and the target image, whatever square the network saw of them.
    """
    if len(source) != len(target) or not source:
        raise ValueError(f"maps in pairs, not {len(source)} and {len(target)}")
    seen, (width, height) = sizes
    device = source[0].device
    places = (points.to(device, torch.float32) + 0.5) / torch.tensor(seen, device=device)
    total = torch.zeros(len(points), height, width, device=device)
    for one, other in zip(source, target, strict=True):
        wanted = normalize(features_at(one[None], places[None]), dim=1)
        total += _cosines(wanted, other.float(), (height, width))
    return total / len(source)


def _cosines(wanted: Tensor, maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Of unit vectors [P, C] with maps [C, h, w] made larger.

    A product is linear in the maps, so it is made larger instead of them; the norm is not.
    """
    products = torch.einsum("pc,chw->phw", wanted, maps)
    found = interpolate(products[None], size, mode="bilinear", align_corners=False)[0]
    square = found.new_zeros(size)
    for some in maps.split(CHANNELS):
        large = interpolate(some[None], size, mode="bilinear", align_corners=False)[0]
        square += large.square().sum(0)
    return found / square.sqrt().clamp(min=1e-12)


def match(
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    points: Tensor,
    sizes: tuple[Size, Size],
    window: Window | None = None,
) -> Tensor:
    """Points of the target image [P, 2] for those of the source [P, 2]."""
    alike = similarity(source, target, points, sizes)
    width = alike.shape[2]
    best = alike.flatten(1).argmax(1)
    places = torch.stack([best % width, best // width], 1)
    if window is None:
        return places.double()
    return torch.stack(
        [_soft(one, place, window) for one, place in zip(alike, places.tolist(), strict=True)]
    )


def _soft(alike: Tensor, place: list[int], window: Window) -> Tensor:
    """The mean of (x, y) around the place, of which only what lies within the image counts."""
    height, width = alike.shape
    left, top = (max(0, at - window.reach) for at in place)
    right, bottom = place[0] + window.reach + 1, place[1] + window.reach + 1
    near = alike[top:bottom, left:right].double()
    weights = (near / window.temperature).flatten().softmax(0).view_as(near)
    columns = torch.arange(left, min(right, width), dtype=torch.float64, device=alike.device)
    rows = torch.arange(top, min(bottom, height), dtype=torch.float64, device=alike.device)
    return torch.stack([(weights.sum(0) * columns).sum(), (weights.sum(1) * rows).sum()])
