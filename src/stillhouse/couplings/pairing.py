"""What a coupling is, and what it answers: which noise meets which datum, in indices.

Nothing is rearranged and no noise is kept: noise depends on (seed, key, purpose) alone, so whoever
knows the key of a row and the number of the draw can have that noise, on any process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.process import Condition

# (shape of one datum, keys, purpose) -> noise [len(keys), *shape]
Draw = Callable[[Sequence[int], Tensor, str], Tensor]


@dataclass(frozen=True)
class KeyedDraws:
    """The noise of a batch's rows by key. A row has any number of draws; 0 is the usual one."""

    key: Tensor  # [B] of the batch's own rows
    draw: Draw

    def __call__(self, shape: Sequence[int], key: Tensor, number: int = 0) -> Tensor:
        """Draw `number` of the rows with these keys."""
        return self.draw(shape, key, f"noise/{number}" if number else "noise")

    def chosen(self, shape: Sequence[int], key: Tensor, number: Tensor | None) -> Tensor:
        """Draw number[r] of row r; the usual one where nothing was chosen."""
        if number is None:
            return self(shape, key)
        noise = torch.empty(len(key), *shape)
        for each in number.unique().tolist():
            rows = number == each
            noise[rows] = self(shape, key[rows], each)
        return noise


@dataclass(frozen=True, eq=False)
class Pairing:
    """Datum r meets the noise of row index[r] of the pool, and of that its draw number draw[r]."""

    index: Tensor  # [B] int64, on the host
    cost_before: float  # mean L2 distance of the pool's data to the noise of their own rows
    cost_after: float  # and to the noise that they meet
    draw: Tensor | None = None  # [B]; None: the usual draw of every row
    key: Tensor | None = None  # [B] of the rows met, where the pool is wider than the batch
    seconds: float = 0.0  # that the choice took

    @property
    def reduction(self) -> float:
        """By how much the mean distance of data and noise fell; 0.02 is 2%."""
        return 1 - self.cost_after / self.cost_before if self.cost_before else 0.0

    def noise(self, noise: Tensor, generator: KeyedDraws | None = None) -> Tensor:
        """The noise that each datum meets, from the batch's own `noise` or drawn again by key."""
        if self.key is None and self.draw is None:
            return noise[self.index.to(noise.device)]
        if generator is None:
            raise ValueError("this pairing goes by key: give the draws it was made with")
        key = generator.key[self.index] if self.key is None else self.key
        return generator.chosen(noise.shape[1:], key, self.draw).to(noise)


class Coupling(Protocol):
    """Chooses noise for data. `noise` is the usual draw of every row, `generator` has the others.

    `mask` marks what is real in padded data; its axes are the first of x's.
    """

    def __call__(
        self,
        x: Tensor,
        noise: Tensor,
        cond: Condition | None = None,
        generator: KeyedDraws | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Pairing: ...


@dataclass(frozen=True)
class Independent:
    """The usual pairing: every datum meets the noise of its own row."""

    def __call__(
        self,
        x: Tensor,
        noise: Tensor,
        cond: Condition | None = None,
        generator: KeyedDraws | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Pairing:
        distance = mean_distance(flat(x, mask), flat(noise, mask))
        return Pairing(torch.arange(len(x)), distance, distance)


def flat(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Rows of float32 with 0 under the mask. Half precision is too coarse for distances."""
    rows = x.detach().flatten(1).float()
    return rows if mask is None else rows.masked_fill(~spread(mask, x), 0.0)


def spread(mask: Tensor, x: Tensor) -> Tensor:
    """The mask in the shape of x's flat rows."""
    mask = mask.to(x.device, torch.bool)
    axes = zip(mask.shape, x.shape, strict=False)
    if mask.ndim > x.ndim or any(marked not in (1, side) for marked, side in axes):
        raise ValueError(
            f"a mask has the first axes of its data {(*x.shape,)}, or 1 where it says the same of "
            f"all: for images [B, 1, H, W], not {(*mask.shape,)}"
        )
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)).expand(x.shape).flatten(1)


def mean_distance(x: Tensor, noise: Tensor, real: Tensor | None = None) -> float:
    """Of rows to rows, L2, over what is real."""
    if not len(x):
        return 0.0
    difference = x - noise if real is None else (x - noise) * real
    return float(difference.norm(dim=1).mean())


def check_rows(x: Tensor, name: str = "data") -> None:
    """Refuses NaN and Inf, which a solver would answer with nonsense; `x` has a row per sample."""
    if bool(x.sum().isfinite()):  # one pass; anything that is not finite shows in the sum
        return
    bad = (~x.isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        what = "NaN" if bool(x[bad[0]].isnan().any()) else "Inf"
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        source = "how it was drawn" if name == "noise" else "what the loader or encoder made of it"
        raise UserError(
            f"row {bad[0]}{more} of the batch's {name} holds {what}, and nothing is near that: "
            f"look at {source}"
        )
