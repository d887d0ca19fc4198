"""From a model's name and a selection to features of pictures.

A selection is made of parts: some activations of one model at one noise level. Parts of several
models or levels may go together; features are then named `0:id`, `1:id`, ... by their part.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

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
from stillhouse.process import VP, Condition, NetworkDenoiser, Scaling
from stillhouse.recipes.judge.galleries import model_folder
from stillhouse.recipes.parts import NoGuidance
from stillhouse.recipes.subjects import Subject, Wish, load_subject

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
    """What a model of text is told that it sees; nothing if not given."""
    label: int | None = None
    """The same for a model of classes; no class if not given."""
    size: NonNegativeInt = 0
    """Side of the square that pictures are made; 0: the model's own."""
    fit: Literal["squash", "crop"] = "squash"
    """The whole picture squeezed to that square, or its middle."""
    seed: int = 0
    batch: PositiveInt = 8
    """Pictures in a run of the network."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the model."""
    device: Annotated[str, Field(min_length=1)] = "auto"


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
    """The parts that a command line asks for, in the order of its words."""
    parts: list[Chosen] = []
    ids: list[str] = []
    for word in (word for group in config.selection for word in group.split(",") if word):
        if word.endswith(".json"):
            parts += read_selection(Path(word)).parts
        elif word in SELECTIONS:
            parts.append(Chosen(ids=SELECTIONS[word].ids, time=SELECTIONS[word].time))
        else:
            ids.append(word)
    parts += [Chosen(ids=tuple(ids))] if ids else []
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


class FeatureModel:
    """A model with what it is told, ready to look at pictures."""

    def __init__(
        self,
        name: str,
        config: Reading,
        device: torch.device,
        prompt: tuple[str, ...] = (),
        label: int | None = None,
    ) -> None:
        if not name:
            raise UserError("name a model: a diffusers directory, a hub id, or a run's folder")
        labels = () if label is None else (label,)
        dtype = getattr(torch, config.dtype)
        wish = Wish(NoGuidance(), labels, None, dtype, device, prompt, unsaid="")
        self.name, self.device, self.prompt, self.label = name, device, prompt, label
        self.subject: Subject = load_subject(model_folder(name), wish)
        if self.subject.bare is None or len(self.subject.shape) != 3:
            raise UserError(f"{name} draws no images: features are read from models that do")
        self.denoiser: NetworkDenoiser = self.subject.bare
        self.known: Catalogue = catalogue(inner_model(self.denoiser))
        self.image = self._image(config)

    def _image(self, config: Reading) -> tuple[ImageConfig, tuple[int, int]]:
        codec, (channels, *sides) = self.subject.codec, self.subject.shape
        scale = 1 if codec is None else codec.downscale
        channels = channels if codec is None else codec.image_channels
        height, width = (config.size or side * scale for side in sides)
        crop = Squash() if config.fit == "squash" else CentreCrop()
        mode = "grey" if channels == 1 else "rgb"
        return ImageConfig(size=height, mode=mode, crop=crop), (height, width)

    @property
    def reading(self) -> str:
        config, (height, width) = self.image
        how = "squashed" if isinstance(config.crop, Squash) else "centre crop"
        return f"{width} x {height} {config.mode}, {how}, {config.filter}"

    @property
    def latent(self) -> tuple[int, int]:
        """Height and width of what the network takes."""
        height, width = self.image[1]
        scale = 1 if self.subject.codec is None else self.subject.codec.downscale
        return height // scale, width // scale

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

    def condition(self, count: int) -> Condition | None:
        """The same for every picture: the prompt or class, or else none."""
        told = self.subject.condition([0], self.device)
        if told is None:
            return None
        silent = self.label is None and not self.prompt
        if silent and self.subject.labels and self.subject.null is None:
            raise UserError(
                f"{self.name} always draws a class and has no label for none: give --label"
            )
        row = self.subject.null if silent and self.subject.null is not None else told
        return row.expand(count)

    @property
    def told(self) -> str:
        """In words, for records."""
        words = [f"prompt {text!r}" for text in self.prompt]
        words += [] if self.label is None else [f"class {self.label}"]
        return ", ".join(words)

    def digest(self) -> str:
        return ", ".join(self.subject.fingerprints().values())

    def sigma(self, part: Chosen | None = None) -> float:
        """The noise level of a part, or the usual one."""
        scaling = self.denoiser.scaling
        if part is not None and part.sigma is not None:
            return part.sigma
        if part is not None and part.time is not None:
            return _at(scaling, part.time)
        if isinstance(scaling, VP):
            return _at(scaling, PAPER_TIME)
        return SIGMA * scaling.sigma_data

    def extractor(self, ids: Sequence[str], sigma: float) -> Extractor:
        return Extractor(self.denoiser, ids, sigma=sigma)


def _at(scaling: Scaling, time: float) -> float:
    level = torch.tensor(min(time, scaling.time_max), dtype=torch.float64)
    return float(f"{float(scaling.sigma_at(level)):.6g}")


def load_model(config: Reading, device: torch.device) -> FeatureModel:
    """The model that the command names."""
    return FeatureModel(config.model, config, device, config.prompt, config.label)


# ---------------------------------------------------------------- several


class Reader:
    """Features of pictures, from all parts."""

    def __init__(self, config: Reading, device: torch.device) -> None:
        self.config = config
        self.parts = chosen_parts(config)
        loaded: dict[str, FeatureModel] = {}
        self.models: list[FeatureModel] = []
        for part in self.parts:
            make = partial(self._model, part, device)
            key = json.dumps([part.model or config.model, part.prompt, part.label])
            self.models.append(loaded.get(key) or loaded.setdefault(key, make()))
        self.sigmas = [
            model.sigma(part) for model, part in zip(self.models, self.parts, strict=True)
        ]
        self.extractors = [
            model.extractor(part.ids, sigma)
            for model, part, sigma in zip(self.models, self.parts, self.sigmas, strict=True)
        ]

    def _model(self, part: Chosen, device: torch.device) -> FeatureModel:
        config = self.config
        prompt = config.prompt if part.prompt is None else part.prompt
        label = config.label if part.label is None else part.label
        return FeatureModel(part.model or config.model, config, device, prompt, label)

    @property
    def reading(self) -> str:
        return "; ".join(dict.fromkeys(model.reading for model in self.models))

    def facts(self) -> tuple[Part, ...]:
        return tuple(
            Part(
                model=model.name,
                digest=model.digest(),
                ids=part.ids,
                sigma=sigma,
                condition=model.told,
                precision=self.config.dtype,
            )
            for model, part, sigma in zip(self.models, self.parts, self.sigmas, strict=True)
        )

    def read(self, pictures: Sequence[Any], key: Sequence[int]) -> dict[str, Tensor]:
        """[B, C, H, W] by name."""
        found: dict[str, Tensor] = {}
        encoded: dict[int, Tensor] = {}
        several = len(self.parts) > 1
        for number, (model, extractor) in enumerate(zip(self.models, self.extractors, strict=True)):
            if id(model) not in encoded:
                encoded[id(model)] = model.encoded(pictures)
            cond = model.condition(len(pictures))
            features = extractor.extract(encoded[id(model)], cond, key=key, seed=self.config.seed)
            found |= {f"{number}:{n}" if several else n: v for n, v in features.items()}
        return found


def pool(model: FeatureModel, config: Reading) -> list[str]:
    """The activations that are compared: those named, or the paper's candidates."""
    if not config.selection:
        return candidates(model.known)
    ids = [name for part in chosen_parts(config) for name in part.ids]
    return [activation.id for activation in look_up(model.known, ids)]
