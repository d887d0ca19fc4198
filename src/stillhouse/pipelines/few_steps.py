"""`FewStepPipeline`: a few-step student, drawn as it was trained to be.

    pipeline = FewStepPipeline.from_pretrained("path/or/hub-id")
    images = pipeline("a red apple", num_inference_steps=2, seed=0)

How it is walked is in few_steps.json, beside the config.json of a bare model or the
model_index.json of a whole pipeline. Sample i follows from the seed and i alone, as everywhere.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from stillhouse.data.crops import usual_control
from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError, one_line
from stillhouse.files import write_whole
from stillhouse.models import Codec, DiffusersNetwork
from stillhouse.models.conditioning import Text
from stillhouse.models.text import EmbeddedCaptions, TextEncoder, packaged
from stillhouse.pipelines.families import downscale, takes_prompts, whole_folder
from stillhouse.pipelines.load import (
    UnreadableCheckpoint,
    inner_model,
    load_codec,
    load_denoiser,
    read_json,
    resolve_folder,
)
from stillhouse.pipelines.prompts import PromptEncoder, spoken
from stillhouse.process import EDM, Condition, KeyedNoise, NetworkDenoiser, starting_noise
from stillhouse.solvers import sample_euler, sample_renoise
from stillhouse.solvers.walk import check_grid

FILE = "few_steps.json"
SOLVERS = {"euler": sample_euler, "renoise": sample_renoise}


# ---------------------------------------------------------------- the file


def save_walk(folder: Path, walk: FewSteps) -> None:
    """Says how the student in this folder is walked."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, (json.dumps(walk.as_json(), indent=2) + "\n").encode())


def read_walk(folder: Path) -> FewSteps | None:
    """How the student in this folder is walked; None where it is none."""
    if not (folder / FILE).is_file():
        return None
    facts = read_json(folder / FILE)
    try:
        walk = FewSteps.from_json(facts)
        if not all(isinstance(flag, bool) for flag in (walk.afs, walk.told)):
            raise TypeError("afs and told are true or false")
        for evaluations in walk.evaluations:
            check_grid(walk.levels(evaluations, EDM()))
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnreadableCheckpoint(
            f"{folder / FILE} does not say how a student is walked ({one_line(error)})."
        ) from error
    return walk


# ---------------------------------------------------------------- what prompts become


class Prompts(Protocol):
    """How prompts reach a network."""

    def encode(self, prompts: Sequence[str]) -> EmbeddedCaptions: ...
    def told(self, found: Condition, indices: Sequence[int], seed: int) -> Condition:
        """What was encoded, for samples with these numbers."""
        ...


@dataclass(frozen=True, eq=False)
class OwnPrompts:
    """Of a model that was trained here: its encoder, and padding as its captions had."""

    text: Text
    encoder: TextEncoder

    @classmethod
    def of(cls, text: Text, elsewhere: str, device: torch.device) -> "OwnPrompts":
        """The encoder that the model was trained with, and no other."""
        name = elsewhere or text.encoder
        try:
            found = TextEncoder(packaged(name), length=text.length, device=device)
        except UserError as error:
            hint = "" if elsewhere else ". If it is elsewhere, name it as prompt_encoder"
            raise UserError(f"the student's text encoder: {error}{hint}") from error
        if found.digest != text.digest:
            raise UserError(
                f"the text encoder {name} is not the one that the student was trained with: its "
                "weights or its tokenizer differ"
            )
        return cls(text, found)

    def encode(self, prompts: Sequence[str]) -> EmbeddedCaptions:
        return EmbeddedCaptions.of(self.encoder, prompts)

    def told(self, found: Condition, indices: Sequence[int], seed: int) -> Condition:
        return self.text.pad(found, indices, seed)


@dataclass(frozen=True, eq=False)
class PipelinePrompts:
    """Of a pipeline: as its own encoders give them, with the sizes that its network is told."""

    encoder: PromptEncoder
    size: tuple[int, int]  # height and width of what is drawn, in pixels

    def encode(self, prompts: Sequence[str]) -> EmbeddedCaptions:
        distinct = tuple(dict.fromkeys([*prompts, ""]))
        return EmbeddedCaptions.packed(distinct, self._rows(distinct))

    def _rows(self, prompts: Sequence[str]) -> Iterator[Condition]:
        """The empty prompt is what guidance leads away from."""
        for said, some in groupby(prompts, key=bool):
            yield self.encoder.encode(list(some)) if said else self.encoder.null

    def told(self, found: Condition, indices: Sequence[int], seed: int) -> Condition:
        return replace(found, **spoken(self.encoder.family, found, self.size))


