"""Denoising: w(sigma) * mean (D(x0 + sigma * noise, sigma) - x0)^2, for every prediction kind.

A loss on the network's own output is a weighted loss on x0: from x0 = skip * x + scale * output,
(output error)^2 = (x0 error)^2 / scale(sigma)^2. So the kinds differ by their weight alone:

| weighting | w(sigma)                       | unit weight on        | paper                   |
|-----------|--------------------------------|-----------------------|-------------------------|
| `x0`      | 1                              | x0                    |                         |
| `eps`     | 1/sigma^2                      | the noise             | Ho et al. 2020          |
| `v`       | (sigma^2 + s^2)/(sigma s)^2    | v                     | Salimans & Ho 2022      |
| `edm`     | (sigma^2 + s^2)/(sigma s)^2    | the EDM network       | Karras et al. 2022      |
| `flow`    | (1 + sigma)^2/sigma^2          | the velocity          | Lipman et al. 2023      |
| `min-snr` | min(1/sigma^2, gamma)          |                       | Hang et al. 2023        |

with s = sigma_data: the process's own for `edm`, 1 for `v` in a variance-preserving process.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stillhouse.objectives.base import Noised, Objective, per_sample_mean
from stillhouse.process import Batch, Denoiser, levels, predictions

Weighting = Literal["x0", "eps", "v", "edm", "flow", "min-snr"]


class Constants(NamedTuple):
    """What weightings depend on besides sigma."""

    sigma_data: float = 0.5
    gamma: float = 5.0  # the largest signal-to-noise ratio that counts, for `min-snr`


def x0_weight(sigma: Tensor, constants: Constants) -> Tensor:
    return torch.ones_like(sigma)


def eps_weight(sigma: Tensor, constants: Constants) -> Tensor:
    return sigma**-2


def edm_weight(sigma: Tensor, constants: Constants) -> Tensor:
    return sigma**-2 + constants.sigma_data**-2


def flow_weight(sigma: Tensor, constants: Constants) -> Tensor:
    return (1 + 1 / sigma) ** 2


def min_snr_weight(sigma: Tensor, constants: Constants) -> Tensor:
    return (sigma**-2).clamp(max=constants.gamma)


WEIGHTINGS: dict[Weighting, Callable[[Tensor, Constants], Tensor]] = {
    "x0": x0_weight,
    "eps": eps_weight,
    "v": edm_weight,
    "edm": edm_weight,
    "flow": flow_weight,
    "min-snr": min_snr_weight,
}

DENSITY = levels.LogNormal()
CONSTANTS = Constants()


@dataclass(frozen=True)
class Denoising(Objective):
    """Weighted squared error of the denoised data, at levels drawn from a density."""

    density: levels.Density = DENSITY
    weighting: Weighting = "edm"
    constants: Constants = CONSTANTS

    def sigmas(self, u: Tensor, batch: Batch) -> Tensor:
        return self.density.quantile(u)

    def weight(self, sigma: Tensor) -> Tensor:
        return WEIGHTINGS[self.weighting](sigma, self.constants)

    def losses(self, denoiser: Denoiser, noised: Noised) -> Tensor:
        error = denoiser(noised.x, noised.sigma, noised.condition) - noised.x0
        # The weight multiplies the error, not its square: 1/sigma^2 of a tiny square underflows.
        return per_sample_mean(
            (predictions.rows(self.weight(noised.sigma).sqrt(), error) * error) ** 2
        )
