"""Where the numbers of a run go: always log.jsonl; TensorBoard, W&B and MLflow where asked for.

The first process alone has trackers. `start` says where the run goes on: a killed run has logged
lines beyond its last checkpoint, and those come again.
"""

import json
import math
import os
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

from stillhouse.config import Config
from stillhouse.engine.loop import Tracker
from stillhouse.engine.storage import Folder
from stillhouse.errors import UserError, missing_extra

LOG = "log.jsonl"


class TrackersConfig(Config):
    """Who else is told the numbers that log.jsonl has."""

    tensorboard: bool = False
    """Write TensorBoard's event files into the run folder."""
    wandb: bool = False
    """Tell Weights & Biases; WANDB_MODE=offline keeps it on disk."""
    mlflow: bool = False
    """Tell MLflow."""
    project: str = "stillhouse"
    """W&B's project, MLflow's experiment."""
    mlflow_uri: str = ""
    """MLflow's server; if empty, MLFLOW_TRACKING_URI, or else mlflow.db in the run folder."""

    def build(self, folder: Path, name: str) -> list[Tracker]:
        """The trackers of the run `name` in `folder`; a package that is missing is said now."""
        others: list[Tracker] = []
        if self.tensorboard:
            others.append(TensorBoard(folder))
        if self.wandb:
            others.append(WandB(folder, self.project, name))
        if self.mlflow:
            others.append(MLflow(folder, self.project, name, self.mlflow_uri))
        return [Jsonl(folder / LOG), *map(Apart, others)]


# ---------------------------------------------------------------- what a line holds


