"""`stillhouse train`: a whole training run, from a config to a diffusers folder and its pictures.

    RUN/run.json       the resolved config        RUN/samples/      grids from fixed seeds
    RUN/log.jsonl      every number               RUN/model/        inference weights
    RUN/checkpoints/   to resume from             RUN/averages/     snapshots of power averages

Running the same command again resumes; any number of processes, under torchrun.
"""

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat

from stillhouse import __version__
from stillhouse.data import DataConfig, Loader, PointsConfig, Prefetch
from stillhouse.engine.checkpoints import CheckpointStore, Found
from stillhouse.engine.ema import HalfLife, Profile
from stillhouse.engine.loop import Engine, Hook, LoopConfig, Tracker, positions
from stillhouse.engine.optimisers import AdamW, Optimiser
from stillhouse.engine.sharding import Spread
from stillhouse.engine.terminal import Terminal
from stillhouse.engine.trackers import TrackersConfig
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World, world
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.models import DiffusersNetwork
from stillhouse.objectives import Draws
from stillhouse.objectives.configs import DenoisingConfig, ObjectiveConfig
from stillhouse.process import Condition, NetworkDenoiser
from stillhouse.recipes.claims import differences, locked
from stillhouse.recipes.learner import NAME, Learner
from stillhouse.recipes.networks import NetworkChoice, UNet
from stillhouse.recipes.processes import Edm, ProcessConfig
from stillhouse.recipes.watching import Drawer, Exporter, Preview, Snapshots, Validation, Validator

RECORD = "run.json"
# What a resumed run may change: how far, how often, how it is spread and shown, not what it learns.
FREE = {
    *("images", "log_every", "checkpoint_every", "keep_last", "keep_every", "max_skips"),
    *("preview", "validation", "trackers", "spread", "micro_batch", "snapshot_every", "log_ids"),
    *("data.workers", "data.worker_start", "data.faults", "device", "out", "checkpoints"),
}


class TrainRun(LoopConfig):
    """A training run."""

    data: Annotated[DataConfig | PointsConfig, Field(discriminator="kind")] = DataConfig()
    classes: NonNegativeInt = 0
    """Number of classes; 0: as many as the label column says."""
    network: NetworkChoice = UNet()
    process: ProcessConfig = Edm()
    objective: ObjectiveConfig = DenoisingConfig()
    drop: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of labels that are replaced by none, for classifier-free guidance."""
    optim: Optimiser = AdamW()
    clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    micro_batch: NonNegativeInt = 0
    """Images per forward and backward on each process; 0: the whole batch at once."""
    averages: tuple[Profile, ...] = (HalfLife(),)
    """Moving averages of the weights, as JSON; the first is shown, measured and exported."""
    snapshot_every: NonNegativeInt = 0
    """Images between stored snapshots of power averages, to synthesize others from; 0: none."""
    spread: Spread = Spread()
    preview: Preview = Preview()
    validation: Validation = Validation()
    trackers: TrackersConfig = TrackersConfig()
    log_ids: bool = False
    """Log the ids of all images trained on, for audits."""
    out: Path = Path("runs/run")
    """The run's folder."""
    checkpoints: str = ""
    """Where checkpoints go, also s3://...; RUN/checkpoints if not given."""
    device: Annotated[str, Field(min_length=1)] = "auto"

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


def run(config: TrainRun) -> int:
    """Trains to the end, from the last checkpoint where there is one; returns the images seen."""
    with world(config.device) as here:
        return train(config, here)  # a function of its own: its networks go before the world does


def train(config: TrainRun, here: World) -> int:
    """The run of one process among all."""
    with ExitStack() as stack:
        here.first(lambda: stack.enter_context(claimed(config)))
        root = config.checkpoints or config.out / "checkpoints"
        store = CheckpointStore(root, keep_last=config.keep_last, keep_every=config.keep_every)
        stack.enter_context(closing(store))
        found = store.find()
        loader = build_loader(config, here, positions(store, found))
        learner = build_learner(config, here, loader)
        trackers = build_trackers(config, stack) if here.rank == 0 else []
        engine = Engine(
            learner,
            config,
            {NAME: config.network_config(here)},
            here,
            store=store,
            trackers=trackers,
            hooks=build_hooks(config, here, learner, trackers),
        )
        if found is not None:
            engine.resume(found)
        if here.rank == 0:
            write_record(config, learner)
        feed = stack.enter_context(Prefetch(loader, learner.prepare))
        with stopping(engine):
            engine.run(feed, opening(here, loader, found))
    return engine.images


# ---------------------------------------------------------------- parts


def build_loader(config: TrainRun, here: World, resume: Sequence[dict[str, Any]]) -> Loader:
    return config.data.build(
        batch=config.batch, seed=config.seed, rank=here.rank, world=here.size, resume=resume
    )


