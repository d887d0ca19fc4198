"""Activations of a U-Net, with the ids of the paper's own code.

| id | module |
|---|---|
| `unet-in`, `unet-after-conv-in`, `unet-out` | what `conv_in` takes; `conv_in`; `conv_out` |
| `{down,up}-level{i}-repeat{j}-res-out` | `{down,up}_blocks.i.resnets.j` |
| `...-res-increment` | `....resnets.j.conv2` |
| `...-vit-out` | `....attentions.j` |
| `...-vit-block{k}-*` | `....attentions.j.transformer_blocks.k`, see `blocks` |
| `{down,up}-level{i}-{down,up}sampler-out` | `....{down,up}samplers.0` |
| `mid-repeat{j}-res-*`, `mid-vit-*` | `mid_block.resnets.j`, `mid_block.attentions.0` |

The attention of a U-Net without text is a ViT of one block that has queries, keys and values only.
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import Any

from stillhouse.errors import UserError
from stillhouse.features.activation import Activation, Stage
from stillhouse.features.blocks import attention_activations, block_activations

# Others keep a second path of images beside, or attention of another form.
KNOWN = {
    "DownBlock2D",
    "CrossAttnDownBlock2D",
    "AttnDownBlock2D",
    "ResnetDownsampleBlock2D",
    "UNetMidBlock2D",
    "UNetMidBlock2DCrossAttn",
    "UpBlock2D",
    "CrossAttnUpBlock2D",
    "AttnUpBlock2D",
    "ResnetUpsampleBlock2D",
}


def unet_activations(model: Any) -> Iterator[Activation]:
    """In the order of computation."""
    _check(model)
    scale = Fraction(1)
    begin = partial(Activation, module="conv_in", stage="in", scale=scale)
    yield begin(id="unet-in", kind="in", channels=model.conv_in.in_channels)
    yield begin(id="unet-after-conv-in", kind="after-conv-in", channels=model.conv_in.out_channels)
    for i, block in enumerate(model.down_blocks):
        yield from _level(block, "down", i, scale)
        if block.downsamplers:
            scale /= 2
            yield _sampler(block.downsamplers[0], "down", i, scale)
    if model.mid_block is not None:
        yield from _middle(model.mid_block, scale)
    for i, block in enumerate(model.up_blocks):
        yield from _level(block, "up", i, scale)
        if block.upsamplers:
            scale *= 2
            yield _sampler(block.upsamplers[0], "up", i, scale)
    channels = model.conv_out.out_channels
    yield Activation("unet-out", "conv_out", "out", "out", scale, channels)


def _check(model: Any) -> None:
    blocks = [*model.down_blocks, *model.up_blocks, model.mid_block]
    names = {type(block).__name__ for block in blocks if block is not None}
    if names - KNOWN:
        raise UserError(
            f"features of a U-Net with {', '.join(sorted(names - KNOWN))} cannot be read; "
            f"known are {', '.join(sorted(KNOWN))}"
        )


def _level(block: Any, stage: Stage, level: int, scale: Fraction) -> Iterator[Activation]:
    attentions = list(getattr(block, "attentions", None) or [])
    path, name = f"{stage}_blocks.{level}", f"{stage}-level{level}"
    for j, resnet in enumerate(block.resnets):
        make = partial(Activation, stage=stage, level=level, repeat=j, scale=scale)
        yield from _residual(resnet, f"{name}-repeat{j}", f"{path}.resnets.{j}", make)
        if attentions:
            yield from _vit(attentions[j], f"{name}-repeat{j}", f"{path}.attentions.{j}", make)


def _middle(block: Any, scale: Fraction) -> Iterator[Activation]:
    attentions = list(getattr(block, "attentions", None) or [])
    for j, resnet in enumerate(block.resnets):
        make = partial(Activation, stage="mid", repeat=j, scale=scale)
        yield from _residual(resnet, f"mid-repeat{j}", f"mid_block.resnets.{j}", make)
        if j < len(attentions) and attentions[j] is not None:
            # The official name counts no repeats, as there is one attention; further ones do.
            name = "mid" if len(attentions) == 1 else f"mid-repeat{j}"
            yield from _vit(attentions[j], name, f"mid_block.attentions.{j}", make)


def _residual(resnet: Any, name: str, path: str, make: Any) -> Iterator[Activation]:
    channels = resnet.conv2.out_channels
    yield make(
        id=f"{name}-res-increment",
        module=f"{path}.conv2",
        kind="res-increment",
        channels=channels,
    )
    yield make(id=f"{name}-res-out", module=path, kind="res-out", channels=channels)


def _vit(vit: Any, name: str, path: str, make: Any) -> Iterator[Activation]:
    inner = partial(make, frame=path)
    blocks = getattr(vit, "transformer_blocks", None)
    if blocks is None:
        yield from attention_activations(vit, "self", f"{name}-vit-block0", path, inner)
        channels = vit.out_dim
    else:
        for k, block in enumerate(blocks):
            numbered = partial(inner, block=k)
            place = f"{path}.transformer_blocks.{k}"
            yield from block_activations(block, f"{name}-vit-block{k}", place, numbered)
        channels = vit.out_channels
    yield make(id=f"{name}-vit-out", module=path, kind="vit-out", channels=channels)


def _sampler(sampler: Any, stage: Stage, level: int, scale: Fraction) -> Activation:
    kind = f"{stage}sampler-out"
    return Activation(
        id=f"{stage}-level{level}-{kind}",
        module=f"{stage}_blocks.{level}.{stage}samplers.0",
        kind=kind,
        stage=stage,
        scale=scale,
        channels=sampler.out_channels,
        level=level,
    )
