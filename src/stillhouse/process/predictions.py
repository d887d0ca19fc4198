"""What a network predicts, as one table: every prediction is linear in x0 and noise.

With x = x0 + sigma * noise,

    x0     = skip(sigma) * x  + scale(sigma) * output        (reading a network)
    output = on_x0(sigma) * x0 + on_noise(sigma) * noise     (its training target)

| kind | output                              | skip            | scale                   |
|------|-------------------------------------|-----------------|-------------------------|
| x0   | x0                                  | 0               | 1                       |
| eps  | noise                               | 1               | -sigma                  |
| v    | (s noise - sigma x0/s) / r          | s^2/r^2         | -sigma s/r              |
| edm  | minus v                             | s^2/r^2         | +sigma s/r              |
| flow | noise - x0                          | 1/(1 + sigma)   | -sigma/(1 + sigma)      |

where r^2 = sigma^2 + s^2 and s = sigma_data (1 for v in a variance-preserving process: Salimans &
Ho 2022, appendix D; `edm`: Karras et al. 2022, table 1). `x` is always in noise-level space; a
network's own input scaling belongs to its adapter.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Prediction = Literal["x0", "eps", "v", "edm", "flow"]
PREDICTIONS: tuple[Prediction, ...] = get_args(Prediction)


class Coefficients(NamedTuple):
    """Two coefficients of a linear relation, each with the shape of sigma."""

    first: Tensor
    second: Tensor


def reading(kind: Prediction, sigma: Tensor, sigma_data: float = 1.0) -> Coefficients:
    """(skip, scale) of `x0 = skip * x + scale * output`, in float64."""
    sigma = sigma.double()
    one = torch.ones_like(sigma)
    if kind == "x0":
        return Coefficients(0 * one, one)
    if kind == "eps":
        return Coefficients(one, -sigma)
    if kind == "flow":
        return Coefficients(1 / (1 + sigma), -sigma / (1 + sigma))
    if kind in ("v", "edm"):
        total = sigma**2 + sigma_data**2
        sign = 1.0 if kind == "edm" else -1.0
        return Coefficients(sigma_data**2 / total, sign * sigma * sigma_data / total.sqrt())
    raise ValueError(f"unknown prediction {kind!r}; known: {', '.join(PREDICTIONS)}")


def targeting(kind: Prediction, sigma: Tensor, sigma_data: float = 1.0) -> Coefficients:
    """(on_x0, on_noise) of `output = on_x0 * x0 + on_noise * noise`, in float64.

    Written out rather than solved from `reading`, which would divide by sigma.
    """
    sigma = sigma.double()
    one = torch.ones_like(sigma)
    if kind == "x0":
        return Coefficients(one, 0 * one)
    if kind == "eps":
        return Coefficients(0 * one, one)
    if kind == "flow":
        return Coefficients(-one, one)
    if kind in ("v", "edm"):
        root = (sigma**2 + sigma_data**2).sqrt()
        sign = 1.0 if kind == "edm" else -1.0
        return Coefficients(sign * sigma / sigma_data / root, -sign * sigma_data / root)
    raise ValueError(f"unknown prediction {kind!r}; known: {', '.join(PREDICTIONS)}")


def rows(coefficient: Tensor, like: Tensor) -> Tensor:
    """Shapes a per-sample coefficient to multiply `like`; a scalar one is left as it is."""
    if coefficient.ndim == 0:
        # A 0-d CPU tensor multiplies a tensor of any device without changing its dtype.
        return coefficient
    return coefficient.to(like).view(-1, *[1] * (like.ndim - 1))


def to_x0(
    kind: Prediction, x: Tensor, output: Tensor, sigma: Tensor, sigma_data: float = 1.0
) -> Tensor:
    """The clean image that a network's output stands for."""
    skip, scale = reading(kind, sigma, sigma_data)
    if kind == "x0":
        return output
    return rows(skip, x) * x + rows(scale, x) * output


def from_x0(
    kind: Prediction, x: Tensor, x0: Tensor, sigma: Tensor, sigma_data: float = 1.0
) -> Tensor:
    """The output that stands for `x0`: the inverse of `to_x0` (sigma > 0 unless kind is x0)."""
    skip, scale = reading(kind, sigma, sigma_data)
    return (x0 - rows(skip, x) * x) / rows(scale, x)


def target(
    kind: Prediction, x0: Tensor, noise: Tensor, sigma: Tensor, sigma_data: float = 1.0
) -> Tensor:
    """What the network should output for this datum and this noise."""
    on_x0, on_noise = targeting(kind, sigma, sigma_data)
    return rows(on_x0, x0) * x0 + rows(on_noise, x0) * noise
