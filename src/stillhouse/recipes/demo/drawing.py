"""What the demo draws and times, without a page: a model, or a teacher beside its student.

A model is read once and told anew for each wish; what it draws is what `stillhouse sample` draws.
"""

import time
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, ValidationError

from stillhouse.config import Config
from stillhouse.distill.walks import FewSteps
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models.conditioning import Parts
from stillhouse.pipelines import resolve_folder
from stillhouse.pipelines.families import takes_prompts, whole_folder
from stillhouse.pipelines.load import CONDITIONING, read_json
from stillhouse.pipelines.prompts import PromptEncoder
from stillhouse.recipes.features.reading import FeatureModel, Reading
from stillhouse.recipes.judge.galleries import Drawn, Pixels
from stillhouse.recipes.parts import ClassifierFree, NoGuidance, SolverName, solver
from stillhouse.recipes.prompting import PipelineSpeech
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.subjects import Subject, run_model
from stillhouse.recipes.telling import Speech, speech_of

PICTURES = 16  # at once: one batch, as `stillhouse sample` cuts them
STEPS = 100
LETTERS = 1000  # of a prompt
GUIDANCE = 100  # the largest weight


class Wanted(Config):
    """What a visitor asks for; a model is told what it takes."""

    prompt: Annotated[str, Field(max_length=LETTERS)] = ""
    label: int | None = None
    """A class; None: all of them in turn."""
    control: tuple[str, ...] = ()
    """How it is framed, as name=value."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    count: Annotated[int, Field(ge=1, le=PICTURES)] = 1
    solver: SolverName = "dpmpp-3m"
    steps: Annotated[int, Field(ge=1, le=STEPS)] = 20
    guidance: Annotated[float, Field(ge=0, le=GUIDANCE)] = 1.0
    """Its weight; 1 is none."""
    evaluations: int | None = None
    """Of a few-step student; None: as many as it can take."""


def wanted(**values: Any) -> Wanted:
    """From what the page holds; a value out of bounds is a sentence."""
    try:
        return Wanted(**values)
    except ValidationError as error:
        first = error.errors()[0]
        why = first["msg"].replace("Input should", "it should").rstrip(".")
        raise UserError(f"{first['loc'][0]} cannot be used: {why}") from None


class Picture(NamedTuple):
    """What was drawn, and what it took."""

    images: list[Any]  # PIL
    seconds: float
    evaluations: int  # of the denoiser
    calls: int  # of the network: guidance may ask twice


# ---------------------------------------------------------------- models


class Model:
    """A model of images, read once."""

    def __init__(self, name: str, reading: Reading, device: torch.device) -> None:
        if not name or name.startswith("toy:"):
            raise UserError("name a model of images: its directory, a hub id, or a run's folder")
        self.name, self.device = name, device
        self.folder = resolve_folder(run_model(name))
        self.takes_text = hears_text(self.folder)
        prompt = ("",) if self.takes_text else ()
        self.reader = FeatureModel(str(self.folder), reading, device, prompt)

    @property
    def title(self) -> str:
        return Path(self.name).name or self.name

    @property
    def subject(self) -> Subject:
        return self.reader.subject

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of what it draws, in pixels."""
        codec, (_, height, width) = self.subject.codec, self.subject.shape
        scale = 1 if codec is None else codec.downscale
        return height * scale, width * scale

    @property
    def walk(self) -> FewSteps | None:
        """Of a few-step student."""
        return self.subject.walk

    @property
    def labels(self) -> tuple[int, ...]:
        """The classes that can be drawn."""
        return self.subject.labels

    @property
    def styles(self) -> Mapping[str, tuple[str, ...]]:
        """The values of each control that is one of a few words."""
        network: Any = self.reader.denoiser.network
        return dict(network.told.layout.styles)

    @property
    def is_guidable(self) -> bool:
        """By the page: a student walks as it was taught to."""
        told = self.takes_text or bool(self.labels)
        return self.walk is None and told and self.subject.null is not None

    def told(self, prompt: str, label: int | None, control: tuple[str, ...] = ()) -> Subject:
        """The subject, asked for something else; no weights are read again."""
        labels = self.labels if label is None else (label,)
        if label is not None and label not in self.labels:
            known = f"choose one of 0 to {max(self.labels)}" if self.labels else "it knows none"
            raise UserError(f"the model has no class {label}: {known}")
        speech = self._speech(prompt, control, len(labels))
        return replace(self.subject, labels=labels, speech=speech)

    def _speech(self, prompt: str, control: tuple[str, ...], kinds: int) -> Speech:
        speech = self.subject.speech
        if isinstance(speech, PipelineSpeech) and speech.texts is not None:
            return speech.saying([prompt], self._prompts)
        prompts = (prompt,) if self.takes_text else ()
        network: Any = self.reader.denoiser.network
        return speech_of(network.told, self.subject.shape, prompts, control, kinds)

    @cached_property
    def _prompts(self) -> PromptEncoder:
        """Of a whole pipeline; read once, as it may be larger than the rest."""
        return PromptEncoder(whole_folder(str(self.folder)), device=self.device)

    def seeing(self, prompt: str, label: int | None) -> FeatureModel:
        """The model as it reads pictures of something; no class if `label` is not given."""
        reader = copy(self.reader)
        reader.subject = self.told(prompt, label)
        reader.label = label
        return reader


