"""Positions of patches, carried to another resolution.

Along a side of N patches that were N_base, patch i stands at i * N_base/N (`resample`: the picture
has the same corners) or at i (`extrapolate`: it goes on beyond the old corner). Sinusoids are
computed there, not interpolated. Where a class keeps what they are computed from:

| class | positions are | resampled |
|---|---|---|
| PixArt | i / `interpolation_scale` | by that scale |
| DiT, MDT, SD3 without a table | i * `sample_size` / size of the image | `sample_size` stays |
| SD3 with a table | saved with the weights | a new table |
| U-Net | none | |

So a config that is read again gives the same positions, and diffusers alone reads it. A model whose
`sample_size` stayed the old is called with larger images, and `data_size` says how large.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stillhouse.errors import UserError

Positions = Literal["resample", "extrapolate"]
# Keys of a config that diffusers writes and reads, and passes on without a word.
SIZE, TABLE = "_data_size", "_positions"
LEARNT = ("encoder_positions", "decoder_positions")  # MDT's own, beside its sinusoids


@dataclass(frozen=True)
class Grid:
    """Patch i of `count` along a side stands at first + i * step."""

    count: int
    first: float
    step: float


def data_size(model: nn.Module) -> Any:
    """Side of the images that the model was made for: an integer, a pair, or None if not said."""
    config: Any = model.config
    return config.get(SIZE) or config.get("sample_size")


@torch.no_grad()
def carry_positions(source: Any, target: Any, how: Positions) -> dict[str, str]:
    """Gives the target the source's positions; tensors by name, and what was done if anything."""
    old, new = (getattr(model, "pos_embed", None) for model in (source, target))
    if old is None or new is None or old.pos_embed is None:
        return {}
    given, count = grid_of(source), data_size(target) // new.patch_size
    if old.pos_embed_max_size:
        done = {"pos_embed.pos_embed": _carry_table(source, target, given, count, how)}
    else:
        wanted = wanted_grid(given, count, how)
        _settle(target, wanted)
        done = {"pos_embed.pos_embed": "" if count == given.count else _said(wanted)}
    for name in LEARNT:
        if hasattr(source, name):
            said = _carry_learnt(source, target, name)
            done[name] = "" if count == given.count else said
    return done


