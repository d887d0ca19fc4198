"""MDTv2, a DiT that learns to fill in tokens it was not shown (Gao et al. 2023, arXiv 2303.14389).

    encoder   in-blocks, then as many out-blocks joined to them by long shortcuts, last to first
    side      masked pass only: a learnt token for every masked place, positions, then blocks that
              may change the masked places alone
    decoder   blocks that each see the embedded input again

`forward(x, timestep, labels)` is a DiT's; sampling needs no more. With `mask` [B, tokens] the
encoder is given the tokens that are not masked. The paper's loss is the sum of both passes over the
same noisy images, each counted on the whole image, with 30 to 50% masked: `keyed_mask`.

Masked places still reach the decoder through its shortcuts, as in the paper. Left out is the
paper's table of relative positions in every attention: it holds at one resolution only, and keeps
attention from its fast kernels. Absolute positions are a DiT's sinusoids, resampled where the
resolution changes, plus what is learnt.

Like `plane`, this module imports diffusers when it is imported.
"""

from typing import Any, NamedTuple

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import (
    CombinedTimestepLabelEmbeddings,
    PatchEmbed,
    get_2d_sincos_pos_embed,
)
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import AdaLayerNormContinuous, AdaLayerNormZero
from torch import Tensor, nn

from stillhouse.process import keyed_normal, keyed_uniform

MASKED = (0.3, 0.5)  # shares of the tokens between which a sample's is drawn


def keyed_mask(
    keys: Tensor, tokens: int, *, seed: int, share: tuple[float, float] = MASKED
) -> Tensor:
    """[B, tokens], true where a token is hidden: what a row hides follows from its key alone."""
    low, high = share
    drawn = low + (high - low) * keyed_uniform(keys, seed=seed, purpose="mask share")
    places = keyed_normal((tokens,), keys, seed=seed, purpose="mask").argsort(1)
    return places < (drawn * tokens).long()[:, None]


class MDTBlock(nn.Module):
    """diffusers' DiT block, told the embedding of time and label; with a shortcut if `skip`."""

    def __init__(
        self, width: int, heads: int, head_width: int, dropout: float = 0.0, *, skip: bool = False
    ) -> None:
        super().__init__()
        self.skip = nn.Linear(2 * width, width) if skip else None
        self.norm1 = AdaLayerNormZero(width)
        self.attn1 = Attention(width, None, heads, dim_head=head_width, dropout=dropout, bias=True)
        self.norm3 = nn.LayerNorm(width, eps=1e-5, elementwise_affine=False)
        self.ff = FeedForward(width, dropout=dropout, activation_fn="gelu-approximate")

    def forward(
        self, h: Tensor, embedded: Tensor, real: Tensor | None, shortcut: Tensor | None = None
    ) -> Tensor:
        if self.skip is not None:
            # Autocast would leave the residual stream in bfloat16 from here on.
            h = self.skip(torch.cat([h, shortcut], -1)).to(h)  # type: ignore[list-item]
        normed, gate, *feed = self.norm1(h, emb=embedded)
        h = h + gate[:, None] * self.attn1(normed, attention_mask=real)
        shift, scale, gate = (part[:, None] for part in feed)
        return h + gate * self.ff(self.norm3(h) * (1 + scale) + shift)


class Kept(NamedTuple):
    """The tokens that are not masked, in rows of equal length."""

    places: Tensor  # [B, L] where they stand; rows that keep fewer end in places of masked ones
    real: Tensor | None  # [B, 1, L] which of them attention may see, None where it is all


def kept_tokens(mask: Tensor) -> Kept:
    counts = (~mask).sum(1)
    fewest, most = map(int, counts.aminmax())
    if not fewest:
        raise ValueError("a mask must leave at least one token in every row")
    places = mask.int().argsort(dim=1, stable=True)[:, :most]
    real = torch.arange(most, device=mask.device) < counts[:, None]
    return Kept(places, real[:, None] if fewest < most else None)


def resampled(table: Tensor, height: int, width: int) -> Tensor:
    """A table [h, w, C] read at i h/height, j w/width: between two rows, linearly."""
    for axis, count in enumerate((height, width)):
        size = table.shape[axis]
        place = torch.arange(count, device=table.device) * (size / count)
        low = place.long()
        below, above = (table.index_select(axis, i) for i in (low, (low + 1).clamp(max=size - 1)))
        weight = (place - low).to(table).view(-1, *[1] * (2 - axis))
        table = below.lerp(above, weight)
    return table


