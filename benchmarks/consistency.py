"""Does noise that lies near save images in consistency training? On eight Gaussians in the plane.

    python benchmarks/consistency.py [--quick]

Improved consistency training from scratch, sigma up to 80, of a perceptron on the toy `ring`, with
noise `independent`, by `assignment` (the pool is the batch of 256), by `assignment/4` (in pools of
4, a weaker coupling) and `nearest` (the best of 4). In the plane noise comes nearer to data than in
any image, where distances fall by 2%: this says how consistency training takes strong couplings.

Last line, JSON, also in results/consistency.json unless --quick:
`reduction`: per arm, by how much the mean distance of data and noise falls;
`images`: seen at the checkpoints;
`w2`: per arm and seed, the W2^2 of one-step samples and data at each checkpoint, by exact
assignment of as many points, with averaged weights; `floor` is what two sets of data are apart;
`images_to_equal`: per arm and seed, the images at the first checkpoint that is as good as the last
of `independent` with that seed (null: none is); `saving`: by how much fewer, a ratio of medians;
`images_to`: the same for fixed distances, as `independent` passes them on its way.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from moons import wasserstein
from torch import Tensor

from stillhouse.couplings import assign, pick
from stillhouse.couplings.pairing import mean_distance
from stillhouse.engine.ema import Averages, PowerFunction
from stillhouse.models import DiffusersNetwork
from stillhouse.models.plane import PlaneNetwork
from stillhouse.objectives import Consistent, Draws, ImprovedConsistency
from stillhouse.process import EDM, TOYS, Batch, NetworkDenoiser

RESULTS = Path(__file__).parent / "results"
TOY = TOYS["ring"]()
PROCESS = EDM(sigma_data=0.7)
AVERAGE = PowerFunction(sigma_rel=0.1)
BATCH, SEEDS, CANDIDATES = 256, 3, 4
GOALS = (0.1, 0.05, 0.03)  # W2^2


def independent(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator)


def assignment(x: Tensor, generator: torch.Generator, pool: int = BATCH) -> Tensor:
    noise = torch.randn(x.shape, generator=generator)
    return noise[assign(x, noise, block=pool)]


def nearest(x: Tensor, generator: torch.Generator) -> Tensor:
    noises = torch.randn(CANDIDATES, *x.shape, generator=generator)
    return noises[pick(x, noises), torch.arange(len(x))]


Noise = Callable[[Tensor, torch.Generator], Tensor]
ARMS: dict[str, Noise] = {
    "independent": independent,
    "assignment": assignment,
    "assignment/4": partial(assignment, pool=4),
    "nearest": nearest,
}


class Effort(NamedTuple):
    """How long to train, how often to look, and how many points to judge by."""

    steps: int = 4000
    checkpoints: int = 16
    points: int = 1024
    width: int = 64

    @property
    def images(self) -> list[int]:
        """Seen at the checkpoints."""
        return [self.steps * BATCH * n // self.checkpoints for n in range(1, self.checkpoints + 1)]


QUICK = Effort(steps=16, checkpoints=4, points=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    quick = parser.parse_args().quick
    effort, seeds = (QUICK, 1) if quick else (Effort(), SEEDS)
    began = time.process_time()
    curves = {name: [curve(name, seed, effort) for seed in range(seeds)] for name in ARMS}
    result = {
        "quick": quick,
        "reduction": reductions(),
        "images": effort.images,
        "w2": curves,
        "floor": [floor(seed, effort.points) for seed in range(seeds)],
        **savings(curves, effort.images),
        **effort._asdict(),
        "batch": BATCH,
        "cpu_minutes": round((time.process_time() - began) / 60, 1),
    }
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "consistency.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


# ---------------------------------------------------------------- training


def curve(name: str, seed: int, effort: Effort) -> list[float]:
    """W2^2 at the checkpoints. Arms of a seed begin alike and see the same data and levels."""
    torch.manual_seed(seed)
    model = PlaneNetwork(width=effort.width)
    denoiser = NetworkDenoiser(DiffusersNetwork(model), PROCESS, "edm")
    objective = ImprovedConsistency(total_images=effort.images[-1], last_steps=160)
    averages = Averages(denoiser, [AVERAGE])
    optimiser = torch.optim.RAdam(denoiser.parameters(), lr=5e-4)
    data, noise = (torch.Generator().manual_seed(2 * seed + n) for n in (0, 1))
    found = []
    for step in range(effort.steps):
        batch = draw(ARMS[name], objective, step * BATCH, data, noise)
        optimiser.zero_grad()
        objective(denoiser, batch, Draws(seed)).total.backward()
        optimiser.step()
        averages.update((step + 1) * BATCH)
        if averages.images in effort.images:
            with averages.applied(AVERAGE.name):
                found.append(quality(denoiser, seed, effort.points))
    print(name, seed, found, flush=True)
    return found


def draw(
    arm: Noise,
    objective: ImprovedConsistency,
    seen: int,
    data: torch.Generator,
    noise: torch.Generator,
) -> Batch:
    x = TOY.sample(BATCH, data).float()
    u = torch.rand(BATCH, generator=data, dtype=torch.float64)
    batch = Batch(data=x, key=torch.arange(seen, seen + BATCH), noise=arm(x, noise))
    return replace(batch, sigma=objective.sigmas(u, batch))


# ---------------------------------------------------------------- judging


@torch.no_grad()
def quality(denoiser: NetworkDenoiser, seed: int, points: int) -> float:
    """W2^2 of one-step samples; noise and data are spread evenly, to be apart by little else."""
    high = torch.tensor(PROCESS.sigma_max, dtype=torch.float64)
    noise = torch.quasirandom.SobolEngine(2, scramble=True, seed=seed).draw(points)
    x = PROCESS.start(torch.special.ndtri(noise.double()).float(), high)
    landed = Consistent(denoiser, PROCESS.sigma_min)(x, high)
    return round(wasserstein(landed, even(points, 1000 + seed)), 5)


def even(points: int, seed: int) -> Tensor:
    """As many points of each Gaussian."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.arange(points) % len(TOY.means)
    place = torch.randn(points, 2, generator=generator)
    return TOY.means[which] + TOY.stds[which, None] * place


