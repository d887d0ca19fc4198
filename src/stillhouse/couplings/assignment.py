"""Assignment: the permutation of a pool's noise that lies nearest to its data.

Li et al. 2024, "Immiscible Diffusion"; Tong et al. 2023 and Pooladian et al. 2023 for flows. The
noise of the pool stays what it was, as a set; only who meets whom changes.

    sum |x_i - n_p(i)|^2 = sum |x_i|^2 + sum |n_j|^2 - 2 sum <x_i, n_p(i)>

so the squared L2 distance is least where the dot product is largest: one matrix product, no
[n, n, d] tensor, and a problem that the solver finds easier than one of distances.

Padded data differ in what of a noise they meet, and |n_j|^2 over that part is no longer the same
sum for every permutation. The dot product is kept: distances would take the parts that are short,
and noise would no longer have variance 1 where data is.
"""

import time
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from stillhouse.couplings.pairing import (
    KeyedDraws,
    Pairing,
    check_rows,
    flat,
    mean_distance,
    spread,
)
from stillhouse.couplings.solve import solve
from stillhouse.errors import UserError
from stillhouse.process import Condition

Cost = Literal["l2", "l1"]
BLOCK = 2048


@dataclass(frozen=True)
class Assignment:
    """Exact within blocks of the pool; consumes no randomness."""

    cost: Cost = "l2"  # squared L2, or L1 to compare
    block: int = BLOCK  # larger pools are cut into blocks of this many rows
    standardise: bool = False  # divide coordinates by their deviation, for the cost only
    side: int = 0  # compare images averaged to this many pixels a side; 0: as they are

    def __post_init__(self) -> None:
        check_choice("cost", self.cost, get_args(Cost))
        if self.block < 2:
            raise ValueError(f"block is how many rows swap noise: at least 2, not {self.block}")

    @torch.no_grad()
    def __call__(
        self,
        x: Tensor,
        noise: Tensor,
        cond: Condition | None = None,
        generator: KeyedDraws | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Pairing:
        check_shapes(x, noise)
        real = None if mask is None else spread(mask, x)
        return self.pair(self.view(x, mask), self.view(noise), self.condition(cond), real)

    def pair(
        self, x: Tensor, noise: Tensor, condition: Tensor | None, real: Tensor | None = None
    ) -> Pairing:
        """From views; `real` marks what of them counts."""
        began = time.perf_counter()
        index = self.match(x, noise, condition)
        seconds = time.perf_counter() - began
        met = noise[index.to(noise.device)]
        costs = mean_distance(x, noise, real), mean_distance(x, met, real)
        return Pairing(index, *costs, seconds=seconds)

    def view(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What is compared, a row per sample; of each row alone, so it can be made anywhere."""
        if mask is not None and (self.cost != "l2" or self.standardise or self.side):
            raise UserError(
                "padded data is compared by the plain cost 'l2': leave out l1, standardise and side"
            )
        return flat(averaged(x, self.side) if self.side else x, mask)

    def condition(self, cond: Condition | None) -> Tensor | None:
        """What of the condition takes part, a row per sample."""
        return None

    def match(self, x: Tensor, noise: Tensor, condition: Tensor | None = None) -> Tensor:
        """The row of `noise` for each row of x: a permutation, int64 on the host."""
        check_rows(x)
        check_rows(noise, "noise")
        x = standardised(x) if self.standardise and len(x) else x
        index, groups = torch.arange(len(x)), self.groups(len(x), condition)
        if len(x) and not any_swap(groups):
            warn_of_nothing_to_swap(len(x))
        for rows in groups:
            if len(rows) > 1:
                index[rows] = rows[solve(self.costs(x, noise, rows, condition))]
        return index

    def groups(self, count: int, condition: Tensor | None) -> list[Tensor]:
        """The rows among which noise may be swapped."""
        return blocks(torch.arange(count), self.block)

    def costs(self, x: Tensor, noise: Tensor, rows: Tensor, condition: Tensor | None) -> Tensor:
        """[n, n] between the data and the noise of these rows, up to numbers per row or column."""
        if len(rows) < len(x):
            x, noise = x[rows.to(x.device)], noise[rows.to(noise.device)]
        if self.cost == "l1":
            return torch.cdist(x, noise, p=1)
        with torch.autocast(x.device.type, enabled=False):  # which would multiply in bfloat16
            return (x @ noise.T).neg_()


def any_swap(groups: list[Tensor]) -> bool:
    return any(len(rows) > 1 for rows in groups)


def warn_of_nothing_to_swap(count: int) -> None:
    warnings.warn(
        f"nothing to swap among {count} rows: every noise stays where it was. Enlarge the batch, "
        "or use the coupling `nearest` (in a loop of your own `couplings.pick`), which needs no "
        "other rows",
        stacklevel=3,
    )


def blocks(rows: Tensor, most: int) -> list[Tensor]:
    """Consecutive pieces of nearly equal length, none over `most`."""
    count = -(-len(rows) // most)
    return list(rows.tensor_split(count)) if count else []


def standardised(x: Tensor) -> Tensor:
    """Mean 0 and deviation 1 in each coordinate over the pool; constant ones are left out."""
    std = x.std(0, correction=0)
    return torch.where(std > 0, (x - x.mean(0)) / std.clamp(min=1e-12), 0.0)


def averaged(x: Tensor, side: int) -> Tensor:
    """Images as means over squares. They keep what images and noise can agree on: 8 pixels a side
    keep 86% of the gain on CIFAR-10 with 1/16 of the numbers, as many random directions 23%."""
    if x.ndim != 4:
        raise UserError(f"side averages images [B, C, H, W], not data of {x.ndim} axes: leave it 0")
    return torch.nn.functional.adaptive_avg_pool2d(x.float(), side)


def check_shapes(x: Tensor, noise: Tensor) -> None:
    if x.ndim < 2:
        raise ValueError(f"data has a row per sample, [B, ...], not the shape {(*x.shape,)}")
    if x.shape != noise.shape:
        raise ValueError(
            f"data {(*x.shape,)} needs noise of its shape, as of torch.randn_like(data), not "
            f"{(*noise.shape,)}"
        )


def check_choice(name: str, said: str, choices: tuple[str, ...]) -> None:
    if said not in choices:
        raise ValueError(f"{name} is one of {', '.join(choices)}, not {said!r}")
