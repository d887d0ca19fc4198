"""One-step generators in the plane: which modes are kept, and how well; a toy, with exact teachers.

    python benchmarks/generators.py [TARGET ...] [--methods METHOD ...] [--updates N] [--quick]

Targets are mixtures of Gaussians, whose denoiser is exact: `ring` (8 of them), `checkerboard`, and
`rare` (two modes, one of which has 2% of the mass). Generator and fake score are one small network,
trained beforehand to denoise the same target, so all arms begin alike. Every method is judged twice
on its way: after as many iterations as the others, and after as many network evaluations as EMD-8
took for them. With --updates it is judged once, after so many, to see where a longer run leads.

Results, also in results/generators/TARGET.json (TARGET-N.json) unless --quick, where what is done
is not run again (one process to a file): per arm a value per seed of
`modes`      share of modes with at least half of the mass that is theirs
`density`    total variation between the histograms of generated and real points, 0 to 1
`recall`     share of real points in the neighbourhood of a generated one (k = 5)
`precision`  share of generated points in the neighbourhood of a real one
`floor` is what as many real points score. Last line: JSON.
"""

import argparse
import copy
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.distill.emd import METHODS, Method, emd, f_distill
from stillhouse.distill.langevin import Langevin
from stillhouse.distill.matching import SCORE, Matching, generated
from stillhouse.distill.sfd import NAME
from stillhouse.distill.trajectories import Starts
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.loop import Engine, LoopConfig
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World
from stillhouse.files import write_whole
from stillhouse.metrics.neighbours import prdc
from stillhouse.models import DiffusersNetwork
from stillhouse.models.plane import PlaneNetwork
from stillhouse.objectives.base import Draws
from stillhouse.objectives.denoising import Denoising
from stillhouse.process import EDM, Batch, GaussianMixture, NetworkDenoiser, toys
from stillhouse.process.levels import LogUniform

RESULTS = Path(__file__).parent / "results" / "generators"
HERE = World(0, 1, torch.device("cpu"))
BATCH, SEEDS, POINTS = 128, 3, 2000
START = 1.0  # of generators: about the size of the targets
LEVELS = LogUniform(0.05, 5.0)
RATE, SCORE_RATE = 3e-4, 1.5e-3
ITERATIONS = 800
# Of what is judged the half-life is a share of the run so far: with a fixed one a short run would
# be judged by weights of long ago, and those of long chains are short at equal evaluations.
AVERAGE = HalfLife(images=1e9, ramp=0.1)
STEPS = (1, 2, 4, 8, 16)  # of Langevin
HOWS = ("iterations", "evaluations")  # what all arms have as many of
CHAIN = {"noise_step": 0.16, "latent_step": 1e-3, "stretch": 3.0}
WIDTH, DEPTH = 128, 2
PRETRAINING = 3000, 2e-3  # steps, and the rate that they begin with
SETTINGS = {
    "batch": BATCH,
    "start": START,
    "levels": [LEVELS.sigma_min, LEVELS.sigma_max],
    "rates": [RATE, SCORE_RATE],
    "iterations": ITERATIONS,
    "average": AVERAGE.ramp,
    "chain": CHAIN,
    "network": [WIDTH, DEPTH],
    "pretraining": list(PRETRAINING),
    "points": POINTS,
}


def rare() -> GaussianMixture:
    """Two modes, one with 2% of the mass."""
    means = torch.tensor([[-0.7, 0.0], [0.9, 0.5]], dtype=torch.float64)
    return GaussianMixture(means, torch.tensor([0.25, 0.1]), torch.tensor([0.98, 0.02]))


