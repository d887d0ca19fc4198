"""Whether an activation says where a cell is rather than what is there.

With labels, the share of (near, far) pairs where the near cell of another label is more alike than
a far cell of the same one:

    AUC = P(cos(near, other label) > cos(far, same label))     1: place alone, 0: label alone

Without, how well a ridge regression tells a cell's place (x, y) from its features: R^2 on images
that it was not fitted to. Features are standardised within each image, over its cells.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from stillhouse.process import keyed_normal

NEAR, AROUND = 1.5, 8  # cells: the eight around
FAR = 0.25  # of the longer side, and more
ANCHORS = 64  # cells of an image that others are compared with
WIDTH = 64  # channels after a random projection, so that the regression cannot learn by heart
RIDGE = 1e-3


def standardised(features: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, cells, C] with mean 0 and deviation 1 within each image."""
    cells = features.float().flatten(2).mT
    centred = cells - cells.mean(1, keepdim=True)
    return centred / centred.square().mean(1, keepdim=True).sqrt().clamp(min=1e-12)


def places(height: int, width: int, device: torch.device) -> Tensor:
    """Row and column of each cell [cells, 2]."""
    rows = torch.arange(height, device=device, dtype=torch.float32)
    columns = torch.arange(width, device=device, dtype=torch.float32)
    return torch.cartesian_prod(rows, columns).view(-1, 2)


# ---------------------------------------------------------------- with labels


class Neighbourhoods:
    """Sums of the AUC over images."""

    def __init__(self) -> None:
        self.wins, self.anchors = 0.0, 0

    def update(self, features: Tensor, labels: Tensor) -> None:
        """[B, C, H, W], and a label for every pixel [B, h, w] of any size; below 0: not known."""
        height, width = features.shape[-2:]
        labels = labels[:, None].to(features.device, torch.float32)
        small = interpolate(labels, (height, width), mode="nearest-exact")
        where = places(height, width, features.device)
        apart = torch.cdist(where, where, compute_mode="donot_use_mm_for_euclid_dist")
        near, far = (apart > 0) & (apart <= NEAR), apart >= FAR * max(height, width)
        for cells, label in zip(standardised(features), small.flatten(1), strict=True):
            known = label >= 0
            pairs = known[:, None] & known
            other = near & pairs & (label[:, None] != label)
            same = far & pairs & (label[:, None] == label)
            self._compare(normalize(cells, dim=1), other, same)

    def _compare(self, cells: Tensor, other: Tensor, same: Tensor) -> None:
        able = (other.any(1) & same.any(1)).nonzero()[:, 0]
        anchors = able[:: max(1, -(-len(able) // ANCHORS))]
        alike = cells[anchors] @ cells.T
        # The few near cells first, so that they can be set against all far ones at once.
        is_near, order = other[anchors].int().topk(min(AROUND, len(cells)), dim=1)
        near, far = alike.gather(1, order)[:, :, None], alike[:, None]
        wins = (near > far).float() + (near == far).float() / 2
        pairs = is_near[:, :, None] * same[anchors][:, None]
        self.wins += float(((wins * pairs).sum((1, 2)) / pairs.sum((1, 2))).sum())
        self.anchors += len(anchors)

    def result(self) -> float | None:
        """None where no image had a cell with both kinds of others."""
        return self.wins / self.anchors if self.anchors else None


# ---------------------------------------------------------------- without


class Normal(NamedTuple):
    """Sums of products of features X [cells, channels] and places Y [cells, 2]."""

    xx: Tensor
    xy: Tensor
    yy: Tensor
    cells: int

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "Normal":
        x = x.to("cpu", torch.float64)
        return cls(x.T @ x, x.T @ y, y.T @ y, len(x))

    def plus(self, other: "Normal") -> "Normal":
        return Normal(
            self.xx + other.xx, self.xy + other.xy, self.yy + other.yy, self.cells + other.cells
        )


class Placing:
    """Normal equations of a ridge regression from features to places, for either half of images."""

    def __init__(self) -> None:
        self.images = 0
        self.halves: list[Normal | None] = [None, None]

    def update(self, features: Tensor) -> None:
        """[B, C, H, W]; images are dealt to the halves in turn."""
        height, width = features.shape[-2:]
        target = places(height, width, features.device)
        target = 2 * (target + 0.5) / target.new_tensor([height, width]) - 1
        target = target.to("cpu", torch.float64)
        for cells in standardised(features):
            half, new = self.images % 2, Normal.of(_projected(cells), target)
            old = self.halves[half]
            self.halves[half] = new if old is None else old.plus(new)
            self.images += 1

    def result(self) -> float:
        """R^2 of each half by the other's regression, on average; nan for a single image."""
        one, two = self.halves
        if one is None or two is None:
            return float("nan")
        return (_explained(one, two) + _explained(two, one)) / 2


def _projected(cells: Tensor) -> Tensor:
    """[cells, C] to at most WIDTH random directions, the same for every image."""
    channels = cells.shape[1]
    if channels <= WIDTH:
        return cells
    return cells @ _directions(channels).to(cells) / channels**0.5


@cache
def _directions(channels: int) -> Tensor:
    return keyed_normal((WIDTH,), range(channels), seed=0, purpose="features/place")


def _explained(fitted: Normal, judged: Normal) -> float:
    """R^2 of places. Features have mean 0 in every image, as places do: there is no offset."""
    ridge = RIDGE * fitted.cells * torch.eye(len(fitted.xx), dtype=torch.float64)
    weights = torch.linalg.solve(fitted.xx + ridge, fitted.xy)
    both = weights.T @ judged.xy
    error = judged.yy - both - both.T + weights.T @ judged.xx @ weights
    spread = judged.yy.diagonal()
    return float((1 - error.diagonal() / spread.clamp(min=1e-12)).mean())
