"""Cost of an iteration of EM distillation beside the network calls in it, and its memory.

    python benchmarks/emd.py [--quick] [--memory]

Last line, JSON, also in results/emd.json unless --quick: `overhead` = time of an iteration on the
Fashion-MNIST model (one update of the fake score, a chain of K = 4 steps on noise and latent, one
update of the generator, with noise drawn, gradients clipped, weights moved and averaged) / time of
the bare calls in it (for each step of the chain a forward of the generator, a vector-Jacobian
product and two forwards of denoisers; a forward of the generator, and a forward and a backward of
each network that learns), alternately in one run, median over rounds.

With --memory: bytes of real tensors, network by network, with a fake score of its own and with one
of adapters (LoRA) on the teacher; a table, and as JSON, also in results/emd_memory.json.
`parameters`, `moments` and `average` stay, `gradients` are there between a backward pass and its
step; `peak` is the most that tensors took during the updates of a network beyond what stays, by the
steps K of the chain (gradients are a part of it), of the teacher during one answer. `flat` is the
peak of a whole iteration at K = 16 / at K = 1, `saved` what adapters save of all that stays.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from timing import alternately
from torch import Tensor, nn
from torch.profiler import profile, record_function

from stillhouse.distill.emd import emd
from stillhouse.distill.langevin import Langevin
from stillhouse.distill.lora_score import LoraScore
from stillhouse.distill.matching import Matching
from stillhouse.distill.trajectories import Labels, Starts, frozen
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.loop import Engine, LoopConfig
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World, world
from stillhouse.models.adapters import add_adapters
from stillhouse.pipelines import load_denoiser
from stillhouse.process import Condition

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
HERE = World(0, 1, torch.device("cpu"))
CLASSES, SIGMA, STEPS = 10, 20.0, 4
AVERAGE = HalfLife(images=20_000)  # of the generator
RANK, CHAINS = 16, (1, 4, 16)  # of adapters; steps of chains whose memory is measured


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
        averaged = settings.model_copy(update={"averages": (AVERAGE,)})
        engine = Engine(
            task, LoopConfig(batch=batch), {"student": averaged, "score": settings}, HERE
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
        denoiser(x, self.sigma, self.cond).square().sum().backward()
        denoiser.zero_grad()  # as the engine does: a gradient that is kept takes memory from others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    parser.add_argument("--memory", action="store_true", help="bytes of each network")
    options = parser.parse_args()
    quick = options.quick
    if options.memory:
        result = {"quick": quick, **memory(2 if quick else 8)}
        print(table(result))
    else:
        with world("cpu"):  # which also sets how memory is kept, as in every run
            result = {"quick": quick, **overhead(4 if quick else 32, 2 if quick else 15)}
    result |= {"cores": os.cpu_count(), "torch": torch.__version__}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        name = "emd_memory.json" if options.memory else "emd.json"
        (RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")
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


# ---------------------------------------------------------------- memory


class Marked(Engine):
    """An engine whose updates can be found in a profile."""

    def update(self, name: str, loss: Any, rows: Any) -> Any:
        with record_function(f"update {name}"):
            return super().update(name, loss, rows)


def memory(batch: int) -> dict[str, Any]:
    """Bytes by kind of fake score and network."""
    found = {kind: measured(kind, batch) for kind in ("full", "lora")}
    stays = {kind: staying(rows.values()) for kind, rows in found.items()}
    peaks = {kind: rows["iteration"]["peak"] for kind, rows in found.items()}
    first, last = str(CHAINS[0]), str(CHAINS[-1])
    return {
        "bytes": found,
        "stays": stays,
        "saved": round(1 - stays["lora"] / stays["full"], 4),
        "flat": {kind: round(peak[last] / peak[first], 4) for kind, peak in peaks.items()},
        "batch": batch,
        "rank": RANK,
    }


def measured(kind: str, batch: int) -> dict[str, dict[str, Any]]:
    student, score, teacher = networks() if kind == "full" else sharing()
    task = Matching(student, score, teacher, SIGMA, HERE)
    optimiser = AdamW(lr=2e-6, betas=(0.0, 0.99))
    settings = {
        "student": NetworkConfig(optimiser=optimiser, averages=(AVERAGE,)),
        "score": NetworkConfig(optimiser=optimiser),
    }
    engine = Marked(task, LoopConfig(batch=batch), settings, HERE)
    feed = Starts(student.network.data_shape, 0, Labels(CLASSES, 0)).feed(0, batch, HERE)
    gradients = noted_gradients(engine)
    task.method = partial(emd, chain=Langevin(1))
    engine._step(next(feed))  # optimisers have their moments from here on
    rows: dict[str, dict[str, Any]] = {
        name: kept(engine, name) | {"gradients": gradients[name]} for name in settings
    }
    rows["teacher"] = {
        "parameters": total(teacher.parameters()) if isinstance(teacher, nn.Module) else 0
    }
    if kind == "lora":  # the layers under the adapters are the teacher's
        rows["score"]["parameters"] = sum(t.nbytes for t in score.parameters() if t.requires_grad)
        rows["teacher"]["parameters"] = total(score.parameters()) - rows["score"]["parameters"]
    rows["iteration"] = {}
    for steps in CHAINS:
        task.method = partial(emd, chain=Langevin(steps))
        found = peaks(lambda: engine._step(next(feed)))
        for name, most in found.items():
            rows[name].setdefault("peak", {})[str(steps)] = most
    cond = Condition(label=torch.arange(batch) % CLASSES)
    x, sigma = torch.randn(batch, *student.network.data_shape), torch.ones(batch).double()
    with torch.no_grad():
        answer = peaks(lambda: teacher(x, sigma, cond))["iteration"]
    rows["teacher"]["peak"] = {str(steps): answer for steps in CHAINS}
    return rows


def sharing() -> tuple[Any, Any, Any]:
    """Student, and a fake score of adapters on its teacher."""
    student, score, _ = networks()
    add_adapters(score.network.model, RANK)
    score = LoraScore(score)
    return student, score, score.teacher


def noted_gradients(engine: Engine) -> dict[str, int]:
    """Bytes of all gradients that are there as each optimiser steps."""
    found: dict[str, int] = {}

    def note(name: str, *_: Any) -> None:
        parameters = [p for n in engine.networks.values() for p in n.inner.parameters()]
        found[name] = sum(p.grad.nbytes for p in parameters if p.grad is not None)

    for name, trained in engine.networks.items():
        trained.optimiser.register_step_pre_hook(partial(note, name))
    return found


def kept(engine: Engine, name: str) -> dict[str, Any]:
    trained = engine.networks[name]
    moments = [t for state in trained.optimiser.state.values() for k, t in state.items()
               if k != "step"]  # fmt: skip
    averages = [t for weights in trained.averages.weights.values() for t in weights.values()]
    return {
        "parameters": total(trained.inner.parameters()),
        "moments": total(moments),
        "average": total(averages),
    }


def total(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def staying(rows: Iterable[dict[str, Any]]) -> int:
    return sum(row.get(name, 0) for row in rows for name in ("parameters", "moments", "average"))


def peaks(work: Callable[[], object]) -> dict[str, int]:
    """The most that tensors took, beyond what was there before: in all, and in each update."""
    with profile(profile_memory=True) as found:
        work()
    results: Any = found.profiler
    events = results.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    levels = list(zip((at for at, _ in changes), accumulate(n for _, n in changes), strict=True))
    spans = {"iteration": [(0, float("inf"))]}
    for event in events:
        if event.name().startswith("update "):
            ends = (event.start_ns(), event.start_ns() + event.duration_ns())
            spans.setdefault(event.name().removeprefix("update "), []).append(ends)
    return {
        name: max(level for at, level in levels for low, high in ends if low <= at <= high)
        for name, ends in spans.items()
    }


NAMES = {
    ("full", "teacher"): "teacher",
    ("full", "student"): "generator",
    ("full", "score"): "fake score, full",
    ("lora", "score"): f"fake score, LoRA of rank {RANK}",
    ("full", "iteration"): "all three, full",
    ("lora", "iteration"): "all three, LoRA",
}


def table(result: dict[str, Any]) -> str:
    """In markdown, in MB."""
    kinds = ("parameters", "gradients", "moments", "average")
    head = ["MB", *kinds, "stays", *(f"peak, K = {steps}" for steps in CHAINS)]
    lines = [head, ["---"] * len(head)]
    for (kind, name), label in NAMES.items():
        row = result["bytes"][kind][name]
        stays = result["stays"][kind] if name == "iteration" else staying([row])
        peak = [row["peak"][str(steps)] for steps in CHAINS]
        cells = [*(row.get(k) for k in kinds), stays, *peak]
        lines.append([label, *("" if c is None else f"{c / 1e6:.2f}" for c in cells)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
