"""KID and CMMD: squared maximum mean discrepancies (Gretton et al. 2012) with two kernels.

MMD^2 = E k(x, x') + E k(y, y') - 2 E k(x, y)
"""

import numpy as np
import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.metrics.bank import Rows, blocks
from stillhouse.metrics.moments import Spread, checked

_TOO_FEW = (
    "a kernel distance needs 2 images or more on either side, and one side has {}: raise the "
    "count, or name a folder with more images"
)


def kernel_distance(
    x: Rows, y: Rows, *, subsets: int = 100, size: int = 1000, seed: int = 0
) -> Spread:
    """KID (Binkowski et al. 2018): `polynomial_mmd` over random subsets, its mean and deviation.

    Subsets have `size` rows of either side, or as many as the smaller side has. They are drawn as
    torch-fidelity draws them: its seed and rows give its value. Unbiased: equal distributions give
    0 on average at any count, so single values may be negative.
    """
    size = min(size, len(x), len(y))
    if size < 2:
        raise UserError(_TOO_FEW.format(size))
    rng = np.random.RandomState(seed)
    values = []
    for _ in range(subsets):
        a, b = (_chosen(rows, rng.choice(len(rows), size, replace=False)) for rows in (x, y))
        values.append(polynomial_mmd(a, b))
    return Spread(float(np.mean(values)), float(np.std(values)))


def _chosen(rows: Rows, numbers: np.ndarray) -> Tensor:
    return rows[torch.from_numpy(np.sort(numbers))]


def polynomial_mmd(x: Tensor, y: Tensor) -> float:
    """Unbiased MMD^2 of two matrices with the kernel (x.y / D + 1)^3."""
    x, y = checked(x), checked(y)
    across = _cubic(x, y).mean()
    return float(_mean_apart(_cubic(x, x)) + _mean_apart(_cubic(y, y)) - 2 * across)


def all_pairs_distance(x: Rows, y: Rows, *, within_y: float | None = None) -> float:
    """`polynomial_mmd` of all rows, a block at a time: the mean of KID over all possible subsets.

    It has KID's expectation with less noise, since no pair is left out, and needs no seed.
    `within_y` is `mean_within(y)`, where it is known.
    """
    for rows in (x, y):
        if len(rows) < 2:
            raise UserError(_TOO_FEW.format(len(rows)))
    across = _sum_across(x, y) / (len(x) * len(y))
    return mean_within(x) + (mean_within(y) if within_y is None else within_y) - 2 * across


def _sum_across(x: Rows, y: Rows) -> float:
    return sum(float(_cubic(checked(a), checked(b)).sum()) for a in blocks(x) for b in blocks(y))


def mean_within(rows: Rows) -> float:
    """The kernel's mean over pairs of different rows; by symmetry half of the blocks will do."""
    total = 0.0
    for i, block in enumerate(blocks(rows)):
        a = checked(block)
        for j, other in enumerate(blocks(rows)):
            if j < i:
                continue
            kernel = _cubic(a, a if i == j else checked(other))
            total += float(kernel.sum() - kernel.diagonal().sum() if i == j else 2 * kernel.sum())
    return total / (len(rows) * (len(rows) - 1))


def _cubic(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _mean_apart(kernel: Tensor) -> Tensor:
    """Mean over pairs of different rows."""
    count = len(kernel)
    return (kernel.sum() - kernel.diagonal().sum()) / (count * (count - 1))


def maximum_mean_discrepancy(
    x: Rows, y: Rows, *, bandwidth: float = 10.0, scale: float = 1000.0, unit: bool = True
) -> float:
    """CMMD (Jayasumana et al. 2024): Gaussian kernel, all pairs (V-statistic), times 1000.

    The features are CLIP's, scaled to unit length (`unit`). Pairs of a row with itself count, as in
    the paper, so the value is not negative, and has a bias of the order scale / count.
    """
    if not len(x) or not len(y):
        raise UserError("there are no images on one side, so there is no distance: name others")
    gamma = 1 / (2 * bandwidth**2)
    own = _mean_kernel(x, x, gamma, unit) + _mean_kernel(y, y, gamma, unit)
    return max(scale * (own - 2 * _mean_kernel(x, y, gamma, unit)), 0.0)


def _mean_kernel(x: Rows, y: Rows, gamma: float, unit: bool) -> float:
    """Mean over all pairs of k - 1, k = exp(-gamma d^2): the ones cancel in an MMD, exactly."""
    total = 0.0
    for i, a in enumerate(blocks(x)):
        for j, b in enumerate(blocks(y)):
            if x is y and j < i:  # symmetric
                continue
            part = torch.expm1(-gamma * squared_distances(_scaled(a, unit), _scaled(b, unit)))
            total += float(part.sum()) * (2 if x is y and i != j else 1)
    return total / (len(x) * len(y))


def _scaled(features: Tensor, unit: bool) -> Tensor:
    x = checked(features)
    return torch.nn.functional.normalize(x, dim=1) if unit else x


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j|^2 of float64 rows by one matrix product; exactly 0 for rows that are equal.

    The product leaves about 1e-15 of the norms where rows are equal. Below 1e-13, which is less
    than what the rounding of float32 features makes of a distance, it is called 0.
    """
    norms = x.square().sum(dim=1)[:, None] + y.square().sum(dim=1)
    squared = torch.addmm(norms, x, y.T, alpha=-2)
    return squared.masked_fill_(squared < 1e-13 * norms, 0.0)
