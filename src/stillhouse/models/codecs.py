"""Codecs: the autoencoder between images in [-1, 1] and the latents that a model works on."""

from typing import Any

import torch
from torch import Tensor, nn


class Codec(nn.Module):
    """A diffusers autoencoder with its latent scaling applied: z = (encode(image) - shift) * scale.

    Scale and shift come from its config, so that latents have about unit variance.
    """

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder
        config: Any = autoencoder.config
        self.scale = float(config.get("scaling_factor") or 1.0)
        self.shift = float(config.get("shift_factor") or 0.0)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images in float32, in [-1, 1] up to the decoder's own overshoot."""
        weights = next(self.autoencoder.parameters())
        native = latents.to(weights) / self.scale + self.shift
        autoencoder: Any = self.autoencoder
        return autoencoder.decode(native).sample.float()
