"""Networks of which a part is learnt: LoRA's adapters, and checkpoints that hold only what is.

An adapter of rank r adds B(A(x)) to what a frozen layer answers (Hu et al. 2022): A leads into r
channels, with the layer's own kernel, and B out of them. B is 0 at first, so that nothing is added.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.errors import UserError, missing_extra
from stillhouse.files import tensors_file, write_whole

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft names them
LORA = ".lora_"  # in the names of all weights of adapters
ROOT = "base_model.model."  # before the names of weights in a file of peft's


def keep_learnt(module: nn.Module) -> None:
    """Its state dict holds what is learnt: the rest is elsewhere, and gigabytes large."""
    module.register_state_dict_post_hook(_forget_frozen)
    module.register_load_state_dict_pre_hook(_recall_frozen)


def _forget_frozen(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            state.pop(f"{prefix}{name}", None)


def _recall_frozen(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            state.setdefault(f"{prefix}{name}", weight.detach())


# ---------------------------------------------------------------- adapters on most layers


def adapter_sizes(network: nn.Module, rank: int) -> dict[str, int]:
    """Numbers in the adapters of every layer that gets some, by its name.

    Linear layers and convolutions that have more numbers than their adapters would.
    """
    found: dict[str, int] = {}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1):
            outward, *inward = layer.weight.shape
            size = rank * (torch.Size(inward).numel() + outward)
            if size < layer.weight.numel():
                found[name] = size
    return found


def add_adapters(network: nn.Module, rank: int) -> dict[str, Any]:
    """In place, in float32; returns the arguments of peft's LoraConfig."""
    names = adapter_sizes(network, rank)
    if not names:
        raise UserError(f"adapters of rank {rank} are no smaller than any layer: choose a lower")
    # One expression for all: in a list a name would also stand for others that end with it.
    options = lora_options(rank, "|".join(map(re.escape, names)))
    inject(network, options)
    return options


def lora_options(rank: int, layers: str | list[str], alpha: float = 0.0) -> dict[str, Any]:
    """Adapters that count alpha / rank (0: 1) each, on layers whose names match or end so."""
    return {
        "r": rank,
        "lora_alpha": alpha or float(rank),
        "target_modules": layers,
        "lora_dropout": 0.0,
        "bias": "none",
    }


def require_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise missing_extra("peft", "finetune") from error
    return peft


def inject(network: nn.Module, options: Mapping[str, Any], **start: Any) -> None:
    """In place: peft freezes the weights; the adapters add nothing at first."""
    peft = require_peft()
    peft.inject_adapter_in_model(peft.LoraConfig(**options, **start), network)
    for name, weight in network.named_parameters():
        if LORA in name:
            weight.data = weight.data.float()  # also where the layers' own are of half precision


def adapters_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those among them that are of adapters, without peft's name of the set."""
    return {_plain(name): w for name, w in weights.items() if LORA in name}


def _plain(name: str) -> str:
    return name.replace(".default.", ".")


def save_adapters(
    folder: Path,
    weights: Mapping[str, Tensor],
    options: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> None:
    """`weights` by the network's own names, as `PeftModel.from_pretrained(network, folder)` opens.

    The weights come last, and every file appears whole.
    """
    config = json.dumps({"peft_type": "LORA", **options}, indent=2) + "\n"
    write_whole(folder / CONFIG, config.encode())
    named = {f"{ROOT}{name}": w.float() for name, w in adapters_of(weights).items()}
    write_whole(folder / WEIGHTS, tensors_file(named, metadata))


def load_adapters(network: nn.Module, folder: Path) -> dict[str, Any]:
    """In place: what `save_adapters` has written; returns the arguments of peft's LoraConfig."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        options = json.loads((folder / CONFIG).read_text())
        found = load_file(folder / WEIGHTS)
        options = lora_options(int(options["r"]), str(options["target_modules"]))
        inject(network, options)
        own = {f"{ROOT}{_plain(k)}": w for k, w in network.named_parameters() if LORA in k}
        with torch.no_grad():
            for name in {*own, *found}:
                own[name].copy_(found[name])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the adapters in {folder} do not fit this network ({error})") from error
    return options