# ---------------------------------------------------------------- the pipeline


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is to be drawn, by the number of the sample: prompts and classes in turn."""

    labels: tuple[int, ...] = ()
    table: EmbeddedCaptions | None = None
    places: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def kinds(self) -> int:
        return max(1, len(self.places) or len(self.labels))


@dataclass(frozen=True, eq=False)
class FewStepPipeline:
    """A student with all that drawing takes."""

    denoiser: NetworkDenoiser
    walk: FewSteps
    device: torch.device
    codec: Codec | None = None
    prompts: Prompts | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prompt_encoder: str = "",
    ) -> "FewStepPipeline":
        """Reads a bare model or a whole pipeline that has a few_steps.json.

        `prompt_encoder` is where a model's text encoder is, if not where the model says. The state
        of the walk and the autoencoder are float32 at any `dtype`.
        """
        folder, device = resolve_folder(path_or_hub_id), torch.device(device)
        own = takes_prompts(folder)
        folder = whole_folder(str(path_or_hub_id)) if own else folder
        walk = read_walk(folder)
        if walk is None:
            raise UnreadableCheckpoint(
                f"{path_or_hub_id} has no {FILE}: it is no few-step student. Other models are read "
                f"by load_denoiser, or drawn by `stillhouse sample`.{inner_model(folder)}"
            )
        denoiser = load_denoiser(folder, dtype=dtype, device=device)
        network: Any = denoiser.network
        _check(path_or_hub_id, network.for_inference(), walk, own)
        prompts: Prompts | None = None
        if own:
            height, width = (side * downscale(folder) for side in network.data_shape[-2:])
            prompts = PipelinePrompts(PromptEncoder(folder, device=device), (height, width))
        elif network.told.text is not None:
            prompts = OwnPrompts.of(network.told.text, prompt_encoder, device)
        return cls(denoiser, walk, device, load_codec(folder, device=device), prompts)

    @property
    def network(self) -> DiffusersNetwork:
        network: Any = self.denoiser.network
        return network

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        labels: int | Sequence[int] | None = None,
        num_inference_steps: int | None = None,
        count: int | None = None,
        seed: int = 0,
        output: Literal["pil", "pt"] = "pil",
        batch: int = 16,
    ) -> Any:
        """PIL images, or images in [-1, 1] as one tensor [count, C, H, W].

        Prompts and labels are drawn in turn, all classes where no label is given. `count`: as many
        as there are prompts or labels, else 1. `num_inference_steps`: evaluations of the student,
        one of the numbers that it was trained for, the largest if not given.
        """
        if output not in ("pil", "pt"):
            raise UserError(f"output is pil or pt, not {output}")
        evaluations, wanted = self._evaluations(num_inference_steps), self.wanted(prompt, labels)
        if count is None:
            count = max(1, len(wanted.places), len(wanted.labels) if labels is not None else 0)
        if count < 1 or batch < 1:
            raise UserError(f"count and batch are 1 or more, not {count} and {batch}")
        starts = range(0, count, batch)
        batches = [range(first, min(first + batch, count)) for first in starts]
        parts = [self._decode(self.draw(part, evaluations, wanted, seed)) for part in batches]
        images = torch.cat(parts)
        return images if output == "pt" else self._pictures(images)

    # ------------------------------------------------------------ what to draw

    def wanted(
        self,
        prompt: str | Sequence[str] | None = None,
        labels: int | Sequence[int] | None = None,
    ) -> Wanted:
        """Prompts encoded and classes checked; what the student does not take is refused."""
        given = [prompt] if isinstance(prompt, str) else list(prompt or ())
        if given and self.prompts is None:
            raise UserError("this student takes no prompts: leave them out")
        if self.prompts is not None and not given:
            raise UserError("this student draws what it is told: give a prompt")
        classes = self._labels([labels] if isinstance(labels, int) else labels)
        if self.prompts is None:
            return Wanted(classes)
        table = self.prompts.encode(given)
        return Wanted(classes, table, table.places(given))

    def condition(self, indices: Sequence[int], wanted: Wanted, seed: int = 0) -> Condition | None:
        """What the samples of this seed with these numbers are told, but for the steps."""
        cond = Condition()
        if self.prompts is not None and wanted.table is not None:
            found = wanted.table[wanted.places[torch.tensor(indices) % len(wanted.places)]]
            cond = self.prompts.told(found, indices, seed)
        layout = self.network.told.layout
        if layout.names:
            size = (self.network.data_shape[-2], self.network.data_shape[-1])
            turns = [index // wanted.kinds for index in indices]  # when all kinds had theirs
            said = [usual_control(layout.names, layout.styles, size, turn) for turn in turns]
            cond = replace(cond, control=torch.cat([layout.row(words) for words in said]))
        if wanted.labels:
            label = [wanted.labels[i % len(wanted.labels)] for i in indices]
            cond = replace(cond, label=torch.tensor(label))
        return cond.to(self.device) if len(cond) else None

    def _labels(self, asked: Sequence[int] | None) -> tuple[int, ...]:
        classes, null = self.network.classes, self.network.null_label
        if not classes:
            if asked is not None:
                raise UserError("this student knows no classes: leave labels out")
            return ()
        if asked is None:
            return tuple(label for label in range(classes) if label != null)
        strange = [label for label in asked if label not in {*range(classes), null}]
        if strange or not len(asked):
            said = f"label {strange[0]} is none of them" if strange else "there is no label"
            raise UserError(f"this student knows {classes} classes, from 0 on: {said}")
        return tuple(int(label) for label in asked)

    # ------------------------------------------------------------ drawing

    def draw(
        self, indices: Sequence[int], evaluations: int, wanted: Wanted, seed: int = 0
    ) -> Tensor:
        """The samples with these numbers [B, ...], before any decoding."""
        scaling = self.denoiser.scaling
        grid = self.walk.levels(evaluations, scaling)
        noise = starting_noise(self.network.data_shape, indices, seed=seed).to(self.device)
        x = self.walk.grids(scaling).start(noise, float(grid[0]))
        cond = self.walk.condition(self.condition(indices, wanted, seed), evaluations, x)
        renewed = KeyedNoise(indices, seed)
        solver = SOLVERS[self.walk.step]
        return solver(self.denoiser, x, grid, cond, afs=self.walk.afs, generator=renewed)

    def _evaluations(self, asked: int | None) -> int:
        known = sorted(self.walk.evaluations)
        if asked is not None and asked not in known:
            numbers = ", ".join(map(str, known))
            raise UserError(
                f"this student was not trained for {asked} evaluations: num_inference_steps is "
                f"{'one of ' if len(known) > 1 else ''}{numbers}"
            )
        return known[-1] if asked is None else asked

    @torch.no_grad()
    def _decode(self, states: Tensor) -> Tensor:
        return states if self.codec is None else self.codec.decode(states)

    def _pictures(self, images: Tensor) -> list[Any]:
        from PIL import Image

        if images.ndim != 4 or images.shape[1] not in (1, 3):
            raise UserError(
                f"this student draws tensors of shape {[*images.shape[1:]]}, which are no images: "
                "take output='pt'"
            )
        levels = ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        rows = levels.movedim(1, -1).cpu().numpy()
        return [Image.fromarray(row[..., 0] if row.shape[-1] == 1 else row) for row in rows]


def _check(name: str | Path, network: DiffusersNetwork, walk: FewSteps, own: bool) -> None:
    """`own`: a pipeline, which encodes prompts and knows what else to tell."""
    config: Any = network.model.config
    if config.get("sample_size", 0) is None:
        raise UserError(f"{name} does not say its image size: put sample_size into its config.json")
    possible = {"label"} if network.classes else set[str]()
    possible |= {"text", "pooled", "control"} if own else set()
    possible |= {"text"} if network.told.text is not None else set()
    possible |= {"control"} if network.told.layout.names else set()
    possible |= {"steps"} if walk.told else set()
    foreign = set(network.condition_shapes) - possible
    if foreign:
        raise UserError(
            f"{name} is conditioned on {', '.join(sorted(foreign))}, which cannot be made here: "
            "read it by load_denoiser, and give a Condition to a solver (shapes per sample: "
            f"{network.condition_shapes})"
        )
