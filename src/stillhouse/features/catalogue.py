"""`catalogue(model)`: every activation of a network, in the order of computation.

A network without weights will do: `with torch.device("meta")` it costs no memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from stillhouse.errors import UserError
from stillhouse.features.activation import Activation
from stillhouse.features.transformers import transformer_activations
from stillhouse.features.unets import unet_activations

FAMILIES: dict[str, Callable[[Any], Iterator[Activation]]] = {
    "UNet2DModel": unet_activations,
    "UNet2DConditionModel": unet_activations,
    "DiTTransformer2DModel": transformer_activations,
    "MDTTransformer2DModel": transformer_activations,
    "PixArtTransformer2DModel": transformer_activations,
    "SD3Transformer2DModel": transformer_activations,
}

Catalogue = dict[str, Activation]


def catalogue(model: nn.Module) -> Catalogue:
    """By id: 197 for SD 1.5, 612 for SDXL."""
    names = [base.__name__ for base in type(model).__mro__]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise UserError(
            f"the activations of a {names[0]} are not known; supported: {', '.join(FAMILIES)}"
        )
    return {activation.id: activation for activation in family(model)}


def look_up(known: Mapping[str, Activation], ids: Sequence[str]) -> list[Activation]:
    """The activations of these ids, each once; an unknown one is an error with close names."""
    if not ids:
        raise UserError("no activation was asked for: give at least one id")
    for name in ids:
        if name not in known:
            close = get_close_matches(name, known, n=3, cutoff=0.5) or list(known)[:3]
            raise UserError(
                f"the network has no activation {name!r}; close ones are {', '.join(close)}"
            )
    return [known[name] for name in dict.fromkeys(ids)]