def count_classes(config: TrainRun, loader: Loader) -> int:
    """What the labels go up to; 0 where the data has none."""
    labelled = isinstance(config.data, PointsConfig) or bool(config.data.columns.label)
    known = config.classes or len(loader.classes)
    if labelled and not known and isinstance(config.data, DataConfig):
        raise UserError(
            f"the label column {config.data.columns.label!r} does not say how many classes there "
            "are: give the number as --classes"
        )
    return known if labelled else 0


def build_learner(config: TrainRun, here: World, loader: Loader) -> Learner:
    """The network as a denoiser, with its objective."""
    classes = count_classes(config, loader)
    torch.manual_seed(config.seed)  # the first weights are the same on every process
    model, null = config.network.build(config.data.shape, classes)
    trained = config.process.build()
    network = DiffusersNetwork(model, null)
    return Learner(
        NetworkDenoiser(network, trained.scaling, trained.prediction).train(),
        config.objective.build(trained.scaling, config.images),
        Draws(config.seed),
        Condition(label=torch.tensor([null])) if classes and null is not None else None,
        config.drop,
        here,
        loader.log,
        config.log_ids,
    )


def build_trackers(config: TrainRun, stack: ExitStack) -> list[Tracker]:
    """Of the first process: closed with the run, however it ends."""
    name = config.out.name
    trackers = [*config.trackers.build(config.out, name), Terminal(name, config.images)]
    return [stack.enter_context(closing(tracker)) for tracker in trackers]


def build_hooks(
    config: TrainRun, here: World, learner: Learner, trackers: Sequence[Tracker]
) -> dict[int, list[Hook]]:
    """What is done every so many images."""
    labels = 0 if learner.null is None else int(learner.null.label)  # type: ignore[arg-type]
    backdrop = None
    if isinstance(config.data, PointsConfig):
        backdrop = config.data.target().sample(2000, torch.Generator().manual_seed(0))
    hooks: dict[int, list[Hook]] = {}

    def every(images: int, hook: Hook) -> None:
        hooks.setdefault(images, []).append(hook)

    for tracker in trackers:
        if isinstance(tracker, Terminal):
            every(1, lambda engine, view=tracker: view.step(engine.images))
    every(
        config.preview.every,
        Drawer(config.preview, learner, labels, config.shown, config.out, backdrop),
    )
    held_out = config.validation.build(config.data, config.batch, here)
    if held_out is not None:
        every(config.validation.every, Validator(held_out, learner, config.shown))
    facts = {"config": config.model_dump(mode="json", exclude={"out", "checkpoints", "device"})}
    every(
        config.checkpoint_every,
        Exporter(learner, config.shown, config.process.scheduler(), facts, config.out / "model"),
    )
    if config.snapshot_every:
        every(config.snapshot_every, Snapshots(config.out / "averages"))
    return hooks


# ---------------------------------------------------------------- the folder


@contextmanager
def claimed(config: TrainRun) -> Iterator[None]:
    """The run's folder, for this run alone, and the same run as before."""
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{config.out} cannot be written to ({error})") from error
    with locked(config.out):
        changed = differences(read_config(config.out), config.model_dump(mode="json"), FREE)
        if changed and (config.out / RECORD).exists():
            raise UserError(
                f"{config.out} holds a run with other settings ({'; '.join(changed)}). Choose "
                "another --out, or remove it to start anew."
            )
        yield


def read_config(out: Path) -> dict[str, Any]:
    """The config of the run in this folder; nothing where there is none."""
    try:
        return json.loads((out / RECORD).read_text())["config"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{out / RECORD} cannot be read ({error}); remove it to go on") from error


def write_record(config: TrainRun, learner: Learner) -> None:
    """The resolved run, beside its results."""
    count = sum(p.numel() for p in learner.denoiser.parameters())
    record = {
        "config": config.model_dump(mode="json"),
        "network": {"parameters": count},
        "versions": {name: version(name) for name in ("torch", "numpy", "diffusers", "datasets")}
        | {"stillhouse": __version__},
    }
    write_whole(config.out / RECORD, json.dumps(record, indent=2).encode())


def opening(here: World, loader: Loader, found: Found | None) -> Mapping[str, Any]:
    """The first line of this session in the log."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    words = [*([] if found is None else found.skipped), *([loader.note] if loader.note else [])]
    session = {"started": started, "world": here.size, "device": str(here.device)}
    return {"session": session, **({"message": "; ".join(words)} if words else {})}


# ---------------------------------------------------------------- signals


@contextmanager
def stopping(engine: Engine) -> Iterator[None]:
    """Ctrl-C or a scheduler's SIGTERM ends the run after this step, with a checkpoint.

    A second one ends it at once.
    """
    caught: list[int] = []
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def stop(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        engine.stop()
        for kind, handler in before.items():
            signal.signal(kind, handler)

    for kind in kinds:
        signal.signal(kind, stop)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
    if caught:
        raise SystemExit(128 + caught[0])
