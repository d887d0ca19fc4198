"""`stillhouse train`: a whole training run, from a config to a diffusers folder and its pictures.

    RUN/run.json       the resolved config        RUN/samples/      grids from fixed seeds
    RUN/log.jsonl      every number               RUN/model/        inference weights
    RUN/checkpoints/   to resume from             RUN/averages/     snapshots of power averages

Running the same command again resumes; any number of processes, under torchrun.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeInt

from stillhouse.couplings.configs import CouplingConfig, IndependentConfig
from stillhouse.couplings.pooled import Pooled
from stillhouse.data import DataConfig, Loader, PointsConfig, Prefetch
from stillhouse.engine.checkpoints import Found
from stillhouse.engine.ema import HalfLife, Profile
from stillhouse.engine.loop import Engine, Hook, positions
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models.conditioning import GAMMA, Parts, Text
from stillhouse.objectives import Draws
from stillhouse.objectives.configs import DenoisingConfig, ObjectiveConfig
from stillhouse.process import Condition, NetworkDenoiser
from stillhouse.recipes.encoded import encodes_once, read_once
from stillhouse.recipes.latents import build_codec, drawn_shape
from stillhouse.recipes.prompting import PipelineText
from stillhouse.recipes.telling import DetailWeight, NoText, TextConfig, Texts, layout_of
from stillhouse.recipes.train.coupled import build_coupling, check_coupling, coupling_note
from stillhouse.recipes.train.folders import handed_on, origins_of, write_record
from stillhouse.recipes.train.learner import NAME, Learner
from stillhouse.recipes.train.measuring import Evaluation, NoEvaluation
from stillhouse.recipes.train.networks import NetworkChoice, Pretrained, UNet
from stillhouse.recipes.train.processes import Edm, ProcessConfig
from stillhouse.recipes.train.progressive import Stage
from stillhouse.recipes.train.sessions import (
    LongRun,
    build_trackers,
    carried_out,
    open_store,
    opening,
    stopping,
)
from stillhouse.recipes.train.starting import (
    Carry,
    enlargement,
    moved_by,
    shifted,
    start_from,
)
from stillhouse.recipes.train.tuning import (
    OwnObjective,
    PipelineExporter,
    Tuned,
    exported_facts,
    fitted,
)
from stillhouse.recipes.train.watching import (
    Drawer,
    Exporter,
    Preview,
    Snapshots,
    Validation,
    Validator,
)


class TrainRun(LongRun):
    """A training run."""

    data: Annotated[DataConfig | PointsConfig, Field(discriminator="kind")] = DataConfig()
    classes: NonNegativeInt = 0
    """Number of classes; 0: as many as the label column says."""
    model: str = ""
    """A diffusers pipeline to fine-tune: what is called own, tuned or pipeline is read from it."""
    network: Annotated[NetworkChoice | Tuned, Field(discriminator="kind")] = UNet()
    init_from: str = ""
    """A checkpoint to start from, carried over as far as it fits; an account is printed."""
    init: Carry = Carry()
    stages: tuple[Stage, ...] = ()
    """Resolutions to go through, as JSON: [{"size": 16, "images": 1e6}, {"size": 32, ...}]."""
    process: ProcessConfig = Edm()
    objective: Annotated[ObjectiveConfig | OwnObjective, Field(discriminator="kind")] = (
        DenoisingConfig()
    )
    coupling: CouplingConfig = IndependentConfig()
    codec: str = ""
    """A diffusers autoencoder, or a pipeline with one: the network then draws its latents."""
    encode_once: bool = False
    """Keep the latents of all images in a cache, with one crop for each."""
    text: Annotated[TextConfig | PipelineText, Field(discriminator="kind")] = NoText()
    detail: DetailWeight = DetailWeight()
    drop: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of labels or captions that are replaced by none, for classifier-free guidance."""
    drop_control: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of controls that are not said, independently of that, for two-term guidance."""
    averages: tuple[Profile, ...] = (HalfLife(),)
    """Moving averages of the weights, as JSON; the first is shown, measured and exported."""
    snapshot_every: NonNegativeInt = 0
    """Images between stored snapshots of power averages, to synthesize others from; 0: none."""
    preview: Preview = Preview()
    validation: Validation = Validation()
    evaluation: Annotated[NoEvaluation | Evaluation, Field(discriminator="kind")] = NoEvaluation()
    log_ids: bool = False
    """Log the ids of all images trained on, for audits."""

    @property
    def labelled(self) -> bool:
        if isinstance(self.data, PointsConfig):
            return self.data.labels and self.data.target().labels is not None
        return bool(self.data.columns.label)

    @property
    def captioned(self) -> bool:
        return self.text.kind != "none"

    def parts(self, text: Text | None) -> Parts:
        """What the network is told beside its own class, with captions if there are any."""
        layout = layout_of(self.data)
        gamma = self.detail.build(self.process.build().scaling) if layout.detail else GAMMA
        return Parts(layout=layout, gamma=gamma, text=text)


def run(config: TrainRun) -> int:
    """Trains to the end, from the last checkpoint where there is one; returns the images seen."""
    return carried_out(config, train)


def train(config: TrainRun, here: World, caught: list[int]) -> int:
    """The run of one process among all."""
    if config.stages:
        raise ValueError("a run in stages is trained by recipes.train.progressive.run_stages")
    config, asked = shifted(fitted(config)), config
    check_coupling(config.coupling, classes=config.labelled, captions=config.captioned)
    with ExitStack() as stack:
        store, found = open_store(config, here, stack)
        loader = build_loader(config, here, positions(store, found))
        learner = build_learner(config, here, loader, begun=found is not None)
        loader = read_once(config, here, loader, learner.codec)
        trackers = build_trackers(config, here, stack)
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
        parameters = sum(p.numel() for p in learner.denoiser.parameters())
        origins = origins_of(config, learner)
        facts = {"enlarged": enlargement(config)} if config.init_from else {}
        here.first(lambda: write_record(config, parameters, origins, **facts))
        if here.rank == 0 and found is None and learner.account is not None:
            print(f"{config.init_from}: {learner.account}", flush=True)
            print(f"{'noise':9}  levels times {moved_by(asked, config):g}", flush=True)
        feed = stack.enter_context(Prefetch(loader, learner.prepare))
        # Of a network that was carried over: what it can do before it has learnt anything here.
        looked = [] if found or learner.account is None else looking(engine)
        with stopping(engine, caught):
            engine.run(feed, opening(here, notes(config, loader, learner, found)), looked)
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
    labelled = config.labelled
    known = config.classes or len(loader.classes)
    if labelled and loader.classes and known != len(loader.classes):
        raise UserError(f"--classes {known}, but the data has {len(loader.classes)}: leave it out")
    if labelled and not known and isinstance(config.data, DataConfig):
        raise UserError(
            f"the label column {config.data.columns.label!r} does not say how many classes there "
            "are: give the number as --classes"
        )
    return known if labelled else 0


def build_learner(config: TrainRun, here: World, loader: Loader, *, begun: bool = False) -> Learner:
    """The network as a denoiser, with its objective. One that has begun has weights of its own."""
    classes, codec = count_classes(config, loader), build_codec(config, here.device)
    texts = config.text.build(loader, config.data, here)
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
    account = None if begun else start_from(config, network, trained, codec)
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
        build_coupling(config.coupling, here),
        texts,
        config.drop_control,
        codec,
        stored=shape == config.data.shape or encodes_once(config, codec),
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
        texts = config.text.build(held_out, data, here)
        shown = config.model_copy(update={"data": data})
        held_out = read_once(shown, here, held_out, learner.codec)
        validator = Validator(held_out, learner, config.shown, texts)
        hooks.append((config.validation.every, validator))
    if config.snapshot_every:
        hooks.append((config.snapshot_every, Snapshots(config.out / "averages")))
    if isinstance(config.evaluation, Evaluation):
        evaluator = config.evaluation.build(config.data, learner, config.shown, here)
        hooks.append((config.evaluation.every, evaluator))
    return [*hooks, (config.checkpoint_every, build_exporter(config, learner))]


def looking(engine: Engine) -> list[Hook]:
    """The hooks that look at the network and store nothing of it."""
    return [hook for _, hook in engine.hooks if isinstance(hook, Drawer | Validator)]


def build_exporter(config: TrainRun, learner: Learner) -> Hook:
    if isinstance(config.network, Tuned):
        facts, folder = exported_facts(config), config.out / "model"
        return PipelineExporter(learner, config.shown, config.network, facts, folder)
    facts = handed_on(config, {"evaluation": True, "codec": True})
    scheduler = config.process.scheduler()
    return Exporter(learner, config.shown, scheduler, facts, config.out / "model")


# ---------------------------------------------------------------- words


def notes(config: TrainRun, loader: Loader, learner: Learner, found: Found | None) -> list[str]:
    """What a user should know before anything is trained."""
    said = "" if learner.texts is None else learner.texts.note
    skipped = [] if found is None else found.skipped
    leaks = coupling_note(config.coupling, classes=config.labelled, captions=config.captioned)
    return [*skipped, loader.note, said, config.process.note, leaks]
