"""A perceptron for 2-D toys, as a diffusers model: saved, loaded and sharded like the large ones.

Kept in a module of its own: it is the only one here that imports diffusers when it is imported.
"""

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn

from stillhouse.models.conditioning import taken_apart


class PlaneNetwork(ModelMixin, ConfigMixin):
    """Residual layers over (x, time, label)."""

    @register_to_config
    def __init__(
        self,
        in_channels: int = 2,
        out_channels: int = 2,
        width: int = 128,
        depth: int = 3,
        num_class_embeds: int | None = None,
    ) -> None:
        super().__init__()
        self.sinusoids = Timesteps(width, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time = TimestepEmbedding(width, width)
        self.label = nn.Embedding(num_class_embeds, width) if num_class_embeds else None
        self.first = nn.Linear(in_channels, width)
        self.blocks = nn.ModuleList(_Residual(width) for _ in range(depth))
        self.last = nn.Linear(width, out_channels)

    @property
    def time_width(self) -> int:
        """Of a vector that may follow the time, [B, 1 + width], and is added to its embedding."""
        return self.config.width  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor, time: Tensor, label: Tensor | None = None) -> Tensor:
        time, added = taken_apart(time)
        # Sinusoids of 100 * time: the times of EDM lie within [-2, 2].
        state = self.time(self.sinusoids(100 * time).to(x.dtype))
        state = state if added is None else state + added.to(state)
        if self.label is not None and label is not None:
            state = state + self.label(label)
        h = self.first(x)
        for block in self.blocks:
            h = block(h, state)
        return self.last(h)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inward, self.state = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.outward = nn.Linear(2 * width, width)

    def forward(self, h: Tensor, state: Tensor) -> Tensor:
        inner = self.inward(self.norm(h)) + self.state(torch.nn.functional.silu(state))
        return h + self.outward(torch.nn.functional.silu(inner))
