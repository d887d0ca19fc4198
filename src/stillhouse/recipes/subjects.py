"""What is sampled or measured: a checkpoint or a toy, made ready with its guidance and labels."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stillhouse.errors import UserError
from stillhouse.models import Codec
from stillhouse.pipelines import load_codec, load_denoiser, resolve_folder, weight_files
from stillhouse.process import EDM, TOYS, Condition, Denoiser, GaussianMixture, Scaling
from stillhouse.recipes.parts import Guidance


@dataclass(frozen=True)
class Subject:
    """A (guided) denoiser with all that a run needs to know about it."""

    denoiser: Denoiser
    scaling: Scaling
    shape: tuple[int, ...]
    fingerprint: str  # of the weights
    labels: tuple[int, ...] = ()  # sample i has class labels[i mod n]; none where empty
    codec: Codec | None = None
    toy: GaussianMixture | None = None

    def condition(self, indices: Iterable[int], device: torch.device) -> Condition | None:
        """What samples with these indices are conditioned on."""
        if not self.labels:
            return None
        labels = [self.labels[i % len(self.labels)] for i in indices]
        return Condition(label=torch.tensor(labels, device=device))


@dataclass(frozen=True)
class Wish:
    """What a run asks of its subject beside its name."""

    guidance: Guidance
    labels: tuple[int, ...]
    null_label: int | None
    dtype: torch.dtype
    device: torch.device


def load_subject(name: str, wish: Wish) -> Subject:
    """A toy by its name, or a checkpoint by its path or hub id."""
    if not name:
        raise UserError("name what to sample: a diffusers directory, a hub id, or toy:moons")
    if name.startswith("toy:"):
        return _toy(name.removeprefix("toy:"), wish)
    return _checkpoint(name, wish)


def _checkpoint(name: str, wish: Wish) -> Subject:
    load = partial(load_denoiser, dtype=wish.dtype, device=wish.device)
    denoiser = load(name)
    network: Any = denoiser.network
    _check_conditions(name, network)
    codec = load_codec(name, device=wish.device)
    channels = network.data_shape[0]
    if codec is None and channels not in (1, 3):
        raise UserError(
            f"{name} draws {channels}-channel latents and has no vae folder to turn them into "
            "images"
        )
    null = network.null_label if wish.null_label is None else wish.null_label
    return Subject(
        wish.guidance.build(denoiser, _null_condition(null, wish.device), load),
        denoiser.scaling,
        network.data_shape,
        fingerprint(weight_files(resolve_folder(name))),
        _labels(wish.labels, network.classes, null) if network.classes else (),
        codec,
    )


def _check_conditions(name: str, network: Any) -> None:
    possible = {"label"} if network.classes else set()
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
    return Subject(
        wish.guidance.build(toy, _null_condition(null, wish.device), load_denoiser),
        EDM(sigma_data=0.7),
        (2,),
        f"toy:{name}",
        _labels(wish.labels, classes, null) if wish.labels else (),
        toy=toy,
    )


def _null_condition(label: int | None, device: torch.device) -> Condition | None:
    return None if label is None else Condition(label=torch.tensor([label], device=device))


def _labels(asked: Sequence[int], classes: int, null: int | None) -> tuple[int, ...]:
    labels = tuple(asked) or tuple(range(classes))
    wrong = [label for label in labels if label not in {*range(classes), null}]
    if wrong:
        raise UserError(f"label {wrong[0]} is not among the model's {classes} classes")
    return labels


def fingerprint(files: Iterable[Path]) -> str:
    """SHA-256 over the files' contents, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"
