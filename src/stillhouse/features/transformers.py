"""Activations of a transformer: like those of a U-Net's ViTs, one stack of blocks long.

| id | module |
|---|---|
| `transformer-in`, `transformer-after-embed` | what `pos_embed` takes; `pos_embed` |
| `block{k}-*` | `transformer_blocks.k`, see `blocks` |
| `transformer-out` | the network itself |
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import Any

from stillhouse.features.activation import Activation
from stillhouse.features.blocks import block_activations


def transformer_activations(model: Any) -> Iterator[Activation]:
    """In the order of computation."""
    patch, embed = model.config.patch_size, model.pos_embed
    begin = partial(Activation, module="pos_embed", stage="in")
    yield begin(id="transformer-in", kind="in", channels=embed.proj.in_channels, scale=Fraction(1))
    in_tokens = {"scale": Fraction(1, patch), "frame": "pos_embed", "patch": patch}
    width = embed.proj.out_channels
    yield begin(id="transformer-after-embed", kind="after-embed", channels=width, **in_tokens)
    for k, block in enumerate(model.transformer_blocks):
        make = partial(Activation, stage="block", block=k, **in_tokens)
        yield from block_activations(block, f"block{k}", f"transformer_blocks.{k}", make)
    channels = model.out_channels
    yield Activation("transformer-out", "", "out", "out", Fraction(1), channels)
