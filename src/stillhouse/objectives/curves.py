"""Validation, and the loss per noise level. Validation noise is independent of any coupling.

The training loss under a coupling is not comparable with one under independent noise, so
`validation_loss` takes no noise from the batch and draws from a stream of its own.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stillhouse.objectives.base import Draws, Loss, Objective
from stillhouse.process import Batch, Denoiser


def log_edges(sigma_min: float, sigma_max: float, bins: int) -> Tensor:
    """`bins + 1` edges, evenly spaced in log sigma."""
    ends = math.log(sigma_min), math.log(sigma_max)
    return torch.linspace(*ends, bins + 1, dtype=torch.float64).exp()


@dataclass(frozen=True, eq=False)
class LevelCurve:
    """Losses summed per bin of sigma. Curves add up over batches and processes."""

    edges: Tensor  # [K + 1]; levels outside count in the bins at the ends
    total: Tensor  # [K] float64
    count: Tensor  # [K] float64, so that one all-reduce can take both

    @classmethod
    def of(cls, loss: Loss, edges: Tensor) -> "LevelCurve":
        """The curve of one batch."""
        sigma, values = loss.sigma.double().cpu(), loss.per_sample.detach().double().cpu()
        finite = values.isfinite()  # a skipped update must not hide the others
        sigma, values = sigma[finite], values[finite]
        bins = torch.bucketize(sigma, edges[1:-1].double().cpu(), right=True)
        none = cls.none(edges)
        total = none.total.index_add(0, bins, values)
        return cls(edges, total, none.count.index_add(0, bins, torch.ones_like(values)))

    @classmethod
    def none(cls, edges: Tensor) -> "LevelCurve":
        """The curve of nothing, to add to."""
        zero = torch.zeros(len(edges) - 1, dtype=torch.float64)
        return cls(edges, zero, zero)

    def __add__(self, other: "LevelCurve") -> "LevelCurve":
        if not torch.equal(self.edges, other.edges):
            raise ValueError("curves over different bins cannot be added")
        return LevelCurve(self.edges, self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> Tensor:
        """[K] mean loss per bin; not a number where nothing fell."""
        return self.total / self.count

    def as_lists(self) -> dict[str, list[float | None]]:
        """For a log: edges, and the mean per bin or None."""
        means = [None if math.isnan(mean) else mean for mean in self.mean.tolist()]
        return {"edges": self.edges.tolist(), "loss": means}

    @property
    def overall(self) -> float:
        """The mean over all samples."""
        return float(self.total.sum() / self.count.sum())


def validation_loss(
    objective: Objective, denoiser: Denoiser, batch: Batch, generator: Draws
) -> Loss:
    """The loss with independent noise: whatever noise and sigma the batch carries is ignored.

    Draws are keyed by the sample id where there is one (else by the key), so that an image meets
    the same noise at every validation of every run with this seed.
    """
    key = batch.key if batch.ids is None else batch.ids
    fresh = replace(batch, noise=None, sigma=None, key=key)
    with torch.no_grad():
        return objective.settled()(denoiser, fresh, replace(generator, stream="validation"))


def validate(
    objective: Objective,
    denoiser: Denoiser,
    batches: Iterable[Batch],
    generator: Draws,
    edges: Tensor,
) -> LevelCurve:
    """The validation loss per noise level, over all batches."""
    curve = LevelCurve.none(edges)
    for batch in batches:
        curve = curve + LevelCurve.of(validation_loss(objective, denoiser, batch, generator), edges)
    return curve
