"""What is sampled or measured: a checkpoint or a toy, made ready with its guidance and labels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError
from stillhouse.files import fingerprint
from stillhouse.models import Codec
from stillhouse.pipelines import (
    checkpoint_files,
    load_codec,
    load_denoiser,
    read_facts,
    resolve_folder,
)
from stillhouse.pipelines.families import takes_prompts, whole_folder
from stillhouse.pipelines.few_steps import read_walk
from stillhouse.process import (
    EDM,
    TOYS,
    Condition,
    Denoiser,
    GaussianMixture,
    NetworkDenoiser,
    Scaling,
)
from stillhouse.recipes.parts import Autoguidance, ClassifierFree, Guidance, TwoTermGuidance
from stillhouse.recipes.prompting import pipeline_speech
from stillhouse.recipes.telling import Speech, speech_of


@dataclass(frozen=True)
class Subject:
    """A (guided) denoiser with all that a run needs to know about it."""

    denoiser: Denoiser
    scaling: Scaling
    shape: tuple[int, ...]
    files: Mapping[str, Sequence[Path]]  # what it was read from, by role
    labels: tuple[int, ...] = ()  # sample i has class labels[i mod n]; none where empty
    codec: Codec | None = None
    toy: GaussianMixture | None = None  # what points of the plane are drawn over
    speech: Speech | None = None  # prompts and control, where the model is told them
    walk: FewSteps | None = None  # of a few-step student: the only ones that it knows
    bare: NetworkDenoiser | None = None  # the denoiser without guidance
    null: Condition | None = None  # one row that says nothing

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of everything that was read, by role."""
        return {role: fingerprint(files) for role, files in self.files.items()}

    def condition(
        self, indices: Sequence[int], device: torch.device, seed: int = 0
    ) -> Condition | None:
        """What the samples of this seed with these indices are conditioned on."""
        cond = Condition() if self.speech is None else self.speech.condition(indices, seed)
        if labels := self.labels_of(indices):
            cond = replace(cond, label=torch.tensor(labels))
        return cond.to(device) if len(cond) else None

    def labels_of(self, indices: Iterable[int]) -> list[int]:
        """Classes are dealt in turn; none where the model knows none."""
        return [self.labels[i % len(self.labels)] for i in indices] if self.labels else []

    def prompts_of(self, indices: Iterable[int]) -> list[str]:
        """Likewise; none where the model takes none."""
        told = self.speech if self.speech is not None and self.speech.table is not None else None
        return [told.prompt(i) for i in indices] if told else []

    @torch.no_grad()
    def decode(self, states: Tensor) -> Tensor:
        """Images from what was drawn: latents go through the codec."""
        return states if self.codec is None else self.codec.decode(states)


@dataclass(frozen=True)
class Wish:
    """What a run asks of its subject beside its name."""

    guidance: Guidance
    labels: tuple[int, ...]
    null_label: int | None
    dtype: torch.dtype
    device: torch.device
    prompts: tuple[str, ...] = ()
    control: tuple[str, ...] = ()  # name=value
    prompt_encoder: str = ""  # where it is, if not where the model says
    unsaid: str | None = None  # the prompt where none is given; None: then one must be


def load_subject(name: str, wish: Wish) -> Subject:
    """A toy by its name, a checkpoint by its path or hub id, or a run by its folder."""
    if not name:
        raise UserError("name what to sample: a diffusers directory, a hub id, or toy:moons")
    if name.startswith("toy:"):
        return _toy(name.removeprefix("toy:"), wish)
    return _checkpoint(run_model(name), wish)


def run_model(name: str) -> str:
    """A run's folder stands for the model in it."""
    folder = Path(name).expanduser()
    if not (folder / "run.json").is_file():
        return name
    if not (folder / "model").is_dir():
        raise UserError(
            f"{name} holds no model yet: wait for its first checkpoint (what prepare and evaluate "
            "leave is no model)"
        )
    return str(folder / "model")


def _checkpoint(name: str, wish: Wish) -> Subject:
    folder = resolve_folder(name)  # once: a hub id would be looked up again by every reader
    own = takes_prompts(folder)  # by text encoders in its folder
    folder = whole_folder(name) if own else folder
    load = partial(load_denoiser, dtype=wish.dtype, device=wish.device)
    denoiser = load(folder)
    network: Any = denoiser.network
    network.for_inference()
    if wish.unsaid is not None and not wish.prompts and (own or network.told.text):
        wish = replace(wish, prompts=(wish.unsaid,))
    _check_conditions(name, network, wish, own)
    codec, plane = load_codec(folder, device=wish.device), len(network.data_shape) == 1
    if codec is None and not plane and network.data_shape[0] not in (1, 3):
        raise UserError(
            f"{name} draws {network.data_shape[0]}-channel latents and has no vae folder to turn "
            "them into images"
        )
    null = _null_label(wish.null_label, network)
    labels = _labels(wish.labels, network.classes, null) if network.classes else ()
    guide = partial(_guide, load, network)
    told, shape = network.told, network.data_shape
    if own:
        speech = pipeline_speech(folder, shape, wish.prompts, wish.device)
    else:
        speech = speech_of(
            told, shape, wish.prompts, wish.control, len(labels), wish.prompt_encoder
        )
    nothing = _null_condition(null, wish.device, speech)
    return Subject(
        wish.guidance.build(denoiser, nothing, guide),
        denoiser.scaling,
        shape,
        checkpoint_files(folder) | _guide_files(wish.guidance),
        labels,
        codec,
        _target(folder) if plane else None,
        speech,
        read_walk(folder),
        denoiser,
        nothing,
    )


