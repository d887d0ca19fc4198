"""Adapters: a network becomes `denoise(x, sigma, cond) -> x0` through its scaling and prediction.

A scaling says how a process's own coordinates follow from sigma: what the network's input is
multiplied by, and which time it is told. There are three; the network itself is any callable
`network(x, time, cond)`.

| process | input scale          | time                            | sigma(time)              |
|---------|----------------------|---------------------------------|--------------------------|
| EDM     | 1/sqrt(s^2+sigma^2)  | ln(sigma)/4                     | exp(4 time)              |
| VP      | 1/sqrt(1 + sigma^2)  | position in its table of levels | sqrt((1 - abar)/abar)    |
| Flow    | 1/(1 + sigma)        | 1000 sigma/(1 + sigma)          | t/(1 - t), t = time/1000 |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from stillhouse.process import levels
from stillhouse.process.batch import Condition
from stillhouse.process.levels import SIGMA_CAP
from stillhouse.process.predictions import PREDICTIONS, Prediction, rows, to_x0


class Denoiser(Protocol):
    """The one contract: the expected clean data given `x = x0 + sigma * noise`.

    `sigma` is a scalar tensor or one level per sample [B].
    """

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor: ...


Network = Callable[[Tensor, Tensor, Condition | None], Tensor]


class Scaling(levels.Timed, Protocol):
    """A process's own coordinates as functions of sigma."""

    @property
    def sigma_data(self) -> float: ...
    @property
    def sigma_min(self) -> float: ...
    @property
    def sigma_max(self) -> float: ...
    def input_scale(self, sigma: Tensor) -> Tensor: ...
    def native_grid(self, steps: int) -> Tensor:
        """The grid its own sampler would take: `steps` levels, then 0."""
        ...

    def start(self, noise: Tensor, sigma: float | Tensor) -> Tensor:
        """The state that its own sampler would start from, given unit noise."""
        ...


@dataclass(frozen=True)
class EDM:
    """Elucidated diffusion (Karras et al. 2022, table 1)."""

    sigma_data: float = 0.5
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0

    @property
    def time_max(self) -> float:
        return float(self.time_at(torch.tensor(self.sigma_max, dtype=torch.float64)))

    def input_scale(self, sigma: Tensor) -> Tensor:
        return (sigma.double() ** 2 + self.sigma_data**2).rsqrt()

    def time_at(self, sigma: Tensor) -> Tensor:
        return sigma.double().clamp(min=1e-20).log() / 4  # sigma = 0 is a finite time too

    def sigma_at(self, time: Tensor) -> Tensor:
        return (4 * time.double()).exp()

    def native_grid(self, steps: int) -> Tensor:
        return levels.to_zero(levels.polynomial(steps, self.sigma_min, self.sigma_max, self.rho))

    def start(self, noise: Tensor, sigma: float | Tensor) -> Tensor:
        return float(sigma) * noise


Spacing = Literal["leading", "trailing", "linspace"]