def grid_of(model: Any) -> Grid:
    """Of images of the size that the model was made for."""
    embed, count = model.pos_embed, data_size(model) // model.pos_embed.patch_size
    most = embed.pos_embed_max_size
    if not most:
        return Grid(count, 0.0, embed.base_size / count / embed.interpolation_scale)
    start, step = model.config.get(TABLE) or (0.0, embed.base_size / most)
    return Grid(count, start + (most - count) // 2 * step, step)


def wanted_grid(given: Grid, count: int, how: Positions, most: int = 0) -> Grid:
    """`most` is the side of a table, which is read around its middle: larger images begin before
    the smaller ones did."""
    if how == "resample":
        return Grid(count, given.first, given.step * given.count / count)
    before = (most - given.count) // 2 - (most - count) // 2 if most else 0
    return Grid(count, given.first - before * given.step, given.step)


def _said(grid: Grid) -> str:
    first = f"{grid.first:g} + " if grid.first else ""
    return f"positions: sinusoids at {first}i * {grid.step:g} for {grid.count} a side, computed"


def _settle(model: Any, grid: Grid) -> None:
    if model.pos_embed.pos_embed_max_size:
        _set_table(model, grid)
    elif "interpolation_scale" in model.config:
        _set_scale(model, 1 / grid.step)
    else:
        _set_base(model, grid)


def _set_scale(model: Any, scale: float) -> None:
    embed = model.pos_embed
    model.register_to_config(interpolation_scale=scale)
    embed.interpolation_scale = scale
    embed.pos_embed.copy_(_sinusoids(embed, embed.base_size, scale))


def _set_base(model: Any, grid: Grid) -> None:
    """The model becomes what its config will be read as: a smaller one, for larger images."""
    embed, base = model.pos_embed, round(grid.step * grid.count)
    if abs(base - grid.step * grid.count) > 1e-6:
        raise UserError(
            f"{grid.count} patches at steps of {grid.step:g} are no whole number of the old ones, "
            "as this network must count: resample its positions"
        )
    size = grid.count * embed.patch_size
    model.register_to_config(sample_size=base * embed.patch_size)
    if data_size(model) != size:
        model.register_to_config(**{SIZE: size})
    embed.height = embed.width = embed.base_size = base
    table = _sinusoids(embed, base).to(embed.pos_embed)
    embed.register_buffer("pos_embed", table, persistent=False)


def _sinusoids(embed: Any, base: int, scale: float = 1.0) -> Tensor:
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    width = embed.pos_embed.shape[-1]
    return get_2d_sincos_pos_embed(width, base, base_size=base, interpolation_scale=scale)[None]


# ---------------------------------------------------------------- tables saved with the weights


def _carry_table(source: Any, target: Any, given: Grid, count: int, how: Positions) -> str:
    old = source.pos_embed
    most = old.pos_embed_max_size
    if count == given.count or (how == "extrapolate" and count <= most):
        _store(target, old.pos_embed, source.config.get(TABLE))
        return ""
    if _is_sinusoids(source, given):
        wanted = wanted_grid(given, count, how, most)
        _set_table(target, wanted)
        return _said(wanted)
    if how == "extrapolate":
        raise UserError("the checkpoint's positions are a table that ends: resample them")
    _store(target, _interpolated(old, given.count, count), None)
    return f"positions: a learnt table, read between its {given.count} x {given.count} entries"


def _set_table(model: Any, grid: Grid) -> None:
    embed = model.pos_embed
    most = max(embed.pos_embed_max_size or 0, grid.count)
    start = grid.first - (most - grid.count) // 2 * grid.step
    _store(model, _table(embed, most, start, grid.step), [start, grid.step])


def _store(model: Any, table: Tensor, places: list[float] | None) -> None:
    embed, most = model.pos_embed, round(table.shape[1] ** 0.5)
    model.register_to_config(pos_embed_max_size=most, **{TABLE: places})
    embed.pos_embed_max_size = most
    embed.register_buffer("pos_embed", table.clone().to(embed.pos_embed), persistent=True)


def _table(embed: Any, most: int, start: float, step: float) -> Tensor:
    from diffusers.models.embeddings import get_2d_sincos_pos_embed_from_grid

    places = (start + step * torch.arange(most, dtype=torch.float64)).float()
    grid = torch.stack(torch.meshgrid(places, places, indexing="xy"))
    return get_2d_sincos_pos_embed_from_grid(embed.pos_embed.shape[-1], grid)[None]


def _is_sinusoids(model: Any, grid: Grid) -> bool:
    """Whether the table is what the config would compute, up to half precision."""
    embed = model.pos_embed
    most = embed.pos_embed_max_size
    start = grid.first - (most - grid.count) // 2 * grid.step
    computed = _table(embed, most, start, grid.step).to(embed.pos_embed)
    return torch.allclose(embed.pos_embed, computed, rtol=0, atol=1e-2)


def _interpolated(embed: Any, own: int, count: int) -> Tensor:
    """What the table holds for images of the source's size, read between its entries."""
    from stillhouse.models.mdt import resampled

    side = own * embed.patch_size
    window = embed.cropped_pos_embed(side, side)[0].unflatten(0, (own, own))
    return resampled(window, count, count).flatten(0, 1)[None]


def _carry_learnt(source: Any, target: Any, name: str) -> str:
    """MDT reads its tables between entries: they stay as they are, or grow where it counts on."""
    old, mine = getattr(source, name), getattr(target, name)
    base = target.pos_embed.base_size
    side = min(base, len(old))
    table = old.new_zeros(base, base, old.shape[2])
    table[:side, :side] = old[:side, :side]
    setattr(target, name, nn.Parameter(table.to(mine), requires_grad=mine.requires_grad))
    target.grid = base
    if side == base:
        return f"positions: a learnt table, read between its {base} x {base} entries"
    return f"positions: a learnt table of {side} x {side}, zero beyond"
