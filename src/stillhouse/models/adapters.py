"""Networks of which a part is learnt, as with LoRA's adapters: only that part is in checkpoints."""

from typing import Any

from torch import nn


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