def _target(folder: Path) -> GaussianMixture:
    """The toy that a network of the plane was trained on."""
    data = read_facts(folder).get("config", {}).get("data", {})
    if data.get("toy") not in TOYS:
        raise UserError(f"{folder} does not say which toy it was trained on")
    return TOYS[data["toy"]]()


def _guide(load: Callable[[str], NetworkDenoiser], wanted: Any, name: str) -> NetworkDenoiser:
    """A guide must take what the guided network takes."""
    guide = load(name)
    network: Any = guide.network
    network.for_inference()
    for what in ("data_shape", "condition_shapes"):
        ours, theirs = getattr(wanted, what), getattr(network, what)
        if ours != theirs:
            raise UserError(f"{name} cannot guide: its {what} is {theirs}, the model's {ours}")
    for what in ("layout", "text", "classes", "tokens"):
        ours, theirs = getattr(wanted.told, what), getattr(network.told, what)
        if ours != theirs:
            raise UserError(f"{name} cannot guide: it is told {what} {theirs}, the model {ours}")
    return guide


def _check_conditions(name: str, network: Any, wish: Wish, own: bool = False) -> None:
    """`own`: prompts are encoded by the pipeline, which also knows what else to tell."""
    if network.model.config.get("sample_size", 0) is None:
        raise UserError(f"{name} does not say its image size: put sample_size into its config.json")
    parts = network.told
    told = own or bool(parts.text)
    if not network.classes and wish.labels:
        raise UserError(f"{name} knows no classes: leave labels out")
    guided = isinstance(wish.guidance, ClassifierFree | TwoTermGuidance)
    if guided and not (network.classes or told):
        raise UserError(f"{name} knows neither classes nor prompts: there is nothing to guide to")
    if told and not wish.prompts:
        raise UserError(
            f"{name} draws what it is told: give --prompt 'a red apple' to sample it, --prompts "
            "FILE to evaluate or distil it"
        )
    if wish.prompts and not told:
        raise UserError(f"{name} takes no prompts: leave them out")
    if wish.prompt_encoder and not told:
        raise UserError(f"{name} takes no prompts: leave --prompt-encoder out")
    if wish.control and not parts.layout.names:
        raise UserError(f"{name} takes no control: leave --control out")
    possible = {"label"} if network.classes else set[str]()
    possible |= {"text"} if told else set()
    possible |= {"pooled", "control"} if own else set()
    possible |= {"control"} if parts.layout.names else set()
    possible |= {"steps"} if parts.steps else set()
    foreign = set(network.condition_shapes) - possible
    if foreign:
        raise UserError(
            f"{name} is conditioned on {', '.join(sorted(foreign))}, which the command line cannot "
            "make; from Python, give a Condition to a solver (shapes per sample: "
            f"{network.condition_shapes})"
        )


def _toy(name: str, wish: Wish) -> Subject:
    if name not in TOYS:
        raise UserError(f"there is no toy:{name}; there are {', '.join(f'toy:{t}' for t in TOYS)}")
    toy, null = TOYS[name](), -1
    classes = 0 if toy.labels is None else int(toy.labels.max()) + 1
    if isinstance(wish.guidance, Autoguidance):
        raise UserError("a toy has no worse version of itself: autoguidance needs a checkpoint")
    if isinstance(wish.guidance, ClassifierFree | TwoTermGuidance) and not wish.labels:
        raise UserError(f"toy:{name} is guided towards --labels (it has {classes} classes)")
    return Subject(
        wish.guidance.build(toy, _null_condition(null, wish.device), load_denoiser),
        EDM(sigma_data=0.7),
        (2,),
        _guide_files(wish.guidance),
        _labels(wish.labels, classes, null) if wish.labels else (),
        toy=toy,
    )


def _null_condition(
    label: int | None, device: torch.device, speech: Speech | None = None
) -> Condition | None:
    null = Condition() if speech is None else speech.null()
    if label is not None:
        null = replace(null, label=torch.tensor([label]))
    return null.to(device) if len(null) else None


def _null_label(asked: int | None, network: Any) -> int | None:
    if asked is None:
        return network.null_label
    if asked not in {*range(network.classes or 0), network.null_label}:
        raise UserError(
            f"--null-label {asked} is not among the model's {network.classes or 0} classes: leave "
            "it out, or give one of them, from 0 on"
        )
    return asked


def known_labels(classes: int, null: int | None) -> list[int]:
    """Those that a model can draw: all but the one that stands for no class."""
    return [label for label in range(classes) if label != null]


def _labels(asked: Sequence[int], classes: int, null: int | None) -> tuple[int, ...]:
    known = known_labels(classes, null)
    for label in asked:
        if label not in {*known, null}:
            raise UserError(
                f"label {label} is not among the model's {len(known)} classes: give a number from "
                f"{min(known, default=null)} to {max(known, default=null)}"
            )
    return tuple(asked) or tuple(known)


def _guide_files(guidance: Guidance) -> dict[str, list[Path]]:
    if not isinstance(guidance, Autoguidance):
        return {}
    parts = checkpoint_files(resolve_folder(guidance.model))
    return {f"guide {role}": files for role, files in parts.items()}
