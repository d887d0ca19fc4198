"""A fake score that is the teacher with adapters (LoRA): one network answers as both.

Teacher and fake score would be two networks of the same size, one of which never changes. As
adapters on the teacher's own weights the fake score takes what they take: in memory, in its
optimiser and in checkpoints. The teacher is the same network with its adapters left out, which is
what it was before they came, to the last bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stillhouse.models.adapters import LORA, keep_learnt
from stillhouse.process import Condition


class LoraScore(nn.Module):
    """The fake score, of a denoiser that holds peft layers; `teacher` is it without them."""

    def __init__(self, denoiser: nn.Module) -> None:
        super().__init__()
        # Once, as every answer of the teacher passes them over; a plain list, which registers none.
        self.layers = [part for part in denoiser.modules() if adapts(part)]
        if not self.layers:
            raise ValueError("this denoiser holds no adapters: inject them first")
        for name, weight in denoiser.named_parameters():
            weight.requires_grad_(LORA in name)
        self.denoiser = denoiser
        keep_learnt(self)

    def forward(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        return self.denoiser(x, sigma, cond)

    @property
    def teacher(self) -> "WithoutAdapters":
        return WithoutAdapters(self)


class WithoutAdapters:
    """The denoiser that was there before its adapters."""

    training = False  # a teacher has no dropout, in whatever mode its fake score is

    def __init__(self, score: LoraScore) -> None:
        self.score = score

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        with without_adapters(self.score, self.score.layers):
            # As a whole: where it is sharded its weights are gathered by its own call.
            return self.score(x, sigma, cond)


@contextmanager
def without_adapters(network: nn.Module, layers: list[Any]) -> Iterator[None]:
    """In evaluation mode, and every adapted layer is its base."""
    training = network.training
    _pass_over(layers, True)
    if training:
        network.eval()
    try:
        yield
    finally:
        _pass_over(layers, False)
        if training:
            network.train()


def _pass_over(layers: list[Any], off: bool) -> None:
    for layer in layers:
        # Not by `enable_adapters`: that also switches requires_grad, which FSDP reads only once.
        layer._disable_adapters = off


def adapts(part: nn.Module) -> bool:
    """Whether it is one of peft's layers."""
    return hasattr(part, "base_layer") and hasattr(part, "_disable_adapters")
