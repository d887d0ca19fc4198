"""`--text pipeline`: captions as the fine-tuned pipeline encodes prompts, kept in a cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from stillhouse.config import Config
from stillhouse.data import Captions, Loader, numbered_captions
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models.conditioning import Parts, Text
from stillhouse.pipelines.families import (
    FAMILIES,
    Family,
    downscale,
    family_of,
    whole_folder,
)
from stillhouse.pipelines.prompts import PromptEncoder, prompt_digest, spoken
from stillhouse.process import Batch, Condition
from stillhouse.recipes.encoded import encoded, encoded_by, encoded_captions
from stillhouse.recipes.telling import Data, Speech, Texts

ALONE = World(0, 1, torch.device("cpu"))


class PipelineText(Config):
    """Captions, encoded as the pipeline that is fine-tuned encodes prompts."""

    kind: Literal["pipeline"] = "pipeline"
    path: str = ""
    """The pipeline, if it is not --model."""
    length: NonNegativeInt = 0
    """Tokens of T5, where the pipeline has one; 0: as many as it takes by itself."""

    def build(self, loader: Loader, data: Data, here: World | None = None) -> "PipelineTexts":
        folder, captions = whole_folder(self.path), numbered_captions(loader)
        _check_captions(captions)
        text, _ = self.foreseen(data)
        text = replace(text, digest=prompt_digest(folder, self.length))
        table = encoded_captions(folder, text.digest, self.length, captions.texts, here or ALONE)
        width, scale = table.tokens.shape[1], downscale(folder)
        return PipelineTexts(table, text, width, captions, family_of(folder), scale)

    def foreseen(self, data: Data) -> tuple[Text, int]:
        """Without loading an encoder; the network brings the width of its tokens itself."""
        family = family_of(whole_folder(self.path))
        if self.length and not family.length:
            raise UserError(
                "--text.length is for pipelines with a T5: this one has prompts of 77 tokens"
            )
        return Text(self.path, "", self.length or family.length), 0


def _check_captions(captions: Captions) -> None:
    if not any(captions.texts):
        raise UserError(
            "no image has a caption: give each one in metadata.jsonl, or in a .txt beside it"
        )


@dataclass(frozen=True, eq=False)
class PipelineTexts(Texts):
    """Captions ready for batches, as the pipeline's network takes them."""

    family: Family = FAMILIES["StableDiffusionPipeline"]
    downscale: int = 8

    @property
    def note(self) -> str:
        """How many captions are missing, and whether any is too long."""
        notes = []
        if self.captions is not None and "" in self.captions.texts:
            empty = int((self.captions.of_row == self.captions.texts.index("")).sum())
            notes.append(f"{empty} of {len(self.captions.of_row)} images have no caption")
        limit = self.text.length or self.table.length
        if self.table.longest > limit:
            longest = self.table.longest
            notes.append(f"captions of more than {limit} tokens are cut; one has {longest}")
        return "; ".join(notes)

    def pad(self, batch: Batch, seed: int) -> Batch:
        """Nothing is padded: the pipeline has done it. Sizes are told truly."""
        assert batch.condition is not None
        return replace(batch, condition=self.told(batch.condition, batch.data.shape[-2:]))

    def told(self, cond: Condition, latent: Sequence[int]) -> Condition:
        height, width = (side * self.downscale for side in latent)
        return replace(cond, **spoken(self.family, cond, (height, width)))

    def speech(self, parts: Parts, shape: tuple[int, ...], places: Tensor) -> "PipelineSpeech":
        return PipelineSpeech(parts, shape, self.table, places, texts=self)


@dataclass(frozen=True, eq=False)
class PipelineSpeech(Speech):
    """What samples are told: captions in turn, whole and as large as they are drawn."""

    texts: PipelineTexts | None = None

    def condition(self, indices: Sequence[int], seed: int = 0) -> Condition:
        assert self.texts is not None
        found = self.texts.table[self.asked(indices)]
        return self.texts.told(found, self.shape[-2:])

    def null(self) -> Condition:
        assert self.texts is not None
        return self.texts.told(self.texts.table.null, self.shape[-2:])

    def saying(self, prompts: Sequence[str], encoder: PromptEncoder) -> "PipelineSpeech":
        """Other prompts, encoded now; nothing is kept."""
        assert self.texts is not None
        table = encoded_by(encoder, tuple(dict.fromkeys([*prompts, ""])))
        texts = replace(self.texts, table=table)
        return replace(self, table=table, places=table.places(prompts), texts=texts)


def pipeline_speech(
    folder: Path, shape: tuple[int, ...], prompts: Sequence[str], device: torch.device
) -> PipelineSpeech:
    """For sampling: prompts as the pipeline encodes them; nothing is kept."""
    table = encoded(folder, 0, tuple(dict.fromkeys([*prompts, ""])), device)
    family = family_of(folder)
    text = Text(str(folder), "", family.length)
    texts = PipelineTexts(table, text, table.tokens.shape[1], None, family, downscale(folder))
    places = table.places(prompts)
    return PipelineSpeech(Parts(), shape, table, places, {}, len(prompts), texts=texts)
