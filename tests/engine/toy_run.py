"""A run for tests, started as a real process (or by torchrun): prints its losses as JSON.

python toy_run.py '{"sharding": "ddp", "steps": 50, ...}'
"""

import json
import os
import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.ema import HalfLife, PowerFunction
from stillhouse.engine.loop import Engine, LoopConfig, Tracker
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.sharding import Spread
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World, world

BATCH = 12


class Net(nn.Module):
    """Small, with a module list for per-block sharding and a dropout for keyed randomness."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Dropout(dropout)) for _ in range(3)]
        )
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Item(NamedTuple):
    batch: torch.Tensor
    state: dict[str, Any]


class Rows(torch.Tensor):
    """A batch that knows its sample ids."""

    ids: torch.Tensor


def feed(start: int, rank: int, size: int, poison: set[int]):
    """Batch after batch of rows keyed by their index; the position is the number of rows."""
    share = BATCH // size
    while True:
        rows = []
        for index in range(start + rank * share, start + (rank + 1) * share):
            row = torch.randn(4, generator=torch.Generator().manual_seed(index))
            rows.append(torch.full((4,), torch.nan) if index in poison else row)
        batch = torch.stack(rows).as_subclass(Rows)
        batch.ids = torch.arange(start + rank * share, start + (rank + 1) * share)
        start += BATCH
        yield Item(batch, {"rows": start})


class Plain:
    """A task without numbers of its own."""

    def report(self):
        return {}


class OneNetwork(Plain):
    """Plain regression."""

    def __init__(self, dropout: float) -> None:
        self.net = Net(0, dropout)

    def modules(self):
        return {"net": self.net}

    def step(self, batch, engine):
        def loss(x):
            x = x.as_subclass(torch.Tensor)
            return (engine["net"](x) - x.sin()).square().mean(1), None

        engine.update("net", loss, batch)


class ThreeDependentUpdates(Plain):
    """Two networks, three updates per batch, each needing the one before (SFD- and EMD-like)."""

    def __init__(self, dropout: float) -> None:
        self.student, self.critic = Net(0, dropout), Net(1, dropout)

    def modules(self):
        return {"student": self.student, "critic": self.critic}

    def step(self, batch, engine):
        x = batch.as_subclass(torch.Tensor)

        def walk(rows):
            state, goal = rows
            moved = state + 0.5 * engine["student"](state)
            return (moved - goal).square().mean(1), moved

        def judge(rows):
            return (engine["critic"](rows) - rows.cos()).square().mean(1), None

        x1 = engine.update("student", walk, (x, x.sin()))
        engine.update("critic", judge, x1)
        engine.update("student", walk, (x1, x.cos()))


TASKS = {"one": OneNetwork, "three": ThreeDependentUpdates}


class Lines(Tracker):
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def start(self, images):
        pass

    def log(self, images, values):
        self.lines.append({"images": images, **values})

    def close(self) -> None:
        pass


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        train(options, here)


def train(options: dict[str, Any], here: World) -> None:
    """A function of its own: its networks go before the world does."""
    task = TASKS[options.get("task", "one")](options.get("dropout", 0.0))
    spread = Spread(
        sharding=options.get("sharding", "none"),
        shard_size=options.get("shard_size", 0),
        precision=options.get("precision", "fp32"),
        checkpointing=options.get("checkpointing", False),
    )
    network = NetworkConfig(
        optimiser=AdamW(lr=1e-2, warmup=100),
        spread=spread,
        clip=options.get("clip", 1.0),
        micro_batch=options.get("micro", 0),
        averages=(HalfLife(images=100), PowerFunction(sigma_rel=0.1)),
    )
    config = LoopConfig(
        images=BATCH * options["steps"],
        batch=BATCH,
        log_every=1,
        checkpoint_every=BATCH * options.get("save_every", 10_000),
        max_skips=options.get("max_skips", 3),
    )
    lines = Lines()
    store = CheckpointStore(options["store"]) if "store" in options else None
    engine = Engine(
        task,
        config,
        dict.fromkeys(task.modules(), network),
        here,
        store=store,
        trackers=[lines] if here.rank == 0 else [],
    )
    engine.resume()
    engine.run(feed(engine.images, here.rank, here.size, set(options.get("poison", ()))))
    if here.rank == 0:
        print(json.dumps(lines.lines))
        sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(json.loads(sys.argv[1]))
