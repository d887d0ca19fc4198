"""The folder of a training run: for this run alone, with its resolved config in run.json."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from stillhouse import __version__
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.recipes.claims import differences, locked
from stillhouse.recipes.learner import Learner

if TYPE_CHECKING:
    from stillhouse.recipes.training import TrainRun

RECORD = "run.json"
# What a resumed run may change: how far, how often, how it is spread and shown, not what it learns.
FREE = {
    *("images", "log_every", "checkpoint_every", "keep_last", "keep_every", "max_skips"),
    *("preview", "validation", "evaluation", "trackers"),
    *("micro_batch", "snapshot_every", "log_ids"),
    *(
        f"spread.{name}"
        for name in ("sharding", "shard_size", "checkpointing", "compile", "offload")
    ),
    *("data.workers", "data.worker_start", "data.faults", "device", "out", "checkpoints"),
}


@contextmanager
def claimed(config: "TrainRun") -> Iterator[None]:
    """The run's folder, for this run alone, and the same run as before."""
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{config.out} cannot be written to ({error})") from error
    with locked(config.out):
        if (config.out / RECORD).exists():
            check_settings(config, read_record(config.out)["config"], str(config.out))
        yield


def check_settings(config: "TrainRun", old: dict[str, Any], where: str) -> None:
    """Refuses to go on with what another run has left."""
    with suppress(ValidationError):  # settings that are newer than the run have their defaults
        old = type(config).model_validate(old).model_dump(mode="json")
    changed = differences(old, config.model_dump(mode="json"), FREE)
    if changed:
        raise UserError(
            f"{where} holds a run with other settings ({'; '.join(changed)}). Choose another "
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


def write_record(config: "TrainRun", learner: Learner) -> None:
    """The resolved run, beside its results. The text encoder is part of it, and no setting."""
    count = sum(p.numel() for p in learner.denoiser.parameters())
    encoder = "" if learner.texts is None else learner.texts.text.digest
    before = read_record(config.out).get("text_encoder", encoder)
    if before != encoder:
        raise UserError(
            f"{config.out} was trained with another text encoder of the same name: its weights or "
            "its tokenizer differ. Bring that one back, or choose another --out"
        )
    record = {
        "config": config.model_dump(mode="json"),
        "network": {"parameters": count},
        "text_encoder": encoder,
        "versions": {name: version(name) for name in ("torch", "numpy", "diffusers", "datasets")}
        | {"stillhouse": __version__},
    }
    write_whole(config.out / RECORD, json.dumps(record, indent=2).encode())
