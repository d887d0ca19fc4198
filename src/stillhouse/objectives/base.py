"""What every objective shares: the contract, keyed draws, and noise that is applied once.

An objective says which noise levels it wants (`sigmas`) and what a noised batch costs (`losses`).
Everything between the two is written here: noise comes from the batch, where a coupling may have
paired it, or is drawn by key; it enters a `Noised` once, and input and target are both read from
there. So no objective can noise twice, or keep a target of other noise than its input.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from stillhouse.process import (
    Batch,
    Condition,
    Denoiser,
    Prediction,
    keyed_normal,
    keyed_uniform,
    predictions,
)

# Levels are never drawn below this: x0 + sigma * noise rounds at 6e-8 in float32, which a weight
# of 1/sigma^2 would make the whole loss.
SIGMA_FLOOR = 1e-4


@dataclass(frozen=True)
class Loss:
    """What an objective gives: `total` is the mean of `per_sample`, each a mean over elements."""

    total: Tensor  # scalar, to differentiate
    per_sample: Tensor  # [B], float32 or wider, weighted
    sigma: Tensor  # [B], the noise level each sample was seen at


@dataclass(frozen=True)
class Draws:
    """Randomness of training: row r depends on (seed, batch.key[r], purpose), on nothing else."""

    seed: int
    stream: str = ""  # a name apart for draws that must not meet those of training

    def normal(self, batch: Batch, purpose: str = "noise") -> Tensor:
        """Unit noise of the data's shape, float32."""
        return self.rows(batch.data.shape[1:], row_keys(batch), purpose)

    def rows(self, shape: Sequence[int], key: Tensor, purpose: str = "noise") -> Tensor:
        """The same for rows known by their keys alone, as a coupling meets them."""
        return keyed_normal(shape, key, seed=self.seed, purpose=self._name(purpose))

    def uniform(self, batch: Batch, purpose: str) -> Tensor:
        """One number in [0, 1) per sample, float64."""
        return keyed_uniform(row_keys(batch), seed=self.seed, purpose=self._name(purpose))

    def _name(self, purpose: str) -> str:
        return f"{self.stream}/{purpose}" if self.stream else purpose


def row_keys(batch: Batch) -> Tensor:
    """The key of every row, which all further draws need."""
    if batch.key is None:
        raise ValueError(
            "this batch has no `key` (the global index of each image), which keys the draws that "
            "it does not carry itself: set Batch.key, or Batch.noise and Batch.sigma"
        )
    return batch.key


@dataclass(frozen=True)
class Noised:
    """Data with the noise that each datum met. Input and target are both read from here."""

    x0: Tensor
    noise: Tensor
    sigma: Tensor  # [B], float64
    condition: Condition | None = None
    key: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch) -> "Noised":
        """From a batch that carries noise and sigma; half precision is raised to float32."""
        if batch.noise is None or batch.sigma is None:
            raise ValueError("a batch is noised after `prepare` has given it noise and sigma")
        if batch.noise.shape != batch.data.shape or batch.sigma.shape != (len(batch.data),):
            raise ValueError(
                f"data {tuple(batch.data.shape)} needs noise of its shape and one sigma per sample,"
                f" not {tuple(batch.noise.shape)} and {tuple(batch.sigma.shape)}"
            )
        half = batch.data.dtype in (torch.float16, torch.bfloat16)
        x0 = batch.data.float() if half else batch.data
        sigma = batch.sigma.to(x0.device).double()
        return cls(x0, batch.noise.to(x0), sigma, batch.condition, batch.key)

    def at(self, sigma: Tensor) -> Tensor:
        """The same data and noise at levels [B] of one's own: x0 + sigma * noise."""
        return self.x0 + predictions.rows(sigma, self.x0) * self.noise

    @property
    def x(self) -> Tensor:
        """What the denoiser sees."""
        return self.at(self.sigma)

    def target(self, kind: Prediction, sigma_data: float = 1.0) -> Tensor:
        """What a network of this kind should output."""
        return predictions.target(kind, self.x0, self.noise, self.sigma, sigma_data)


class Objective(ABC):
    """`objective(denoiser, batch, generator) -> Loss`."""

    @abstractmethod
    def sigmas(self, u: Tensor, batch: Batch) -> Tensor:
        """One noise level per sample from one uniform number per sample, float64."""

    @abstractmethod
    def losses(self, denoiser: Denoiser, noised: Noised) -> Tensor:
        """The loss of every sample [B], weighted, a mean over its elements."""

    def settled(self) -> Self:
        """The objective as it is at the end of its curriculum, where it has one.

        Validation uses it, so that losses are comparable over a whole run.
        """
        return self

    def prepare(self, batch: Batch, generator: Draws) -> Batch:
        """The batch with the noise and sigma it lacks. The prefetch may call it: same result."""
        noise, sigma = batch.noise, batch.sigma
        if noise is None:
            noise = generator.normal(batch).to(batch.data.device)
        if sigma is None:
            drawn = self.sigmas(generator.uniform(batch, "sigma"), batch)
            sigma = drawn.clamp(min=SIGMA_FLOOR).to(batch.data.device)
        return replace(batch, noise=noise, sigma=sigma)

    def __call__(self, denoiser: Denoiser, batch: Batch, generator: Draws) -> Loss:
        noised = Noised.of(self.prepare(batch, generator))
        per_sample = self.losses(denoiser, noised)
        return Loss(per_sample.mean(), per_sample, noised.sigma)


def per_sample_mean(values: Tensor) -> Tensor:
    """[B, ...] -> [B]."""
    return values.flatten(1).mean(1)


def drop_condition(
    batch: Batch, null: Condition, rate: float, generator: Draws, *, only: Sequence[str] = ()
) -> Batch:
    """Replaces the condition of a share `rate` of the samples by `null` (one row).

    The mask is keyed per sample. Calls with another `only` (the names of the fields to drop) draw
    masks of their own, so that text and label can be dropped independently.
    """
    if batch.condition is None:
        return batch
    purpose = "/".join(["drop", *sorted(only)])
    mask = generator.uniform(batch, purpose) < rate
    return replace(batch, condition=batch.condition.drop(mask, null, only=only))


def drop_apart(
    batch: Batch, null: Condition, generator: Draws, *, semantics: float, control: float
) -> Batch:
    """Drops what is drawn (label, text) and how it is framed (control) independently of each other.

    Two-term guidance needs all four cases. With `control` = 0, the control is always kept and the
    rest is dropped for the very samples that `drop_condition` takes.
    """
    batch = drop_condition(batch, replace(null, control=None), semantics, generator)
    if control == 0:
        return batch
    return drop_condition(batch, null, control, generator, only=["control"])