TARGETS = {"ring": toys.ring, "checkerboard": toys.checkerboard, "rare": rare}
LATTICE = 25  # Gaussians in a square of the checkerboard
ARMS: dict[str, Method] = {
    **{f"emd-{k}": partial(emd, chain=Langevin(k, **CHAIN)) for k in STEPS},  # type: ignore[arg-type]
    **{name: method for name, method in METHODS.items() if name not in ("emd", "f-distill")},
    "f-distill": partial(f_distill, highest=LEVELS.sigma_max),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []])
    parser.add_argument("--methods", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--updates", type=int, help="judge methods after so many updates alone")
    parser.add_argument("--quick", action="store_true", help="a few iterations of one seed")
    options = parser.parse_args()
    if options.updates is not None and options.updates < 1:
        parser.error("--updates: 1 or more")
    torch.set_num_threads(1)
    names = options.targets or list(TARGETS)
    longer = f"-{options.updates}" if options.updates else ""
    kept = {
        name: Kept(None if options.quick else RESULTS / f"{name}{longer}.json", options.updates)
        for name in names
    }
    for seed in range(1 if options.quick else SEEDS):
        for name in names:
            measure(TARGETS[name](), kept[name], seed, options)
    found = {name: {key: value for key, value in each.found.items() if key != "points"}
             for name, each in kept.items()}  # fmt: skip
    print(json.dumps({"quick": options.quick, **found}))


class Kept:
    """What is known of a target, in its file after every run: one that was broken off goes on."""

    def __init__(self, file: Path | None, updates: int | None = None) -> None:
        self.file = file
        self.found: dict[str, Any] = {}
        settings = SETTINGS | {"iterations": updates or ITERATIONS}
        if file is not None and file.exists():
            self.found = json.loads(file.read_text())
            if self.found.get("settings") != settings:
                raise SystemExit(f"{file} was measured with other settings: remove it")
        self.found["settings"] = settings
        self.runs: dict[str, list[dict[str, float]]] = self.found.setdefault("runs", {})
        self.points: dict[str, Any] = self.found.setdefault("points", {})

    def write(self) -> None:
        if self.file is not None:
            self.file.parent.mkdir(exist_ok=True)
            write_whole(self.file, (json.dumps(self.found) + "\n").encode())


def measure(target: GaussianMixture, kept: Kept, seed: int, options: argparse.Namespace) -> None:
    """All arms that are asked for on one target, from one seed."""
    iterations = 4 if options.quick else kept.found["settings"]["iterations"]
    hows = HOWS[:1] if options.updates else HOWS
    real = target.sample(POINTS, torch.Generator().manual_seed(99))
    kept.found["floor"], kept.points["real"] = scores(target, real, 0), some(real)
    todo = [
        name for name in options.methods if len(kept.runs.get(f"{name}/{hows[-1]}", [])) <= seed
    ]
    if not todo:
        return
    network = trained(target, seed, steps=20 if options.quick else PRETRAINING[0])
    costs = {name: task_of(target, network, m, seed).evaluations_per_image.total()
             for name, m in ARMS.items()}  # fmt: skip
    for arm in todo:
        began = time.perf_counter()
        equal = max(1, round(iterations * costs["emd-8"] / costs[arm]))
        legs = dict(zip(hows, (iterations, equal), strict=False))
        drawn = distilled(target, network, ARMS[arm], seed, set(legs.values()))
        for how, count in legs.items():
            row = scores(target, drawn[count], seed) | {"updates": count, "cost": costs[arm]}
            kept.runs.setdefault(f"{arm}/{how}", []).append(row)
            print(f"{arm}/{how} {seed} {row}", flush=True)
        if seed == 0:
            kept.points[arm] = some(drawn[legs[hows[-1]]])
        kept.write()
        print(f"{arm} {seed} {time.perf_counter() - began:.0f} s", flush=True)


def some(points: Tensor) -> list[list[float]]:
    """To draw."""
    return [[round(value, 3) for value in point] for point in points[:500].tolist()]


# ---------------------------------------------------------------- training


def trained(target: GaussianMixture, seed: int, *, steps: int) -> NetworkDenoiser:
    """The network that generators and fake scores begin as: it has learnt to denoise."""
    torch.manual_seed(seed)
    network = NetworkDenoiser(
        DiffusersNetwork(PlaneNetwork(width=WIDTH, depth=DEPTH)), EDM(), "edm"
    )
    objective, draws = Denoising(LEVELS), Draws(seed, "generators")
    optimiser = torch.optim.Adam(network.parameters(), lr=PRETRAINING[1])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    source = torch.Generator().manual_seed(seed)
    for step in range(steps):
        key = torch.arange(step * BATCH, (step + 1) * BATCH)
        batch = Batch(target.sample(BATCH, source).float(), key=key)
        optimiser.zero_grad()
        objective(network, batch, draws).per_sample.mean().backward()
        optimiser.step()
        schedule.step()
    return network


def task_of(target: GaussianMixture, network: nn.Module, method: Method, seed: int) -> Matching:
    both = copy.deepcopy(network), copy.deepcopy(network)
    return Matching(
        *both, target, START, HERE, seed, method, LEVELS, "x0", Denoising(LEVELS), score_steps=1
    )


def distilled(
    target: GaussianMixture, network: nn.Module, method: Method, seed: int, counts: set[int]
) -> dict[int, Tensor]:
    """Points of the averaged generator after each of these counts of iterations."""
    task = task_of(target, network, method, seed)
    config = LoopConfig(images=max(counts) * BATCH, batch=BATCH, seed=seed, log_every=10**9)
    z = torch.randn(POINTS, 2, generator=torch.Generator().manual_seed(1000 + seed))
    found = dict[int, Tensor]()

    def settings(rate: float, *averages: HalfLife) -> NetworkConfig:
        optimiser = AdamW(lr=rate, betas=(0.0, 0.99))
        return NetworkConfig(optimiser=optimiser, clip=1e3, averages=averages)

    def look(engine: Engine) -> None:
        count = engine.images // BATCH
        if count in counts:
            with engine.networks[NAME].evaluating(AVERAGE.name) as denoiser:
                found[count] = generated(denoiser, z, START, None)  # type: ignore[arg-type]

    networks = {NAME: settings(RATE, AVERAGE), SCORE: settings(SCORE_RATE)}
    engine = Engine(task, config, networks, HERE, hooks=[(BATCH, look)])
    engine.run(Starts((2,), seed).feed(0, BATCH, HERE))
    return found


# ---------------------------------------------------------------- scores


def scores(target: GaussianMixture, points: Tensor, seed: int) -> dict[str, float]:
    real = target.sample(POINTS, torch.Generator().manual_seed(7 + seed)).double()
    fake = points.double()
    nearest = prdc(real, fake, k=5)
    masses, wanted = (mode_masses(target, rows) for rows in (fake, real))
    kept = (masses >= 0.5 * wanted)[wanted > 0].double().mean()
    return {
        "modes": float(kept),
        "density": 0.5 * float((histogram(fake) - histogram(real)).abs().sum()),
        "recall": float(nearest.recall),
        "precision": float(nearest.precision),
    }


def mode_masses(target: GaussianMixture, points: Tensor) -> Tensor:
    """The share of points that lie nearest to each mode, in its own deviations, and within 4.

    A mode is a Gaussian; of the checkerboard, a square.
    """
    away = torch.cdist(points, target.means.double()) / target.stds.double()
    found, index = away.min(1)
    each = LATTICE if len(target.means) > 2 * LATTICE else 1
    count = len(target.means) // each
    return torch.bincount(index[found < 4] // each, minlength=count) / len(points)


def histogram(points: Tensor, bins: int = 24, reach: float = 1.5) -> Tensor:
    """Shares of the cells of a square; what lies beyond is counted at its border."""
    inside = ((points.clamp(-reach, reach) / reach + 1) / 2 * bins).floor().clamp(max=bins - 1)
    cells = (inside[:, 0] * bins + inside[:, 1]).long()
    return torch.bincount(cells, minlength=bins**2) / len(points)


if __name__ == "__main__":
    main()
