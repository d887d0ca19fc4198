"""Straight paths, and what a condition does to them: flow matching from 8 Gaussians to two moons.

    python benchmarks/moons.py [--quick]

The source stands for noise, so a coupling pairs it with the moons. The set-up is that of Cheng &
Schwing 2025, "The Curse of Conditions", figure 1, from whose code source and moons are taken to the
letter: Gaussians of variance sqrt(0.1) on a circle of radius 5; moons blurred along the diagonal by
up to 0.2, times 3, minus 1. Smaller here: the network, the training, and the pool (the batch).

Last line, JSON, also in results/moons.json unless --quick: for each arm, a value per seed of
`one_step`, `adaptive`: W2^2 of as many generated as real points, by exact assignment, after one
Euler step and with Runge-Kutta 4(5) at a tolerance of 1e-5;
`one_step_by_class`, `adaptive_by_class`: its mean over the moons, where they are the condition.
`floor` and `floor_by_class` are what two real sets are apart. The file also has some points.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from stillhouse.couplings import Assignment, Conditional, Coupling, Independent
from stillhouse.couplings.solve import solve
from stillhouse.models import DiffusersNetwork
from stillhouse.models.plane import PlaneNetwork
from stillhouse.objectives import Draws, FlowMatching
from stillhouse.objectives.base import SIGMA_FLOOR
from stillhouse.process import SIGMA_CAP, Batch, Condition, Flow, NetworkDenoiser, levels
from stillhouse.solvers import sample_euler

RESULTS = Path(__file__).parent / "results"
PROCESS = Flow(time_scale=1.0)
OBJECTIVE = FlowMatching(levels.UniformTime(PROCESS))
BATCH, SEEDS, SHOWN = 256, 3, 300
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Arm:
    """A coupling, and whether the network is told the moon."""

    coupling: Coupling
    told: bool = False


ARMS = {
    "independent": Arm(Independent()),
    "assignment": Arm(Assignment()),
    "told/independent": Arm(Independent(), told=True),
    "told/assignment": Arm(Assignment(), told=True),
    "told/within-class": Arm(Conditional(), told=True),
    "told/soft": Arm(Conditional(mode="soft"), told=True),
}


class Effort(NamedTuple):
    """How long to train, and how many points to judge by."""

    iterations: int = 4000
    points: int = 2000
    width: int = 64


QUICK = Effort(iterations=20, points=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    quick = parser.parse_args().quick
    effort, seeds = (QUICK, 1) if quick else (Effort(), SEEDS)
    began = time.process_time()
    runs = [{name: run(name, seed, effort) for name in ARMS} for seed in range(seeds)]
    result = {
        "quick": quick,
        "arms": {name: columns([each[name].distances for each in runs]) for name in ARMS},
        **columns([floors(seed, effort.points) for seed in range(seeds)]),
        **effort._asdict(),
        "batch": BATCH,
        "cpu_minutes": round((time.process_time() - began) / 60, 1),
    }
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        shown = {name: found.shown for name, found in runs[0].items()}
        text = json.dumps(result | {"shown": shown}, indent=2)
        (RESULTS / "moons.json").write_text(text + "\n")
    print(json.dumps(result))


def columns(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [round(row[name], 5) for row in rows] for name in rows[0]}


# ---------------------------------------------------------------- points


def eight_gaussians(count: int, generator: torch.Generator, *, even: bool = False) -> Tensor:
    """As many of each Gaussian, and with each moon, if `even`."""
    which = torch.arange(count) // 2 % 8
    if not even:
        which = torch.randint(8, (count,), generator=generator)
    angle = which * (torch.pi / 4)
    around = 0.1**0.25 * torch.randn(count, 2, generator=generator)
    return 5 * torch.stack([angle.cos(), angle.sin()], 1) + around


def two_moons(
    count: int, generator: torch.Generator, *, even: bool = False
) -> tuple[Tensor, Tensor]:
    """Points in turns from both moons, and which moon; all along the moons alike if `even`."""
    moon = torch.arange(count) % 2
    angle = torch.pi * torch.rand(count, generator=generator)
    if even:
        angle = torch.linspace(0, torch.pi, count)
    upper = torch.stack([angle.cos(), angle.sin()], 1)
    x = torch.where(moon[:, None] == 0, upper, torch.tensor([1.0, 0.5]) - upper)
    return 3 * (x + 0.2 * torch.rand(count, 1, generator=generator)) - 1, moon


# ---------------------------------------------------------------- training


def draw(arm: Arm, generator: torch.Generator) -> Batch:
    """Moons with the source that they meet, at times drawn evenly."""
    x, moon = two_moons(BATCH, generator)
    source = eight_gaussians(BATCH, generator)
    u = torch.rand(BATCH, generator=generator, dtype=torch.float64)
    cond = Condition(label=moon)
    met = arm.coupling(x, source, cond).noise(source)
    batch = Batch(data=x, condition=cond if arm.told else None, noise=met)
    return replace(batch, sigma=OBJECTIVE.sigmas(u, batch).clamp(min=SIGMA_FLOOR))


def train(arm: Arm, seed: int, effort: Effort) -> NetworkDenoiser:
    """Every arm of a seed begins with the same weights and sees the same points."""
    torch.manual_seed(seed)
    model = PlaneNetwork(width=effort.width, num_class_embeds=2 if arm.told else None)
    denoiser = NetworkDenoiser(DiffusersNetwork(model), PROCESS, "flow")
    optimiser = torch.optim.Adam(denoiser.parameters(), lr=2e-3, fused=True)
    schedule = CosineAnnealingLR(optimiser, effort.iterations)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(effort.iterations):
        loss = OBJECTIVE(denoiser, draw(arm, generator), Draws(seed))
        optimiser.zero_grad()
        loss.total.backward()
        optimiser.step()
        schedule.step()
    return denoiser.eval()


# ---------------------------------------------------------------- sampling


@torch.no_grad()
def one_step(denoiser: NetworkDenoiser, source: Tensor, cond: Condition | None) -> Tensor:
    """Euler from pure source to data in one."""
    grid = torch.tensor([SIGMA_CAP, 0.0], dtype=torch.float64)
    return sample_euler(denoiser, SIGMA_CAP * source, grid, cond)


@torch.no_grad()
def adaptive(denoiser: NetworkDenoiser, source: Tensor, cond: Condition | None) -> Tensor:
    """dx/dt = u(x, t) from t = 1 to 0, in the flow's own coordinates."""
    from scipy.integrate import solve_ivp

    def velocity(t: float, state: Any) -> Any:
        x = torch.as_tensor(state, dtype=torch.float32).view_as(source)
        return denoiser.network(x, torch.full((len(x),), t), cond).flatten().double().numpy()

    start = source.flatten().double().numpy()
    end = solve_ivp(velocity, (1.0, 0.0), start, rtol=TOLERANCE, atol=TOLERANCE).y[:, -1]
    return torch.as_tensor(end, dtype=torch.float32).view_as(source)


