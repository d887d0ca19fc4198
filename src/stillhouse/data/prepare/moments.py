"""Mean and deviation of latents per channel, summable over batches and shards."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class ChannelMoments:
    """Count, mean [C] and sum of squared deviations [C], in float64."""

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def of(cls, latents: NDArray[np.float32]) -> "ChannelMoments":
        """Of latents [B, C, H, W]."""
        x = np.moveaxis(latents.astype(np.float64), 1, 0).reshape(latents.shape[1], -1)
        mean = x.mean(1)
        return cls(x.shape[1], mean, ((x - mean[:, None]) ** 2).sum(1))

    def __add__(self, other: "ChannelMoments") -> "ChannelMoments":
        """Of both together (Chan, Golub and LeVeque 1979)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        between = delta**2 * (self.count * other.count / count)
        mean = self.mean + delta * (other.count / count)
        return ChannelMoments(count, mean, self.squares + other.squares + between)

    @property
    def std(self) -> NDArray[np.float64]:
        return np.sqrt(self.squares / self.count)

    def to_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "mean": self.mean.tolist(),
            "squares": self.squares.tolist(),
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "ChannelMoments":
        return cls(found["count"], np.array(found["mean"]), np.array(found["squares"]))
