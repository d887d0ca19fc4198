"""What a network is told: captions in training, prompts and control at sampling.

Captions are encoded once, before training, and looked up in the prefetch; their padding is drawn
there too. A model remembers its encoder and its padding (`models.conditioning.Text`), so prompts
reach it at sampling as captions did in training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data import (
    Captions,
    DataConfig,
    Loader,
    PointsConfig,
    Prepared,
    numbered_captions,
)
from stillhouse.data.crops import usual_control
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models.conditioning import Parts, Text
from stillhouse.models.control import Gamma, Layout, Shape
from stillhouse.models.padding import PaddingKind
from stillhouse.models.text import (
    MINILM,
    EmbeddedCaptions,
    TextEncoder,
    encoder_width,
    packaged,
)
from stillhouse.process import EDM, Batch, Condition, Scaling

SHOWN = 64  # captions of prepared shards that are drawn during training


# ---------------------------------------------------------------- configs


class NoText(Config):
    """Captions are not used."""

    kind: Literal["none"] = "none"

    def build(self, loader: Loader, data: "Data", here: World | None = None) -> None:
        return None

    def foreseen(self, data: "Data") -> None:
        return None


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

    def build(self, loader: Loader, data: "Data", here: World | None = None) -> "Texts":
        """The captions behind a loader, encoded."""
        encoder = load_encoder(self.encoder, self.length)
        captions = numbered_captions(loader)
        table = EmbeddedCaptions.of(encoder, captions.texts)
        text = Text(self.encoder, encoder.digest, self.length, self.padding, self.beta)
        return Texts(table, text, encoder.width, captions)

    def foreseen(self, data: "Data") -> tuple[Text, int]:
        """What a model will remember, and numbers per token, without loading the encoder."""
        text = Text(self.encoder, "", self.length, self.padding, self.beta)
        return text, encoder_width(packaged(self.encoder))


class StoredText(Config):
    """Captions that `stillhouse prepare` has encoded, as tokens that the network attends to."""

    kind: Literal["stored"] = "stored"
    padding: PaddingKind = "noisy"
    """What stands where a caption has no token."""
    beta: NonNegativeFloat = 0.02
    """Amount of noise in noisy padding."""

    def build(self, loader: Loader, data: "Data", here: World | None = None) -> "Texts":
        """Nothing is encoded here; some captions are kept to be drawn during training."""
        text, width = self.foreseen(data)
        source = _prepared(data)
        if not data.columns.text:  # type: ignore[union-attr]
            raise UserError("name the column of captions as --data.columns.text: --text is stored")
        shown, encoded = source.captions(data.columns, SHOWN)  # type: ignore[union-attr]
        parts = [encoded, source.null()] if "" not in shown else [encoded]
        table = EmbeddedCaptions.packed(tuple(dict.fromkeys([*shown, ""])), parts)
        return Texts(table, text, width)

    def foreseen(self, data: "Data") -> tuple[Text, int]:
        index = _prepared(data).index
        if index.text is None:
            raise UserError(
                "the shards were prepared without captions: prepare them with --text, or leave "
                "--text stored out"
            )
        facts = index.text
        text = Text(index.encoder, facts["digest"], facts["length"], self.padding, self.beta)
        return text, facts["width"]


def _prepared(data: "Data") -> Prepared:
    if isinstance(data, PointsConfig) or not isinstance(data.source, Prepared):
        raise UserError(
            "--text stored reads what `stillhouse prepare` has encoded: give --data.source "
            "prepared, or --text captions to encode captions now"
        )
    return data.source


Data = DataConfig | PointsConfig
TextConfig = Annotated[NoText | CaptionText | StoredText, Field(discriminator="kind")]


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
    layout = Layout(data.control.composition, styles, data.control.detail)
    if len(set(layout.names)) < len(layout.names):
        raise UserError(f"two controls have the same name: {', '.join(layout.names)}")
    return layout


# ---------------------------------------------------------------- the encoder


@lru_cache(maxsize=2)
def load_encoder(name: str, length: int) -> TextEncoder:
    """Read once: training and validation use the same."""
    return TextEncoder(packaged(name), length=length)


# ---------------------------------------------------------------- training


@dataclass(frozen=True, eq=False)
class Texts:
    """The captions of a data set, ready for its batches."""

    table: EmbeddedCaptions
    text: Text
    width: int  # numbers per token
    captions: Captions | None = None  # which of them an image has; None: images bring their own

    def tell(self, batch: Batch) -> Batch:
        """The batch with the tokens of its captions, unpadded."""
        if self.captions is None:
            return batch
        if batch.ids is None:
            raise ValueError("captions are found by the ids of a batch, and this one has none")
        found = self.table[self.captions.of(batch.ids)]
        cond = batch.condition or Condition()
        told = {"text": found.text, "text_mask": found.text_mask, "pooled": found.pooled}
        return replace(batch, condition=replace(cond, **told))

    @property
    def note(self) -> str:
        """What a user should know of the captions."""
        return f"{self.table.note} (--text.length)" if self.table.note else ""

    def speech(self, parts: Parts, shape: tuple[int, ...], places: Tensor) -> "Speech":
        """The captions at these places, in turn, to be drawn during training."""
        return Speech(parts, shape, self.table, places)

    def pad(self, batch: Batch, seed: int) -> Batch:
        """The same with padding, as the network attends to it, and without what it does not."""
        if batch.condition is None or batch.key is None:
            raise ValueError("padding is keyed: the batch needs keys, and a condition to pad")
        cond = self.text.pad(batch.condition, batch.key, seed)
        return replace(batch, condition=cond)


# ---------------------------------------------------------------- sampling


@dataclass(frozen=True, eq=False)
class Speech:
    """What samples are told beside their class, by their number: prompts in turn, then styles."""

    parts: Parts
    shape: tuple[int, ...]
    table: EmbeddedCaptions | None = None
    places: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # in turn
    control: Mapping[str, float | str] = field(default_factory=dict)  # as asked for, by name
    kinds: int = 1  # prompts or classes that are drawn in turn
    mixed: bool = False  # not in turn: few numbers have prompts from all over, and all styles

    def condition(self, indices: Sequence[int], seed: int = 0) -> Condition:
        """Of the samples of this seed with these numbers, on the host."""
        told = Condition()
        if self.table is not None and self.parts.text is not None:
            found = self.table[self.asked(indices)]
            told = self.parts.text.pad(found, indices, seed)
        if not self.parts.layout.names:
            return told
        rows = [self._control(index) for index in indices]
        return replace(told, control=torch.cat(rows))

    def null(self) -> Condition:
        """One row that says nothing, for guidance."""
        told = Condition()
        if self.table is not None and self.parts.text is not None:
            told = self.parts.text.pad(self.table.null, [0], seed=0)
        layout = self.parts.layout
        return replace(told, control=layout.row({})) if layout.names else told

    def _control(self, index: int) -> Tensor:
        """Whole, upright and as large as it is drawn, unless something else was asked for."""
        # Every prompt or class in every style: the next style comes when all had their turn.
        turn, layout = self._place(index) // max(1, self.kinds), self.parts.layout
        size = (self.shape[-2], self.shape[-1])
        usual = usual_control(layout.names, layout.styles, size, turn)
        return layout.row(usual | dict(self.control))

    def prompt(self, index: int) -> str:
        """What sample `index` was asked to be."""
        if self.table is None:
            return ""
        return self.table.captions[int(self.asked([index]))]

    def asked(self, indices: Sequence[int]) -> Tensor:
        """The captions of these samples, by their places in the table."""
        return self.places[torch.tensor([self._place(i) for i in indices]) % len(self.places)]

    def _place(self, index: int) -> int:
        """In turn; or mixed, by steps of about the golden ratio through all there are."""
        if not self.mixed:
            return index
        styles = (len(values) for _, values in self.parts.layout.styles)
        every = math.prod(styles, start=max(1, self.kinds))
        return index * long_stride(every) % every


def speech_of(
    parts: Parts,
    shape: tuple[int, ...],
    prompts: Sequence[str],
    control: Sequence[str],
    classes: int = 0,
    encoder: str = "",
) -> Speech:
    """For sampling: prompts are encoded as the model's captions were.

    `encoder` is where the model's own is, if not where the model says.
    """
    said = {}
    for word in control:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"--control {word}: write name=value, such as height=512")
        said[name] = value
    text = parts.text
    if text is None:
        speech = Speech(parts, shape, control=said, kinds=classes)
    else:
        table = EmbeddedCaptions.of(_own_encoder(text, encoder), prompts)
        places = table.places(prompts)
        speech = Speech(parts, shape, table, places, said, len(prompts))
    try:
        speech.condition([0])
    except ValueError as error:
        raise UserError(f"--control {' '.join(control)}: {error}") from error
    return speech


def _own_encoder(text: Text, elsewhere: str) -> TextEncoder:
    """The one that a model was trained with, and no other."""
    name = elsewhere or text.encoder
    try:
        found = load_encoder(name, text.length)
    except UserError as error:
        hint = "" if elsewhere else ". If it is elsewhere, name it as --prompt-encoder"
        raise UserError(f"the model's text encoder: {error}{hint}") from error
    if found.digest != text.digest:
        raise UserError(
            f"the text encoder {name} is not the one that the model was trained with: its weights "
            "or its tokenizer differ"
        )
    return found


def preview_speech(
    parts: Parts, shape: tuple[int, ...], texts: Texts | None, classes: int
) -> Speech:
    """For pictures during training: captions from all over the table."""
    if texts is None:
        return Speech(parts, shape, kinds=classes)
    count = len(texts.captions.texts if texts.captions is not None else texts.table.captions)
    places = torch.arange(count) * long_stride(count) % count
    return texts.speech(parts, shape, places)


def long_stride(count: int) -> int:
    """Whose multiples, modulo `count`, are all numbers, each far from those just before it."""
    near = max(1, round(0.618 * count))  # the golden ratio
    return next(n for n in range(near, count + 2) if math.gcd(n, count) == 1)