SAMPLERS = {"one_step": one_step, "adaptive": adaptive}


class Run(NamedTuple):
    """What a trained arm is worth, and what it looks like."""

    distances: dict[str, float]
    shown: dict[str, str]


def run(name: str, seed: int, effort: Effort) -> Run:
    arm = ARMS[name]
    denoiser = train(arm, seed, effort)
    generator = torch.Generator().manual_seed(1000 + seed)
    real, moon = two_moons(effort.points, generator, even=True)
    source = eight_gaussians(effort.points, generator, even=True)
    cond = Condition(label=moon) if arm.told else None
    found = {each: sampler(denoiser, source, cond) for each, sampler in SAMPLERS.items()}
    distances = {each: wasserstein(x, real) for each, x in found.items()}
    if arm.told:
        distances |= {f"{each}_by_class": by_class(x, real, moon) for each, x in found.items()}
    print(name, seed, distances, flush=True)
    shown = {"source": source} | found
    return Run(distances, {each: as_text(x) for each, x in shown.items()})


def floors(seed: int, points: int) -> dict[str, float]:
    """Of the real set that this seed is judged by, to another."""
    real, moon = two_moons(points, torch.Generator().manual_seed(1000 + seed), even=True)
    other, _ = two_moons(points, torch.Generator().manual_seed(2000 + seed), even=True)
    return {"floor": wasserstein(other, real), "floor_by_class": by_class(other, real, moon)}


def wasserstein(x: Tensor, y: Tensor) -> float:
    """W2^2 between sets of equal size: the least mean squared distance of a matching."""
    cost = torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist") ** 2
    return float(cost.gather(1, solve(cost)[:, None]).mean())


def by_class(x: Tensor, y: Tensor, label: Tensor) -> float:
    """Its mean over classes; both sets have these labels."""
    parts = [wasserstein(x[label == each], y[label == each]) for each in label.unique()]
    return sum(parts) / len(parts)


def as_text(x: Tensor) -> str:
    """Few points in little room, in turns from both moons where they were asked for."""
    return " ".join(f"{a:.2f},{b:.2f}" for a, b in x[:SHOWN].tolist())


if __name__ == "__main__":
    main()
