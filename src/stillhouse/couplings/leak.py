"""How much the noise that data meets says of their class: the condition leak, as a number.

The probe asks which class's mean image a noise is most aligned with, and compares with the class of
the datum that meets it. Means come from earlier batches: the batch's own would hold the very data
that the noise was chosen for.
"""

import math
from collections import defaultdict
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from stillhouse.couplings.pairing import flat


@dataclass(frozen=True)
class Leak:
    """Answers of the probe, counted: batches and processes add up."""

    right: float = 0.0
    by_chance: float = 0.0  # right answers if noise knew nothing
    asked: float = 0.0

    @property
    def accuracy(self) -> float:
        """Without a leak it is `chance`."""
        return self.right / self.asked if self.asked else math.nan

    @property
    def chance(self) -> float:
        return self.by_chance / self.asked if self.asked else math.nan

    def __add__(self, other: "Leak") -> "Leak":
        return Leak(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class LeakProbe:
    """Call it with batch after batch: noise as met, and the labels. The first is learnt only.

    Images of different shapes have no mean: each shape is asked about by itself. Nothing is kept
    of a run that is resumed, whose first batch is learnt only too.
    """

    def __init__(self) -> None:
        self._shapes: dict[torch.Size, _ClassMeans] = defaultdict(_ClassMeans)

    @torch.no_grad()
    def __call__(self, x: Tensor, noise: Tensor, labels: Tensor) -> Leak:
        means, labels = self._shapes[x.shape[1:]], labels.cpu()
        leak = means.ask(flat(noise).cpu(), labels)
        means.learn(flat(x).cpu(), labels)
        return leak


class _ClassMeans:
    """The mean of each class's rows so far."""

    def __init__(self) -> None:
        self._labels = torch.empty(0, dtype=torch.int64)
        self._sums = torch.empty(0)
        self._counts = torch.empty(0)

    def ask(self, noise: Tensor, labels: Tensor) -> Leak:
        """Of the rows whose class has a mean."""
        known = torch.isin(labels, self._labels)
        if len(self._labels) < 2 or not bool(known.any()):
            return Leak()
        means = normalize(self._sums / self._counts[:, None], dim=1)
        found = (noise[known] @ means.T).argmax(1)
        true = self._places(labels[known])
        answers, truths = (each.bincount(minlength=len(means)) for each in (found, true))
        by_chance = float((answers * truths).sum()) / len(true)
        return Leak(float((found == true).sum()), by_chance, len(true))

    def learn(self, x: Tensor, labels: Tensor) -> None:
        new = labels[~torch.isin(labels, self._labels)].unique()
        self._labels = torch.cat([self._labels, new])
        sums = x.new_zeros(len(new), x.shape[1])
        self._sums = torch.cat([self._sums, sums]) if len(self._sums) else sums
        self._counts = torch.cat([self._counts, torch.zeros(len(new))])
        places = self._places(labels)
        self._sums.index_add_(0, places, x)
        self._counts.index_add_(0, places, torch.ones(len(x)))

    def _places(self, labels: Tensor) -> Tensor:
        return (labels[:, None] == self._labels[None]).int().argmax(1)
