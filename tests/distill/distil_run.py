"""A run of SFD-v for tests, here or as a process of its own (torchrun): prints its log as JSON.

PYTHONPATH=tests python distil_run.py '{"sharding": "ddp", ...}'
"""

import json
import sys
from typing import Any

import torch
from distill.toys import Residual, three_on_a_circle
from engine.toy_run import Lines
from torch import Tensor, nn

from stillhouse.distill.grids import Polynomial
from stillhouse.distill.sfd import SFD
from stillhouse.distill.trajectories import Labels, Starts, Teacher
from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.loop import Engine, LoopConfig
from stillhouse.engine.optimisers import AdamW, Steps
from stillhouse.engine.sharding import Spread
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World, world

BATCH, STEPS = 12, 24


class Wide(Polynomial):
    """States in float64.

    The first step from 80 misses its goal by 6e-4 only: in float32 its loss is half rounding, the
    sign of which the L1 loss and Adam would carry into every weight.
    """

    def start(self, noise: Tensor, sigma: float) -> Tensor:
        return super().start(noise.double(), sigma)


class Dropping(Residual):
    """With dropout, which shows whether randomness is keyed or consumed."""

    def forward(self, x, sigma, cond=None):
        rate = 0.1 if self.training else 0.0
        return nn.functional.dropout(super().forward(x, sigma, cond), rate)


def train(here: World, **options: Any) -> list[dict[str, Any]]:
    """The log lines; `stop_at`: told to stop by then, in batches."""
    data, grids, afs = three_on_a_circle(), Wide(), options.get("afs", True)
    student = (Dropping if options.get("dropout") else Residual)(data).double()
    task = SFD(student, Teacher(data, grids), grids, (4, 5, 6), here, afs=afs, told=True)
    network = NetworkConfig(
        optimiser=AdamW(lr=1e-2, schedule=Steps()),
        spread=Spread(sharding=options.get("sharding", "none")),
        micro_batch=options.get("micro", 0),
    )
    every = BATCH * options.get("save_every", 10_000)
    config = LoopConfig(images=BATCH * STEPS, batch=BATCH, log_every=1, checkpoint_every=every)
    store, lines = options.get("store"), Lines()
    engine = Engine(
        task,
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
