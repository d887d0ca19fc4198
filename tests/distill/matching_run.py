"""Runs of distribution matching for tests, here or as processes of their own (torchrun).

PYTHONPATH=tests python matching_run.py '{"method": "sid", "sharding": "fsdp", ...}'

Prints the log as JSON, and the sums of squares of all weights.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from distill.toys import three_on_a_circle
from engine.toy_run import Lines
from torch import Tensor, nn

from stillhouse.distill.emd import METHODS, Method, emd
from stillhouse.distill.langevin import Langevin
from stillhouse.distill.lora_score import LoraScore
from stillhouse.distill.matching import Matching
from stillhouse.distill.trajectories import Labels, Start, Starts, frozen
from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.loop import Engine, LoopConfig
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.sharding import Spread, spread
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World, world
from stillhouse.objectives.denoising import Denoising
from stillhouse.process import Condition
from stillhouse.process.levels import LogUniform

BATCH, STEPS = 12, 20
LEVELS = LogUniform(0.1, 10.0)


class Blocks(nn.Module):
    """A denoiser of the plane with a module list, to be sharded block by block, and dropout."""

    def __init__(self, dropout: float = 0.0, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.label = nn.Linear(4, width), nn.Embedding(3, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout), nn.SiLU())
            for _ in range(depth)
        )
        self.outward = nn.Linear(width, 2)

    def forward(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        level = sigma.to(x).expand(len(x))[:, None]
        known = torch.cat([level.log() / 4, level / (1 + level)], 1)
        h = self.inward(torch.cat([x / (1 + level**2).sqrt(), known], 1))
        if cond is not None and cond.label is not None:
            h = h + self.label(cond.label)
        for block in self.blocks:
            h = h + block(h)
        return x / (1 + level**2) + self.outward(h)


class WideStarts(Starts):
    """Latents in float64."""

    def rows(self, key: Tensor) -> Start:
        found = super().rows(key)
        return replace(found, noise=found.noise.double())


def adapted(network: nn.Module) -> nn.Module:
    """With adapters (rank 2) of some effect on its blocks."""
    import peft

    options = peft.LoraConfig(r=2, target_modules=r"blocks\.\d+\.0", init_lora_weights=False)
    torch.manual_seed(1)
    peft.inject_adapter_in_model(options, network)
    return network


def networks_of(here: World, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Student, fake score and teacher: of the same weights at first, or a formula (`analytic`)."""
    dropout, sizes = options.get("dropout", 0.0), options.get("sizes", {})
    sharding = options.get("sharding", "none")
    student, score, teacher = (Blocks(dropout, **sizes) for _ in range(3))
    if not options.get("single"):
        student, score, teacher = student.double(), score.double(), teacher.double()
    if options.get("lora"):
        score = LoraScore(adapted(score)).double()
        return student, score, score.teacher
    if options.get("analytic", True):
        return student, score, three_on_a_circle()
    nn.init.normal_(teacher.outward.weight, std=0.1)
    return student, score, spread(frozen(teacher), Spread(sharding=sharding), here)


def method_of(**options: Any) -> Method:
    name = options.get("method", "emd")
    if name != "emd":
        return METHODS[name]
    chain = Langevin(options.get("K", 3), latent_step=options.get("latent_step", 1e-3))
    return partial(emd, chain=chain)


def task_of(here: World, **options: Any) -> Matching:
    student, score, teacher = networks_of(here, **options)
    return Matching(
        student,
        score,
        teacher,
        2.5,
        here,
        options.get("seed", 0),
        method=method_of(**options),
        levels=LEVELS,
        objective=Denoising(LEVELS),
        score_steps=options.get("score_steps", 2),
    )


def engine_of(task: Matching, here: World, lines: Lines | None = None, **options: Any) -> Engine:
    """Both networks with Adam, the fake score five times as fast, and an average of each."""
    how = Spread(
        sharding=options.get("sharding", "none"),
        checkpointing=options.get("checkpointing", False),
        precision=options.get("precision", "fp32"),
    )

    def network(lr: float) -> NetworkConfig:
        return NetworkConfig(
            optimiser=AdamW(lr=lr, betas=(0.0, 0.99)),
            spread=how,
            micro_batch=options.get("micro", 0),
            averages=(HalfLife(images=100),),
        )

    batch, steps = options.get("batch", BATCH), options.get("steps", STEPS)
    every = batch * options.get("save_every", 10_000)
    config = LoopConfig(images=batch * steps, batch=batch, log_every=1, checkpoint_every=every)
    store = options.get("store")
    return Engine(
        task,
        config,
        {"student": network(2e-3), "score": network(1e-2)},
        here,
        store=CheckpointStore(store) if store else None,
        trackers=[lines] if lines else [],
        hooks=[(batch * options.get("stop_at", 10_000), Engine.stop)],
    )


def starts(**options: Any) -> Starts:
    kind = Starts if options.get("single") else WideStarts
    return kind((2,), seed=0, conditions=Labels(3, seed=0))


def train(here: World, **options: Any) -> list[dict[str, Any]]:
    """The log lines; `stop_at`: told to stop by then, in batches. Last of all the weights' sums."""
    lines = Lines()
    engine = engine_of(task_of(here, **options), here, lines, **options)
    engine.resume()
    engine.run(starts(**options).feed(engine.images, engine.config.batch, here))
    return [*lines.lines, fingerprint(engine)]


def fingerprint(engine: Engine) -> dict[str, float]:
    """The norm of all weights and averages, which no log line shows."""
    found = {}
    for name, trained in engine.networks.items():
        for average in ("", *trained.averages.weights):
            weights: Mapping[str, Tensor] = trained.weights(average)
            norms = [float(w.double().square().sum()) for w in weights.values()]
            found[f"{name}/{average}"] = sum(norms)
    return {"images": engine.images, **found}


def peak_bytes(**options: Any) -> int:
    """The most that tensors took in a step beyond what was there, where activations weigh most."""
    here, batch = World(0, 1, torch.device("cpu")), 512
    options = {"sizes": {"width": 64, "depth": 8}, "batch": batch, **options}
    engine = engine_of(task_of(here, **options), here, **options)
    items = starts(**options).feed(0, batch, here)
    engine._step(next(items))  # optimisers have their moments from here on
    with torch.profiler.profile(profile_memory=True) as profile:
        engine._step(next(items))
    results: Any = profile.profiler
    changes = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    return max(accumulate(e.nbytes() for e in changes))


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        lines = train(here, **options)
        if here.rank == 0:
            print(json.dumps(lines), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
