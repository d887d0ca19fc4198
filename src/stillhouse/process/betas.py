"""The variance schedules that discrete VP checkpoints name in their configs, in float64."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

BetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"]
BETA_SCHEDULES: tuple[BetaSchedule, ...] = get_args(BetaSchedule)


def betas(
    schedule: BetaSchedule = "linear",
    count: int = 1000,
    start: float = 1e-4,
    end: float = 0.02,
) -> Tensor:
    """beta_t for t = 0 .. count-1, named as in diffusers' scheduler configs."""
    ramp = torch.linspace(0, 1, count, dtype=torch.float64)
    if schedule == "linear":
        return start + ramp * (end - start)
    if schedule == "scaled_linear":  # linear in sqrt(beta): Stable Diffusion
        return (math.sqrt(start) + ramp * (math.sqrt(end) - math.sqrt(start))) ** 2
    if schedule == "squaredcos_cap_v2":  # Nichol & Dhariwal 2021, eq. 17
        times = torch.arange(count + 1, dtype=torch.float64) / count
        abar = torch.cos((times + 0.008) / 1.008 * math.pi / 2) ** 2
        return (1 - abar[1:] / abar[:-1]).clamp(max=0.999)
    if schedule == "sigmoid":
        return torch.sigmoid(12 * ramp - 6) * (end - start) + start
    raise ValueError(f"unknown beta schedule {schedule!r}; known: {', '.join(BETA_SCHEDULES)}")


def alphas_cumprod(betas: Tensor | Sequence[float], *, zero_terminal_snr: bool = False) -> Tensor:
    """The squared signal level abar_t = prod(1 - beta), optionally rescaled to end at exactly 0."""
    abar = (1 - torch.as_tensor(betas, dtype=torch.float64)).cumprod(0)
    if zero_terminal_snr:  # Lin et al. 2024, algorithm 1: shift and scale sqrt(abar)
        root = abar.sqrt()
        abar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
    return abar


def shifted_betas(abar: Tensor, scale: float) -> Tensor:
    """The betas of a process at `scale` times the side: each timestep's sigma times the scale.

    sigma^2 = (1 - abar)/abar, so abar' = abar/(abar + scale^2 (1 - abar)).
    """
    moved = abar / (abar + scale**2 * (1 - abar))
    return 1 - moved / torch.cat([moved.new_ones(1), moved[:-1]])
