"""Small networks and published configs, shared by the tests of models, pipelines and parity."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from stillhouse.models import DiffusersNetwork
from stillhouse.models.networks import Shapes
from stillhouse.process import Condition

CONFIGS = Path(__file__).parent / "configs"
MODELS = ("sd15", "sdxl", "pixart-alpha", "sd3", "dit-xl-2")


def part(model: str, name: str) -> dict[str, Any]:
    """One published config of a model: unet, transformer, scheduler, vae or model_index."""
    return json.loads((CONFIGS / model / f"{name}.json").read_text())


def network_folder(model: str) -> str:
    """The folder that the network has in its pipeline."""
    return "unet" if (CONFIGS / model / "unet.json").is_file() else "transformer"


def network_config(model: str, *, reduced: bool = False) -> dict[str, Any]:
    """The published config, or its small version of the same structure."""
    config = part(model, network_folder(model))
    return {**config, **part(model, "reduced")} if reduced else config


def build_network(config: dict[str, Any], seed: int = 0) -> Any:
    """A diffusers network with random weights."""
    torch.manual_seed(seed)
    return getattr(diffusers, config["_class_name"]).from_config(config).eval()


def small_unet(seed: int = 0, **changes: Any) -> Any:
    """A U-Net with some 40 thousand parameters, for 3x8x8 images."""
    config = {
        "_class_name": "UNet2DModel",
        "sample_size": 8,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "UpBlock2D"),
        "norm_num_groups": 4,
        "attention_head_dim": 8,
    }
    return build_network({**config, **changes}, seed)


def small_autoencoder(latent_channels: int, **changes: Any) -> Any:
    """An AutoencoderKL that halves the side once."""
    config = {
        "_class_name": "AutoencoderKL",
        "block_out_channels": (8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 4,
        "latent_channels": latent_channels,
        "sample_size": 16,
    }
    return build_network({**config, **changes}, seed=3)


def unit_noise(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_condition(shapes: Shapes, count: int, tokens: int = 5) -> Condition:
    """Random values for exactly the fields that a network asks for."""
    fields = {}
    for index, (name, shape) in enumerate(shapes.items()):
        if name == "label":
            fields[name] = torch.arange(count) % 7
        else:
            sizes = (count, *(tokens if size is None else size for size in shape))
            fields[name] = unit_noise(sizes, seed=100 + index)
    return Condition(**fields)


def call(network: DiffusersNetwork, count: int = 2) -> Tensor:
    """One evaluation of a network on noise, with a random condition."""
    x = unit_noise((count, *network.data_shape))
    time = torch.full((count,), 500.0)
    with torch.no_grad():
        return network(x, time, random_condition(network.condition_shapes, count))


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest reference value."""
    difference = (value.double() - reference.double()).abs().max()
    return float(difference / reference.double().abs().max())


def save_scheduler(folder: Path, config: dict[str, Any]) -> None:
    """A scheduler's config file, as diffusers writes it."""
    getattr(diffusers, config["_class_name"]).from_config(config).save_pretrained(folder)


def save_pipeline(folder: Path, model: str) -> Any:
    """A small version of a published pipeline, saved the way diffusers does; returns its network.

    Text encoders are left out: nothing here reads them.
    """
    network = build_network(network_config(model, reduced=True))
    network.save_pretrained(folder / network_folder(model))
    save_scheduler(folder / "scheduler", part(model, "scheduler"))
    small_autoencoder(network.config.in_channels).save_pretrained(folder / "vae")
    (folder / "model_index.json").write_text(json.dumps(part(model, "model_index")))
    return network


def save_bare(folder: Path, **scheduler: Any) -> Any:
    """A small U-Net with its scheduler's config in one folder; returns the U-Net."""
    network = small_unet()
    network.save_pretrained(folder)
    save_scheduler(folder, {"_class_name": "DDIMScheduler", "clip_sample": False, **scheduler})
    return network


def rewrite(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
