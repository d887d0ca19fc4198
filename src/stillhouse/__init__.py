"""Stillhouse: a diffusion model's whole life in one formalism, `denoise(x, sigma, cond) -> x0`.

Names are resolved on first use, so that `import stillhouse` stays as light as `import torch`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

# public name -> module that defines it
_EXPORTS = {
    "Batch": "stillhouse.process",
    "Condition": "stillhouse.process",
    "Denoiser": "stillhouse.process",
    "NetworkDenoiser": "stillhouse.process",
    "couplings": "stillhouse",
    "levels": "stillhouse.process",
    "load_denoiser": "stillhouse.pipelines",
    "process": "stillhouse",
    "solvers": "stillhouse",
    "starting_noise": "stillhouse.process",
}

if TYPE_CHECKING:
    from stillhouse import couplings, process, solvers
    from stillhouse.pipelines import load_denoiser
    from stillhouse.process import (
        Batch,
        Condition,
        Denoiser,
        NetworkDenoiser,
        levels,
        starting_noise,
    )

__all__ = [
    "Batch",
    "Condition",
    "Denoiser",
    "NetworkDenoiser",
    "couplings",
    "levels",
    "load_denoiser",
    "process",
    "solvers",
    "starting_noise",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'stillhouse' has no attribute {name!r}")
    home = _EXPORTS[name]
    if home == "stillhouse":
        return import_module(f"stillhouse.{name}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
