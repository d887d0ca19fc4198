"""Networks that attend to text, with queries and keys normalised per head (Henry et al. 2020).

Without it attention's logits grow in long training until it follows one token alone (Dehghani et
al. 2023; Esser et al. 2024, section 5.3.2). diffusers' class for SD3 has it as `qk_norm`. These two
do not, and no config or weight of theirs can stand for it: hence classes of ours, which diffusers
alone cannot open.

Like `plane`, this module imports diffusers when it is imported.
"""

from functools import wraps
from typing import Any

from diffusers import PixArtTransformer2DModel, UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from torch import nn


def _normalise(model: nn.Module) -> None:
    """diffusers' attention applies these norms wherever it finds them."""
    for module in model.modules():
        if isinstance(module, Attention):
            width = module.inner_dim // module.heads
            module.norm_q = RMSNorm(width, eps=1e-6)
            module.norm_k = RMSNorm(width, eps=1e-6)


# `wraps`: diffusers reads the names in a config from the signature.


class QKNormPixArtTransformer2DModel(PixArtTransformer2DModel):
    """PixArt with normalised queries and keys."""

    @wraps(PixArtTransformer2DModel.__init__)
    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        _normalise(self)


class QKNormUNet2DConditionModel(UNet2DConditionModel):
    """The U-Net with normalised queries and keys."""

    @wraps(UNet2DConditionModel.__init__)
    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        _normalise(self)
