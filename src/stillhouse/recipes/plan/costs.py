"""`stillhouse plan`: what a run will need, before anyone pays for it.

Every line says whether it was counted (on tensors without storage: see `shadows`) or estimated, and
then from what. Nothing of a GPU was measured.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt
from torch._subclasses import FakeTensorMode

from stillhouse.config import Config
from stillhouse.data.prepare.shard import Precision
from stillhouse.data.prepare.units import usual_size
from stillhouse.engine.sharding import Kind, Spread
from stillhouse.errors import UserError
from stillhouse.models import Codec, DiffusersNetwork
from stillhouse.models.networks import attended_width
from stillhouse.models.text import empty_encoder
from stillhouse.pipelines.families import whole_folder
from stillhouse.recipes.encoded import encodes_once
from stillhouse.recipes.latents import build_codec, drawn_shape, prepared
from stillhouse.recipes.plan.devices import DEVICES, Device, Name
from stillhouse.recipes.plan.ledger import Ledger
from stillhouse.recipes.plan.shadows import (
    CPU,
    Footprint,
    Step,
    footprint,
    measure,
    shadow,
    told_tokens,
)
from stillhouse.recipes.plan.stored import COUNTED, checkpoint, exported
from stillhouse.recipes.prompting import PipelineText
from stillhouse.recipes.telling import CaptionText
from stillhouse.recipes.train.training import TrainRun
from stillhouse.recipes.train.tuning import fitted

BYTES = {"float32": 4, "float16": 2}


class PlanRun(Config):
    """Where a run would be done."""

    gpus: PositiveInt = 1
    """How many, in all machines."""
    device: Name = "h100"
    """Whose data sheet is read; cpu has none."""
    per_node: PositiveInt = 8
    """GPUs in one machine."""
    utilisation: Annotated[float, Field(gt=0, le=1)] = 0.35
    """Share of the data sheet's operations per second that training will get: an assumption."""
    flops_per_second: NonNegativeFloat = 0
    """What one device gets in training, if you have measured it; 0: data sheet times utilisation"""
    dataset: NonNegativeInt = 0
    """Images that are stored; 0: as many as are trained on, each seen once."""
    stored: Precision = "float32"
    """Of latents and captions in shards, as --dtype and --text-dtype of stillhouse prepare."""


@dataclass(frozen=True)
class Line:
    """One thing that a run needs."""

    section: str
    name: str
    value: float | None  # None: cannot be said
    unit: str
    how: str
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """One way to spread the run, and what a step of it takes."""

    how: Spread
    step: Step
    footprint: Footprint

    @property
    def name(self) -> str:
        return self.how.sharding + (", recomputing" if self.how.checkpointing else "")


@dataclass(frozen=True)
class Planned:
    """What the lines are made from."""

    config: TrainRun
    place: PlanRun
    device: Device | None
    ways: list[Way]
    codec: Codec | None
    network: DiffusersNetwork  # without storage

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.network.parameters())

    @property
    def trained(self) -> int:
        """Of them."""
        return sum(p.numel() for p in self.network.parameters() if p.requires_grad)

    @property
    def own(self) -> Way:
        """As the run itself says."""
        wanted = (_own_kind(self.config, self.place), self.config.spread.checkpointing)
        return next(w for w in self.ways if (w.how.sharding, w.how.checkpointing) == wanted)

    @property
    def rate(self) -> float:
        """Operations per second of one device; 0: nobody knows."""
        if self.place.flops_per_second or self.device is None:
            return self.place.flops_per_second
        own = self.device.bf16 if self.config.spread.precision == "bf16" else self.device.fp32
        return own * self.place.utilisation

    @property
    def rate_how(self) -> str:
        if self.place.flops_per_second:
            return "estimated: as you said by --flops-per-second"
        share, kind = f"{self.place.utilisation:.0%}", self.config.spread.precision
        return f"estimated: {share} (an assumption) of the data sheet's {kind} rate"

    @property
    def encodes(self) -> bool:
        """Whether images become latents again and again in training."""
        stored = prepared(self.config) is not None or encodes_once(self.config, self.codec)
        return self.codec is not None and not stored


def plan(config: TrainRun, place: PlanRun) -> list[Line]:
    """All lines, section by section."""
    config = fitted(config)
    if config.batch % place.gpus:
        raise UserError(
            f"a batch of {config.batch} cannot be shared by {place.gpus} GPUs: choose another "
            "--batch or --gpus"
        )
    ways = [_way(config, how, place.gpus) for how in _spreads(config, place)]
    codec, network = build_codec(config, CPU), shadow(config)
    found = Planned(config, place, DEVICES[place.device], ways, codec, network)
    sections = (computing, memory, communication, time, storage)
    return [line for section in sections for line in section(found)]


def _own_kind(config: TrainRun, place: PlanRun) -> Kind:
    if place.gpus == 1:
        return "none"
    return "ddp" if config.spread.sharding == "none" else config.spread.sharding


