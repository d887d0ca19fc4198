"""Checkpoints in diffusers' format: reading them as denoisers and codecs."""

from stillhouse.pipelines.load import (
    UnreadableCheckpoint,
    load_codec,
    load_denoiser,
    resolve_folder,
    weight_files,
)

__all__ = [
    "UnreadableCheckpoint",
    "load_codec",
    "load_denoiser",
    "resolve_folder",
    "weight_files",
]
