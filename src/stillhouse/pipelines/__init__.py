"""Checkpoints in diffusers' format: read as denoisers and codecs, and written.

Few-step students are resolved on first use, so that reading any other checkpoint stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from stillhouse.pipelines.exportable import (
        exportable_scheduler,
        plain_pipeline,
        save_exportable,
    )
    from stillhouse.pipelines.few_steps import FewStepPipeline, read_walk, save_walk

# public name -> module that defines it
_LATER = {
    "FewStepPipeline": "few_steps",
    "exportable_scheduler": "exportable",
    "plain_pipeline": "exportable",
    "read_walk": "few_steps",
    "save_exportable": "exportable",
    "save_walk": "few_steps",
}

__all__ = [
    "FewStepPipeline",
    "UnreadableCheckpoint",
    "checkpoint_files",
    "exportable_scheduler",
    "is_hub_id",
    "load_codec",
    "load_denoiser",
    "plain_pipeline",
    "read_facts",
    "read_walk",
    "resolve_folder",
    "save_codec",
    "save_denoiser",
    "save_exportable",
    "save_walk",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'stillhouse.pipelines' has no attribute {name!r}")
    return getattr(import_module(f"stillhouse.pipelines.{_LATER[name]}"), name)
