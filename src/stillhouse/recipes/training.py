"""`stillhouse train`: a whole training run, from a config to a diffusers folder and its pictures.

    RUN/run.json       the resolved config        RUN/samples/      grids from fixed seeds
    RUN/log.jsonl      every number               RUN/model/        inference weights
    RUN/checkpoints/   to resume from             RUN/averages/     snapshots of power averages

Running the same command again resumes; any number of processes, under torchrun.
"""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat

from stillhouse.couplings import Coupling
from stillhouse.couplings.configs import CouplingConfig, IndependentConfig
from stillhouse.couplings.pooled import GroupExchange, Pooled
from stillhouse.data import DataConfig, Loader, PointsConfig, Prefetch
from stillhouse.engine.checkpoints import CheckpointStore, Found
from stillhouse.engine.ema import HalfLife, Profile
from stillhouse.engine.loop import Engine, Hook, LoopConfig, Tracker, positions
from stillhouse.engine.optimisers import AdamW, Optimiser
from stillhouse.engine.sharding import Spread
from stillhouse.engine.terminal import Terminal
from stillhouse.engine.trackers import TrackersConfig
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import WORK, World, gloo_group, world
from stillhouse.errors import UserError
from stillhouse.models.conditioning import GAMMA, Parts, Text
from stillhouse.objectives import Draws
from stillhouse.objectives.configs import DenoisingConfig, ObjectiveConfig
from stillhouse.process import Condition, NetworkDenoiser
from stillhouse.recipes.folders import check_settings, claimed, write_record
from stillhouse.recipes.latents import build_codec, drawn_shape
from stillhouse.recipes.learner import NAME, Learner
from stillhouse.recipes.measuring import Evaluation, NoEvaluation
from stillhouse.recipes.networks import NetworkChoice, Pretrained, UNet
from stillhouse.recipes.processes import Edm, ProcessConfig
from stillhouse.recipes.starting import Carry, shifted, start_from
from stillhouse.recipes.telling import DetailWeight, NoText, TextConfig, Texts, layout_of
from stillhouse.recipes.watching import Drawer, Exporter, Preview, Snapshots, Validation, Validator


class TrainRun(LoopConfig):
    """A training run."""

    data: Annotated[DataConfig | PointsConfig, Field(discriminator="kind")] = DataConfig()
    classes: NonNegativeInt = 0
    """Number of classes; 0: as many as the label column says."""
    network: NetworkChoice = UNet()
    init_from: str = ""
    """A checkpoint to start from, carried over as far as it fits; an account is printed."""
    init: Carry = Carry()
    process: ProcessConfig = Edm()
    objective: ObjectiveConfig = DenoisingConfig()
    coupling: CouplingConfig = IndependentConfig()
    codec: str = ""
    """A diffusers autoencoder, or a pipeline with one: the network then draws its latents."""
    text: TextConfig = NoText()
    detail: DetailWeight = DetailWeight()
    drop: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of labels or captions that are replaced by none, for classifier-free guidance."""
    drop_control: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of controls that are not said, independently of that, for two-term guidance."""
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
    evaluation: Annotated[NoEvaluation | Evaluation, Field(discriminator="kind")] = NoEvaluation()
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

    def parts(self, text: Text | None) -> Parts:
        """What the network is told beside its own class, with captions if there are any."""
        layout = layout_of(self.data)
        gamma = self.detail.build(self.process.build().scaling) if layout.detail else GAMMA
        return Parts(layout=layout, gamma=gamma, text=text)

    @property
    def shown(self) -> str:
        """The average that is shown and exported; the weights themselves where there is none."""
        return self.averages[0].name if self.averages else ""


def run(config: TrainRun) -> int:
    """Trains to the end, from the last checkpoint where there is one; returns the images seen."""
    caught: list[int] = []  # signals
    with world(config.device) as here:
        # A function of its own: its networks go before the world does.
        images = train(config, here, caught)
    if images < config.images:
        raise SystemExit(128 + (caught or [signal.SIGTERM])[0])
    return images


def train(config: TrainRun, here: World, caught: list[int]) -> int:
    """The run of one process among all."""
    config = shifted(config)
    with ExitStack() as stack:
        here.first(lambda: stack.enter_context(claimed(config)))
        root = config.checkpoints or config.out / "checkpoints"
        store = CheckpointStore(root, keep_last=config.keep_last, keep_every=config.keep_every)
        stack.enter_context(closing(store))
        found = store.find()
        if found is not None:
            check_settings(config, store.values(found)["config"], str(store.root))
            if found.images > config.images:
                raise UserError(
                    f"{config.out} is at {found.images} images already, beyond --images "
                    f"{config.images}: nothing to do"
                )
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
            hooks=build_hooks(config, here, learner),
        )
        if found is not None:
            engine.resume(found)
        here.first(lambda: write_record(config, learner))
        if here.rank == 0 and found is None and learner.account is not None:
            print(f"{config.init_from}: {learner.account}", flush=True)
        feed = stack.enter_context(Prefetch(loader, learner.prepare))
        with stopping(engine, caught):
            engine.run(feed, opening(here, notes(loader, learner, found)))
        if isinstance(learner.coupling, Pooled):  # before the prefetch, which may wait in it
            learner.coupling.close(lambda step: max(here.gather(step)))
        if engine.stopped:
            build_exporter(config, learner)(engine)
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
    if labelled and loader.classes and known != len(loader.classes):
        raise UserError(f"--classes {known}, but the data has {len(loader.classes)}: leave it out")
    if labelled and not known and isinstance(config.data, DataConfig):
        raise UserError(
            f"the label column {config.data.columns.label!r} does not say how many classes there "
            "are: give the number as --classes"
        )
    return known if labelled else 0


