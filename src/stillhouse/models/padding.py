"""Text padding: what stands where a prompt has no token.

| name | position j >= n of a prompt with n tokens e |
|---|---|
| `zero` | 0 |
| `replicate` | e[j mod n] |
| `noisy` | e[j mod n] + beta * sqrt(m) * std(e) * N(0, 1), m copies added (Berrada et al. 2024) |

std is per channel over the n tokens, without correction; m = ceil(L / n) - 1 counts the copies of
the prompt that were added, the last perhaps in part. Padding takes part in attention as any token
does, so the mask is gone afterwards. A prompt without tokens counts as one token of zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from stillhouse.process import Condition, keyed_normal

PaddingKind = Literal["zero", "replicate", "noisy"]


@dataclass(frozen=True)
class Padding:
    """Fills the padding of a condition's text."""

    kind: PaddingKind = "noisy"
    beta: float = 0.02  # amount of noise; 0.02 to 0.05 is sensible

    def __call__(
        self,
        cond: Condition,
        key: Tensor | Sequence[int],
        *,
        seed: int,
        purpose: str = "padding",
    ) -> Condition:
        """`key` is the image that each row belongs to, in training (`Batch.key`) as in sampling.

        A null condition is one row for all images, and has a key of its own. A condition that has
        no text or no mask has no padding either, and is returned as it is.
        """
        if cond.text is None or cond.text_mask is None:
            return cond
        real = _real_tokens(cond.text_mask)
        text = cond.text.masked_fill(~cond.text_mask[..., None], 0)
        if self.kind != "zero":
            padded = _replicated(text, real)
            if self.kind == "noisy":
                if len(key) != len(text):
                    raise ValueError(f"{len(key)} keys for {len(text)} prompts")
                noise = keyed_normal(text.shape[1:], key, seed=seed, purpose=purpose).to(text)
                padded = padded + self.beta * _spread(text, cond.text_mask, real) * noise
            text = torch.where(cond.text_mask[..., None], text, padded)
        return replace(cond, text=text, text_mask=None)


def _real_tokens(mask: Tensor) -> Tensor:
    """Tokens per prompt, [B], at least 1; real ones must come first."""
    count = mask.sum(1)
    if not torch.equal(mask, torch.arange(mask.shape[1], device=mask.device) < count[:, None]):
        raise ValueError("real tokens must come before the padding: pad on the right")
    return count.clamp(min=1)


def _replicated(text: Tensor, real: Tensor) -> Tensor:
    """e[j mod n] at every position j."""
    source = torch.arange(text.shape[1], device=text.device) % real[:, None]
    return text.gather(1, source[..., None].expand_as(text))


@torch.no_grad()  # an amount, not a path for gradients: that of a root is infinite at 0
def _spread(text: Tensor, mask: Tensor, real: Tensor) -> Tensor:
    """sqrt(m) * std(e), [B, 1, C]."""
    n, added = real[:, None, None], (text.shape[1] - 1) // real[:, None, None]
    apart = (text - text.sum(1, keepdim=True) / n).masked_fill(~mask[..., None], 0)
    return (added * apart.square().sum(1, keepdim=True) / n).sqrt()


def log_copies(mask: Tensor) -> Tensor:
    """-ln(how often a position's token occurs), [B, L], for prompts padded by replication.

    `mask` is the one from before padding. In joint attention c copies weigh c times as much against
    the image; with this added to the logits of text keys, attention is that of the bare prompt
    (exactly so for beta = 0), for any L. Image tokens come first in SD3, so the `attn_mask` of
    scaled_dot_product_attention is `F.pad(log_copies(mask), (image_tokens, 0))[:, None, None]`;
    diffusers' own processor for SD3 takes no mask, so one that does must be set.
    """
    real, length = _real_tokens(mask)[:, None], mask.shape[1]
    token = torch.arange(length, device=mask.device) % real
    copies = (length - token + real - 1) // real
    return -copies.double().log()
