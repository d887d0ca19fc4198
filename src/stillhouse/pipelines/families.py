"""Pipelines that can be fine-tuned: what each class of diffusers is made of, and what it is told.

| class | text encoders | tokens | pooled | control |
|---|---|---|---|---|
| `StableDiffusionPipeline` | CLIP | 77 | | |
| `StableDiffusionXLPipeline` | 2 CLIPs | 77 | of the second | sizes, crop: its time_ids |
| `PixArtAlphaPipeline`, `PixArtSigmaPipeline` | T5 | 120 or 300, masked | | the image's shape |
| `StableDiffusion3Pipeline` | 2 CLIPs, T5 (may be absent) | 77 + 256 | of both CLIPs | |
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillhouse.models.codecs import AUTOENCODERS
from stillhouse.pipelines.load import (
    HUB_FILES,
    HUB_SKIPPED,
    UnreadableCheckpoint,
    fetch,
    is_hub_id,
    read_json,
)

INDEX = "model_index.json"
# Beside what sampling needs: text encoders and tokenizers; never pickles, never code.
WHOLE = [
    *HUB_FILES,
    "text_encoder*/model*.safetensors",
    *(f"tokenizer*/*.{suffix}" for suffix in ("txt", "model")),
]
SKIPPED = [*HUB_SKIPPED, "text_encoder*/*.fp16*"]
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
JOINT = tuple(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"))

# (numbers that the data tells of each image [B, K], the shape of the image, rows) -> control
Control = Callable[[Tensor | None, tuple[int, int], int], Tensor | None]


# ---------------------------------------------------------------- what a network is told of sizes


def no_control(told: Tensor | None, size: tuple[int, int], count: int) -> None:
    return None


def time_ids(told: Tensor | None, size: tuple[int, int], count: int) -> Tensor:
    """SDXL: height and width of the source, top and left of the crop, height and width here.

    Where nothing is told the image is asked for whole, and as large as it is drawn.
    """
    here = torch.tensor(size, dtype=torch.float32).expand(count, 2)
    if told is None:
        told = torch.cat([here, torch.zeros(count, 2)], 1)
    return torch.cat([told, here.to(told)], 1)


def resolution_and_ratio(told: Tensor | None, size: tuple[int, int], count: int) -> Tensor:
    """PixArt: height, width and height over width of what is drawn."""
    height, width = size
    return torch.tensor([height, width, height / width], dtype=torch.float32).expand(count, 3)


# ---------------------------------------------------------------- the classes


@dataclass(frozen=True)
class Family:
    """What fine-tuning has to know of a class of pipelines."""

    network: str  # its folder
    encoders: tuple[str, ...]  # what follows text_encoder and tokenizer in their names
    gives: tuple[str, ...]  # what encode_prompt returns; minus: what guidance leads away from
    options: tuple[str, ...] = ()  # arguments of encode_prompt that may be None, but not absent
    length: int = 0  # tokens of T5; 0: it has none
    optional: tuple[str, ...] = ()  # encoders that may be absent
    reports: tuple[str, ...] = ()  # what the data tells of each image, by the names of `data.crops`
    control: Control = no_control
    lora: tuple[str, ...] = ATTENTION  # layers that get adapters
    loads_lora: bool = True  # whether the pipeline has load_lora_weights


PIXART = {
    "network": "transformer",
    "encoders": ("",),
    "gives": ("text", "text_mask", "-text", "-text_mask"),
    "control": resolution_and_ratio,
    "loads_lora": False,
}
POOLED = ("text", "-text", "pooled", "-pooled")
FAMILIES: dict[str, Family] = {
    "StableDiffusionPipeline": Family("unet", ("",), ("text", "-text")),
    "StableDiffusionXLPipeline": Family(
        "unet",
        ("", "_2"),
        POOLED,
        reports=("height", "width", "crop_top", "crop_left"),
        control=time_ids,
    ),
    "PixArtAlphaPipeline": Family(**PIXART, length=120),
    "PixArtSigmaPipeline": Family(**PIXART, length=300),
    "StableDiffusion3Pipeline": Family(
        "transformer",
        ("", "_2", "_3"),
        POOLED,
        options=("prompt_2", "prompt_3"),
        length=256,
        optional=("_3",),
        lora=(*(f"attn.{name}" for name in ATTENTION), *JOINT),
    ),
}


# ---------------------------------------------------------------- whole pipelines


def whole_folder(path_or_hub_id: str) -> Path:
    """A local pipeline as it is; one of the hub with all that fine-tuning reads."""
    if not path_or_hub_id:
        raise UnreadableCheckpoint("name the pipeline to fine-tune as --model")
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir() or not is_hub_id(path_or_hub_id):
        if not (path / INDEX).is_file():
            raise UnreadableCheckpoint(
                f"{path_or_hub_id} is no diffusers pipeline: it has no {INDEX}. Fine-tuning takes "
                "a whole one, with its text encoders and its autoencoder."
            )
        return path
    return _fetched(path_or_hub_id)


@cache
def _fetched(hub_id: str) -> Path:
    """Asked for once: a run stays with the revision that it began with."""
    return fetch(hub_id, WHOLE, SKIPPED)


def read_index(folder: Path) -> dict[str, Any]:
    """The pipeline's class and its parts, [library, class] by name."""
    return read_json(folder / INDEX)


def family_of(folder: Path) -> Family:
    """What is known of the pipeline's class; others are refused."""
    name = read_index(folder).get("_class_name")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UnreadableCheckpoint(
            f"{folder} is a {name}; pipelines that can be fine-tuned are {', '.join(FAMILIES)}."
        )
    if not (folder / "vae" / "config.json").is_file():
        raise UnreadableCheckpoint(
            f"{folder} has no vae: fine-tuning works on its latents. Put the autoencoder that it "
            "was trained with into its vae folder."
        )
    return FAMILIES[name]


def takes_prompts(folder: Path) -> bool:
    """Whether this is a pipeline whose own text encoders can be asked."""
    if not (folder / INDEX).is_file() or not any(folder.glob("text_encoder*")):
        return False
    return read_index(folder).get("_class_name") in FAMILIES


def scheduler_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "scheduler" / "scheduler_config.json")


def network_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / family_of(folder).network / "config.json")


def downscale(folder: Path) -> int:
    """Pixels of an image along the side of one pixel of its latents, from the config alone."""
    config = read_json(folder / "vae" / "config.json")
    widths = AUTOENCODERS.get(str(config.get("_class_name")))
    if widths is None:
        known = ", ".join(AUTOENCODERS)
        raise UnreadableCheckpoint(
            f"{folder / 'vae'} holds a {config.get('_class_name')}; supported: {known}."
        )
    return 2 ** (len(config[widths]) - 1)
