"""Cost of an iteration of EM distillation beside the network calls in it.

    python benchmarks/emd.py [--quick]

Last line, JSON, also in results/emd.json unless --quick: `overhead` = time of an iteration on the
Fashion-MNIST model (one update of the fake score, a chain of K = 4 steps on noise and latent, one
update of the generator, with noise drawn, gradients clipped and weights moved) / time of the bare
calls in it (for each step of the chain a forward of the generator, a vector-Jacobian product and
two forwards of denoisers; a forward of the generator, and a forward and a backward of each network
that learns), alternately in one run, median over rounds.
"""

import argparse
import json
import os
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import alternately

from stillhouse.distill.emd import emd
from stillhouse.distill.langevin import Langevin
from stillhouse.distill.matching import Matching
from stillhouse.distill.trajectories import Labels, Starts, frozen
from stillhouse.engine.loop import Engine, LoopConfig
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World
from stillhouse.pipelines import load_denoiser
from stillhouse.process import Condition

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
HERE = World(0, 1, torch.device("cpu"))
CLASSES, SIGMA, STEPS = 10, 20.0, 4


def networks() -> tuple[Any, Any, Any]:
    """Student, fake score and teacher."""
    student, score, teacher = (load_denoiser(ROOT / "reference/fashion") for _ in range(3))
    return student.train(), score.train(), frozen(teacher)


@dataclass
class Distilling:
    """A run without pictures and checkpoints."""

    engine: Engine
    feed: Any

    @classmethod
    def of(cls, batch: int, shape: tuple[int, ...]) -> "Distilling":
        student, score, teacher = networks()
        method = partial(emd, chain=Langevin(STEPS))
        task = Matching(student, score, teacher, SIGMA, HERE, method=method)
        settings = NetworkConfig(optimiser=AdamW(lr=2e-6, betas=(0.0, 0.99)), clip=1.0)
        engine = Engine(
            task, LoopConfig(batch=batch), {"student": settings, "score": settings}, HERE
        )
        starts = Starts(shape, 0, Labels(CLASSES, 0))
        return cls(engine, starts.feed(0, batch, HERE))

    def step(self) -> None:
        self.engine._step(next(self.feed))


@dataclass
class Bare:
    """Networks of the same kind, and nothing but their calls."""

    student: Any
    score: Any
    teacher: Any
    x: torch.Tensor
    sigma: torch.Tensor  # [B]
    cond: Condition

    def step(self) -> None:
        self._learnt(self.score, self._sample(self.x).detach())
        self.student.eval()
        self.score.eval()
        for _ in range(STEPS):
            z = self.x.detach().requires_grad_()
            with torch.enable_grad():
                y = self._sample(z)
            gap = self._answer(self.teacher, y) - self._answer(self.score, y)
            torch.autograd.grad(y, z, gap)
        self.student.train()
        self.score.train()
        self._learnt(self.student, self.x)

    def _sample(self, z: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(z.requires_grad):
            return self.student(SIGMA * z, torch.tensor(SIGMA), self.cond)

    @torch.no_grad()
    def _answer(self, denoiser: Any, x: torch.Tensor) -> torch.Tensor:
        return denoiser(x, self.sigma, self.cond)

    def _learnt(self, denoiser: Any, x: torch.Tensor) -> None:
        denoiser.zero_grad()  # adding to the last gradient would be work that no iteration does
        denoiser(x, self.sigma, self.cond).square().sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    quick = parser.parse_args().quick
    result = {"quick": quick, **overhead(4 if quick else 32, 2 if quick else 15)}
    result |= {"cores": os.cpu_count(), "torch": torch.__version__}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "emd.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def overhead(batch: int, rounds: int) -> dict[str, Any]:
    student, score, teacher = networks()
    shape = student.network.data_shape
    cond = Condition(label=torch.arange(batch) % CLASSES)
    sigma = torch.full((batch,), 1.0, dtype=torch.float64)
    bare = Bare(student, score, teacher, torch.randn(batch, *shape), sigma, cond)
    run = Distilling.of(batch, shape)
    seconds = alternately({"step": run.step, "bare": bare.step}, repeats=rounds, warmup=1)
    ratios = [a / b for a, b in zip(seconds["step"], seconds["bare"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "overhead": round(middle, 4),
        "overhead_quartiles": [round(low, 4), round(high, 4)],
        "step_ms": round(1e3 * statistics.median(seconds["step"]), 1),
        "steps": STEPS,
        "batch": batch,
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