def _spreads(config: TrainRun, place: PlanRun) -> Iterator[Spread]:
    """All that make sense on so many GPUs, and the run's own."""
    group = config.spread.shard_size or min(place.per_node, place.gpus)
    kinds: list[Kind] = ["none"] if place.gpus == 1 else ["ddp", "fsdp"]
    if place.gpus > group or _own_kind(config, place) == "hsdp":
        kinds.append("hsdp")
    if "hsdp" in kinds and place.gpus % group:
        raise UserError(
            f"{place.gpus} GPUs cannot be split into groups of {group}: say --per-node or "
            "--spread.shard-size"
        )
    for kind in kinds:
        for again in (False, True):
            change = {"sharding": kind, "checkpointing": again, "shard_size": group}
            yield config.spread.model_copy(update=change)


def _way(config: TrainRun, how: Spread, gpus: int) -> Way:
    step = measure(config, how, gpus)
    return Way(how, step, footprint(config, step, how))


# ---------------------------------------------------------------- sections


def computing(found: Planned) -> Iterator[Line]:
    step = found.own.step
    again = next(w.step for w in found.ways if w.how.checkpointing)
    plain = next(w.step for w in found.ways if not w.how.checkpointing)
    section = "computing, per image"
    yield Line("network", "parameters", found.parameters / 1e6, "M", COUNTED)
    yield Line(section, "forward", step.forward / 1e9, "GFLOP", COUNTED)
    yield Line(section, "forward and backward", plain.operations / 1e9, "GFLOP", COUNTED)
    yield Line(section, "the same, recomputing", again.operations / 1e9, "GFLOP", COUNTED)
    if found.codec is not None:
        when = "in training" if found.encodes else "once, before"
        encoding = encoding_operations(found.config, found.codec) / 1e9
        yield Line(section, f"encoding, {when}", encoding, "GFLOP", COUNTED)
    if captions := caption_operations(found.config):
        how = f"{COUNTED}, for a caption of all the tokens that there is room for"
        yield Line(section, "its caption, once, before", captions / 1e9, "GFLOP", how)


def encoding_operations(config: TrainRun, codec: Codec) -> float:
    """Of making one image's latents."""
    _, *sides = drawn_shape(config, codec)
    shape = (codec.image_channels, *(side * codec.downscale for side in sides))
    autoencoder: Any = codec.autoencoder
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        images = torch.empty(2, *shape)
        with Ledger() as ledger:
            autoencoder.encode(images)
    return ledger.operations / 2


def caption_operations(config: TrainRun) -> float:
    """Of encoding one caption, by all encoders there are; 0 where the run encodes none."""
    text = config.text
    if isinstance(text, PipelineText):
        folders = sorted(whole_folder(text.path).glob("text_encoder*"))
        encoders = {str(folder): text.foreseen(config.data)[0].length for folder in folders}
    elif isinstance(text, CaptionText):
        encoders = {text.encoder: text.length}
    else:
        return 0
    operations = 0
    for name, length in encoders.items():
        with FakeTensorMode(), torch.no_grad():
            encoder, kind = empty_encoder(name)
            # In a pipeline the length that is asked for is T5's; CLIP has its own.
            own = isinstance(text, PipelineText) and "T5" not in kind.model
            tokens = encoder.config.max_position_embeddings if own else length
            with Ledger() as ledger:
                encoder(torch.zeros(1, tokens, dtype=torch.long))
        operations += ledger.operations
    return operations


def memory(found: Planned) -> Iterator[Line]:
    section = "memory per GPU, without CUDA's own (context, workspaces, fragments)"
    for way in found.ways:
        how = COUNTED
        if found.config.optim.kind == "adamw-8bit":
            how = "estimated: counted but for 8-bit moments, from torchao's blocks of 256"
        parts = {name: size / 1e9 for name, size in asdict(way.footprint).items()}
        together = parts.pop("together")
        if found.device is not None:
            room = found.device.memory / 1e9
            how += f"; {'fits' if together < room else 'does not fit'} into {room:g} GB"
        yield Line(section, way.name, together, "GB", how, parts)


def communication(found: Planned) -> Iterator[Line]:
    section = "communication per step, sent by each GPU"
    ways = [way for way in found.ways if not way.how.checkpointing]  # which sends no more
    for way in ways if found.place.gpus > 1 else []:
        near, far = traffic(found, way.how)
        parts = {"within machines": near / 1e9, "across": far / 1e9}
        how = "estimated: ring collectives over counted bytes"
        device = found.device
        if device is not None and (device.network or not far):
            parts["seconds"] = near / device.link + (far / device.network if far else 0.0)
            how += "; seconds at the data sheet's links, if nothing is hidden behind computing"
        yield Line(section, way.name, (near + far) / 1e9, "GB", how, parts)