class MDTTransformer2DModel(ModelMixin, ConfigMixin):
    """Called like a `DiTTransformer2DModel`; the names of its config are the same."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 16,
        attention_head_dim: int = 72,
        in_channels: int = 4,
        out_channels: int | None = None,
        num_layers: int = 28,
        decoder_layers: int = 4,
        side_layers: int = 1,
        dropout: float = 0.0,
        sample_size: int = 32,
        patch_size: int = 2,
        num_embeds_ada_norm: int = 1000,
    ) -> None:
        """`num_layers` counts encoder and decoder, as the paper does; not the side's."""
        super().__init__()
        pairs, odd = divmod(num_layers - decoder_layers, 2)
        if odd or pairs < 1:
            raise ValueError(
                f"the encoder has {num_layers - decoder_layers} blocks, which must be an even "
                "number: change num_layers or decoder_layers"
            )
        self.gradient_checkpointing = False
        width = num_attention_heads * attention_head_dim
        self.pairs, self.grid = pairs, sample_size // patch_size
        self.out_channels = out_channels or in_channels
        self.pos_embed = PatchEmbed(sample_size, sample_size, patch_size, in_channels, width)
        self.embed = CombinedTimestepLabelEmbeddings(num_embeds_ada_norm, width)
        shape = (width, num_attention_heads, attention_head_dim, dropout)
        self.transformer_blocks = nn.ModuleList(
            MDTBlock(*shape, skip=i >= pairs) for i in range(num_layers)
        )
        self.side_blocks = nn.ModuleList(MDTBlock(*shape) for _ in range(side_layers))
        self.mask_token = nn.Parameter(0.02 * torch.randn(width))
        self.encoder_positions = nn.Parameter(torch.zeros(self.grid, self.grid, width))
        self.decoder_positions = nn.Parameter(torch.zeros(self.grid, self.grid, width))
        self.norm_out = AdaLayerNormContinuous(width, width, elementwise_affine=False, eps=1e-6)
        self.proj_out = nn.Linear(width, patch_size**2 * self.out_channels)

    def leave_masks_alone(self) -> None:
        """Freezes what only masked passes use, for training without them."""
        self.side_blocks.requires_grad_(False)
        self.mask_token.requires_grad_(False)

    def hidden(self, images: Tensor, keys: Tensor, *, seed: int) -> Tensor | None:
        """What is hidden of these images in training; None where masks are left alone."""
        if not self.mask_token.requires_grad:
            return None
        height, width = (side // self.pos_embed.patch_size for side in images.shape[-2:])
        return keyed_mask(keys, height * width, seed=seed)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
        mask: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        patch = self.pos_embed.patch_size
        height, width = (side // patch for side in hidden_states.shape[-2:])
        embedded = self.embed(timestep, class_labels, hidden_dtype=hidden_states.dtype)
        tokens = self.pos_embed(hidden_states)
        tokens = tokens + resampled(self.encoder_positions, height, width).flatten(0, 1)
        positions = self._decoder_positions(height, width)
        if mask is None:
            h = self._encode(tokens, embedded) + positions
        else:
            h = self._fill_in(tokens, embedded, positions, mask)
        for block in self.transformer_blocks[2 * self.pairs :]:
            h = self._run(block, h, embedded, None, tokens)
        output = self._unpatchify(self.proj_out(self.norm_out(h, embedded)), height, width)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _encode(self, h: Tensor, embedded: Tensor, real: Tensor | None = None) -> Tensor:
        blocks, shortcuts = self.transformer_blocks, []
        for block in blocks[: self.pairs]:
            h = self._run(block, h, embedded, real)
            shortcuts.append(h)
        for block in blocks[self.pairs : 2 * self.pairs]:
            h = self._run(block, h, embedded, real, shortcuts.pop())
        return h

    def _fill_in(self, tokens: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """The encoder on what is kept, and the side interpolator's guess of what is not."""
        if mask.shape != tokens.shape[:2]:
            raise ValueError(
                f"a mask of shape {list(mask.shape)} for tokens of {list(tokens.shape[:2])}"
            )
        places, real = kept_tokens(mask)
        places = places[..., None].expand(-1, -1, tokens.shape[2])
        encoded = self._encode(tokens.gather(1, places), embedded, real)
        hidden = mask[..., None]
        known = torch.zeros_like(tokens).scatter(1, places, encoded.to(tokens))
        known = torch.where(hidden, self.mask_token.to(known), known) + positions
        guess = known
        for block in self.side_blocks:
            guess = self._run(block, guess, embedded, None)
        return torch.where(hidden, guess, known)

    def _run(self, block: nn.Module, *given: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            again: Any = self._gradient_checkpointing_func
            return again(block, *given)
        return block(*given)

    def _decoder_positions(self, height: int, width: int) -> Tensor:
        learnt = resampled(self.decoder_positions, height, width).flatten(0, 1)
        fixed: Any = self.pos_embed.pos_embed
        if (height, width) != (self.grid, self.grid):
            fixed = get_2d_sincos_pos_embed(
                learnt.shape[1], (height, width), base_size=self.grid, device=learnt.device
            )
        return (fixed.to(torch.float32) + learnt).to(learnt)

    def _unpatchify(self, h: Tensor, height: int, width: int) -> Tensor:
        patch = self.pos_embed.patch_size
        pixels = h.view(h.shape[0], height, width, patch, patch, self.out_channels)
        return pixels.permute(0, 5, 1, 3, 2, 4).reshape(
            h.shape[0], self.out_channels, height * patch, width * patch
        )
