"""Runs of SFD's peers for tests, here or as processes of their own (torchrun): prints the log.

PYTHONPATH=tests python peers_run.py '{"method": "progressive", "sharding": "ddp", ...}'
"""

import json
import sys
from typing import Any

import torch
from distill.distil_run import BATCH, STEPS, Wide
from distill.toys import Gains, Residual, three_on_a_circle
from engine.toy_run import Lines
from torch import Tensor, nn

from stillhouse.distill.consistency import ConsistencyDistillation
from stillhouse.distill.progressive import Progressive
from stillhouse.distill.trajectories import Labels, Starts, Teacher
from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.loop import Engine, LoopConfig
from stillhouse.engine.optimisers import AdamW, Steps
from stillhouse.engine.sharding import Spread
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World, world
from stillhouse.process import Condition, Denoiser
from stillhouse.solvers import sample_heun


class RowGains(Gains):
    """Each row at a level of its own."""

    def forward(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        gaps = (sigma.expand(len(x))[:, None] - self.grid[:-1]).abs()
        return torch.stack(list(self.gains))[gaps.argmin(1)].to(x)[:, None] * x


class RowResidual(Residual):
    """Each row at a level of its own; nothing is told about steps."""

    def __init__(self, teacher: Denoiser, seed: int = 0) -> None:
        super().__init__(teacher, seed)
        del self.steps

    def forward(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        level = sigma.to(x).expand(len(x))[:, None]
        known = torch.cat([level.log() / 4, level / (1 + level)], 1)
        h = self.inward(torch.cat([x / (1 + level**2).sqrt(), known], 1))
        h = self.middle(nn.functional.silu(h))
        return self.teacher(x, sigma, cond) + self.outward(nn.functional.silu(h))


class Dropping(RowResidual):
    """With dropout, which shows whether randomness is keyed or consumed."""

    def forward(self, x, sigma, cond=None):
        rate = 0.1 if self.training else 0.0
        return nn.functional.dropout(super().forward(x, sigma, cond), rate)


class Drops(nn.Module):
    """A denoiser with a weight, a dropout and a running mean: in a teacher nothing may move."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(2)), nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x, sigma, cond=None):
        scaled = self.norm(x / sigma.to(x).expand(len(x))[:, None])
        return self.weight * three_on_a_circle()(x, sigma) + 0.1 * self.dropout(scaled)


class Measured:
    """Evaluations of a student, as they happen."""

    def __init__(self, student: RowResidual) -> None:
        self.forwards = self.backwards = 0
        student.register_forward_hook(self._forward)
        student.outward.bias.register_hook(self._backward)

    def _forward(self, *_) -> None:
        self.forwards += 1

    def _backward(self, _) -> None:
        self.backwards += 1


def task_of(
    method: str, student: nn.Module, here: World, teacher: Denoiser
) -> Progressive | ConsistencyDistillation:
    """Both on five levels of the plane, with walks of eight evaluations."""
    grids = Wide()
    if method == "progressive":
        return Progressive(student, teacher, grids, 4, here)
    walk = Teacher(teacher, grids, 1, sample_heun, lower_order_final=False)
    return ConsistencyDistillation(student, walk, grids, 5, here)


def train(here: World, method: str, **options: Any) -> list[dict[str, Any]]:
    """The log lines; `stop_at`: told to stop by then, in batches."""
    data = three_on_a_circle()
    student = (Dropping if options.get("dropout") else RowResidual)(data).double()
    network = NetworkConfig(
        optimiser=AdamW(lr=1e-2, schedule=Steps()),
        spread=Spread(sharding=options.get("sharding", "none")),
        micro_batch=options.get("micro", 0),
    )
    every = BATCH * options.get("save_every", 10_000)
    config = LoopConfig(images=BATCH * STEPS, batch=BATCH, log_every=1, checkpoint_every=every)
    store, lines = options.get("store"), Lines()
    engine = Engine(
        task_of(method, student, here, data),
        config,
        {"student": network},
        here,
        store=CheckpointStore(store) if store else None,
        trackers=[lines],
        hooks=[(BATCH * options.get("stop_at", 10_000), Engine.stop)],
    )
    engine.resume()
    starts = Starts((2,), seed=0, conditions=Labels(3, seed=0))
    engine.run(starts.feed(engine.images, BATCH, here))
    return lines.lines


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        lines = train(here, **options)
        if here.rank == 0:
            print(json.dumps(lines), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