def floor(seed: int, points: int) -> float:
    """Of the data that this seed is judged by, to others."""
    return round(wasserstein(even(points, 1000 + seed), even(points, 2000 + seed)), 5)


def reductions(batches: int = 20) -> dict[str, float]:
    """By arm, over batches of the training's size."""
    total = dict.fromkeys(ARMS, 0.0)
    for (name, arm), batch in product(ARMS.items(), range(batches)):
        generator = torch.Generator().manual_seed(batch)
        x = TOY.sample(BATCH, generator).float()
        total[name] += mean_distance(x, arm(x, generator))
    return {name: round(1 - each / total["independent"], 4) for name, each in total.items()}


def savings(curves: dict[str, list[list[float]]], images: Sequence[int]) -> dict[str, dict]:
    goals = [each[-1] for each in curves["independent"]]
    equal = {
        name: [reached(each, goal, images) for each, goal in zip(found, goals, strict=True)]
        for name, found in curves.items()
    }
    middle = {  # None, which is never, lies above all
        name: statistics.median_high([math.inf if n is None else n for n in found])
        for name, found in equal.items()
    }
    saving = {name: round(middle["independent"] / each, 2) for name, each in middle.items()}
    return {"images_to_equal": equal, "saving": saving, "images_to": passing(curves, images)}


def passing(
    curves: dict[str, list[list[float]]], images: Sequence[int]
) -> dict[str, dict[str, list[int | None]]]:
    """By goal, arm and seed."""
    return {
        str(goal): {
            name: [reached(each, goal, images) for each in found] for name, found in curves.items()
        }
        for goal in GOALS
    }


def reached(curve: Sequence[float], goal: float, images: Sequence[int]) -> int | None:
    """The images at the first checkpoint that is as good as the goal."""
    return next((n for n, value in zip(images, curve, strict=True) if value <= goal), None)


if __name__ == "__main__":
    main()
