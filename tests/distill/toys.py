"""Small students, teachers with a closed form, and an engine that trains one on the other."""

import torch
from torch import Tensor, nn

from stillhouse.distill.sfd import SFD
from stillhouse.distill.trajectories import Starts
from stillhouse.engine.loop import Engine, LoopConfig
from stillhouse.engine.optimisers import AdamW, Steps
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World
from stillhouse.process import Condition, Denoiser, Gaussian, GaussianMixture

HERE = World(0, 1, torch.device("cpu"))


class Gains(nn.Module):
    """D = c_i x, with a number for each level of a grid; at first that of N(0, std^2) data."""

    def __init__(self, grid: Tensor, std: float = 1.0) -> None:
        super().__init__()
        self.grid = grid
        first = std**2 / (std**2 + grid[:-1] ** 2)
        self.gains = nn.ParameterList([nn.Parameter(c.float()) for c in first])

    def forward(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        return self.gains[int((self.grid - sigma).abs().argmin())] * x


class Residual(nn.Module):
    """A denoiser plus a perceptron (64 x 2) of zero at first, which may be told the steps."""

    def __init__(self, teacher: Denoiser, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.teacher = teacher
        self.inward, self.middle = nn.Linear(4, 64), nn.Linear(64, 64)
        self.steps, self.outward = nn.Embedding(8, 64), nn.Linear(64, 2)
        for silent in (self.steps.weight, self.outward.weight, self.outward.bias):
            nn.init.zeros_(silent)

    def forward(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        known = torch.stack([sigma.log() / 4, sigma / (1 + sigma)]).to(x).expand(len(x), 2)
        scaled = x / (1 + sigma.to(x) ** 2).sqrt()
        h = self.inward(torch.cat([scaled, known], 1))
        if cond is not None and cond.steps is not None:
            h = h + self.steps(cond.steps)
        h = self.middle(nn.functional.silu(h))
        return self.teacher(x, sigma, cond) + self.outward(nn.functional.silu(h))


class ExactFlow:
    """The trajectories of the ODE itself, for Gaussian data."""

    def __init__(self, data: Gaussian, grids) -> None:
        self.data, self.grids = data, grids

    def __call__(self, x: Tensor, timestamps: int, cond: Condition | None) -> list[Tensor]:
        first, *others = self.grids.student(timestamps).tolist()
        return [self.data.exact_flow(x, first, sigma) for sigma in others]


def three_on_a_circle() -> GaussianMixture:
    """Three modes of std 0.15 at radius 1."""
    angle = torch.arange(3, dtype=torch.float64) * 2 * torch.pi / 3
    means = torch.stack([angle.cos(), angle.sin()], 1)
    return GaussianMixture(means, torch.full((3,), 0.15), torch.ones(3), torch.arange(3))


def engine_of(task: SFD, *, steps: int, batch: int, lr: float = 2e-3, **network) -> Engine:
    """Adam, with a tenth of its learning rate from half of the images on."""
    config = LoopConfig(images=steps * batch, batch=batch, log_every=10**9)
    optimiser = AdamW(lr=lr, schedule=Steps())
    return Engine(task, config, {"student": NetworkConfig(optimiser=optimiser, **network)}, HERE)


def distil(task: SFD, starts: Starts, *, steps: int, batch: int, **options) -> Engine:
    """A whole run."""
    engine = engine_of(task, steps=steps, batch=batch, **options)
    engine.run(starts.feed(0, batch, HERE))
    return engine
