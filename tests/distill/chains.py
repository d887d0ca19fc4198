"""Generators, teachers and fake scores with a closed form, without an engine."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from stillhouse.distill.emd import Rows, Still
from stillhouse.process import noise_source

MODE, WIDTH = 2.0, 0.4  # the teacher: 1/2 N(+-2, .4^2)


def two_modes(x: Tensor, sigma: Tensor, cond=None) -> Tensor:
    """Its denoiser: the posterior mean of the mode is 2 tanh(2 x/v)."""
    level = sigma.to(x).view(-1, 1) ** 2
    mean = MODE * torch.tanh(MODE * x / (WIDTH**2 + level))
    return mean + WIDTH**2 / (WIDTH**2 + level) * (x - mean)


def two_modes_log_density(x: Tensor, sigma: float) -> Tensor:
    v = WIDTH**2 + sigma**2
    modes = torch.stack([-((x - m) ** 2) / (2 * v) for m in (-MODE, MODE)])
    return modes.logsumexp(0) - math.log(2) - 0.5 * math.log(2 * math.pi * v)


class Line(nn.Module):
    """g = A z + B with its exact fake score; equal parts of the rows are students"""

    def __init__(self, a: float, b: float, students: int = 1) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((students, 1, 1), a))
        self.b = nn.Parameter(torch.full((students, 1, 1), b))

    def forward(self, z: Tensor, cond=None) -> Tensor:
        return (self.a * z.view(len(self.a), -1, 1) + self.b).view_as(z)

    def score(self, x: Tensor, sigma: Tensor, cond=None) -> Tensor:
        a, b, apart = self.a.detach(), self.b.detach(), x.view(len(self.a), -1, 1)
        level = sigma.to(x).view_as(apart) ** 2
        return (b + a**2 / (a**2 + level) * (apart - b)).view_as(x)

    def log_density(self, x: Tensor, sigma: float) -> Tensor:
        v = float(self.a) ** 2 + sigma**2
        return -((x - float(self.b)) ** 2) / (2 * v) - 0.5 * math.log(2 * math.pi * v)


class Analytic:
    """A generator, a teacher and a fake score without an engine."""

    def __init__(self, generator, teacher, score) -> None:
        self.generator = generator
        self.parts = Still(generator, teacher, score)

    def generate(self, z, cond):
        return self.generator(z, cond)

    def still(self):
        return nullcontext(self.parts)


def gap_of(networks: Analytic):
    return lambda x, sigma: networks.parts.teacher(x, sigma) - networks.parts.score(x, sigma)


def drawn(batch: int, sigma: float, seed: int = 0, size: int = 1, dtype=torch.float64) -> Rows:
    g = torch.Generator().manual_seed(seed)
    z, eps = (torch.randn(batch, size, generator=g, dtype=dtype) for _ in range(2))
    return Rows(z, eps, torch.full((batch,), sigma), torch.ones(batch))


def torch_noise(seed: int = 1):
    return noise_source(torch.Generator().manual_seed(seed))
