"""Checkpoints in diffusers' format: reading them as denoisers and codecs."""

from stillhouse.pipelines.load import (
    UnreadableCheckpoint,
    checkpoint_files,
    load_codec,
    load_denoiser,
    resolve_folder,
)

__all__ = [
    "UnreadableCheckpoint",
    "checkpoint_files",
    "load_codec",
    "load_denoiser",
    "resolve_folder",
]
