"""What any way of pairing noise with data must keep, as checks that broken ones are given too."""

from collections.abc import Callable
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.couplings import KeyedDraws
from stillhouse.process import keyed_normal

SEED = 11


class Met(NamedTuple):
    """What training sees after the pairing."""

    x: Tensor
    noise: Tensor
    labels: Tensor


Pair = Callable[[Tensor, Tensor, Tensor], Met]


def check_only_noise_moves(pair: Pair, x: Tensor, noise: Tensor, labels: Tensor) -> None:
    """Data with their labels stay, noise is the same set to the bit, shapes and types too."""
    met = pair(x.clone(), noise.clone(), labels.clone())
    assert torch.equal(met.x, x), "data changed"
    assert torch.equal(met.labels, labels), "labels changed"
    assert met.noise.shape == noise.shape, "shape changed"
    assert met.noise.dtype == noise.dtype, "type changed"
    assert sorted(map(bytes_of, met.noise)) == sorted(map(bytes_of, noise)), "noise lost or doubled"


def bytes_of(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).numpy().tobytes()


def squared(x: Tensor, noise: Tensor) -> float:
    """The sum of squared distances, in float64."""
    return float(((x.double() - noise.double()) ** 2).sum())


def brute_force(x: Tensor, noise: Tensor, p: int = 2) -> float:
    """The least sum of |x - noise|^p over all permutations."""
    cost = ((x.double()[:, None] - noise.double()[None]).abs() ** p).flatten(2).sum(2)
    rows = torch.arange(len(x))
    return min(float(cost[rows, list(order)].sum()) for order in permutations(range(len(x))))


def normal(count: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def keyed(count: int, first: int = 0) -> KeyedDraws:
    """Draws as objectives make them."""
    key = torch.arange(first, first + count)
    return KeyedDraws(
        key, lambda shape, k, purpose: keyed_normal(shape, k, seed=SEED, purpose=purpose)
    )
