"""PCK@alpha: the share of keypoints that were found, in original pixels (SPair-71k's protocol).

A point is right iff ||found - true|| <= alpha * max(height, width), of the target's box or of the
whole target image. `per_point` pools all points; `per_image` is the mean over pairs of images of
the share within each, so that a pair with few points counts as much as one with many.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Box = tuple[float, float, float, float]  # x1, y1, x2, y2


class Share(NamedTuple):
    """Of points that are right, from 0 to 1."""

    per_point: float
    per_image: float


class Pck(NamedTuple):
    """By what the threshold is measured against."""

    box: Share
    image: Share


def are_right(found: Tensor, true: Tensor, threshold: float) -> Tensor:
    """[P] of points (x, y) [P, 2]; one that lies exactly on the threshold is right."""
    if found.shape != true.shape or found.shape[-1] != 2:
        raise ValueError(f"points [P, 2] on both sides, not {[*found.shape]} and {[*true.shape]}")
    apart = torch.linalg.vector_norm(found.double() - true.double(), dim=-1)
    return apart <= threshold * (1 + 1e-12)  # 0.29 * 100 is a little less than 29


class KeypointScore:
    """Sums over pairs of images; those of two processes add up."""

    def __init__(self, alpha: float = 0.1) -> None:
        self.alpha = alpha
        self.points, self.images = 0, 0
        self.right = torch.zeros(2, dtype=torch.int64)  # by box, by image
        self.shares = torch.zeros(2, dtype=torch.float64)

    def update(self, found: Tensor, true: Tensor, *, box: Box, size: Sequence[float]) -> None:
        """Points [P, 2] of one pair; `box` and `size` (width, height) are the target's."""
        if not len(true):
            return
        reaches = (max(box[2] - box[0], box[3] - box[1]), max(size))
        right = torch.stack([are_right(found, true, self.alpha * reach) for reach in reaches])
        self.points += len(true)
        self.images += 1
        self.right += right.sum(1).cpu()
        self.shares += right.double().mean(1).cpu()

    def __add__(self, other: "KeypointScore") -> "KeypointScore":
        if other.alpha != self.alpha:
            raise ValueError(f"shares at alpha {self.alpha} and {other.alpha} do not add up")
        both = KeypointScore(self.alpha)
        both.points, both.images = self.points + other.points, self.images + other.images
        both.right, both.shares = self.right + other.right, self.shares + other.shares
        return both

    def result(self) -> Pck:
        """Without a point (nan) where there were none."""
        nothing = float("nan")
        shares = [
            Share(
                int(right) / self.points if self.points else nothing,
                float(share) / self.images if self.images else nothing,
            )
            for right, share in zip(self.right, self.shares, strict=True)
        ]
        return Pck(*shares)
