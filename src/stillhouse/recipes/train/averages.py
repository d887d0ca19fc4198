"""Averages of another width than those that were kept: from a run's stored snapshots.

Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stillhouse.engine.ema import Snapshot, Weights, coefficients, combine
from stillhouse.errors import UserError
from stillhouse.pipelines import load_denoiser, read_facts, save_denoiser
from stillhouse.recipes.train.watching import PREFIX


def read_snapshots(folder: Path) -> list[Snapshot]:
    """All snapshots of a run, whole in memory."""
    return [Snapshot(*_moment(file), _weights(file)) for file in sorted(_files(folder))]


def synthesize_model(run: Path, *, sigma_rel: float, images: int | None = None) -> Path:
    """Writes the model that an average of this width would be; returns its folder.

    One snapshot is in memory at a time.
    """
    files = _files(run / "averages")
    moments = [_moment(file) for file in files]
    images = max(seen for seen, _ in moments) if images is None else images
    shares = coefficients(moments, sigma_rel, images)
    weights = combine((c, _weights(f)) for c, f in zip(shares, files, strict=True) if c)
    target = run / f"model-power-{sigma_rel:g}-images-{images:012d}"
    template = load_denoiser(run / "model")
    network: Any = template.network
    scheduler = json.loads((run / "model" / "scheduler_config.json").read_text())
    facts = {**read_facts(run / "model"), "images": images, "average": f"power-{sigma_rel:g}"}
    save_denoiser(
        target,
        network,
        {name.removeprefix(PREFIX): weight for name, weight in weights.items()},
        scheduler,
        facts=facts,
    )
    return target


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder} has no snapshots: train with power averages and --snapshot-every"
        )
    return files


def _moment(file: Path) -> tuple[int, float]:
    with _opened(file) as stored:
        facts = json.loads(stored.metadata()["snapshot"])
        return facts["images"], facts["sigma_rel"]


def _weights(file: Path) -> Weights:
    with _opened(file) as stored:
        return {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as stored:
            yield stored
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is no snapshot of an average ({error})") from error
