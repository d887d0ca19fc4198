"""Statistics of a reference, stored with where they come from: others are refused, with the reason.

One safetensors file: mean and scatter of all features, the first of the features themselves (for
distances that need them), and `Facts` in the metadata.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillhouse.config import Config
from stillhouse.errors import UserError, one_line
from stillhouse.files import write_whole
from stillhouse.metrics.moments import Moments

KEY, TEXTS = "stillhouse", "texts"  # of the metadata


class DetectorFacts(Config):
    """What made the features."""

    name: str
    digest: str
    preprocessing: str


class Facts(Config):
    """Where statistics come from."""

    name: str
    """What the data was called by whoever computed them."""
    count: int
    fingerprint: str
    """Of the files: names, sizes, times of change."""
    reading: str
    """How they were read or drawn, in a line."""
    size: int
    mode: str
    """Of the images: pixels along a side; rgb or grey."""
    detector: DetectorFacts
    content: str = ""
    """Of the pixels that the detector saw, in any order; the same pixels have the same anywhere."""
    version: str = ""
    """Of stillhouse."""


@dataclass(frozen=True, eq=False)
class Reference:
    """What samples are compared with."""

    facts: Facts
    moments: Moments
    features: Tensor  # [n, D] float32, a random part of all
    texts: tuple[str, ...] = ()  # captions of that part

    def save(self, path: Path) -> None:
        from safetensors.torch import save

        tensors = {
            "mean": self.moments.mean,
            "scatter": self.moments.scatter,
            "features": self.features,
        }
        metadata = {KEY: self.facts.model_dump_json(), TEXTS: json.dumps(self.texts)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save(tensors, metadata=metadata))


def load_reference(path: Path) -> Reference:
    """Reads what `save` has written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            facts, texts = Facts.model_validate_json(metadata[KEY]), json.loads(metadata[TEXTS])
            mean, scatter, features = map(file.get_tensor, ("mean", "scatter", "features"))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(
            f"{path} does not hold the statistics of a reference ({one_line(error)}). Name the "
            "data itself as --reference to compute them, or remove the file"
        ) from error
    if mean.dtype != torch.float64 or not bool(torch.isfinite(scatter).all()):
        raise UserError(f"{path} holds statistics that are not finite float64: remove it")
    return Reference(facts, Moments(facts.count, mean, scatter), features, tuple(texts))


def mismatches(found: Facts, **wanted: Any) -> list[str]:
    """What is not as it should be, a reason each: `wanted` are fields of `Facts`."""
    reasons = []
    for name, value in wanted.items():
        if getattr(found, name) != value:
            reasons.append(_reason(name, getattr(found, name), value))
    return reasons


def _reason(name: str, found: Any, wanted: Any) -> str:
    if isinstance(found, DetectorFacts):
        differing = [
            f"{part} {getattr(found, part)!r}, now {getattr(wanted, part)!r}"
            for part in DetectorFacts.model_fields
            if getattr(found, part) != getattr(wanted, part)
        ]
        return "their detector is another: " + ", ".join(differing)
    if name == "fingerprint":
        return "the data's files have changed since"
    what = {"count": "number of images", "size": "size in pixels", "mode": "colour"}
    return f"their {what.get(name, name)} is {found}, now {wanted}"
