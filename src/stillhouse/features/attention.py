"""Attention as it is computed inside: where queries and keys appear, and the maps they give.

    map = mean over heads of softmax(q k^T / sqrt(width of a head) + bias)

`fuse_qkv_projections()` of diffusers leaves `to_q`, `to_k` and `to_v` uncalled: the same numbers
are then thirds of `to_qkv`, or halves of `to_kv` where keys come from a text.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Which = Literal["q", "k", "v", "text-k"]


class Projection(NamedTuple):
    """The module that puts out queries, keys or values, maybe with others beside them."""

    module: nn.Module
    part: int = 0
    parts: int = 1

    def take(self, output: Tensor) -> Tensor:
        return output.chunk(self.parts, dim=-1)[self.part]


def projection(attention: Any, which: Which) -> Projection:
    """`text-k`: of the text in joint attention."""
    # Unfusing puts the old processor back and leaves all else as it is.
    fused = "Fused" in type(attention.processor).__name__
    if which == "text-k":
        if fused:
            return Projection(attention.to_added_qkv, 1, 3)
        return Projection(attention.add_k_proj)
    if fused and not attention.is_cross_attention:
        return Projection(attention.to_qkv, "qkv".index(which), 3)
    if fused and which != "q":
        return Projection(attention.to_kv, "kv".index(which), 2)
    return Projection(getattr(attention, f"to_{which}"))


def is_joint(attention: Any) -> bool:
    """Whether text tokens attend beside those of the image."""
    return getattr(attention, "add_k_proj", None) is not None


class Attended(NamedTuple):
    """What a map is computed from."""

    query: Tensor  # [B, N, C] of image tokens
    key: Tensor  # [B, M, C]
    text_key: Tensor | None = None  # [B, L, C], attended to beside the others
    bias: Tensor | None = None  # [B, 1, M], added before the softmax; boolean: true is kept


def head_maps(attention: Any, given: Attended) -> Iterator[Tensor]:
    """[B, N, M + L] for each head in turn, in float32; rows sum to 1."""
    query = _heads(attention, given.query, attention.norm_q)
    key = _heads(attention, given.key, attention.norm_k)
    if given.text_key is not None:
        text = _heads(attention, given.text_key, attention.norm_added_k)
        key = torch.cat([key, text], dim=2)
    bias = _as_bias(given.bias)
    for q, k in zip(query.unbind(1), key.unbind(1), strict=True):
        logits = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        yield (logits if bias is None else logits + bias).softmax(-1)


def mean_map(attention: Any, given: Attended) -> Tensor:
    """[B, N, M + L]; never holds more than one head beside the sum."""
    total = None
    for found in head_maps(attention, given):
        total = found if total is None else total.add_(found)
    assert total is not None
    return total / attention.heads


def _heads(attention: Any, tokens: Tensor, norm: nn.Module | None) -> Tensor:
    split = tokens.unflatten(-1, (attention.heads, -1)).transpose(1, 2)
    return split if norm is None else norm(split)


def _as_bias(bias: Tensor | None) -> Tensor | None:
    if bias is None or bias.dtype != torch.bool:
        return bias
    return torch.zeros_like(bias, dtype=torch.float32).masked_fill(~bias, float("-inf"))
