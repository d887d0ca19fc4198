"""Activations of one transformer block: the same within U-Nets and in transformers.

| id ends in | module |
|---|---|
| `self-{q,k,v}` | `attn1.to_{q,k,v}`; `attn` where image and text attend jointly |
| `cross-q` | `attn2.to_q` |
| `dual-{q,k,v}` | `attn2.to_{q,k,v}`, a second attention among image tokens (SD 3.5) |
| `{self,cross,dual}-map` | none: computed from queries and keys |
| `ffn-inner` | `ff.net.0` |
| `out` | the block |

In joint attention, `self-map` and `cross-map` are the image's and the text's part of one softmax.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from stillhouse.features.activation import Activation


class Make(Protocol):
    """Makes an activation of what is not yet known of it."""

    def __call__(
        self, *, id: str, module: str, kind: str, channels: int | None, part: int = 0
    ) -> Activation: ...


def block_activations(block: Any, name: str, path: str, make: Make) -> Iterator[Activation]:
    """In the order of computation. `name` and `path` of the block itself."""
    joint = getattr(block, "attn", None)
    first, second = ("attn", "dual") if joint is not None else ("attn1", "cross")
    attention, further = getattr(block, first), getattr(block, "attn2", None)
    yield from attention_activations(attention, "self", name, f"{path}.{first}", make)
    if joint is not None:
        yield make(
            id=f"{name}-cross-map", module=f"{path}.{first}", kind="cross-map", channels=None
        )
    if further is not None:
        yield from attention_activations(further, second, name, f"{path}.attn2", make)
    yield make(
        id=f"{name}-ffn-inner",
        module=f"{path}.ff.net.0",
        kind="ffn-inner",
        channels=block.ff.net[2].in_features,
    )
    # A joint block gives the text's tokens, then the image's.
    part = 1 if joint is not None else 0
    width = block.ff.net[2].out_features
    yield make(id=f"{name}-out", module=path, kind="out", channels=width, part=part)


def attention_activations(
    attention: Any, which: str, name: str, path: str, make: Make
) -> Iterator[Activation]:
    """Queries, keys and values of image tokens, and the map; of a text there are no maps to see."""
    for projection in "q" if which == "cross" else "qkv":
        kind = f"{which}-{projection}"
        width = getattr(attention, f"to_{projection}").out_features
        module = f"{path}.to_{projection}"
        yield make(id=f"{name}-{kind}", module=module, kind=kind, channels=width)
    yield make(id=f"{name}-{which}-map", module=path, kind=f"{which}-map", channels=None)
