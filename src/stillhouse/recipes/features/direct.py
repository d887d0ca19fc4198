"""`Features`: features of pictures in three lines of Python.

from stillhouse.recipes.features import Features

features = Features("stable-diffusion-v1-5/stable-diffusion-v1-5", "sd15", t=50)
found = features.extract(pictures, "a photo of a cat")
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.features.extractor import Extractor, Levels
from stillhouse.features.selection import published
from stillhouse.pipelines.families import whole_folder
from stillhouse.pipelines.prompts import PromptEncoder
from stillhouse.recipes.features.reading import Chosen, FeatureModel, Reading
from stillhouse.recipes.prompting import PipelineSpeech
from stillhouse.recipes.telling import Speech, speech_of


class Features:
    """Activations of a model as features of pictures.

    `model` is a diffusers directory, a hub id or a run's folder. `ids` are those that `stillhouse
    features info` lists, or the name of a published selection (sd15, sdxl, legacy-sd15,
    legacy-sdxl). The noise level is that of the timestep `t` of the model's own process, or
    `sigma`; if neither is given, the selection's own, or else timestep 50. `size` is what pictures
    are made, a side or height and width; 0: the model's own.
    """

    def __init__(
        self,
        model: str | Path,
        ids: str | Sequence[str],
        *,
        t: Levels | None = None,
        sigma: Levels | None = None,
        size: int | tuple[int, int] = 0,
        fit: Literal["squash", "crop"] = "squash",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch: int = 8,
    ) -> None:
        precision: Any = str(dtype).removeprefix("torch.")
        config = Reading(size=size, fit=fit, dtype=precision)
        self.model = FeatureModel(str(model), config, torch.device(device))
        chosen = Chosen(ids=tuple(ids))
        if isinstance(ids, str):
            chosen = Chosen(ids=published(ids).ids, time=published(ids).time)
        if t is None and sigma is None:
            sigma = self.model.sigma(chosen)
        self.extractor = Extractor(self.model.denoiser, chosen.ids, sigma=sigma, t=t)
        self.batch = batch

    def extract(
        self,
        images: Sequence[Any],
        prompts: str | Sequence[str] = (),
        *,
        label: int | None = None,
        key: Sequence[int] | None = None,
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """id -> [images, C, H, W] of PIL images; with several levels [images, levels, C, H, W].

        `prompts`: one for all, or one for each; a model of text is told nothing if not given, one
        of classes no class if there is no `label`. An image's noise follows from its `key` (if not
        given, its place) and the seed.
        """
        said = (prompts,) if isinstance(prompts, str) else tuple(prompts)
        keys = range(len(images)) if key is None else key
        if not images or len(keys) != len(images):
            raise UserError(f"{len(images)} images have {len(keys)} keys: give one for each image")
        if len(said) not in (0, 1, len(images)):
            raise UserError(
                f"{len(images)} images have {len(said)} prompts: give one for all, or one for each"
            )
        model, found = self._told(said, label), list[dict[str, Tensor]]()
        for start in range(0, len(images), self.batch):
            numbers = range(start, min(start + self.batch, len(images)))
            x, cond = model.encoded([images[n] for n in numbers]), model.condition(numbers)
            some = [keys[n] for n in numbers]
            found.append(self.extractor.extract(x, cond, key=some, seed=seed))
        return {name: torch.cat([part[name] for part in found]) for name in found[0]}

    def _told(self, prompts: tuple[str, ...], label: int | None) -> FeatureModel:
        """The model, told something else; no weights are read again."""
        other, subject = copy(self.model), self.model.subject
        if label is not None and label not in subject.labels:
            known = f"give one of 0 to {max(subject.labels)}" if subject.labels else "leave it out"
            raise UserError(f"{other.name} has no class {label}: {known}")
        other.prompt, other.label = prompts, label
        labels = subject.labels if label is None else (label,)
        speech = self._speech(prompts) if prompts else subject.speech
        other.subject = replace(subject, labels=labels, speech=speech)
        return other

    def _speech(self, prompts: tuple[str, ...]) -> Speech:
        subject = self.model.subject
        speech = subject.speech
        if speech is None or speech.table is None:
            raise UserError(f"{self.model.name} takes no prompts: leave them out")
        if isinstance(speech, PipelineSpeech) and speech.texts is not None:
            return speech.saying(prompts, self._encoder)
        return speech_of(speech.parts, speech.shape, prompts, (), len(subject.labels))

    @cached_property
    def _encoder(self) -> PromptEncoder:
        """Of a whole pipeline; read once, as it may be larger than the rest."""
        return PromptEncoder(whole_folder(self.model.place), device=self.model.device)
