"""Cost of choosing noise: the solve, and what a training step notices of it.

    STILLHOUSE_DATA=../shared/data python benchmarks/coupling.py [--quick]

Last line, JSON, also in results/coupling.json unless --quick:
`n`: milliseconds by size of the pool, on CIFAR-10 in [-1, 1], alternately, on one thread: `ours_ms`
(exact, from images and noise to indices, with scipy), `scipy_l2_ms` (distances and scipy's solver
on them, unsquared L2), `scipy_dot_ms` (scipy on dot products, without our start), `lapx_ms` (ours
with lapx; only if installed); `solve_ratio` is the median of scipy_l2 / ours.
`reduction`: by how much the mean distance falls, by size.
`step_share`: extra time per training step with `assignment` / step without, `cifar10-unet` with the
network of `--scale tiny` at batch 256, prefetch on: the smallest network is the hardest case.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from timing import alternately
from torch import Tensor

from stillhouse.couplings import solve as solving
from stillhouse.couplings.assignment import Assignment
from stillhouse.couplings.configs import AssignmentConfig, IndependentConfig
from stillhouse.couplings.pairing import mean_distance
from stillhouse.data import Prefetch
from stillhouse.engine.loop import Engine
from stillhouse.engine.world import World
from stillhouse.recipes.train.catalogue import RECIPES
from stillhouse.recipes.train.learner import NAME
from stillhouse.recipes.train.training import TrainRun, build_learner, build_loader

RESULTS = Path(__file__).parent / "results"
HERE = World(0, 1, torch.device("cpu"))
SIZES = (128, 256, 512, 1024, 2048, 4096)
ENDLESS = 10**12  # images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    quick = parser.parse_args().quick
    sizes = SIZES[:2] if quick else SIZES
    result: dict[str, Any] = {"quick": quick, **solves(sizes, repeats=3)}
    result |= step_share(*((8, 2, 1) if quick else (256, 9, 4)))
    result |= {"cores": os.cpu_count(), "torch": torch.__version__}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "coupling.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


# ---------------------------------------------------------------- the solve


def solves(sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    images = cifar(max(sizes))
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    table, reduction = {}, {}
    for n in sizes:
        x, z = images[:n], noise[:n]
        exact = Assignment(block=n)
        ways: dict[str, Callable[[], Tensor]] = {
            "ours": partial(ours, exact, x, z, lapx_from=n + 1),
            "scipy_l2": lambda x=x, z=z: scipy_on(torch.cdist(x, z)),
            "scipy_dot": lambda x=x, z=z: scipy_on(-x @ z.T),
        }
        if find_spec("lap") is not None:
            ways["lapx"] = partial(ours, exact, x, z, lapx_from=n)
        seconds = alternately(ways, repeats=1 if n > 2048 else repeats)
        ratios = [b / a for a, b in zip(seconds["ours"], seconds["scipy_l2"], strict=True)]
        table[str(n)] = {
            f"{way}_ms": round(1e3 * statistics.median(found), 2) for way, found in seconds.items()
        }
        table[str(n)]["solve_ratio"] = round(statistics.median(ratios), 2)
        met = z[exact.match(x, z)]
        reduction[str(n)] = round(1 - mean_distance(x, met) / mean_distance(x, z), 5)
    torch.set_num_threads(threads)
    return {"n": table, "reduction": reduction}


def scipy_on(cost: Tensor) -> Tensor:
    """On distances, this is the published code."""
    from scipy.optimize import linear_sum_assignment

    return torch.as_tensor(linear_sum_assignment(cost.numpy())[1])


def ours(coupling: Assignment, x: Tensor, noise: Tensor, *, lapx_from: int) -> Tensor:
    """With the solver that is asked for, whatever is installed and usual for this size."""
    usual, solving.LAPX_FROM = solving.LAPX_FROM, lapx_from
    try:
        return coupling.match(x, noise)
    finally:
        solving.LAPX_FROM = usual


def cifar(count: int) -> Tensor:
    """Flat images in [-1, 1]."""
    config = RECIPES["cifar10-unet"]("tiny").data
    loader = config.build(batch=256, seed=0)
    batches = [item.batch.data.flatten(1) for item in islice(loader, -(-count // 256))]
    return torch.cat(batches)[:count]


# ---------------------------------------------------------------- the step


class Training:
    """The recipe's own loader, prefetch and engine, some steps at a time."""

    def __init__(self, config: TrainRun) -> None:
        loader = build_loader(config, HERE, ())
        learner = build_learner(config, HERE, loader)
        self.feed = Prefetch(loader, learner.prepare)
        self.engine = Engine(learner, config, {NAME: config.network_config(HERE)}, HERE)

    def steps(self, number: int) -> None:
        """And until batches are ready again: no prefetch works in the other's time."""
        self.engine.run(islice(self.feed, number))
        while not self.feed.full:
            time.sleep(0.0005)


def step_share(batch: int, rounds: int, block: int) -> dict[str, Any]:
    """`block` steps of the one, as many of the other, and so on."""
    config = RECIPES["cifar10-unet"]("tiny").model_copy(
        update={"batch": batch, "images": ENDLESS, "log_every": ENDLESS}
    )
    with_coupling = config.model_copy(update={"coupling": AssignmentConfig()})
    without = config.model_copy(update={"coupling": IndependentConfig()})
    on, off = Training(with_coupling), Training(without)
    try:
        arms = {"on": lambda: on.steps(block), "off": lambda: off.steps(block)}
        seconds = alternately(arms, repeats=rounds, warmup=2)
    finally:
        on.feed.close()
        off.feed.close()
    shares = [a / b - 1 for a, b in zip(seconds["on"], seconds["off"], strict=True)]
    low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
    return {
        "step_share": round(middle, 4),
        "step_share_quartiles": [round(low, 4), round(high, 4)],
        "step_ms": round(1e3 * statistics.median(seconds["off"]) / block, 1),
        "batch": batch,
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
