"""Analytic denoisers: distributions whose exact denoiser is known. The oracle of every test.

For x = x0 + sigma * noise the exact denoiser is the posterior mean E[x0 | x]; for Gaussians the
probability-flow ODE dx/dsigma = (x - D)/sigma has a closed-form solution too (`exact_flow`).
"""

import math

import torch
from torch import Tensor

from stillhouse.process.batch import Condition
from stillhouse.process.predictions import rows


class Gaussian:
    """N(mean, std^2 I): D = mean + std^2/(std^2 + sigma^2) (x - mean)."""

    def __init__(self, mean: float | Tensor = 0.0, std: float = 1.0) -> None:
        self.mean, self.std = mean, std

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        gain = self.std**2 / (self.std**2 + sigma.double() ** 2)
        return self.mean + rows(gain, x) * (x - self.mean)

    def exact_flow(self, x: Tensor, sigma: float, to: float) -> Tensor:
        """The probability-flow ODE from one level to another, exactly."""
        ratio = math.sqrt((self.std**2 + to**2) / (self.std**2 + sigma**2))
        return self.mean + ratio * (x - self.mean)


class GaussianField:
    """Images as a stationary Gaussian field with power spectrum 1/f^(2 slope), like photographs.

    White noise is white in Fourier space, so each frequency is a `Gaussian` of its own variance.
    """

    def __init__(self, size: int, *, slope: float = 1.0, std: float = 0.5) -> None:
        frequency = torch.fft.fftfreq(size, dtype=torch.float64) * size
        radius = (frequency[:, None] ** 2 + frequency[None, :] ** 2).sqrt().clamp(min=1)
        power = radius ** (-2 * slope)
        self.power = power * std**2 / power.mean()  # the mean over frequencies is the variance

    def _filter(self, x: Tensor, gain: Tensor) -> Tensor:
        return torch.fft.ifft2(torch.fft.fft2(x) * gain.to(x)).real

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        level = sigma.double().cpu().view(-1, 1, 1, 1) ** 2
        return self._filter(x, self.power / (self.power + level))

    def exact_flow(self, x: Tensor, sigma: float, to: float) -> Tensor:
        """The probability-flow ODE from one level to another, exactly, frequency by frequency."""
        return self._filter(x, ((self.power + to**2) / (self.power + sigma**2)).sqrt())

    def sample(self, noise: Tensor) -> Tensor:
        """A draw from the distribution, from white noise of its shape [B, C, size, size]."""
        return self._filter(noise, self.power.sqrt())


class GaussianMixture:
    """sum_k w_k N(m_k, s_k^2 I) over data of any shape; means [K, *shape], stds [K], weights [K].

    D = sum_k r_k(x) (m_k + s_k^2/(s_k^2 + sigma^2) (x - m_k)), with r_k the posterior of k.
    With `labels` (one class per component), a condition's label keeps only its own components; a
    negative label keeps all.
    """

    def __init__(
        self, means: Tensor, stds: Tensor, weights: Tensor, labels: Tensor | None = None
    ) -> None:
        if not len(means) == len(stds) == len(weights):
            raise ValueError("means, stds and weights must have one row per component")
        self.shape = tuple(means.shape[1:])
        self.means, self.stds, self.weights = means.double(), stds.double(), weights.double()
        self.weights = self.weights / self.weights.sum()
        self.labels = labels

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        means = self.means.to(x).flatten(1)
        variance = self.stds.to(x) ** 2
        level = sigma.to(x).view(-1, 1) ** 2  # [B or 1, 1]
        total = variance + level  # [B or 1, K]
        offset = x.flatten(1)[:, None] - means  # [B, K, D]
        distance = (offset**2).sum(-1)
        logits = self.weights.to(x).log() - distance / (2 * total)
        logits = logits - 0.5 * means.shape[1] * total.log()
        if self.labels is not None and cond is not None and cond.label is not None:
            wanted = cond.label.to(x.device)[:, None]
            other = (self.labels.to(x.device) != wanted) & (wanted >= 0)
            logits = logits.masked_fill(other, -math.inf)
        posterior = logits.softmax(-1)
        gain = variance / total
        mean_part = posterior @ means
        return (mean_part + ((posterior * gain)[..., None] * offset).sum(1)).view_as(x)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """`count` draws from the mixture."""
        which = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        noise = torch.randn(count, *self.shape, generator=generator, dtype=torch.float64)
        return self.means[which] + rows(self.stds[which], noise) * noise
