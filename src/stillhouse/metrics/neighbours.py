"""Precision and recall, density and coverage, by balls around features that reach k neighbours.

Kynkaanniemi et al. 2019 (precision, recall), Naeem et al. 2020 (density, coverage). A sample is
precise if it is inside the ball of some real image; recall swaps the roles; density counts the
balls around a sample; coverage is the share of real balls that hold a sample.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.metrics.bank import Rows, blocks
from stillhouse.metrics.kernels import squared_distances
from stillhouse.metrics.moments import checked

K = 5  # neighbours, as in the package `prdc`


class Prdc(NamedTuple):
    """Shares from 0 to 1, but for the density, which has no upper end."""

    precision: float
    recall: float
    density: float
    coverage: float


def prdc(real: Rows, fake: Rows, *, k: int = K, real_radii: Tensor | None = None) -> Prdc:
    """All four, from distances block against block: memory does not grow with their number.

    As in the package `prdc`, a row on the edge of a ball is outside of it, and distances are
    compared after rounding to float32. `real_radii` are `radii(real, k)`, where they are known.
    """
    _enough("the reference has", len(real), k)
    _enough("the samples have", len(fake), k)
    fake_radii = radii(fake, k)
    real_radii = radii(real, k) if real_radii is None else real_radii
    balls = torch.zeros(len(fake), dtype=torch.int64)  # real ones, around each sample
    recalled, covered = torch.zeros(2, len(real), dtype=torch.bool)
    for i, a in _parts(real):
        for j, b in _parts(fake):
            apart = _distances(a, b)
            within = apart < real_radii[i, None]
            balls[j] += within.sum(dim=0)
            covered[i] |= within.any(dim=1)
            recalled[i] |= (apart < fake_radii[j]).any(dim=1)
    shares = [float(x.double().mean()) for x in (balls > 0, recalled, balls, covered)]
    return Prdc(shares[0], shares[1], shares[2] / k, shares[3])


def radii(rows: Rows, k: int) -> Tensor:
    """Distance from each row to its k-th nearest other row, float32."""
    found = torch.empty(len(rows))
    for i, a in _parts(rows):
        nearest = torch.empty(len(a), 0)
        for _, b in _parts(rows):
            nearest = torch.cat([nearest, _distances(a, b)], dim=1)
            # One more than k, because every row is its own nearest neighbour.
            nearest = nearest.topk(min(k + 1, nearest.shape[1]), largest=False).values
        found[i] = nearest.amax(dim=1)
    return found


def _parts(rows: Rows) -> Iterator[tuple[slice, Tensor]]:
    start = 0
    for block in blocks(rows):
        yield slice(start, start + len(block)), checked(block)
        start += len(block)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    return squared_distances(a, b).sqrt_().float()


def _enough(side: str, count: int, k: int) -> None:
    if count <= k:
        raise UserError(
            f"{k} nearest neighbours need more than {k} images, and {side} {count}: "
            "raise the count, or leave this metric out"
        )