def traffic(found: Planned, how: Spread) -> tuple[float, float]:
    """Bytes that one GPU sends in a step: within its machine, and across machines.

    A ring of n gathers or reduce-scatters W bytes by sending (n - 1)/n W, and all-reduces by both.
    A ring over several machines goes at the pace of the network, so that is where it counts.
    """
    config, place = found.config, found.place
    n, gradients = place.gpus, 4.0 * found.trained
    if how.sharding == "ddp":
        sent = 2 * (n - 1) / n * gradients
        return (sent, 0.0) if n <= place.per_node else (0.0, sent)
    sharers = n if how.sharding == "fsdp" else how.shard_size
    share = config.batch // n
    pieces = math.ceil(share / (config.micro_batch or share))
    weights = (2.0 if how.precision == "bf16" else 4.0) * found.parameters
    # Weights are gathered for the forward and again for the backward of every micro-batch.
    shared = (sharers - 1) / sharers * (2 * pieces * weights + gradients)
    copies = n // sharers
    reduced = 2 * (copies - 1) / copies * gradients / sharers
    return (shared, reduced) if sharers <= place.per_node else (0.0, shared + reduced)


def time(found: Planned) -> Iterator[Line]:
    config, place = found.config, found.place
    section = f"time with {found.own.name}, as the run says, if nothing waits"
    steps = math.ceil(config.images / config.batch)
    yield Line(section, "steps", steps, "", COUNTED)
    if not found.rate:
        why = "estimated: cannot be said without --flops-per-second, as measured on yours"
        yield Line(section, "all steps", None, "hours", why)
        return
    operations = found.own.step.operations
    if found.codec is not None and found.encodes:
        operations += encoding_operations(config, found.codec)
    seconds = config.images * operations / (found.rate * place.gpus)
    how = "estimated: counted operations at that rate"
    yield Line(section, "rate of one device", found.rate / 1e12, "TFLOPS", found.rate_how)
    yield Line(section, "a step", seconds / steps, "s", how)
    yield Line(section, "all steps", seconds / 3600, "hours", how)
    yield Line(section, "GPU hours", seconds / 3600 * place.gpus, "hours", how)


def storage(found: Planned) -> Iterator[Line]:
    config, place = found.config, found.place
    section = "storage"
    if found.codec is not None:
        yield from _shards(found, place.dataset or config.images)
    one = checkpoint(config, found.network)
    model = exported(config, found.network, found.codec)
    kept = config.keep_last + (config.images // config.keep_every if config.keep_every else 0)
    yield Line(section, "a checkpoint", one.size / 1e9, "GB", one.how)
    yield Line(section, f"checkpoints, {kept} kept", one.size * kept / 1e9, "GB", one.how)
    yield Line(section, "the exported model", model.size / 1e9, "GB", model.how)


def _shards(found: Planned, images: int) -> Iterator[Line]:
    config, size = found.config, BYTES[found.place.stored]
    row = math.prod(drawn_shape(config, found.codec)) * size
    text = config.text.foreseen(config.data)
    how = f"{COUNTED}: latents in {found.place.stored}; names, crops and digests come on top"
    if text is not None:
        tokens, width = told_tokens(config), text[1] or attended_width(found.network.model)
        row += (tokens + 1) * width * size
        how = f"estimated: latents, and all {tokens} tokens of captions: at most"
    section = "storage"
    yield Line(section, "a prepared image", row / 1e3, "kB", how)
    yield Line(section, f"{images:,} of them", images * row / 1e12, "TB", how)
    many = "estimated: from prepare's usual rows per shard; a tar becomes one"
    yield Line(section, "shards", math.ceil(images / usual_size(images)), "", many)


# ---------------------------------------------------------------- words


def show(config: TrainRun, place: PlanRun, lines: list[Line]) -> str:
    """The plan as a person reads it."""
    device = DEVICES[place.device]
    named = device.name if device else "CPU"
    text = [f"{config.images:,} images in batches of {config.batch:,} on {place.gpus} x {named}"]
    text += [f"data sheet: {device.source}"] if device else []
    section = ""
    for line in lines:
        if line.section != section:
            section = line.section
            text += ["", section]
        text.append(f"  {line.name:<28} {_number(line.value):>10} {line.unit:<6} {line.how}")
        if line.parts:
            inner = ", ".join(f"{name} {_number(part)}" for name, part in line.parts.items())
            text.append(f"    {inner}")
    return "\n".join(text)


def _number(value: float | None) -> str:
    if value is None:
        return "?"
    if value == int(value) and abs(value) >= 1:
        return f"{int(value):,}"
    return f"{value:,.2f}" if abs(value) >= 10 else f"{value:.3g}"


def as_json(config: TrainRun, place: PlanRun, lines: list[Line]) -> dict[str, Any]:
    """The same for machines."""
    device = DEVICES[place.device]
    return {
        "place": place.model_dump(mode="json"),
        "device": None if device is None else asdict(device),
        "images": config.images,
        "batch": config.batch,
        "lines": [asdict(line) for line in lines],
    }
