"""Whether a network draws pixels or the latents of a codec, and of which shape."""

from typing import TYPE_CHECKING

import torch

from stillhouse.data import DataConfig, Prepared
from stillhouse.errors import UserError
from stillhouse.models import Codec
from stillhouse.pipelines import load_codec

if TYPE_CHECKING:
    from stillhouse.recipes.train.training import TrainRun


def prepared(config: "TrainRun") -> Prepared | None:
    """The shards that hold latents already; None where data are images or points."""
    source = config.data.source if isinstance(config.data, DataConfig) else None
    return source if isinstance(source, Prepared) else None


def build_codec(config: "TrainRun", device: torch.device) -> Codec | None:
    """None where the network draws pixels, or points."""
    shards = prepared(config)
    if not config.codec and shards is None:
        return None
    codec = load_codec(config.codec, device=device) if config.codec else None
    if codec is None:
        named = f"{config.codec} is none; " if config.codec else ""
        raise UserError(f"{named}name the autoencoder whose latents the network draws as --codec")
    if shards is not None and codec.digest != shards.index.codec:
        raise UserError(f"{config.codec} is not the codec that the shards were prepared with")
    return codec


def drawn_shape(config: "TrainRun", codec: Codec | None) -> tuple[int, ...]:
    """Of what the network draws."""
    if codec is None or prepared(config) is not None:
        return config.data.shape
    return codec.latent_shape(config.data.shape)


def image_side(config: "TrainRun") -> int:
    """Of the images, whether they are drawn as they are or decoded."""
    codec = build_codec(config, torch.device("cpu"))
    side = drawn_shape(config, codec)[-1]
    return side if codec is None else side * codec.downscale
