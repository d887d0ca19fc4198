"""What every long run shares: its folder and checkpoints, signals, the first line of its log."""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

from pydantic import Field, NonNegativeInt, PositiveFloat

from stillhouse.engine.checkpoints import CheckpointStore, Found
from stillhouse.engine.ema import Profile
from stillhouse.engine.loop import Engine, LoopConfig, Tracker
from stillhouse.engine.optimisers import AdamW, Optimiser
from stillhouse.engine.sharding import Spread
from stillhouse.engine.terminal import Terminal
from stillhouse.engine.trackers import TrackersConfig
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World, world
from stillhouse.errors import UserError
from stillhouse.recipes.train.folders import check_settings, claimed


class LongRun(LoopConfig):
    """What every run of the engine has."""

    optim: Optimiser = AdamW()
    clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    micro_batch: NonNegativeInt = 0
    """Images per forward and backward on each process; 0: the whole batch at once."""
    averages: tuple[Profile, ...] = ()
    """Moving averages of the weights, as JSON; the first is shown, measured and exported."""
    spread: Spread = Spread()
    trackers: TrackersConfig = TrackersConfig()
    out: Path = Path("runs/run")
    """The run's folder."""
    checkpoints: str = ""
    """Where checkpoints go, also s3://...; RUN/checkpoints if not given."""
    device: Annotated[str, Field(min_length=1)] = "auto"
    """auto, cpu or cuda."""

    def network_config(self, here: World) -> NetworkConfig:
        """Several processes train copies where nothing else was asked for."""
        spread = self.spread
        if spread.sharding == "none" and here.size > 1:
            spread = spread.model_copy(update={"sharding": "ddp"})
        return NetworkConfig(
            optimiser=self.optim,
            spread=spread,
            clip=self.clip,
            micro_batch=self.micro_batch,
            averages=self.averages,
        )

    @property
    def shown(self) -> str:
        """The average that is shown and exported; the weights themselves where there is none."""
        return self.averages[0].name if self.averages else ""


Run = TypeVar("Run", bound=LongRun)


def carried_out(config: Run, work: Callable[[Run, World, list[int]], int]) -> int:
    """Calls `work` within the world; the images it has seen, unless a signal ended it before."""
    caught: list[int] = []  # signals
    with world(config.device) as here:
        # A function of its own: its networks go before the world does.
        images = work(config, here, caught)
    if images < config.images:
        raise SystemExit(128 + (caught or [signal.SIGTERM])[0])
    return images


def open_store(
    config: LongRun, here: World, stack: ExitStack
) -> tuple[CheckpointStore, Found | None]:
    """The run's folder for this run alone, its checkpoints, and the newest that is whole."""
    here.first(lambda: stack.enter_context(claimed(config)))
    store = stack.enter_context(closing(store_of(config)))
    return store, newest(config, store)


def store_of(config: LongRun) -> CheckpointStore:
    root = config.checkpoints or config.out / "checkpoints"
    return CheckpointStore(root, keep_last=config.keep_last, keep_every=config.keep_every)


def newest(config: LongRun, store: CheckpointStore) -> Found | None:
    """The newest checkpoint that is whole: of these settings, and not beyond their end."""
    found = store.find()
    if found is not None:
        check_settings(config, store.values(found)["config"], str(store.root))
        if found.images > config.goal:
            raise UserError(
                f"{config.out} is at {found.images} images already, beyond --images "
                f"{config.images}: nothing to do"
            )
    return found


def build_trackers(config: LongRun, here: World, stack: ExitStack) -> list[Tracker]:
    """Of the first process: closed with the run, however it ends."""
    if here.rank:
        return []
    name = config.out.name
    trackers = [*config.trackers.build(config.out, name), Terminal(name, config.goal)]
    return [stack.enter_context(closing(tracker)) for tracker in trackers]


def opening(here: World, notes: Sequence[str]) -> Mapping[str, Any]:
    """The first line of this session in the log."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    words = [note for note in notes if note]
    session = {"started": started, "world": here.size, "device": str(here.device)}
    return {"session": session, **({"message": "; ".join(words)} if words else {})}


# ---------------------------------------------------------------- signals


@contextmanager
def stopping(engine: Engine, caught: list[int]) -> Iterator[None]:
    """Ctrl-C or a scheduler's SIGTERM ends the run after this step, with a checkpoint.

    A second Ctrl-C ends it at once; a second SIGTERM is torchrun handing on the first one. What was
    caught is put into the list.
    """
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def stop(number: int, frame: FrameType | None) -> None:
        if not caught and engine.world.rank == 0:
            print("stopping after this step, with a checkpoint ...", file=sys.stderr, flush=True)
        caught.append(number)
        engine.stop()
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    for kind in kinds:
        signal.signal(kind, stop)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