@dataclass(frozen=True, eq=False)
class VP:
    """Discrete variance-preserving process: one level per timestep 0 .. T-1.

    Between whole timesteps, time is linear in log sigma. A last `abar` of 0 (zero terminal SNR,
    Lin et al. 2024) is a sigma of `SIGMA_CAP`.
    """

    alphas_cumprod: Tensor
    spacing: Spacing = "trailing"
    offset: int = 0  # added to timesteps of "leading" spacing
    open_end: bool = False  # "leading" and "linspace" stop one point before the end, as DPM-Solver
    karras: bool = False  # native grids are rho = 7 polynomials between the same ends
    _log_sigmas: dict[torch.device, Tensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        abar = self.alphas_cumprod.detach().double().cpu()
        falling = abar.ndim == 1 and bool((abar[1:] < abar[:-1]).all())
        if not falling or not (abar[0] < 1 and abar[-1] >= 0):
            raise ValueError("alphas_cumprod must be one row, decreasing, within [0, 1)")
        sigmas = ((1 - abar) / abar).sqrt().clamp(max=SIGMA_CAP)
        object.__setattr__(self, "alphas_cumprod", abar)
        object.__setattr__(self, "_log_sigmas", {torch.device("cpu"): sigmas.log()})

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._log_sigmas:
            self._log_sigmas[device] = self._log_sigmas[torch.device("cpu")].to(device)
        return self._log_sigmas[device]

    @property
    def sigma_data(self) -> float:
        return 1.0

    @property
    def sigma_min(self) -> float:
        return float(self._table(torch.device("cpu"))[0].exp())

    @property
    def sigma_max(self) -> float:
        # exp(log) of the cap may fall short of it by a rounding; the cap is recognised by value.
        capped = bool(self.alphas_cumprod[-1] <= 1 / (1 + SIGMA_CAP**2))
        return SIGMA_CAP if capped else float(self._table(torch.device("cpu"))[-1].exp())

    @property
    def time_max(self) -> float:
        return float(len(self.alphas_cumprod) - 1)

    def input_scale(self, sigma: Tensor) -> Tensor:
        return (1 + sigma.double() ** 2).rsqrt()

    def time_at(self, sigma: Tensor) -> Tensor:
        table, log_sigma = self._table(sigma.device), sigma.double().log()
        right = torch.searchsorted(table, log_sigma).clamp(1, len(table) - 1)
        # take: indexing by a scalar tensor would wait for the device, and stop torch.compile
        low, high = table.take(right - 1), table.take(right)
        return right - 1 + ((log_sigma - low) / (high - low)).clamp(0, 1)

    def sigma_at(self, time: Tensor) -> Tensor:
        table, time = self._table(time.device), time.double().clamp(0, self.time_max)
        left = time.floor().long().clamp(max=len(table) - 2)
        sigma = torch.lerp(table.take(left), table.take(left + 1), time - left).exp()
        return torch.where(time >= self.time_max, self.sigma_max, sigma)

    def native_grid(self, steps: int) -> Tensor:
        """Whole timesteps, spaced as diffusers' schedulers name it, then 0."""
        count, points = len(self.alphas_cumprod), steps + self.open_end
        if not 1 <= steps <= count:
            raise ValueError(f"a model of {count} timesteps cannot take {steps} native steps")
        if self.spacing == "leading":
            times = torch.arange(points, dtype=torch.float64).flip(0) * (count // points)
            times = times + self.offset
        elif self.spacing == "trailing":
            index = torch.arange(steps, dtype=torch.float64)
            times = (count - index * (count / steps)).round() - 1
        else:
            times = torch.linspace(count - 1, 0, points, dtype=torch.float64).round()
        if times[0] > self.time_max:
            raise ValueError(f"{steps} steps with offset {self.offset} go beyond timestep {count}")
        grid = self.sigma_at(times[:steps])
        if self.karras and steps > 1:
            # Open-ended schedulers take the ends of the whole table, the others of their grid.
            ends = [self.sigma_min, self.sigma_max] if self.open_end else grid[[-1, 0]].tolist()
            grid = levels.polynomial(steps, *ends)
        return levels.to_zero(grid)

    def start(self, noise: Tensor, sigma: float | Tensor) -> Tensor:
        """Unit variance in its own coordinates, whatever the first level: sqrt(1 + sigma^2)."""
        return math.sqrt(1 + float(sigma) ** 2) * noise


@dataclass(frozen=True)
class Flow:
    """Rectified flow x_t = (1 - t) x0 + t noise, told `time_scale * t` (Esser et al. 2024).

    `shift_scale` moves the sampling grid, not the network: t' = s t/(1 + (s - 1) t).
    """

    shift_scale: float = 1.0
    time_scale: float = 1000.0
    first_time: float = 1e-3  # the smallest t that the sampler's grid starts its ramp from

    @property
    def sigma_data(self) -> float:
        return 1.0

    @property
    def sigma_min(self) -> float:
        return float(levels.shift(self.sigma_at(self._first()), self.shift_scale))

    @property
    def sigma_max(self) -> float:
        return SIGMA_CAP

    @property
    def time_max(self) -> float:
        return self.time_scale

    def _first(self) -> Tensor:
        return torch.tensor(self.first_time * self.time_scale, dtype=torch.float64)

    def input_scale(self, sigma: Tensor) -> Tensor:
        return 1 / (1 + sigma.double())

    def time_at(self, sigma: Tensor) -> Tensor:
        sigma = sigma.double()
        # The cap stands for t = 1, and that is what the network is told.
        return torch.where(
            sigma >= SIGMA_CAP, self.time_scale, self.time_scale * sigma / (1 + sigma)
        )

    def sigma_at(self, time: Tensor) -> Tensor:
        t = time.double() / self.time_scale
        return (t / (1 - t)).clamp(max=SIGMA_CAP)

    def native_grid(self, steps: int) -> Tensor:
        """As diffusers' FlowMatchEulerDiscreteScheduler: its ramp ends at the once-shifted first
        time, and the whole ramp is then shifted."""
        if steps < 1:
            raise ValueError(f"a grid needs at least one step, not {steps}")
        last = float(self.time_at(torch.tensor(self.sigma_min, dtype=torch.float64)))
        ramp = torch.linspace(self.time_scale, last, steps, dtype=torch.float64)
        grid = levels.shift(self.sigma_at(ramp), self.shift_scale)
        grid[0] = SIGMA_CAP  # t = 1 is its own shift
        return levels.to_zero(grid)

    def start(self, noise: Tensor, sigma: float | Tensor) -> Tensor:
        return float(sigma) * noise


class NetworkDenoiser(nn.Module):
    """A network read as a denoiser: scale the input, tell the time, convert the output to x0.

    The network computes in the dtype of its weights. `clip` bounds x0, as some checkpoints were
    sampled; not in training mode, where it would stop the gradient.
    """

    def __init__(
        self,
        network: nn.Module,
        scaling: Scaling,
        prediction: Prediction,
        *,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        if prediction not in PREDICTIONS:
            raise ValueError(f"unknown prediction {prediction!r}; known: {', '.join(PREDICTIONS)}")
        if prediction == "eps" and scaling.sigma_max >= SIGMA_CAP:
            raise ValueError(
                "eps-prediction cannot be combined with a process whose signal vanishes (zero "
                "terminal SNR): at its noisy end the output says nothing about x0. Use a model "
                "trained with v- or x0-prediction."
            )
        self.network = network
        self.scaling = scaling
        self.prediction: Prediction = prediction
        self.clip = clip

    def forward(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        weights = (p.dtype for p in self.network.parameters() if p.is_floating_point())
        dtype = next(weights, x.dtype)
        time = self.scaling.time_at(sigma).to(x.device, torch.float32, non_blocking=True)
        time = time.expand(len(x))
        scaled = rows(self.scaling.input_scale(sigma), x) * x
        output = self.network(scaled.to(dtype), time, cond).to(x.dtype)
        x0 = to_x0(self.prediction, x, output, sigma, self.scaling.sigma_data)
        if self.clip is None or self.training:
            return x0
        return x0.clamp(-self.clip, self.clip)
