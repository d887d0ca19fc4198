"""Noise levels: the grids that solvers walk, the densities that training draws from, the shift.

A grid is a float64 tensor of decreasing sigmas. It ends where the walk ends: at sigma_min, or at 0
after `to_zero`. A density is its quantile function, so that one uniform number per sample (keyed,
stratified, whatever the caller likes) becomes one noise level.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Where a process's signal vanishes (flow at t=1, zero-terminal-SNR) sigma would be infinite. This
# cap agrees with the native start within 1e-4; solvers take a capped first step at first order.
SIGMA_CAP = 1e5


class Timed(Protocol):
    """A process that counts its own time, which grows with the noise up to `time_max`."""

    @property
    def time_max(self) -> float: ...
    def sigma_at(self, time: Tensor) -> Tensor: ...
    def time_at(self, sigma: Tensor) -> Tensor: ...


# ---------------------------------------------------------------- grids


def polynomial(count: int, sigma_min: float, sigma_max: float, rho: float = 7.0) -> Tensor:
    """`count` levels, evenly spaced in sigma^(1/rho) (Karras et al. 2022, eq. 5)."""
    _check(count, sigma_min, sigma_max)
    ramp = _ramp(count)
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    return _ends((high + ramp * (low - high)) ** rho, sigma_max, sigma_min)


def uniform_log_snr(count: int, sigma_min: float, sigma_max: float) -> Tensor:
    """`count` levels, evenly spaced in log sigma, which is evenly in log-SNR."""
    _check(count, sigma_min, sigma_max)
    low, high = math.log(sigma_min), math.log(sigma_max)
    return _ends((high + _ramp(count) * (low - high)).exp(), sigma_max, sigma_min)


def uniform_time(count: int, process: Timed, sigma_min: float, sigma_max: float) -> Tensor:
    """`count` levels, evenly spaced in the process's own time."""
    _check(count, sigma_min, sigma_max)
    ends = process.time_at(torch.tensor([sigma_max, sigma_min], dtype=torch.float64))
    times = ends[0] + _ramp(count) * (ends[1] - ends[0])
    return _ends(process.sigma_at(times), sigma_max, sigma_min)


def to_zero(grid: Tensor) -> Tensor:
    """The same walk with a last step to sigma = 0, where the answer is the denoiser's own."""
    return torch.cat([grid, grid.new_zeros(1)])


def refine(grid: Tensor, factor: int, rho: float = 7.0) -> Tensor:
    """`factor` sub-steps per step, evenly spaced in sigma^(1/rho); `[::factor]` is the input."""
    root = grid ** (1 / rho)
    parts = torch.arange(factor, dtype=torch.float64) / factor
    inner = (root[:-1, None] + parts * (root[1:] - root[:-1])[:, None]) ** rho
    inner[:, 0] = grid[:-1]
    return torch.cat([inner.flatten(), grid[-1:]])


def shift(sigma: Tensor, scale: float) -> Tensor:
    """The level that destroys as much at `scale` times the side: sigma' = scale * sigma.

    Every pixel of the small image is then seen scale^2 times. The same thing in other words:
    log-SNR - 2 ln scale; flow time t' = scale t/(1 + (scale - 1) t).
    """
    if scale <= 0:
        raise ValueError(f"resolution scale must be positive, not {scale}")
    return sigma * scale


def _ramp(count: int) -> Tensor:
    return torch.linspace(0, 1, count, dtype=torch.float64)


def _check(count: int, sigma_min: float, sigma_max: float) -> None:
    if count < 1:
        raise ValueError(f"a grid needs at least one level, not {count}")
    if not 0 < sigma_min < sigma_max:
        raise ValueError(f"need 0 < sigma_min < sigma_max, not {sigma_min} and {sigma_max}")


def _ends(grid: Tensor, first: float, last: float) -> Tensor:
    """Sets the ends exactly, free of the rounding in powers and logarithms."""
    grid[-1] = last
    grid[0] = first
    return grid


# ---------------------------------------------------------------- densities


class Density(Protocol):
    """A distribution of training noise levels."""

    def quantile(self, u: Tensor) -> Tensor:
        """The sigma below which a share `u` in [0, 1) of the levels lies, float64."""
        ...

    def cdf(self, sigma: Tensor) -> Tensor:
        """The inverse of `quantile`."""
        ...


_SMALLEST = 1e-4

# u is kept inside the open interval so that unbounded densities stay finite.
_EDGE = 2.0**-33


def _normal_quantile(u: Tensor) -> Tensor:
    return torch.special.ndtri(u.double().clamp(_EDGE, 1 - _EDGE))


@dataclass(frozen=True)
class LogNormal:
    """ln sigma ~ N(mean, std^2), EDM's training density (Karras et al. 2022, table 1)."""

    mean: float = -1.2
    std: float = 1.2

    def quantile(self, u: Tensor) -> Tensor:
        return (self.mean + self.std * _normal_quantile(u)).exp()

    def cdf(self, sigma: Tensor) -> Tensor:
        return torch.special.ndtr((sigma.double().log() - self.mean) / self.std)


@dataclass(frozen=True)
class LogUniform:
    """Uniform in log-SNR between two levels."""

    sigma_min: float = 0.002
    sigma_max: float = 80.0

    def quantile(self, u: Tensor) -> Tensor:
        return self.sigma_min * (self.sigma_max / self.sigma_min) ** u.double()

    def cdf(self, sigma: Tensor) -> Tensor:
        span = math.log(self.sigma_max / self.sigma_min)
        return (sigma.double() / self.sigma_min).log() / span


@dataclass(frozen=True)
class UniformTime:
    """Uniform in the process's own time from 0; whole timesteps only where `discrete`.

    For processes whose time 0 is (nearly) no noise: VP and flow. In EDM's time, ln(sigma)/4, use
    `LogUniform`.
    """

    process: Timed
    discrete: bool = False

    def quantile(self, u: Tensor) -> Tensor:
        last = self.process.time_max
        if self.discrete:
            time = (u.double() * (last + 1)).floor().clamp(max=last)
            # A flow's timestep 0 is no noise at all: it teaches nothing and divides by zero.
            return self.process.sigma_at(time).clamp(min=_SMALLEST)
        # Time 0 is no noise at all, which teaches nothing and divides by zero.
        return self.process.sigma_at(u.double().clamp(min=_EDGE) * last)

    def cdf(self, sigma: Tensor) -> Tensor:
        time, last = self.process.time_at(sigma), self.process.time_max
        return (time + 1) / (last + 1) if self.discrete else time / last


@dataclass(frozen=True)
class LogitNormal:
    """logit(t) ~ N(mean, std^2) for flow time t = sigma/(1 + sigma) (Esser et al. 2024, eq. 19).

    logit(t) is ln sigma, so this is `LogNormal` under the name that flow models know.
    """

    mean: float = 0.0
    std: float = 1.0

    def quantile(self, u: Tensor) -> Tensor:
        return LogNormal(self.mean, self.std).quantile(u)

    def cdf(self, sigma: Tensor) -> Tensor:
        return LogNormal(self.mean, self.std).cdf(sigma)


@dataclass(frozen=True)
class Shifted:
    """A density carried to `scale` times the resolution (see `shift`)."""

    density: Density
    scale: float

    def quantile(self, u: Tensor) -> Tensor:
        return shift(self.density.quantile(u), self.scale)

    def cdf(self, sigma: Tensor) -> Tensor:
        return self.density.cdf(sigma / self.scale)
