"""From a model's name and a selection to features of pictures.

A selection is made of parts: some activations of one model at one noise level. Parts of several
models or levels may go together; features are then named `0:id`, `1:id`, ... by their part.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data import CentreCrop, ImageConfig, Squash, to_float
from stillhouse.errors import UserError
from stillhouse.features.catalogue import Catalogue, catalogue, look_up
from stillhouse.features.extractor import Extractor, inner_model
from stillhouse.features.selection import SELECTIONS, candidates
from stillhouse.features.store import Part
from stillhouse.files import fingerprint
from stillhouse.pipelines import checkpoint_files, resolve_folder
from stillhouse.pipelines.families import downscale
from stillhouse.pipelines.load import CONFIG_FILES, load_outline, read_json
from stillhouse.process import VP, Condition, NetworkDenoiser, Scaling
from stillhouse.recipes.judge.galleries import model_folder
from stillhouse.recipes.parts import NoGuidance
from stillhouse.recipes.subjects import Subject, Wish, load_subject

M = TypeVar("M")

PAPER_TIME = 50  # the timestep of the paper
SIGMA = 0.2  # of processes without such timesteps, as a share of the data's deviation


class Reading(Config):
    """How a model reads pictures."""

    model: str = ""
    """A diffusers directory, a hub id, or a run's folder."""
    selection: tuple[str, ...] = ()
    """Activations: ids, a published selection (sd15, sdxl, legacy-sd15, legacy-sdxl), or files that
    `features select` has written; several, with commas or spaces between, go together."""
    sigma: tuple[NonNegativeFloat, ...] = ()
    """Noise levels; several go together. If not given, the selection's own, or else timestep 50."""
    prompt: tuple[str, ...] = ()
    """What a model of text is told that it sees; nothing if not given. Of several, image i gets
    prompt i mod n."""
    label: int | None = None
    """The same for a model of classes; no class if not given."""
    size: NonNegativeInt | tuple[PositiveInt, PositiveInt] = 0
    """Pixels that pictures are made: the side of a square, or height and width; 0: the model's
    own."""
    fit: Literal["squash", "crop"] = "squash"
    """The whole picture squeezed to that size, or its middle."""
    seed: int = 0
    """Of the noise."""
    batch: PositiveInt = 8
    """Pictures in a run of the network."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the model."""
    device: Annotated[str, Field(min_length=1)] = "auto"
    """auto, cpu or cuda."""


class Chosen(Config):
    """Some activations of one model at one noise level."""

    ids: tuple[str, ...]
    model: str = ""
    """Empty: the one that the command names."""
    sigma: float | None = None
    time: float | None = None
    """The level as the model's own timestep; neither: the usual one."""
    prompt: tuple[str, ...] | None = None
    label: int | None = None


class SelectionFile(Config):
    """What `features select` writes."""

    parts: tuple[Chosen, ...]
    why: dict[str, str] = Field(default_factory=dict)
    """How each was chosen."""


def read_selection(path: Path) -> SelectionFile:
    try:
        return SelectionFile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} holds no selection ({reason}): name a file of `stillhouse features select`"
        ) from error


def chosen_parts(config: Reading) -> list[Chosen]:
    """The parts that a command line asks for, in the order of its words; bare ids are one part,
    where the first of them stands."""
    words = [word for group in config.selection for word in group.split(",") if word]
    ids = [word for word in words if not word.endswith(".json") and word not in SELECTIONS]
    parts: list[Chosen] = []
    for word in words:
        if word.endswith(".json"):
            parts += read_selection(Path(word)).parts
        elif word in SELECTIONS:
            parts.append(Chosen(ids=SELECTIONS[word].ids, time=SELECTIONS[word].time))
        elif ids:
            parts.append(Chosen(ids=tuple(ids)))
            ids = []
    if not parts:
        raise UserError(
            "name activations as --selection: ids that `stillhouse features info MODEL` lists, "
            f"one of {', '.join(SELECTIONS)}, or a file of `stillhouse features select`"
        )
    levels = config.sigma or (None,)
    return [
        part if sigma is None else part.model_copy(update={"sigma": sigma, "time": None})
        for part in parts
        for sigma in levels
    ]


# ---------------------------------------------------------------- one model


