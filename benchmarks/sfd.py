"""Cost of a distillation step beside the network calls in it.

    python benchmarks/sfd.py [--quick]

Last line, JSON, also in results/sfd.json unless --quick: `overhead` = time of a step of SFD on the
Fashion-MNIST model (2 evaluations with an analytical first step, K = 4: 12 calls of the teacher, 2
updates of the student, with noise drawn, classes dealt, gradients clipped and weights moved) / time
of the bare calls in it (12 forwards without gradient, 2 forwards and backwards), alternately in one
run, median over rounds.
"""

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import alternately

from stillhouse.distill.trajectories import Starts
from stillhouse.engine.loop import Engine
from stillhouse.engine.world import World, world
from stillhouse.process import Condition
from stillhouse.recipes.distill.distilling import lesson, plan_walk
from stillhouse.recipes.distill.methods import Sfd
from stillhouse.recipes.distill.settings import DistillRun
from stillhouse.recipes.distill.students import load_source, load_student
from stillhouse.recipes.distill.told import Conditions

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
HERE = World(0, 1, torch.device("cpu"))
REFINEMENT, EVALUATIONS = 4, 2


@dataclass
class Distilling:
    """A run without pictures and checkpoints."""

    engine: Engine
    feed: Any

    @classmethod
    def of(cls, config: DistillRun) -> "Distilling":
        source = load_source(config, HERE)
        walk = plan_walk(config, source, (EVALUATIONS,))
        student = load_student(config, source, walk)
        task = config.method.task(lesson(config, source, student, walk, HERE))
        engine = Engine(task, config, {"student": config.network_config(HERE)}, HERE)
        starts = Starts(source.subject.shape, config.seed, Conditions(source.subject, config.seed))
        return cls(engine, starts.feed(0, config.batch, HERE))

    def step(self) -> None:
        self.engine._step(next(self.feed))


@dataclass
class Bare:
    """The same networks, and nothing but their calls."""

    teacher: Any
    student: Any
    x: torch.Tensor
    cond: Condition
    sigma: torch.Tensor

    def step(self) -> None:
        with torch.no_grad():
            for _ in range(REFINEMENT * (EVALUATIONS + 1)):
                self.teacher(self.x, self.sigma, self.cond)
        for _ in range(EVALUATIONS):
            self.student(self.x, self.sigma, self.cond).abs().sum().backward()
            self.student.zero_grad()  # as the engine does: adding to the last would be more work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    quick = parser.parse_args().quick
    # The world also sets how memory is kept, as in every run.
    with world("cpu"), tempfile.TemporaryDirectory() as folder:
        result = {"quick": quick, **overhead(Path(folder), 4 if quick else 32, 2 if quick else 15)}
    result |= {"cores": os.cpu_count(), "torch": torch.__version__}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "sfd.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def overhead(folder: Path, batch: int, rounds: int) -> dict[str, Any]:
    config = DistillRun(
        model=str(ROOT / "reference/fashion"),
        method=Sfd(refinement=REFINEMENT),
        evaluations=str(EVALUATIONS),
        batch=batch,
        out=folder,
        device="cpu",
    )
    run = Distilling.of(config)
    again = load_source(config, HERE)
    walk = plan_walk(config, again, (EVALUATIONS,))
    cond = again.subject.condition(range(batch), HERE.device)
    assert cond is not None
    x, sigma = torch.randn(batch, *again.subject.shape), torch.tensor(1.0, dtype=torch.float64)
    bare = Bare(again.subject.denoiser, load_student(config, again, walk), x, cond, sigma)
    seconds = alternately({"step": run.step, "bare": bare.step}, repeats=rounds, warmup=1)
    ratios = [a / b for a, b in zip(seconds["step"], seconds["bare"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "overhead": round(middle, 4),
        "overhead_quartiles": [round(low, 4), round(high, 4)],
        "step_ms": round(1e3 * statistics.median(seconds["step"]), 1),
        "batch": batch,
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
