"""GITS: a sampling grid found by dynamic programming over one fine trajectory (Chen et al. 2024).

Trajectories of diffusion models have one shape up to rotation, so the cost of an Euler jump from
level j to level i, measured once on a batch, tells which jumps are cheap for every sample.
"""

import torch
from torch import Tensor

from stillhouse.process import Condition, Denoiser
from stillhouse.solvers.onestep import sample_heun
from stillhouse.solvers.walk import Point, Progress, at_least_float32, check_grid, first_order


def jump_costs(
    denoiser: Denoiser, x: Tensor, fine: Tensor, cond: Condition | None = None
) -> Tensor:
    """cost[j, i]: mean distance of the Euler jump j -> i from the fine trajectory, inf for i <= j.

    The trajectory is Heun's on the `fine` grid, from the states `x` at its first level.
    """
    grid = check_grid(fine)
    states, denoised = [at_least_float32(x)], []

    def keep(progress: Progress) -> None:
        states.append(progress.x)
        denoised.append(progress.denoised)  # at the state that the step started from

    sample_heun(denoiser, states[0], fine, cond, callback=keep)
    cost = torch.full((len(grid), len(grid)), torch.inf, dtype=torch.float64)
    for j in range(len(grid) - 1):
        point = Point(grid[j], states[j], denoised[j])
        misses = [first_order(point, grid[i]) - states[i] for i in range(j + 1, len(grid))]
        cost[j, j + 1 :] = torch.stack([m.flatten(1).norm(dim=1).mean() for m in misses]).double()
    return cost


def cheapest_path(cost: Tensor, jumps: int, gamma: float = 1.15) -> list[int]:
    """The `jumps` + 1 levels from first to last with the least cost-to-go,

    V[j][1] = cost[j][last],   V[j][k] = min_{i > j} cost[j][i] + gamma V[i][k-1].
    """
    count = len(cost)
    if not 1 <= jumps < count:
        raise ValueError(f"{count} fine levels allow 1 to {count - 1} jumps, not {jumps}")
    value, choices = cost[:, -1].clone(), []
    value[-1] = torch.inf
    for _ in range(jumps - 1):
        total = cost + gamma * value[None, :]
        value, choice = total.min(dim=1)
        choices.append(choice)
    path = [0]
    for choice in reversed(choices):
        path.append(int(choice[path[-1]]))
    return [*path, count - 1]


def search_grid(
    denoiser: Denoiser,
    x: Tensor,
    fine: Tensor,
    counts: list[int],
    cond: Condition | None = None,
    *,
    gamma: float = 1.15,
    batch: int | None = None,
) -> dict[int, Tensor]:
    """For every number of timestamps in `counts`, the best grid among the levels of `fine`.

    The paper's setting: 61 fine levels, 256 samples `x` at the first of them, walked `batch` at a
    time.
    """
    size = batch or len(x)
    costs = [
        jump_costs(denoiser, x[i : i + size], fine, None if cond is None else cond[i : i + size])
        * len(x[i : i + size])
        for i in range(0, len(x), size)
    ]
    cost = torch.stack(costs).sum(0) / len(x)
    return {n: fine.double().cpu()[cheapest_path(cost, n - 1, gamma)] for n in counts}
