"""The networks of a distillation: a frozen teacher, and a student that begins as its equal."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from stillhouse.distill.lora_score import LoraScore
from stillhouse.distill.trajectories import frozen
from stillhouse.distill.walks import FewSteps
from stillhouse.engine.sharding import spread
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.files import fingerprint
from stillhouse.models import DiffusersNetwork
from stillhouse.models.conditioning import conditioned
from stillhouse.models.networks import attended_width
from stillhouse.pipelines import checkpoint_files, load_denoiser, resolve_folder
from stillhouse.pipelines.exportable import plain_pipeline
from stillhouse.pipelines.families import (
    FAMILIES,
    INDEX,
    read_index,
    takes_prompts,
    whole_folder,
)
from stillhouse.pipelines.schedules import read_schedule
from stillhouse.process import NetworkDenoiser
from stillhouse.recipes.distill.generators import Matched
from stillhouse.recipes.distill.settings import DistillRun
from stillhouse.recipes.distill.told import find_labels, find_prompts
from stillhouse.recipes.judge.galleries import model_folder
from stillhouse.recipes.parts import Guidance
from stillhouse.recipes.subjects import Subject, Wish, load_subject
from stillhouse.recipes.train.tuning import Tuned


@dataclass(frozen=True)
class Source:
    """Where the teacher is, and what it is."""

    name: str
    folder: Path
    subject: Subject  # with the guidance that the student learns
    prompts: tuple[str, ...] = ()  # to distil on
    score: LoraScore | None = None  # the fake score, where it is adapters on the teacher
    adapters: dict[str, Any] = field(default_factory=dict[str, Any])  # peft's options of them

    @property
    def pipeline(self) -> bool:
        """Whether it is of a class whose other parts a student goes back among."""
        index = self.folder / INDEX
        return index.is_file() and read_index(self.folder).get("_class_name") in FAMILIES

    def long_walk(self, steps: int) -> int:
        """Steps of the teacher at its best; one that is a student itself knows its own alone."""
        known = self.subject.walk
        return steps if known is None else max(known.evaluations)


def load_source(config: DistillRun, here: World, like: Source | None = None) -> Source:
    """The teacher: in its own precision, spread as the student is where that is sharded.

    Not where the fake score is a part of it, which the engine will spread. It is told what `like`
    is told: files may have changed since that was loaded.
    """
    if not config.model:
        raise UserError("name the model to distil: a diffusers directory, a run, or a hub id")
    if config.model.startswith("toy:"):
        raise UserError("a toy is a formula: train one (stillhouse train toy-moons), distil that")
    name = model_folder(config.model)
    if config.adapters and isinstance(config.method, Matched):
        raise UserError(
            "a one-step generator learns all of its weights: leave --adapters out; what saves "
            "memory is --method.score lora, --teacher bfloat16 and --micro-batch"
        )
    if config.labels and config.labels_of:
        raise UserError("--labels are to be dealt, and those of a data set: leave one of them out")
    if config.label_column and not config.labels_of:
        raise UserError("--label-column is of the data set that --labels-of names: name one")
    prompts = like.prompts if like else find_prompts(config.prompts, config.prompt_column)
    folder = teacher_folder(name)
    wish = Wish(
        config.guidance,
        like.subject.labels if like else config.labels,
        config.null_label,
        getattr(torch, config.teacher),
        here.device,
        prompts,
        config.control,
        config.prompt_encoder,
    )
    subject = load_subject(str(folder), wish)
    if config.labels_of and not like:
        if not subject.labels:
            raise UserError(f"{name} knows no classes: leave --labels-of out")
        labels = find_labels(config.labels_of, config.label_column, subject.labels)
        subject = replace(subject, labels=labels)
    if subject.speech is not None:  # few walks, or few samples to compare, are of all kinds
        subject = replace(subject, speech=replace(subject.speech, mixed=True))
    teacher = subject.bare
    assert teacher is not None
    frozen(teacher)
    if config.spread.sharding in ("fsdp", "hsdp"):
        teacher.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
        how = config.spread.model_copy(update={"checkpointing": False, "precision": "fp32"})
        if not shares_teacher(config):
            spread(teacher, how, here)
    return Source(name, folder, subject, prompts)


def shares_teacher(config: DistillRun) -> bool:
    """Whether the fake score is adapters on the teacher."""
    return isinstance(config.method, Matched) and config.method.score == "lora"


def guidance_in(walk: FewSteps) -> Guidance:
    """What a student's teacher was guided by."""
    return TypeAdapter(Guidance).validate_python(walk.guidance or {"kind": "none"})


def teacher_folder(name: str) -> Path:
    """With the text encoders of a pipeline that takes prompts."""
    name = model_folder(name)
    folder = resolve_folder(name)
    return whole_folder(name) if takes_prompts(folder) else folder


def teacher_digest(folder: Path) -> str:
    return fingerprint([file for files in checkpoint_files(folder).values() for file in files])


def load_student(config: DistillRun, source: Source, walk: FewSteps) -> NetworkDenoiser:
    """The teacher's weights in float32, with a way to hear the number of steps if it is told."""
    denoiser, told = load_denoiser(source.folder), walk.told
    network: Any = denoiser.network
    process = (denoiser.scaling, denoiser.prediction)
    if config.exportable:  # the same process, with the timesteps that its scheduler will walk
        plain = plain_pipeline(source.folder, network, walk)
        process = read_schedule(plain.scheduler)[:2]
    if told and not network.told.steps:
        network = hearing_steps(network)
    if config.adapters:
        if not source.pipeline:
            raise UserError(
                f"{source.name} has no pipeline that adapters could be loaded into: leave "
                "--adapters out"
            )
        if not config.exportable:
            raise UserError("adapters are opened by diffusers: add --exportable --method sfd")
        tuned = Tuned(path=str(source.folder), method="lora", rank=config.adapters)
        tuned.add_adapters(network.model)
    # Without the teacher's clipping: no scheduler of a student would do it.
    return NetworkDenoiser(network, *process).train()


def as_student(subject: Subject, denoiser: Any, walk: FewSteps) -> Subject:
    """The student in its teacher's place."""
    return replace(subject, denoiser=denoiser, scaling=denoiser.scaling, walk=walk)


def hearing_steps(network: DiffusersNetwork) -> DiffusersNetwork:
    """The same network, which also takes a number of steps, and does not heed it yet."""
    parts, old = replace(network.told, steps=True), network.conditioning
    try:
        new = conditioned(network.model, parts, attended_width(network.model))
    except ValueError as error:
        raise UserError(f"{error}: give --method sfd") from error
    if old is not None:
        new.load_state_dict({**new.state_dict(), **old.state_dict()})
    return DiffusersNetwork(network.model, network.null_label, new)