def standard(value: Any) -> Any:
    """The value as standard JSON has it: what is not finite is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: standard(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [standard(item) for item in value]
    return value


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers that make a curve; those of a skipped update would spoil it."""
    if "skipped" in values:
        return {f"{values['skipped']}/skipped": 1.0}
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif name != "checkpoint" and _is_number(value) and math.isfinite(value):
            found[name] = float(value)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def pictures(values: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """The PNG files that are named, relative to the run folder."""
    return {
        name: folder / value
        for name, value in values.items()
        if isinstance(value, str) and value.endswith(".png")
    }


# ---------------------------------------------------------------- log.jsonl


class Jsonl(Tracker):
    """One standard JSON object per line. It is the record of the run: failing to write is an error.

    The file is opened for each line, so that each is there when `log` returns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, images: int) -> None:
        """Lines beyond `images` go, and a last one that a kill has torn."""
        try:
            kept = [line for line in read_log(self.path) if line["images"] <= images]
            whole = "".join(map(_spell, kept))
            Folder.at(self.path.parent).write(self.path.name, whole.encode())
        except OSError as error:
            raise self._unwritable(error) from error

    def log(self, images: int, values: Mapping[str, Any]) -> None:
        line = _spell({"images": images, **values})
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        pass

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path} cannot be written ({error.strerror or error}). Make room on its disk or "
            "mend its permissions, and run the same command again: it goes on from the last "
            "checkpoint."
        )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log.jsonl; a last line that a kill has torn is left out."""
    if not path.exists():
        return []
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    lines = [parse_line(text) for text in texts]
    if None in lines[:-1]:
        warnings.warn(f"{path}: line {lines.index(None) + 1} is damaged, left out", stacklevel=2)
    return [line for line in lines if line is not None]


def _spell(line: Mapping[str, Any]) -> str:
    return json.dumps(standard(line), allow_nan=False) + "\n"


def parse_line(text: str) -> dict[str, Any] | None:
    """The object of a line, if it is whole: one that is torn lacks its last brace."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("images"), int) else None


# ---------------------------------------------------------------- others


class Apart(Tracker):
    """A tracker in a thread of its own, where it can neither end the run nor hold it up.

    A server that is down makes MLflow's client try for minutes, and the other processes of a run
    would take that for a hang. What fails is said once: log.jsonl has the same numbers.
    """

    def __init__(self, tracker: Tracker, patience: float = 60.0) -> None:
        """`patience` is how many seconds the start and the end of the run wait for it."""
        self.tracker, self.patience = tracker, patience
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._open = self._warned = False

    def start(self, images: int) -> None:
        self._open = True
        Thread(target=self._work, daemon=True).start()
        self._calls.put(partial(self.tracker.start, images))
        self._caught_up()

    def log(self, images: int, values: Mapping[str, Any]) -> None:
        self._calls.put(partial(self.tracker.log, images, dict(values)))

    def close(self) -> None:
        """Also of a run that failed before it started: then there is nobody to wait for."""
        if not self._open:
            return
        self._open = False
        self._calls.put(self.tracker.close)
        if not self._caught_up():
            self._warn(f"it is still busy after {self.patience:g} seconds")
        self._calls.put(_stop)

    def _caught_up(self) -> bool:
        done = Event()
        self._calls.put(done.set)
        return done.wait(self.patience)

    def _work(self) -> None:
        while (call := self._calls.get()) is not _stop:
            try:
                call()
            except Exception as error:
                self._warn(str(error) or type(error).__name__)

    def _warn(self, reason: str) -> None:
        """Once: after a start that failed, every line fails too."""
        if not self._warned:
            self._warned = True
            name = type(self.tracker).__name__
            warnings.warn(f"{name}: {reason}. The run goes on; {LOG} has it all.", stacklevel=2)


def _stop() -> None:
    """Ends the thread."""


class TensorBoard(Tracker):
    """Event files in the run folder: `tensorboard --logdir` on it, or on the folder of all runs."""

    def __init__(self, folder: Path) -> None:
        _load("tensorboard")
        self.folder = folder
        self._writer: Any = None

    def start(self, images: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=images + 1)

    def log(self, images: int, values: Mapping[str, Any]) -> None:
        for name, value in scalars(values).items():
            self._writer.add_scalar(name, value, images)
        for name, path in pictures(values, self.folder).items():
            self._writer.add_image(name, _pixels(path), images, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _pixels(path: Path) -> Any:
    import numpy as np
    from PIL import Image

    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


class WandB(Tracker):
    """A run on Weights & Biases. The folder keeps its id, so the same command goes on with it.

    It cannot take back what it was told. A run that is resumed repeats those lines bit for bit, so
    they are told once.
    """

    def __init__(self, folder: Path, project: str, name: str) -> None:
        self.wandb = _load("wandb")
        self.folder, self.project, self.name = folder, project, name
        self._run: Any = None

    def start(self, images: int) -> None:
        identity = Identity(self.folder, "wandb-run")
        self._run = self.wandb.init(
            project=self.project,
            name=self.name,
            id=identity.read() or identity.write(uuid.uuid4().hex),
            dir=str(self.folder),
            resume="allow",
            # It leaves stdout alone, is no global, and lets the job end without a network.
            settings=self.wandb.Settings(console="off", reinit="create_new", finish_timeout=600),
        )

    def log(self, images: int, values: Mapping[str, Any]) -> None:
        drawn = pictures(values, self.folder).items()
        told = scalars(values) | {name: self.wandb.Image(str(path)) for name, path in drawn}
        if told and images >= self._run.starting_step:
            self._run.log(told, step=images)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run on an MLflow server or database. The folder keeps its id, as with W&B."""

    def __init__(self, folder: Path, experiment: str, name: str, uri: str = "") -> None:
        self.mlflow = _load("mlflow")
        self.folder, self.experiment, self.name = folder.absolute(), experiment, name
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        self._client: Any = None
        self._run, self._told = "", -1.0

    def start(self, images: int) -> None:
        uri = self.uri or f"sqlite:///{self.folder / 'mlflow.db'}"
        self._client = self.mlflow.MlflowClient(tracking_uri=uri)
        self._run = self._resumed() or self._created()
        self._told = self._client.get_run(self._run).data.metrics.get("images", -1.0)

    def _resumed(self) -> str | None:
        run = Identity(self.folder, "mlflow-run").read()
        try:
            if run is not None:
                self._client.update_run(run, status="RUNNING")
        except self.mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run

    def _created(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        number = self._new_experiment() if found is None else found.experiment_id
        run = self._client.create_run(number, run_name=self.name)
        return Identity(self.folder, "mlflow-run").write(run.info.run_id)

    def _new_experiment(self) -> str:
        # A database in the run folder would put its pictures wherever the command was called.
        where = None if self.uri else str(self.folder / "mlflow-artifacts")
        return self._client.create_experiment(self.experiment, artifact_location=where)

    def log(self, images: int, values: Mapping[str, Any]) -> None:
        if images <= self._told:
            return
        now, told = int(time.time() * 1000), scalars(values) | {"images": float(images)}
        metric = self.mlflow.entities.Metric
        metrics = [metric(name, value, now, images) for name, value in told.items()]
        self._client.log_batch(self._run, metrics=metrics)
        for name, path in pictures(values, self.folder).items():
            self._client.log_artifact(self._run, str(path), name)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Identity:
    """The name under which a run is known elsewhere, in a file of its folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def read(self) -> str | None:
        path = self.folder / self.name
        return path.read_text().strip() if path.exists() else None

    def write(self, value: str) -> str:
        Folder.at(self.folder).write(self.name, value.encode())
        return value


def _load(package: str) -> Any:
    """The package, or the line that installs it. A folder of that name is none: W&B makes one."""
    try:
        module = import_module(package)
    except ImportError:
        raise missing_extra(package, "trackers") from None
    if module.__file__ is None:
        raise missing_extra(package, "trackers")
    return module
