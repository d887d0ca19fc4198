"""The folder of a training run: for this run alone, with its resolved config in run.json."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stillhouse import __version__
from stillhouse.errors import UserError
from stillhouse.files import fingerprint, write_whole
from stillhouse.pipelines import checkpoint_files
from stillhouse.pipelines.families import whole_folder
from stillhouse.recipes.claims import (
    changes,
    listed,
    locked,
    make_folder,
    without_places,
)
from stillhouse.recipes.train.learner import Learner

if TYPE_CHECKING:
    from stillhouse.recipes.train.sessions import LongRun
    from stillhouse.recipes.train.training import TrainRun

RECORD = "run.json"
# What a resumed run may change: how far, how often, how it is spread and shown, not what it learns.
FREE = {
    *("images", "log_every", "checkpoint_every", "keep_last", "keep_every", "max_skips"),
    *("preview", "validation", "evaluation", "comparison", "trackers"),
    *("micro_batch", "snapshot_every", "log_ids"),
    *(
        f"spread.{name}"
        for name in ("sharding", "shard_size", "checkpointing", "compile", "offload")
    ),
    *("data.workers", "data.worker_start", "data.faults", "device", "out", "checkpoints"),
}

# What a run was made from, by its name in run.json, and how it is told that this has changed.
ORIGINS = {
    "text_encoder": "trained with another text encoder of the same name: its weights or its "
    "tokenizer differ",
    "pipeline": "fine-tuned from another pipeline of the same name: its network or its vae differs",
    "teacher": "distilled from another teacher of the same name: its files differ",
    "prompts": "distilled on other prompts of the same name",
    "labels": "distilled on other classes of the same name",
}


@contextmanager
def claimed(config: "LongRun") -> Iterator[None]:
    """The run's folder, for this run alone, and the same run as before."""
    make_folder(config.out)
    with locked(config.out):
        if (config.out / RECORD).exists():
            check_settings(config, read_record(config.out)["config"], str(config.out))
        yield


def check_settings(config: "LongRun", old: dict[str, Any], where: str) -> None:
    """Refuses to go on with what another run has left."""
    if changed := changes(config, old, FREE):
        raise UserError(
            f"{where} holds a run with other settings ({listed(changed)}). Choose another "
            "--out, or remove it to start anew."
        )


def read_record(out: Path) -> dict[str, Any]:
    """What is known of the run in this folder; nothing where there is none."""
    try:
        record = json.loads((out / RECORD).read_text())
        record["config"]  # or it is none of ours
        return record
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{out / RECORD} cannot be read ({error}); remove it to go on") from error


def write_record(
    config: "LongRun", parameters: int, origins: dict[str, str], **facts: float
) -> None:
    """The resolved run, beside its results. What it was made from is part of it, and no setting."""
    check_origins(config.out, origins)
    record = {
        "config": config.model_dump(mode="json"),
        "network": {"parameters": parameters},
        **origins,
        **facts,
        "versions": {name: version(name) for name in ("torch", "numpy", "diffusers", "datasets")}
        | {"stillhouse": __version__},
    }
    write_whole(config.out / RECORD, json.dumps(record, indent=2).encode())


def origins_of(config: "TrainRun", learner: Learner) -> dict[str, str]:
    """Digests of what a training run is made from."""
    encoder = "" if learner.texts is None else learner.texts.text.digest
    return {"text_encoder": encoder, "pipeline": base_digest(config)}


def check_origins(out: Path, origins: dict[str, str]) -> None:
    """Checkpoints hold what is learnt: what it was learnt beside must still be the same."""
    before = read_record(out)
    for name, digest in origins.items():
        if before.get(name, digest) != digest:
            raise UserError(
                f"{out} was {ORIGINS[name]}. Bring that one back, or choose another --out"
            )


def base_digest(config: "TrainRun") -> str:
    """Of the network and the vae that are fine-tuned; empty where none is."""
    if config.network.kind != "tuned":
        return ""
    files = checkpoint_files(whole_folder(config.network.path))
    return fingerprint([*files["network"], *files["vae"]])


def handed_on(config: "LongRun", elsewhere: dict[str, Any]) -> dict[str, Any]:
    """The config as it goes with the weights, without what is of this machine and no part of them.

    `elsewhere`: what else is left out, as pydantic's `exclude`.
    """
    left_out = dict.fromkeys(("out", "checkpoints", "device", "trackers"), True) | elsewhere
    return {"config": without_places(config.model_dump(mode="json", exclude=left_out))}
