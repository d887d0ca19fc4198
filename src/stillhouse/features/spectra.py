"""How much of an activation is the noise's, and how fine its detail is: sums over images.

z are features standardised per channel, S >= 2 noises for the same image and level:

    noise fraction   eta   = E[Var_seed z] / E[z^2]        0: none, 1: nothing else
    in a band        eta_B = the same of the Fourier coefficients with |k| in B
    granularity      kappa = sum |k| S(k) / sum S(k),  S = sum over pairs of seeds of Re(z_1 z_2*)

Frequencies are in cycles per cell: `lo` is 0 < |k| <= 1/4, `hi` is beyond. What the noise adds is
another with every seed, so it cancels in S. Only sums per channel are kept: standardising is
dividing them by the channel's variance in the end.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LOW = 0.25  # cycles per cell where the low band ends


class Detail(NamedTuple):
    """Without a value (nan) where there is nothing to measure."""

    eta: float
    eta_lo: float
    eta_hi: float
    kappa: float


class Spectra:
    """Sums of one activation over any number of batches."""

    def __init__(self) -> None:
        self.seeds = 0
        self.cells = 0  # of all images
        self.shift: Tensor | None = None  # [C], subtracted from every value
        self.sums: dict[str, Tensor] = {}  # [C] or [C, bands] each, float64

    def update(self, features: Tensor) -> None:
        """[seeds, B, C, H, W]: the same images with other noise."""
        seeds, images, _, height, width = features.shape
        if seeds < 2 or self.seeds not in (0, seeds):
            raise ValueError(f"features of two seeds or more, always as many, not {seeds}")
        self.seeds = seeds
        self.cells += images * height * width
        x = features.float()
        if self.shift is None:  # near the mean, so that squares keep their digits
            self.shift = x.mean((0, 1, 3, 4))
        x = x - self.shift.to(x)[:, None, None]
        frequency, weight = _frequencies(height, width, x.device)
        spectrum = torch.fft.rfft2(x, norm="ortho")
        power = spectrum.abs().square().sum(0) * weight  # [B, C, H, W/2 + 1]
        together = spectrum.sum(0).abs().square() * weight
        noise = (power - together / seeds) / (seeds - 1)
        bands = torch.stack([(frequency > 0) & (frequency <= LOW), frequency > LOW]).to(x)
        new = {
            "sum": x.sum((0, 1, 3, 4)),
            "square": x.square().sum((0, 1, 3, 4)),
            "noise": x.var(0).sum((0, 2, 3)),
            "band_power": torch.einsum("bchw,khw->ck", power / seeds, bands),
            "band_noise": torch.einsum("bchw,khw->ck", noise, bands),
            "cross": (together - power).sum((0, 2, 3)),
            "cross_k": ((together - power) * frequency).sum((0, 2, 3)),
        }
        for name, value in new.items():
            value = value.to("cpu", torch.float64)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def result(self) -> Detail:
        if self.shift is None:
            raise ValueError("no features were given")
        count = self.seeds * self.cells
        mean = self.sums["sum"] / count
        variance = self.sums["square"] / count - mean.square()
        # A channel that does not vary says nothing; what it seems to vary is rounding.
        live = variance > (1e-5 * self.shift.to(variance)).square().clamp(min=1e-30)
        weights = torch.where(live, 1 / variance, 0.0)
        eta = float((self.sums["noise"] / self.cells * weights).sum() / live.sum())
        low, high = (
            _ratio(self.sums["band_noise"][:, i] @ weights, self.sums["band_power"][:, i] @ weights)
            for i in range(2)
        )
        # Without the channel's mean, which is a part of k = 0 alone.
        cross = self.sums["cross"] - mean.square() * (self.seeds - 1) * count
        kappa = _ratio(self.sums["cross_k"] @ weights, cross @ weights)
        return Detail(eta, low, high, kappa)


def _frequencies(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """|k| of each coefficient of a real transform, and how many of a full one it stands for."""
    down = torch.fft.fftfreq(height, device=device)[:, None]
    across = torch.fft.rfftfreq(width, device=device)[None]
    weight = torch.full((1, width // 2 + 1), 2.0, device=device)
    weight[:, 0] = 1
    if width % 2 == 0:
        weight[:, -1] = 1
    return (down.square() + across.square()).sqrt(), weight


def _ratio(over: Tensor, under: Tensor) -> float:
    return float(over / under) if float(under) > 0 else float("nan")
