"""Mean and covariance of features, summable: any split over batches and processes is the same."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.metrics.bank import Rows, blocks


class Spread(NamedTuple):
    """A value with how much its parts differ."""

    mean: float
    std: float


def checked(features: Tensor) -> Tensor:
    """float64 on the host; features that are no numbers are refused."""
    if features.ndim != 2:
        raise ValueError(f"features are rows [N, D], not {list(features.shape)}")
    wrong = int((~torch.isfinite(features)).any(dim=1).sum())
    if wrong:
        raise UserError(
            f"{wrong} of {len(features)} rows of features are not finite, so nothing can be "
            "measured. Look at the images first: a model that diverged makes such ones; if they "
            "are fine, run the detector in float32"
        )
    return features.detach().to("cpu", torch.float64)


@dataclass(frozen=True, eq=False)
class Moments:
    """Count, mean [D] and scatter [D, D] = sum of (x - mean)(x - mean)^T, in float64."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def none(cls, dims: int) -> "Moments":
        """Of no rows at all: what sums start from."""
        zeros = torch.zeros(dims, dims, dtype=torch.float64)
        return cls(0, zeros.new_zeros(dims), zeros)

    @classmethod
    def of(cls, features: Rows) -> "Moments":
        """Of rows of features, a block at a time."""
        total = cls.none(features[:0].shape[1])
        for block in blocks(features):
            x = checked(block)
            mean = x.mean(dim=0)
            x = x - mean
            total = total + cls(len(x), mean, x.T @ x)
        return total

    @property
    def dims(self) -> int:
        return len(self.mean)

    @property
    def covariance(self) -> Tensor:
        """Unbiased; zeros for fewer than two rows."""
        return self.scatter / max(self.count - 1, 1)

    @cached_property
    def factor(self) -> Tensor:
        """A with covariance A A^T; kept, because a reference is compared again and again."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return vectors * without_rounding(values).sqrt()

    def __add__(self, other: "Moments") -> "Moments":
        """Of both together: the pairwise update of Chan, Golub and LeVeque (1979),

        S = S_a + S_b + (m_b - m_a)(m_b - m_a)^T n_a n_b / n.
        """
        _same_width(self, other)
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        delta = other.mean - self.mean
        between = self.count * other.count / count
        scatter = torch.addr(self.scatter + other.scatter, delta, delta, alpha=between)
        return Moments(count, self.mean + delta * (other.count / count), scatter)

    def __sub__(self, part: "Moments") -> "Moments":
        """Of what is left without `part`, which must be among the rows: the update backwards."""
        _same_width(self, part)
        count = self.count - part.count
        if count < 0:
            raise ValueError(f"{part.count} rows cannot be taken away from {self.count}")
        if not count or not part.count:
            return self if count else Moments.none(self.dims)
        mean = self.mean + (self.mean - part.mean) * (part.count / count)
        if count == 1:
            return Moments(count, mean, torch.zeros_like(self.scatter))
        delta = part.mean - mean
        between = count * part.count / self.count
        scatter = torch.addr(self.scatter - part.scatter, delta, delta, alpha=-between)
        return Moments(count, mean, scatter)


def without_rounding(values: Tensor) -> Tensor:
    """Eigenvalues with those set to 0 that are rounding: their roots would be 1e8 times larger."""
    floor = len(values) * torch.finfo(values.dtype).eps * values.max().clamp(min=0)
    return values.masked_fill(values <= floor, 0.0)


def _same_width(a: Moments, b: Moments) -> None:
    if a.dims != b.dims:
        raise UserError(
            f"features of {a.dims} and of {b.dims} numbers cannot be set side by side: use the "
            "same detector for both"
        )
