"""Principal components of features, from any number of images without keeping them.

The covariance is summed in float64 (`metrics.Moments`), so any split into batches or processes
gives the components of all images together, up to rounding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.metrics.moments import Moments


@dataclass(frozen=True, eq=False)
class Components:
    """The directions of largest variance, largest first; each one's largest entry is positive."""

    mean: Tensor  # [C]
    directions: Tensor  # [k, C], orthonormal
    variances: Tensor  # [k]

    def project(self, features: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, k, H, W], or rows [N, C] -> [N, k], in the features' dtype."""
        directions, mean = self.directions.to(features), self.mean.to(features)
        if features.ndim == 2:
            return (features - mean) @ directions.T
        return torch.einsum("bchw,kc->bkhw", features - mean[:, None, None], directions)


class StreamingPCA:
    """Sums over batches; two of them add up."""

    def __init__(self, channels: int, moments: Moments | None = None) -> None:
        self.channels = channels
        self.moments = Moments.none(channels) if moments is None else moments

    def update(self, features: Tensor) -> None:
        """[B, C, H, W] or rows [N, C]."""
        rows = features if features.ndim == 2 else features.transpose(0, 1).flatten(1).T
        if rows.shape[1] != self.channels:
            raise ValueError(f"features of {rows.shape[1]} channels, not {self.channels}")
        self.moments = self.moments + Moments.of(rows)

    def __add__(self, other: "StreamingPCA") -> "StreamingPCA":
        return StreamingPCA(self.channels, self.moments + other.moments)

    def components(self, count: int) -> Components:
        most = min(self.channels, self.moments.count - 1)
        if not 1 <= count <= most:
            raise UserError(
                f"{self.moments.count} cells of {self.channels} channels have up to {max(most, 0)} "
                f"components, not {count}"
            )
        variances, vectors = torch.linalg.eigh(self.moments.covariance)
        directions = vectors.T.flip(0)[:count]
        # Both signs are right: one of them is taken, so that the same data gives the same.
        largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
        return Components(
            self.moments.mean, directions * largest.sign(), variances.flip(0)[:count].clamp(min=0)
        )
