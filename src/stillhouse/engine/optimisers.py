"""Optimisers and learning-rate schedules as configs. Schedules are functions of images seen."""

import math
from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import nn

from stillhouse.config import Config
from stillhouse.errors import missing_extra


class Constant(Config):
    """The learning rate stays."""

    kind: Literal["constant"] = "constant"

    def factor(self, images: float, total: float) -> float:
        return 1.0


class Cosine(Config):
    """Falls along a half cosine to `floor` at the end of the run."""

    kind: Literal["cosine"] = "cosine"
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the learning rate that is left at the end."""

    def factor(self, images: float, total: float) -> float:
        share = min(images / total, 1.0)
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2


class Steps(Config):
    """Divided by `divisor` at each of the given shares of the run (SFD: by 10 at half)."""

    kind: Literal["steps"] = "steps"
    at: tuple[float, ...] = (0.5,)
    """Shares of the run, from 0 to 1."""
    divisor: PositiveFloat = 10.0
    """Of the learning rate, at each of them."""

    def factor(self, images: float, total: float) -> float:
        return self.divisor ** -sum(images >= share * total for share in self.at)


class InverseRoot(Config):
    """Constant up to `reference` images, then 1/sqrt (EDM2: Karras et al. 2024, eq. 67)."""

    kind: Literal["inverse-root"] = "inverse-root"
    reference: PositiveFloat = 1e6
    """Images before it falls."""

    def factor(self, images: float, total: float) -> float:
        return 1 / math.sqrt(max(images / self.reference, 1.0))


Schedule = Annotated[Constant | Cosine | Steps | InverseRoot, Field(discriminator="kind")]


class AdamW(Config):
    """Adam with decoupled weight decay; the fused kernel where the device has it."""

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-4
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""
    eps: PositiveFloat = 1e-8
    """Keeps small second moments from dividing by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Share of a weight that is taken off per step, times the learning rate."""
    warmup: Annotated[float, Field(ge=0)] = 0.0
    """Images over which the learning rate rises from 0."""
    schedule: Schedule = Constant()

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )

    def rate(self, images: float, total: float) -> float:
        """The learning rate after so many images; the first update already moves."""
        ramp = min(images / self.warmup, 1.0) if self.warmup else 1.0
        return self.lr * ramp * self.schedule.factor(images, total)


class AdamW8bit(AdamW):
    """Adam with 8-bit moments (torchao)."""

    kind: Literal["adamw-8bit"] = "adamw-8bit"  # pyright: ignore[reportIncompatibleVariableOverride]

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            from torchao.optim import AdamW8bit as Low  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise missing_extra("torchao", "8bit") from None
        return Low(
            list(parameters),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


Optimiser = Annotated[AdamW | AdamW8bit, Field(discriminator="kind")]
