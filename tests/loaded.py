"""Processes that start at once: as those of warm.py, with this package and its readers loaded too.

For runs of a few steps, which would spend most of their time on that. How the package is loaded is
shown by those that start through warm.py, and by some in tests/resilience that start afresh. What
`datasets` keeps is with the server: it reads from its environment where that is, when it is loaded.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import warm

READERS = (
    *("datasets", "pyarrow.parquet", "scipy.linalg", "tyro", "yaml"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *("transformers.models.bert.modeling_bert", "transformers.models.bert.tokenization_bert"),
    *("diffusers.models.unets.unet_2d_condition", "diffusers.models.autoencoders.autoencoder_kl"),
    "diffusers.models.transformers.dit_transformer_2d",
    "diffusers.models.transformers.pixart_transformer_2d",
    "diffusers.models.transformers.transformer_sd3",
)
PACKAGE = (
    *("stillhouse.cli.parse", "stillhouse.models.mdt", "stillhouse.models.plane"),
    *("stillhouse.recipes.train.catalogue", "stillhouse.recipes.train.progressive"),
    *("stillhouse.recipes.distill.distilling", "stillhouse.recipes.judge.evaluating"),
    *("stillhouse.recipes.preparing", "stillhouse.recipes.sampling"),
)


# A fork would lose pyarrow's thread.
_here = warm.Forking(__file__, warm.HERE, JE_ARROW_MALLOC_CONF="background_thread:false")
command, run, environment = _here.command, _here.run, _here.environment


@contextmanager
def ray_workers() -> Iterator[None]:
    """Workers of a cluster that Ray starts herein are forked; all else of it is started afresh."""
    before, sys.executable = sys.executable, ray_python()
    try:
        yield
    finally:
        sys.executable = before


@cache
def ray_python() -> str:
    """What Ray is to take for Python: the program for its workers, Python itself for the rest."""
    forked = _here.program
    program = Path(forked).with_name("ray-python")
    program.write_text(
        f'#!/bin/sh\ncase "$1" in */default_worker.py) exec {forked} "$@" ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


if __name__ == "__main__":
    warm.LOADED = (*warm.LOADED, *READERS, *PACKAGE)
    warm.main()
