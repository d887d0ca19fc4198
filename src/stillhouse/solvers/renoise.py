"""Multistep sampling of a consistency model: to the end in one step, noise anew, and again."""

import math
from itertools import pairwise
from typing import Unpack

import torch
from torch import Tensor

from stillhouse.process import Condition, Denoiser, noise_source
from stillhouse.solvers.onestep import sample_euler
from stillhouse.solvers.walk import Options, Progress, check_grid


def sample_renoise(
    denoiser: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    cond: Condition | None = None,
    **options: Unpack[Options],
) -> Tensor:
    """Song et al. 2023, algorithm 1, on levels t_0 > ... > t_n = e, which may be 0:

        y = (e/t_i) x + (1 - e/t_i) D(x, t_i)           the consistency function's answer, at e
        x = y + sqrt(t_(i+1)^2 - e^2) noise             nothing at the last level: x = y

    It takes the denoiser itself: y is what `Consistent(denoiser, e)` would say. Other denoisers end
    in a blur, because only a consistency model says where the ODE ends.
    """
    grid, noise = check_grid(sigmas), noise_source(options.get("generator"))
    callback, afs = options.pop("callback", None), options.pop("afs", False)
    steps, end = len(grid) - 1, grid[-1]
    heard: list[Progress] = []
    options["callback"] = heard.append
    for i, (sigma, sigma_next) in enumerate(pairwise(grid)):
        down = torch.tensor([sigma, end], dtype=torch.float64)
        options["afs"] = afs and i == 0
        x = sample_euler(denoiser, x, down, cond, **options)
        if sigma_next > end:
            x = x + math.sqrt(sigma_next**2 - end**2) * noise(x, i)
        if callback is not None:
            callback(Progress(i + 1, steps, sigma_next, x, heard[-1].denoised))
    return x
