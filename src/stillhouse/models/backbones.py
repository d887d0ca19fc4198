"""Five networks by name and size, as diffusers models with random weights.

| name | class | told what to draw by |
|---|---|---|
| `unet` | `UNet2DConditionModel`, in LDM-4's shape | tokens, cross-attention |
| `dit` | `DiTTransformer2DModel` | class, in the norms (adaLN) |
| `mdt` | `MDTTransformer2DModel`, ours | class, in the norms (adaLN) |
| `pixart` | `PixArtTransformer2DModel` | tokens, cross-attention |
| `mmdit` | `SD3Transformer2DModel` | tokens, joint attention with QK norm |

All but `mdt` open in diffusers alone; `unet` and `pixart` no longer with `qk_norm`, for which
diffusers has no place in them (see `qk_norm`): who wants both takes `mmdit`. A class reaches a
network that takes tokens as a token (see `conditioning`).

`tiny` is for tests (at most 2M parameters), `small` for a CPU (4 to 6M, 12 MB in bfloat16); `S`,
`B`, `L` and `XL` have the depth, heads and width of DiT's (Peebles & Xie 2023), the U-Net LDM-4's
widths (Rombach et al. 2022) times 1/3, 1/2, 5/6 and 1. Millions of parameters, for 4 channels of
32 x 32 in patches of 2, and 1000 classes or tokens of width 768:

| | tiny | small | S | B | L | XL |
|---|---|---|---|---|---|---|
| `unet` | 1.4 | 5.8 | 49 | 106 | 284 | 406 |
| `dit` | 1.9 | 5.8 | 40 | 147 | 512 | 750 |
| `mdt` | 1.9 | 5.4 | 38 | 151 | 507 | 742 |
| `pixart` | 1.3 | 5.2 | 30 | 119 | 413 | 607 |
| `mmdit` | 1.8 | 5.5 | 63 | 251 | 898 | 1328 |

LDM-4's 401M are for tokens of 512. A DiT of diffusers embeds time and class in every block; the
paper, with one embedder for all, counts 675M for XL/2. Blocks that shared one could be neither
saved by diffusers nor sharded block by block, so they keep their own. MDT has one, and beyond a DiT
42M of shortcuts and 24M of side interpolator, which sampling does not run. mmDiT is as deep as the
others; with `num_layers=14` it has their size (660M).

Given images of another size than it was built for, a transformer resamples its positions. One that
is built anew at that size counts on from where the old one ended: weights do not fit it. PixArt's
`base_resolution` makes it count as the old one did. diffusers' DiT takes square images only.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stillhouse.errors import UserError

Name = Literal["unet", "dit", "mdt", "pixart", "mmdit"]
Size = Literal["tiny", "small", "S", "B", "L", "XL"]


class Transformer(NamedTuple):
    """Blocks, and the heads of their attention."""

    depth: int
    heads: int
    head_width: int


class UNet(NamedTuple):
    """Widths from full resolution down; tokens are attended to on all levels but the first."""

    widths: tuple[int, ...]
    layers: int  # residual blocks per level
    heads: int
    groups: int  # of normalisation: they divide every width


PAPERS: dict[Size, Transformer] = {
    "S": Transformer(12, 6, 64),
    "B": Transformer(12, 12, 64),
    "L": Transformer(24, 16, 64),
    "XL": Transformer(28, 16, 72),
}
DIT: dict[Size, Transformer] = {
    "tiny": Transformer(4, 4, 32),
    "small": Transformer(6, 6, 32),
    **PAPERS,
}
PIXART: dict[Size, Transformer] = {**DIT, "small": Transformer(8, 6, 32)}
MMDIT: dict[Size, Transformer] = {
    "tiny": Transformer(3, 4, 32),
    "small": Transformer(6, 5, 32),
    **PAPERS,
}
UNET: dict[Size, UNet] = {
    "tiny": UNet((32, 64), 1, 2, 8),
    "small": UNet((48, 80, 128), 1, 2, 16),
    "S": UNet((64, 128, 192, 320), 2, 1, 32),
    "B": UNet((96, 192, 288, 480), 2, 1, 32),
    "L": UNet((160, 320, 480, 800), 2, 1, 32),
    "XL": UNet((192, 384, 576, 960), 2, 1, 32),
}


# ---------------------------------------------------------------- the builders

# `changes` are further keys of the class's own config.


def build_unet(
    size: Size,
    *,
    channels: int,
    resolution: int,
    token_width: int,
    qk_norm: bool = False,
    widths: tuple[int, ...] = (),
    **changes: Any,
) -> Any:
    """`widths` of the levels, where they are not those of the size."""
    shape = _look_up(UNET, size, "unet")
    if widths:
        shape = shape._replace(widths=widths, groups=math.gcd(32, *widths))
    halvings = len(shape.widths) - 1
    if resolution % 2**halvings:
        raise UserError(
            f"a unet of size {size} halves the resolution {halvings} times: {resolution} is no "
            f"multiple of {2**halvings}"
        )
    config: dict[str, Any] = {
        "sample_size": resolution,
        "in_channels": channels,
        "out_channels": channels,
        "block_out_channels": shape.widths,
        "layers_per_block": shape.layers,
        "down_block_types": ("DownBlock2D", *["CrossAttnDownBlock2D"] * halvings),
        "up_block_types": (*["CrossAttnUpBlock2D"] * halvings, "UpBlock2D"),
        "attention_head_dim": shape.heads,  # diffusers' name for their number
        "norm_num_groups": shape.groups,
        "cross_attention_dim": token_width,
    }
    return _unet_class(qk_norm)(**config | changes)


def _unet_class(qk_norm: bool) -> Any:
    if qk_norm:
        from stillhouse.models.qk_norm import QKNormUNet2DConditionModel

        return QKNormUNet2DConditionModel
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel


def build_dit(
    size: Size, *, channels: int, resolution: int, classes: int, patch: int = 2, **changes: Any
) -> Any:
    from diffusers import DiTTransformer2DModel

    config = _transformer(_look_up(DIT, size, "dit"), channels, resolution, patch)
    config |= {"num_embeds_ada_norm": classes}
    return DiTTransformer2DModel(**config | changes)


def build_mdt(
    size: Size, *, channels: int, resolution: int, classes: int, patch: int = 2, **changes: Any
) -> Any:
    from stillhouse.models.mdt import MDTTransformer2DModel

    shape = _look_up(DIT, size, "mdt")
    config = _transformer(shape, channels, resolution, patch)
    config |= {"num_embeds_ada_norm": classes, "decoder_layers": 4 if size in PAPERS else 2}
    return MDTTransformer2DModel(**config | changes)


def build_pixart(
    size: Size,
    *,
    channels: int,
    resolution: int,
    token_width: int,
    patch: int = 2,
    base_resolution: int | None = None,
    qk_norm: bool = False,
    **changes: Any,
) -> Any:
    """`base_resolution`: the one whose positions it takes, for weights that come from there."""
    shape = _look_up(PIXART, size, "pixart")
    config = _transformer(shape, channels, resolution, patch) | {
        "cross_attention_dim": shape.heads * shape.head_width,
        "caption_channels": token_width,
        # Both would change by themselves at 128 and above.
        "interpolation_scale": resolution / (base_resolution or resolution),
        "use_additional_conditions": False,
    }
    return _pixart_class(qk_norm)(**config | changes)


def _pixart_class(qk_norm: bool) -> Any:
    if qk_norm:
        from stillhouse.models.qk_norm import QKNormPixArtTransformer2DModel

        return QKNormPixArtTransformer2DModel
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel


def build_mmdit(
    size: Size, *, channels: int, resolution: int, token_width: int, patch: int = 2, **changes: Any
) -> Any:
    from diffusers import SD3Transformer2DModel

    shape = _look_up(MMDIT, size, "mmdit")
    config = _transformer(shape, channels, resolution, patch) | {
        "joint_attention_dim": token_width,
        "caption_projection_dim": shape.heads * shape.head_width,
        # The class will have a pooled text in its time path: the smallest there is, always zero.
        "pooled_projection_dim": 1,
        "pos_embed_max_size": None,  # positions are resampled, not cropped from a larger table
        "qk_norm": "rms_norm",
    }
    return SD3Transformer2DModel(**config | changes)


def _transformer(shape: Transformer, channels: int, resolution: int, patch: int) -> dict[str, Any]:
    """What the configs of all four have in common."""
    if resolution % patch:
        raise UserError(f"images of {resolution} pixels are not made of patches of {patch}")
    return {
        "num_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "attention_head_dim": shape.head_width,
        "in_channels": channels,
        "out_channels": channels,
        "sample_size": resolution,
        "patch_size": patch,
    }


def _look_up(table: Mapping[Size, Any], size: Size, name: str) -> Any:
    if size not in table:
        raise UserError(f"there is no {name} of size {size}: choose one of {', '.join(table)}")
    return table[size]


# ---------------------------------------------------------------- by name


@dataclass(frozen=True)
class Backbone:
    """How a network is built, and by what it is told what to draw."""

    build: Callable[..., Any]
    takes: Literal["classes", "token_width"]  # the builder's argument for it


BACKBONES: dict[Name, Backbone] = {
    "unet": Backbone(build_unet, "token_width"),
    "dit": Backbone(build_dit, "classes"),
    "mdt": Backbone(build_mdt, "classes"),
    "pixart": Backbone(build_pixart, "token_width"),
    "mmdit": Backbone(build_mmdit, "token_width"),
}
