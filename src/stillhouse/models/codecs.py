"""Codecs: the autoencoder between images in [-1, 1] and the latents that a model works on."""

from typing import Any

import torch
from torch import Tensor, nn


def _per_channel(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)


class Codec(nn.Module):
    """A diffusers autoencoder with its latent scaling applied: z = (encode(image) - shift) * scale.

    Scale and shift come from its config, so that latents have about unit variance. Where it gives
    their mean and standard deviation per channel, shift is the mean and scale is divided by the
    deviation.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder
        config: Any = autoencoder.config
        scale, shift = config.get("scaling_factor") or 1.0, config.get("shift_factor") or 0.0
        mean, std = config.get("latents_mean"), config.get("latents_std")
        if mean is not None and std is not None:
            scale, shift = scale / _per_channel(std), _per_channel(mean)
        self.register_buffer("scale", torch.as_tensor(scale), persistent=False)
        self.register_buffer("shift", torch.as_tensor(shift), persistent=False)

    def decode(self, latents: Tensor) -> Tensor:
        """Images in float32, in [-1, 1] up to the decoder's own overshoot."""
        weights = next(self.autoencoder.parameters())
        native = (latents.to(self.scale) / self.scale + self.shift).to(weights)
        autoencoder: Any = self.autoencoder
        return autoencoder.decode(native).sample.float()