def hears_text(folder: Path) -> bool:
    """Whether a model in this folder is told prompts."""
    if takes_prompts(folder):
        return True
    described = [*folder.glob(f"{CONDITIONING}.json"), *folder.glob(f"*/{CONDITIONING}.json")]
    return any(Parts.from_json(read_json(file)).text is not None for file in described)


def load_models(
    name: str, student: str, reading: Reading, device: torch.device
) -> tuple[Model, Model | None]:
    """The model, and the student if one is named; they must take the same wishes."""
    model = Model(name, reading, device)
    other = Model(student, reading, device) if student else None
    if other is not None:
        if other.walk is None:
            raise UserError(f"{student} is no few-step student: it has no few_steps.json")
        for what, ours, theirs in (
            ("prompts", model.takes_text, other.takes_text),
            ("classes", model.labels, other.labels),
            ("control", model.styles, other.styles),
        ):
            if ours != theirs:
                raise UserError(
                    f"{name} and {student} take other {what}: show a student beside its own teacher"
                )
    return model, other


def first_guidance(student: Model | None, asked: float | None) -> float:
    """The weight that the page begins with: as asked, as the student was taught, or none."""
    if asked is not None:
        return asked
    taught = student.walk.guidance if student is not None and student.walk is not None else None
    # Weights of other kinds of guidance mean something else.
    guided = taught is not None and taught.get("kind") == ClassifierFree().kind
    return float(taught["weight"]) if taught and guided else 1.0


# ---------------------------------------------------------------- drawing


def sample_run(model: Model, wish: Wanted) -> SampleRun:
    """How `stillhouse sample` would walk; what the model is told is in its subject."""
    usual = SampleRun(model=str(model.folder), seed=wish.seed, count=wish.count)
    if model.walk is not None:
        return usual.model_copy(update={"steps": wish.evaluations})
    guided = model.is_guidable and wish.guidance != 1
    guidance = ClassifierFree(weight=wish.guidance) if guided else NoGuidance()
    own = {"solver": solver(wish.solver), "steps": wish.steps, "guidance": guidance}
    return usual.model_copy(update=own)


def draw(model: Model, wish: Wanted) -> Picture:
    """The pictures of a wish, timed from the noise to the pixels."""
    if model.takes_text and not wish.prompt.strip():
        raise UserError("write what to draw, such as: red apple")
    run = sample_run(model, wish)
    subject = model.told(wish.prompt, wish.label, wish.control)
    denoiser = run.guidance.build(model.reader.denoiser, subject.null, _no_guide)
    drawn = Drawn(run, replace(subject, denoiser=denoiser), Pixels(), model.device)
    alone = World(0, 1, model.device)
    started = time.perf_counter()
    (shown,) = drawn.batches(alone, 0, lambda share: None)
    pixels = shown.images.movedim(1, -1).cpu().numpy()
    seconds = time.perf_counter() - started
    return Picture(_pil(pixels), seconds, drawn.evaluations, drawn.evaluations * run.guidance.calls)


def _pil(pixels: Any) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(image) for image in pixels]


def _no_guide(name: str) -> Any:
    raise UserError(f"the demo guides by no other model: {name} is not read")


def warm(model: Model) -> None:
    """One small picture, so that the first time on the page is not that of starting up."""
    fewest = None if model.walk is None else min(model.walk.evaluations)
    draw(model, Wanted(prompt="warm", solver="euler", steps=1, evaluations=fewest))
