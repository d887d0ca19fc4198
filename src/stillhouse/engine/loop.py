"""The training loop: one for every method. It drives a task and knows nothing of diffusion.

    task.step(batch, engine)            once per batch, with this process's share of it
      engine.update(name, loss, rows)   as often as the method needs; owns everything in an update

Progress is counted in images. Everything that decides what happens next is in the checkpoint or
follows from (seed, images), so a run that is killed anywhere continues bit for bit.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import nn
from torch.distributed.checkpoint import state_dict as states

from stillhouse.config import Config
from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.updates import Loss, NetworkConfig, Trained, Update
from stillhouse.engine.world import World
from stillhouse.errors import UserError


class Task(Protocol):
    """A method of training: its networks, and what it does with one batch."""

    def modules(self) -> Mapping[str, nn.Module]:
        """The networks that are trained, by name."""
        ...

    def step(self, batch: Any, engine: "Engine") -> None:
        """Makes the updates of one batch."""
        ...


class Item(Protocol):
    """What the data gives: a batch and the position after it (JSON)."""

    @property
    def batch(self) -> Any: ...
    @property
    def state(self) -> dict[str, Any]: ...


class Tracker(Protocol):
    """Where numbers go: JSONL, TensorBoard, a terminal."""

    def log(self, images: int, values: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class LoopConfig(Config):
    """How long, how often, and what to do about trouble."""

    images: PositiveInt = 1_000_000
    """Images to train on."""
    batch: PositiveInt = 256
    """Images per step, over all processes."""
    seed: int = 0
    log_every: PositiveInt = 10_000
    """Images between log lines."""
    checkpoint_every: PositiveInt = 100_000
    """Images between checkpoints."""
    keep_last: PositiveInt = 3
    keep_every: PositiveInt | None = None
    """Keep one checkpoint per so many images for good."""
    max_skips: NonNegativeInt = 10
    """Updates in a row that may be skipped for a loss or gradient that isn't finite."""


Hook = Callable[["Engine"], None]


class Engine:
    """Runs a task from where its last checkpoint is to the end."""

    def __init__(
        self,
        task: Task,
        config: LoopConfig,
        networks: Mapping[str, NetworkConfig],
        world: World,
        *,
        store: CheckpointStore | None = None,
        trackers: Sequence[Tracker] = (),
        hooks: Mapping[int, Sequence[Hook]] | None = None,
    ) -> None:
        """`hooks` maps a number of images to what is called each time so many have passed."""
        if config.batch % world.size:
            raise UserError(f"a batch of {config.batch} cannot be shared by {world.size} processes")
        self.task, self.config, self.world = task, config, world
        self.store, self.trackers, self.hooks = store, trackers, dict(hooks or {})
        self.images, self.skips_in_a_row = 0, 0
        self.position: dict[str, Any] = {}  # of this process, after its last batch
        self.positions: list[dict[str, Any]] = []  # of every process of the run that is resumed
        self.networks = {
            name: Trained.start(module, networks[name], world)
            for name, module in task.modules().items()
        }
        self.last: dict[str, Update] = {}
        self._batch: Any = None

    def __getitem__(self, name: str) -> nn.Module:
        """The network to call in a loss."""
        return self.networks[name].module

    def inner(self, name: str) -> nn.Module:
        """The network itself, for vector-Jacobian products and evaluation."""
        return self.networks[name].inner

    # ------------------------------------------------------------ what a task calls

    def update(self, name: str, loss: Loss, rows: Any) -> Any:
        """One optimiser step of network `name`; returns what `loss` carried over, joined."""
        update = self.networks[name].update(
            loss, rows, images=self.images, total=self.config.images
        )
        self.last[name] = update
        if update.skipped:
            self._skipped(name, update)
        else:
            self.skips_in_a_row = 0
        return update.carry

    def _skipped(self, name: str, update: Update) -> None:
        self.skips_in_a_row += 1
        ids = getattr(self._batch, "ids", None)
        event = {
            "skipped": name,
            "loss": update.loss,
            "gradient_norm": update.gradient_norm,
            "ids": None if ids is None else ids.tolist(),
        }
        self._log(event)
        if self.skips_in_a_row > self.config.max_skips:
            raise UserError(
                f"{self.skips_in_a_row} updates of {name} in a row had a loss or gradient that is "
                "not finite. Lower the learning rate, clip the gradient, or use fp32; the sample "
                "ids are in the log."
            )

    # ------------------------------------------------------------ the loop

    def run(self, feed: Iterable[Item]) -> None:
        """Trains until the configured number of images; `feed` starts where `resume` left off."""
        started, seen = time.perf_counter(), self.images
        for item in feed:
            if self.images >= self.config.images:
                break
            self._step(item)
            if self._due(self.config.log_every):
                now = time.perf_counter()
                speed = (self.images - seen) / (now - started)
                self._log({"images_per_second": speed, **self.numbers()})
                started, seen = now, self.images
            if self._due(self.config.checkpoint_every):
                self.save()
            for every, hooks in self.hooks.items():
                if self._due(every):
                    for hook in hooks:
                        hook(self)
        self.save()
        if self.store is not None:
            self.store.wait()

    def _step(self, item: Item) -> None:
        # What is random inside a network (dropout) is keyed by (seed, step, rank).
        torch.manual_seed(hash((self.config.seed, self.images, self.world.rank)) & (2**63 - 1))
        self._batch = item.batch
        self.task.step(item.batch, self)
        self.images += self.config.batch
        self.position = item.state
        for trained in self.networks.values():
            trained.average(self.images)

    def _due(self, every: int) -> bool:
        """Whether the last step passed a multiple of `every`, or was the last of all."""
        before = self.images - self.config.batch
        return self.images // every > before // every or self.images >= self.config.images

    def numbers(self) -> dict[str, float]:
        """Loss, gradient norm and learning rate of every network's last update."""
        return {
            f"{name}/{key}": getattr(update, key)
            for name, update in self.last.items()
            for key in ("loss", "gradient_norm", "lr")
        }

    def _log(self, values: Mapping[str, Any]) -> None:
        if self.world.rank == 0:
            for tracker in self.trackers:
                tracker.log(self.images, values)

    # ------------------------------------------------------------ state

    def tensors(self) -> dict[str, Any]:
        """Everything with weights: networks, optimisers, averages."""
        return {
            name: {
                "network": states.get_model_state_dict(trained.inner),
                "optimiser": states.get_optimizer_state_dict(trained.inner, trained.optimiser),
                "averages": trained.averages.state_dict(),
            }
            for name, trained in self.networks.items()
        }

    def save(self) -> None:
        """Starts an asynchronous checkpoint."""
        if self.store is not None:
            values = {
                "images": self.images,
                "skips_in_a_row": self.skips_in_a_row,
                "config": self.config.model_dump(mode="json"),
            }
            self.store.save(self.images, self.tensors(), values, {"position": self.position})

    def resume(self) -> bool:
        """Continues from the newest whole checkpoint, if there is one."""
        found = None if self.store is None else self.store.find()
        if self.store is None or found is None:
            return False
        tensors = self.tensors()
        values = self.store.load(found, tensors)
        for name, trained in self.networks.items():
            states.set_model_state_dict(trained.inner, tensors[name]["network"])
            states.set_optimizer_state_dict(
                trained.inner, trained.optimiser, tensors[name]["optimiser"]
            )
            trained.averages.load_state_dict(tensors[name]["averages"])
        self.images = values["images"]
        self.skips_in_a_row = values["skips_in_a_row"]
        self.positions = [entry["position"] for entry in self.store.rank_values(found)]
        return True