def build_learner(config: TrainRun, here: World, loader: Loader) -> Learner:
    """The network as a denoiser, with its objective."""
    classes, codec = count_classes(config, loader), build_codec(config, here.device)
    texts = config.text.build(loader, config.data)
    if texts is None and isinstance(config.data, DataConfig) and config.data.columns.text:
        raise UserError(
            f"the captions in {config.data.columns.text!r} would not be used: add --text captions, "
            "or leave --data.columns.text out"
        )
    if texts is not None and classes:
        raise UserError(
            "the network is told a caption or a class, not both: leave --data.columns.label or "
            "--text out"
        )
    trained = config.process.build()
    if isinstance(config.network, Pretrained):
        config.network.check(trained)
    torch.manual_seed(config.seed)  # the first weights are the same on every process
    parts = config.parts(None if texts is None else texts.text)
    text_width = 0 if texts is None else texts.width
    shape = drawn_shape(config, codec)
    network = config.network.network(shape, classes, parts, text_width)
    check_buckets(config, network)
    account = start_from(config, network, trained, codec)
    return Learner(
        NetworkDenoiser(network, trained.scaling, trained.prediction).train(),
        config.objective.build(trained.scaling, config.images),
        Draws(config.seed),
        null_condition(network, classes, texts),
        config.drop,
        here,
        loader.log,
        classes,
        config.log_ids,
        build_coupling(config, here),
        texts,
        config.drop_control,
        codec,
        stored=shape == config.data.shape,
        account=account,
    )


def check_buckets(config: TrainRun, network: Any) -> None:
    shaped = isinstance(config.data, DataConfig) and config.data.buckets.kind != "none"
    if shaped and network.convention.square:
        raise UserError(
            "a DiT draws square images only: choose --network backbone --network.name mdt, pixart, "
            "mmdit or unet, or leave --data.buckets out"
        )


def null_condition(network: Any, classes: int, texts: Texts | None) -> Condition | None:
    """What is dropped becomes this; None where nothing can be."""
    null = Condition() if texts is None else texts.table.null
    if classes and network.null_label is not None:
        null = replace(null, label=torch.tensor([network.null_label]))
    if network.conditioning is not None:
        null = replace(null, control=network.conditioning.null_control)
    return null if len(null) else None


def build_coupling(config: TrainRun, here: World) -> Coupling | None:
    """None where noise is independent. A pool over processes talks in a group of its own."""
    if isinstance(config.coupling, IndependentConfig):
        return None
    shared = config.coupling.pooled and here.size > 1
    return config.coupling.build(GroupExchange(gloo_group(WORK)) if shared else None)


def build_trackers(config: TrainRun, stack: ExitStack) -> list[Tracker]:
    """Of the first process: closed with the run, however it ends."""
    name = config.out.name
    trackers = [*config.trackers.build(config.out, name), Terminal(name, config.images)]
    return [stack.enter_context(closing(tracker)) for tracker in trackers]


def build_hooks(config: TrainRun, here: World, learner: Learner) -> list[tuple[int, Hook]]:
    """What is done every so many images, in the same order on every process."""
    backdrop = None
    if isinstance(config.data, PointsConfig):
        backdrop = config.data.target().sample(2000, torch.Generator().manual_seed(0))
    drawer = Drawer(config.preview, learner, config.shown, config.out, backdrop)
    hooks: list[tuple[int, Hook]] = [(config.preview.every, drawer)]
    held_out = config.validation.build(config.data, config.batch, here)
    if held_out is not None:
        data = config.data.model_copy(update={"source": config.validation.source})
        texts = config.text.build(held_out, data)
        validator = Validator(held_out, learner, config.shown, texts)
        hooks.append((config.validation.every, validator))
    if config.snapshot_every:
        hooks.append((config.snapshot_every, Snapshots(config.out / "averages")))
    if isinstance(config.evaluation, Evaluation):
        evaluator = config.evaluation.build(config.data, learner, config.shown, here)
        hooks.append((config.evaluation.every, evaluator))
    return [*hooks, (config.checkpoint_every, build_exporter(config, learner))]


def build_exporter(config: TrainRun, learner: Learner) -> Exporter:
    # What is of this machine and no part of the model.
    elsewhere = {"out", "checkpoints", "device", "evaluation", "codec"}
    facts = {"config": config.model_dump(mode="json", exclude=elsewhere)}
    scheduler = config.process.scheduler()
    return Exporter(learner, config.shown, scheduler, facts, config.out / "model")


# ---------------------------------------------------------------- words


def notes(loader: Loader, learner: Learner, found: Found | None) -> list[str]:
    """What a user should know before anything is trained."""
    cut = "" if learner.texts is None else learner.texts.table.note
    hint = f"{cut} (--text.length)" if cut else ""
    return [*([] if found is None else found.skipped), loader.note, hint]


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
