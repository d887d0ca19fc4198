"""Checkpoints in diffusers' format: read as denoisers and codecs, and written."""

from stillhouse.pipelines.load import (
    UnreadableCheckpoint,
    checkpoint_files,
    is_hub_id,
    load_codec,
    load_denoiser,
    read_facts,
    resolve_folder,
)
from stillhouse.pipelines.save import save_codec, save_denoiser

__all__ = [
    "UnreadableCheckpoint",
    "checkpoint_files",
    "is_hub_id",
    "load_codec",
    "load_denoiser",
    "read_facts",
    "resolve_folder",
    "save_codec",
    "save_denoiser",
]
