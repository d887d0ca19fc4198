"""The training loop: one for every method. It drives a task and knows nothing of diffusion.

    task.step(batch, engine)            once per batch, with this process's share of it
      engine.update(name, loss, rows)   as often as the method needs; owns everything in an update

Progress is counted in images. Everything that decides what happens next is in the checkpoint or
follows from (seed, images), so a run that is killed anywhere continues bit for bit.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, Protocol

from pydantic import NonNegativeInt, PositiveInt
from torch import nn
from torch.distributed.checkpoint import state_dict as states

from stillhouse.config import Config
from stillhouse.engine.checkpoints import CheckpointStore, Found
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

    def report(self) -> Mapping[str, Any]:
        """Its own numbers since the last log line. Every process calls it: it may exchange."""
        ...


class Item(Protocol):
    """What the data gives: a batch and the position after it (JSON)."""

    @property
    def batch(self) -> Any: ...
    @property
    def state(self) -> dict[str, Any]: ...


class Tracker(Protocol):
    """Where numbers go: JSONL, TensorBoard, a terminal. The first process alone has any."""

    def start(self, images: int) -> None:
        """The run goes on at `images`; what was logged beyond them is forgotten."""
        ...

    def step(self, images: int) -> None:
        """So many images have been seen: called after every step, and must cost nothing."""

    def log(self, images: int, values: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class LoopConfig(Config):
    """How long, how often, and what to do about trouble."""

    images: PositiveInt = 1_000_000
    """Images to train on."""
    batch: PositiveInt = 256
    """Images per step, over all processes."""
    seed: NonNegativeInt = 0
    """Of everything that is drawn."""
    log_every: PositiveInt = 10_000
    """Images between log lines."""
    checkpoint_every: PositiveInt = 100_000
    """Images between checkpoints."""
    keep_last: PositiveInt = 3
    """Checkpoints that stay; older ones are removed."""
    keep_every: PositiveInt | None = None
    """Keep one checkpoint per so many images for good."""
    max_skips: NonNegativeInt = 10
    """Updates in a row that may be skipped for a loss or gradient that isn't finite."""

    @property
    def goal(self) -> int:
        """Images at the end of the run: the last batch is a whole one."""
        return -(-self.images // self.batch) * self.batch


Hook = Callable[["Engine"], None]


def check_shared(batch: int, processes: int) -> None:
    """Every process takes as many images of a batch."""
    if batch % processes:
        raise UserError(
            f"a batch of {batch} cannot be shared by {processes} processes: choose another "
            "--batch, or another number of processes"
        )


class Clock:
    """Images per second and the share of time spent waiting for data, without that of hooks."""

    def __init__(self, images: int) -> None:
        self._images, self._started, self._waited = images, time.perf_counter(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in here is time without data."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time in here does not count."""
        began = time.perf_counter()
        yield
        self._started += time.perf_counter() - began

    def lap(self, images: int) -> dict[str, float]:
        """The numbers since the last lap."""
        now = time.perf_counter()
        took, added = now - self._started, images - self._images
        waited, self._waited = self._waited, 0.0
        self._images, self._started = images, now
        return {"images_per_second": added / took, "data_wait": waited / took}


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
        hooks: Sequence[tuple[int, Hook]] = (),
    ) -> None:
        """`hooks`: how many images have to pass, and what is called then, in order.

        One that exchanges with the other processes must be there on all, at the same place.
        """
        check_shared(config.batch, world.size)
        self.task, self.config, self.world = task, config, world
        self.store, self.trackers, self.hooks = store, trackers, hooks
        self.images, self.skips_in_a_row = 0, 0
        self.bad_batches, self._skipped_here = 0, False  # in a row; whether this one is
        self._saved: int | None = None
        self._stop = self.stopped = False
        self.position: dict[str, Any] = {}  # of this process, after its last batch
        self.networks = {
            name: Trained.start(module, networks[name], world)
            for name, module in task.modules().items()
        }
        self.updates: dict[str, list[Update]] = {}  # of every network, since the last log line
        self._batch: Any = None

    def __getitem__(self, name: str) -> nn.Module:
        """The network to call in a loss."""
        return self.networks[name].module

    # ------------------------------------------------------------ what a task calls

    def update(self, name: str, loss: Loss, rows: Any) -> Any:
        """One optimiser step of network `name`; returns what `loss` carried over, joined."""
        update = self.networks[name].update(
            loss, rows, images=self.images, total=self.config.images
        )
        if update.skipped:
            self._skipped(name, update)
        else:
            self.updates.setdefault(name, []).append(update)
            self.skips_in_a_row = 0
        return update.carry

    def _skipped(self, name: str, update: Update) -> None:
        self.skips_in_a_row += 1
        self._skipped_here = True
        ids = getattr(self._batch, "ids", None)
        ids = [] if ids is None else ids.tolist()
        event = {
            "skipped": name,
            "loss": update.loss,
            "gradient_norm": update.gradient_norm,
            "ids": [i for share in self.world.gather(ids) for i in share],
        }
        # Under the count that this step will reach: a resume from before it forgets the line.
        self.log(event, self.images + self.config.batch)
        # Where a batch makes several updates, good ones between the bad must not hide them.
        bad = max(self.skips_in_a_row, self.bad_batches + 1)
        if bad > self.config.max_skips:
            raise UserError(
                f"{bad} updates of {name} in a row had a loss or gradient that is "
                "not finite. Lower the learning rate, clip the gradient, or use fp32; the sample "
                "ids are in the log."
            )

    # ------------------------------------------------------------ the loop

    def run(
        self,
        feed: Iterable[Item],
        opening: Mapping[str, Any] | None = None,
        first: Sequence[Hook] = (),
    ) -> None:
        """Trains until the configured number of images, or until `stop` was called.

        `feed` starts where `resume` left off; `opening` is logged first, then `first` is called.
        """
        for tracker in self.trackers:
            tracker.start(self.images)
        if opening:
            self.log(opening)
        for hook in first:
            self._call(hook)
        clock, items = Clock(self.images), iter(feed)
        while self.images < self.config.images:
            with clock.waiting():
                item = next(items, None)
            if item is None:
                break
            self._step(item)
            for tracker in self.trackers:
                tracker.step(self.images)
            stopping = bool(self.world.total(self._stop))
            saving = stopping or self._due(self.config.checkpoint_every)
            # With each checkpoint too: no sum that a log line is made of spans a resume.
            if saving or self._due(self.config.log_every):
                self.log({**clock.lap(self.images), **self.numbers(), **self.task.report()})
            with clock.stopped():
                self._call_hooks()
            # Last: when the checkpoint exists, everything up to it has been logged and drawn.
            if saving:
                self.save()
            if stopping:
                self.stopped = True
                break
        self.save()
        if self.store is not None:
            self.store.wait()

    def stop(self) -> None:
        """Ends the run after this step, everywhere, with a checkpoint; for signal handlers."""
        self._stop = True

    def _call_hooks(self) -> None:
        for every, hook in self.hooks:
            if self._due(every):
                self._call(hook)

    def _call(self, hook: Hook) -> None:
        try:
            hook(self)
        except OSError as error:
            where = error.filename or "What is drawn and stored during training"
            raise UserError(
                f"{where}: {error.strerror or error}. Mend that, and run the same command "
                "again: it goes on from the last checkpoint."
            ) from error

    def _step(self, item: Item) -> None:
        # What is random inside a network (dropout) is keyed by (seed, step, rank).
        self.world.seed(hash((self.config.seed, self.images, self.world.rank)) & (2**63 - 1))
        self._batch, self._skipped_here = item.batch, False
        self.task.step(item.batch, self)
        self.bad_batches = self.bad_batches + 1 if self._skipped_here else 0
        self.images += self.config.batch
        self.position = item.state
        for trained in self.networks.values():
            trained.average(self.images)

    def _due(self, every: int) -> bool:
        """Whether the last step passed a multiple of `every`, or was the last of all."""
        before = self.images - self.config.batch
        return self.images // every > before // every or self.images >= self.config.images

    def numbers(self) -> dict[str, float]:
        """Mean loss and gradient norm since the last line, and the learning rate, per network."""
        updates, self.updates = self.updates, {}
        found = {}
        for name, those in updates.items():
            found[f"{name}/loss"] = fmean(update.loss for update in those)
            found[f"{name}/gradient_norm"] = fmean(update.gradient_norm for update in those)
            found[f"{name}/lr"] = those[-1].lr
        return found

    def log(self, values: Mapping[str, Any], images: int | None = None) -> None:
        """Tells every tracker, under the present count of images if no other is given."""
        for tracker in self.trackers:
            tracker.log(self.images if images is None else images, values)

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
        """Starts an asynchronous checkpoint, unless there is one of this moment."""
        if self.store is None or self.images == self._saved:
            return
        values = {
            "images": self.images,
            "skips_in_a_row": self.skips_in_a_row,
            "bad_batches": self.bad_batches,
            "config": self.config.model_dump(mode="json"),
        }
        self.store.save(self.images, self.tensors(), values, {"position": self.position})
        self._saved = self.images
        self.log({"checkpoint": self.images})

    def resume(self, found: Found | None = None) -> bool:
        """Continues from `found`, else from the newest whole checkpoint, if there is one."""
        if found is None and self.store is not None:
            found = self.store.find()
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
        self.images = self._saved = values["images"]
        self.skips_in_a_row = values["skips_in_a_row"]
        self.bad_batches = values.get("bad_batches", 0)
        return True


def positions(store: CheckpointStore, found: Found | None) -> list[dict[str, Any]]:
    """Where each process of the run that is resumed was in its data."""
    return [] if found is None else [v["position"] for v in store.rank_values(found)]