class Outline:
    """What a model's files say without its weights: activations, sizes, noise levels."""

    def __init__(
        self,
        name: str,
        config: Reading,
        prompt: tuple[str, ...] = (),
        label: int | None = None,
    ) -> None:
        if not name:
            raise UserError("name a model: a diffusers directory, a hub id, or a run's folder")
        self.name, self.prompt, self.label = name, prompt, label
        self.place = model_folder(name)
        if self.place.startswith("toy:"):
            raise _no_images(name)
        folder = resolve_folder(self.place, CONFIG_FILES)
        outline = load_outline(folder)
        network: Any = outline.network
        self.scaling: Scaling = outline.scaling
        self.shape = _shape(name, network)
        self.known: Catalogue = catalogue(inner_model(outline))
        self.scale, self.channels = _of_codec(folder) or (1, self.shape[0])
        self.image = self._image(config)
        self._check(network.convention.square)

    def _image(self, config: Reading) -> tuple[ImageConfig, tuple[int, int]]:
        height, width = (side * self.scale for side in self.shape[1:])
        if config.size:
            height, width = (config.size,) * 2 if isinstance(config.size, int) else config.size
        crop = Squash() if config.fit == "squash" else CentreCrop()
        mode = "grey" if self.channels == 1 else "rgb"
        return ImageConfig(size=height, mode=mode, crop=crop), (height, width)

    def _check(self, square: bool) -> None:
        """A network that cuts pictures into patches would leave out what is too small for one."""
        size, patch = self.image[1], self.scale * max(a.patch for a in self.known.values())
        if square and len({*size}) > 1:
            raise UserError(f"{self.name} takes square pictures only: give --size one side")
        if any(side % patch for side in size):
            raise UserError(
                f"{self.name} takes sides that are multiples of {patch}: give such a --size"
            )

    @property
    def reading(self) -> str:
        config, (height, width) = self.image
        how = "squashed" if isinstance(config.crop, Squash) else "centre crop"
        if self.channels not in (1, 3):  # without its codec
            return f"{width} x {height} latents"
        return f"{width} x {height} {config.mode}, {how}, {config.filter}"

    @property
    def latent(self) -> tuple[int, int]:
        """Height and width of what the network takes."""
        height, width = self.image[1]
        return height // self.scale, width // self.scale

    @property
    def told(self) -> str:
        """In words, for records."""
        said = ", ".join(f"prompt {text!r}" for text in self.prompt)
        said += " in turn" * (len(self.prompt) > 1)
        label = "" if self.label is None else f"class {self.label}"
        return ", ".join(filter(None, [said, label]))

    def digest(self) -> str:
        """Of all files that features depend on."""
        files = checkpoint_files(resolve_folder(self.place))
        return ", ".join(map(fingerprint, files.values()))

    def sigma(self, part: Chosen | None = None) -> float:
        """The noise level of a part, or the usual one."""
        if part is not None and part.sigma is not None:
            return part.sigma
        if part is not None and part.time is not None:
            return _at(self.scaling, part.time)
        if isinstance(self.scaling, VP):
            return _at(self.scaling, PAPER_TIME)
        return SIGMA * self.scaling.sigma_data


class FeatureModel(Outline):
    """A model with what it is told, ready to look at pictures."""

    def __init__(
        self,
        name: str,
        config: Reading,
        device: torch.device,
        prompt: tuple[str, ...] = (),
        label: int | None = None,
    ) -> None:
        super().__init__(name, config, prompt, label)
        labels = () if label is None else (label,)
        dtype = getattr(torch, config.dtype)
        wish = Wish(NoGuidance(), labels, None, dtype, device, prompt, unsaid="")
        self.device = device
        self.subject: Subject = self._sized(load_subject(self.place, wish))
        if self.subject.bare is None:
            raise _no_images(name)
        self.denoiser: NetworkDenoiser = self.subject.bare

    def _sized(self, subject: Subject) -> Subject:
        """It is told the size of what it sees, not of what it would draw."""
        if subject.speech is None:
            return subject
        speech = replace(subject.speech, shape=(self.shape[0], *self.latent))
        null = subject.null
        if null is not None and null.control is not None:
            null = replace(null, control=speech.null().control).to(self.device)
        return replace(subject, speech=speech, null=null)

    def pixels(self, picture: Any) -> Tensor:
        """[C, H, W] in [-1, 1] of a PIL image."""
        config, size = self.image
        picture = picture.convert("L" if config.mode == "grey" else "RGB")
        return to_float(torch.from_numpy(config.apply(picture, 0, 0, size)[0].copy()))

    @torch.no_grad()
    def encoded(self, pictures: Sequence[Any]) -> Tensor:
        """What the network takes: pixels, or latents."""
        x = torch.stack([self.pixels(picture) for picture in pictures]).to(self.device)
        return x if self.subject.codec is None else self.subject.codec.encode(x)

    def condition(self, numbers: Sequence[int] | int) -> Condition | None:
        """What pictures with these numbers, or the first so many, are told: prompts in turn, the
        class, or else none."""
        numbers = range(numbers) if isinstance(numbers, int) else numbers
        null = self.subject.null
        if self.label is None and self.subject.labels and (null is None or null.label is None):
            raise UserError(
                f"{self.name} always draws a class and has no label for none: give --label"
            )
        if self.label is None and not self.prompt and null is not None:
            return null.expand(len(numbers))
        turns = [number % max(1, len(self.prompt)) for number in numbers]
        said = {turn: self._said(turn) for turn in turns}
        rows = [row for turn in turns if (row := said[turn]) is not None]
        return Condition.cat(rows) if rows else None

    def _said(self, turn: int) -> Condition | None:
        """One row: what this prompt alone says."""
        subject, null = self.subject, self.subject.null
        if subject.speech is not None and self.prompt:
            places = subject.speech.places[turn : turn + 1]
            subject = replace(subject, speech=replace(subject.speech, places=places))
        told = subject.condition([0], self.device)
        if told is not None and self.label is None and null is not None and subject.labels:
            return replace(told, label=null.label)
        return told

    def extractor(self, ids: Sequence[str], sigma: float) -> Extractor:
        return Extractor(self.denoiser, ids, sigma=sigma)


