"""The Frechet distance between Gaussians, its bias at a finite count, and its limit without one.

With covariances factored as S = A A^T, the trace of the root of S_1 S_2 is the sum of the singular
values of A^T B: no root of an asymmetric matrix, so nothing complex and nothing negative, however
singular the covariances are.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.metrics.bank import Rows, blocks
from stillhouse.metrics.moments import Moments, without_rounding

TRUSTED = 10  # samples per dimension: with fewer, bias is large and the extrapolation bends


class Infinity(NamedTuple):
    """A distance extrapolated to infinitely many samples."""

    value: float
    slope: float
    error: float
    """Standard error of `value` in the fit. That the samples are these and not others is not in
    it: other seeds show that."""
    sizes: list[int]
    distances: list[float]


def frechet_distance(a: Moments, b: Moments) -> float:
    """|m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2)) (Dowson and Landau 1982).

    Fewer samples than dimensions are fine for the arithmetic; `expected_distance` tells how much of
    the value is then due to the count alone.
    """
    _comparable(a, b)
    return _distance(a, b)


def expected_distance(
    reference: Moments, count: int, *, seed: int = 0, draws: int | None = None
) -> float:
    """The distance that `count` perfect samples would have: the bias of a measurement.

    Perfect means drawn from the Gaussian with the moments of the reference. In its eigenbasis, with
    Z of count - 1 rows of unit noise, their covariance is L^(1/2) Z^T Z L^(1/2) / (count - 1), and

        tr L / count + E[ tr L + tr S - 2 |L Z^T|_* / sqrt(count - 1) ]

    is their mean distance. S and the nuclear norm |.|_* come from the same draw: what they
    fluctuate cancels to first order, so a few `draws` are enough (None: chosen by the rank).
    """
    _enough(count)
    _comparable(reference)
    spectrum = without_rounding(torch.linalg.eigvalsh(reference.covariance))
    spectrum = spectrum[spectrum > 0]
    if not len(spectrum):
        return 0.0
    rng = np.random.default_rng(seed)
    draws = draws or max(2, 4096 // len(spectrum))
    excess = [_excess(spectrum, count - 1, rng) for _ in range(draws)]
    return float(spectrum.sum()) / count + max(sum(excess) / draws, 0.0)


def frechet_infinity(
    rows: Rows, reference: Moments, *, seed: int = 0, points: int = 15
) -> Infinity:
    """The distance at infinitely many samples (Chong and Forsyth 2020, "Effectively unbiased FID").

    Distances of random subsets, whose sizes N are evenly spaced from a tenth of the rows to all of
    them, lie on a line over 1/N; its intercept is the value. The line bends where N is not far
    above the number of dimensions: with fewer than about 10 rows per dimension (`TRUSTED`) the
    value is not to be trusted, and it may come out negative.
    """
    if points < 3:
        raise ValueError("a line with its error needs 3 points or more")
    total = len(rows)
    if total < 2 * points:
        raise UserError(
            f"an extrapolation needs {2 * points} samples or more and there are {total}: raise "
            "the count, or leave this metric out"
        )
    _comparable(reference)
    rng = np.random.default_rng(seed)
    sizes = [round(n) for n in np.linspace(max(total / 10, 2), total, points)]
    distances = []
    for size in sizes:
        part = _subset(rows, rng.permutation(total)[:size])
        _comparable(part, reference)
        distances.append(_distance(part, reference))
    return Infinity(*_line(1 / np.array(sizes), np.array(distances)), sizes, distances)


def _comparable(*sides: Moments) -> None:
    for side in sides:
        _enough(side.count)
        if not bool(torch.isfinite(side.mean).all() and torch.isfinite(side.scatter).all()):
            raise UserError(
                "the mean or covariance of the features is not finite, so there is no distance: "
                "look at the images that the features come from, and compute stored statistics "
                "anew"
            )
        if side.dims != sides[0].dims:
            raise UserError(
                f"features of {sides[0].dims} and of {side.dims} numbers have no distance: use "
                "the same detector for both"
            )


def _enough(count: int) -> None:
    if count < 2:
        raise UserError(
            f"a Frechet distance needs 2 images or more on either side, and one side has {count}: "
            "raise the count, or name a folder with more images"
        )


def _distance(a: Moments, b: Moments) -> float:
    overlap = torch.linalg.svdvals(a.factor.T @ b.factor).sum()
    apart = (a.mean - b.mean).square().sum()
    value = apart + a.factor.square().sum() + b.factor.square().sum() - 2 * overlap
    return max(float(value), 0.0)  # negative by rounding only


def _excess(spectrum: Tensor, freedom: int, rng: np.random.Generator) -> float:
    """tr L + tr S - 2 |L Z^T|_* / sqrt(freedom) of one draw."""
    noise = torch.from_numpy(_noise(len(spectrum), freedom, rng)) / math.sqrt(freedom)
    overlap = torch.linalg.svdvals(spectrum[:, None] * noise).sum()
    own = (spectrum * noise.square().sum(dim=1)).sum()
    return float(spectrum.sum() + own - 2 * overlap)


def _noise(dims: int, freedom: int, rng: np.random.Generator) -> np.ndarray:
    """W [dims, .] with W W^T a Wishart matrix: noise itself, or its Bartlett factor if smaller."""
    if freedom <= dims:
        return rng.standard_normal((dims, freedom))
    factor = np.tril(rng.standard_normal((dims, dims)), -1)
    factor[np.diag_indices(dims)] = np.sqrt(rng.chisquare(freedom - np.arange(dims)))
    return factor


def _subset(rows: Rows, chosen: np.ndarray) -> Moments:
    """Moments of the chosen rows, read in the order of the file."""
    mask = torch.zeros(len(rows), dtype=torch.bool)
    mask[torch.from_numpy(chosen)] = True
    total, start = Moments.none(rows[:0].shape[1]), 0
    for block in blocks(rows):
        total = total + Moments.of(block[mask[start : start + len(block)]])
        start += len(block)
    return total


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Least squares: value at 0, slope, standard error of the value."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    value = float(y.mean()) - slope * float(x.mean())
    variance = float(np.square(y - value - slope * x).sum()) / (len(x) - 2)
    leverage = 1 / len(x) + float(x.mean()) ** 2 / float(centred @ centred)
    return value, slope, math.sqrt(variance * leverage)