def _no_images(name: str) -> UserError:
    return UserError(f"{name} draws no images: features are read from models that do")


def _shape(name: str, network: Any) -> tuple[int, int, int]:
    """Channels, height and width of what a network takes."""
    try:
        shape = network.data_shape
    except ValueError as error:
        raise UserError(
            f"{name} does not say its image size: put sample_size into its config.json"
        ) from error
    if len(shape) != 3:
        raise _no_images(name)
    return shape


def _of_codec(folder: Path) -> tuple[int, int] | None:
    """Pixels along one of its latents, and channels of its images."""
    file = folder / "vae" / "config.json"
    if not file.is_file():
        return None
    return downscale(folder), int(read_json(file).get("in_channels", 3))


def _at(scaling: Scaling, time: float) -> float:
    level = torch.tensor(min(time, scaling.time_max), dtype=torch.float64)
    return float(f"{float(scaling.sigma_at(level)):.6g}")


def load_model(config: Reading, device: torch.device) -> FeatureModel:
    """The model that the command names."""
    return FeatureModel(config.model, config, device, config.prompt, config.label)


def read_outline(config: Reading) -> Outline:
    """The same without its weights, which are not read."""
    return Outline(config.model, config, config.prompt, config.label)


# ---------------------------------------------------------------- several


class Reader:
    """Features of pictures, from all parts. Weights are read with the first pictures."""

    def __init__(self, config: Reading, device: torch.device) -> None:
        self.config, self.device = config, device
        self.parts = chosen_parts(config)
        self.outlines = self._of_parts(Outline)
        for part, outline in zip(self.parts, self.outlines, strict=True):
            look_up(outline.known, part.ids)
        self.sigmas = [
            outline.sigma(part) for outline, part in zip(self.outlines, self.parts, strict=True)
        ]

    def _of_parts(self, make: Callable[..., M]) -> list[M]:
        """For each part its model, the same for parts that tell it the same."""
        config, made = self.config, dict[str, M]()
        found: list[M] = []
        for part in self.parts:
            name = part.model or config.model
            told = (
                config.prompt if part.prompt is None else part.prompt,
                config.label if part.label is None else part.label,
            )
            key = json.dumps([name, *told])
            if key not in made:
                made[key] = make(name, config, *told)
            found.append(made[key])
        return found

    @cached_property
    def models(self) -> list[FeatureModel]:
        return self._of_parts(
            lambda name, config, *told: FeatureModel(name, config, self.device, *told)
        )

    @cached_property
    def extractors(self) -> list[Extractor]:
        return [
            model.extractor(part.ids, sigma)
            for model, part, sigma in zip(self.models, self.parts, self.sigmas, strict=True)
        ]

    @property
    def reading(self) -> str:
        return "; ".join(dict.fromkeys(outline.reading for outline in self.outlines))

    def facts(self) -> tuple[Part, ...]:
        return tuple(
            Part(
                model=outline.name,
                digest=outline.digest(),
                ids=part.ids,
                sigma=sigma,
                condition=outline.told,
                precision=self.config.dtype,
            )
            for outline, part, sigma in zip(self.outlines, self.parts, self.sigmas, strict=True)
        )

    def read(self, pictures: Sequence[Any], key: Sequence[int]) -> dict[str, Tensor]:
        """[B, C, H, W] by name."""
        found: dict[str, Tensor] = {}
        encoded: dict[int, Tensor] = {}
        several = len(self.parts) > 1
        for number, (model, extractor) in enumerate(zip(self.models, self.extractors, strict=True)):
            if id(model) not in encoded:
                encoded[id(model)] = model.encoded(pictures)
            cond = model.condition(key)
            features = extractor.extract(encoded[id(model)], cond, key=key, seed=self.config.seed)
            found |= {f"{number}:{n}" if several else n: v for n, v in features.items()}
        return found


def pool(model: Outline, config: Reading) -> list[str]:
    """The activations that are compared: those named, or the paper's candidates."""
    if not config.selection:
        return candidates(model.known)
    ids = [name for part in chosen_parts(config) for name in part.ids]
    return [activation.id for activation in look_up(model.known, ids)]
