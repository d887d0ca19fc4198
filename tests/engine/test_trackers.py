"""Trackers: what was logged can be read back, also after kills; none but log.jsonl ends a run."""

import json
import math
import os
import shutil
import struct
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stillhouse.engine.trackers import (
    Apart,
    Jsonl,
    MLflow,
    TensorBoard,
    TrackersConfig,
    WandB,
    pictures,
    read_log,
    scalars,
)
from stillhouse.errors import UserError

SAMPLES = "samples/images-000000000020.png"
SKIP = {"skipped": "denoiser", "loss": 0.5, "gradient_norm": math.inf, "ids": [3, 4]}


def strict(text: str):
    """JSON as the standard has it: Python alone would take NaN and Infinity."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def folder(tmp_path):
    """A run folder with a sample grid, four colours in two by two."""
    path = tmp_path / SAMPLES
    path.parent.mkdir()
    Image.fromarray(colours()).save(path)
    return tmp_path


def colours() -> np.ndarray:
    return np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [9, 8, 7]]], dtype=np.uint8)


# ---------------------------------------------------------------- what a line holds


def test_scalars_are_the_finite_numbers_and_a_skip_is_counted():
    values = {
        "denoiser/loss": 0.25,
        "denoiser/gradient_norm": math.nan,
        "count": 3,
        "flag": True,
        "levels": {"edges": [0.0, 1.0], "mean": 2.0, "worst": math.inf},
        "samples": SAMPLES,
        "checkpoint": 1024,
    }
    assert scalars(values) == {"denoiser/loss": 0.25, "count": 3.0, "levels/mean": 2.0}
    assert scalars(SKIP) == {"denoiser/skipped": 1.0}


def test_pictures_are_found_in_the_run_folder():
    found = pictures({"samples": SAMPLES, "message": "no picture", "loss": 1.0}, Path("run"))
    assert found == {"samples": Path("run") / SAMPLES}


# ---------------------------------------------------------------- log.jsonl


def test_lines_are_standard_json_whatever_the_numbers(tmp_path):
    log = Jsonl(tmp_path / "log.jsonl")
    log.start(0)
    log.log(10, {"denoiser/loss": math.nan, "levels": {"loss": [1.5, -math.inf]}, "ids": (1, 2)})
    log.log(20, {"message": "weiter\nZeile", "rate": 0.1})
    first, second = (tmp_path / "log.jsonl").read_text().splitlines()
    assert strict(first) == {
        "images": 10,
        "denoiser/loss": None,
        "levels": {"loss": [1.5, None]},
        "ids": [1, 2],
    }
    assert strict(second) == {"images": 20, "message": "weiter\nZeile", "rate": 0.1}
    assert read_log(tmp_path / "log.jsonl") == [strict(first), strict(second)]


def test_each_line_is_on_disk_when_log_returns(tmp_path):
    log = Jsonl(tmp_path / "log.jsonl")
    log.start(0)
    for images in (1, 2, 3):
        log.log(images, {})
        assert [line["images"] for line in read_log(log.path)] == list(range(1, images + 1))


def test_a_resumed_run_forgets_what_lies_beyond_its_checkpoint(tmp_path):
    log = Jsonl(tmp_path / "deep" / "log.jsonl")
    log.start(0)
    for images in (10, 20, 30, 40):
        log.log(images, {"attempt": 1})
    log.start(20)
    log.log(30, {"attempt": 2})
    told = [(line["images"], line["attempt"]) for line in read_log(log.path)]
    assert told == [(10, 1), (20, 1), (30, 2)]
    assert [path.name for path in log.path.parent.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("torn", range(1, len('{"images": 20, "loss": 2.5}')))
def test_a_line_torn_by_a_kill_is_left_out_wherever_it_is_torn(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    whole = '{"images": 10, "loss": 1.5}\n'
    path.write_text(whole + '{"images": 20, "loss": 2.5}'[:torn])
    assert read_log(path) == [{"images": 10, "loss": 1.5}]
    log = Jsonl(path)
    log.start(100)
    assert path.read_text() == whole
    log.log(20, {"loss": 2.5})
    assert [line["images"] for line in read_log(path)] == [10, 20]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"images": 10}')
    log = Jsonl(path)
    log.start(10)
    log.log(20, {})
    assert path.read_text() == '{"images": 10}\n{"images": 20}\n'


def test_damage_within_is_said_and_the_rest_is_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"images": 1}\n\x00\x00\xff\n[1]\n{"images": 2}\n')
    with pytest.warns(UserWarning, match="line 2 is damaged"):
        assert read_log(path) == [{"images": 1}, {"images": 2}]


def test_no_log_is_an_empty_one(tmp_path):
    assert read_log(tmp_path / "log.jsonl") == []


def test_the_old_log_survives_a_start_that_fails(tmp_path, monkeypatch):
    log = Jsonl(tmp_path / "log.jsonl")
    log.start(0)
    log.log(10, {})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"log\.jsonl cannot be written \(No space left on device"):
        log.start(0)
    assert read_log(log.path) == [{"images": 10}]


def test_a_disk_that_is_full_is_an_error_that_says_what_to_do(tmp_path):
    log = Jsonl(Path("/dev/full") if Path("/dev/full").exists() else tmp_path)
    with pytest.raises(UserError, match=r"cannot be written .* run the same command again"):
        log.log(10, {})


# ---------------------------------------------------------------- none other ends a run


class Recorder:
    """A tracker that keeps what it is told, and fails where it is asked to."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.told = failing, []

    def _take(self, name: str, *arguments) -> None:
        if name in self.failing:
            raise ConnectionError("no route to host")
        self.told.append((name, *arguments))

    def start(self, images):
        self._take("start", images)

    def log(self, images, values):
        self._take("log", images, values)

    def close(self):
        self._take("close")


def drive(tracker) -> None:
    tracker.start(0)
    for images in (10, 20, 30):
        tracker.log(images, {"loss": 1.0 / images})
    tracker.close()


def test_a_tracker_apart_is_told_everything_in_order():
    inner = Recorder()
    drive(Apart(inner))
    lines = [("log", images, {"loss": 1.0 / images}) for images in (10, 20, 30)]
    assert inner.told == [("start", 0), *lines, ("close",)]


def test_what_is_told_is_what_it_was_then():
    inner, values = Recorder(), {"loss": 1.0}
    apart = Apart(inner)
    apart.start(0)
    apart.log(10, values)
    values["loss"] = 2.0
    apart.close()
    assert inner.told[1] == ("log", 10, {"loss": 1.0})


@pytest.mark.parametrize("failing", [("start", "log", "close"), ("log",), ("close",)])
def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(failing):
    inner = Recorder(*failing)
    with pytest.warns(UserWarning, match="Recorder") as warned:
        drive(Apart(inner))
    assert [str(w.message) for w in warned] == [
        "Recorder: no route to host. The run goes on; log.jsonl has it all."
    ]
    assert {name for name, *_ in inner.told} == {"start", "log", "close"} - set(failing)


def test_a_tracker_that_recovers_is_told_again():
    inner = Recorder("log")
    apart = Apart(inner)
    apart.start(0)

    def tell(images):
        apart.log(images, {})
        apart._caught_up()

    with pytest.warns(UserWarning, match="no route"):
        tell(10)
    inner.failing = ()
    tell(20)
    apart.close()
    assert inner.told == [("start", 0), ("log", 20, {}), ("close",)]


def test_closing_what_never_started_or_is_closed_waits_for_nobody():
    inner = Recorder()
    apart = Apart(inner)
    began = time.monotonic()
    apart.close()
    assert inner.told == []
    drive(apart)
    apart.close()
    assert [name for name, *_ in inner.told].count("close") == 1
    assert time.monotonic() - began < 5


def test_a_tracker_that_hangs_holds_nothing_up():
    release, before = threading.Event(), set(threading.enumerate())

    class Hanging(Recorder):
        def log(self, images, values):
            release.wait()
            super().log(images, values)

    inner = Hanging()
    apart = Apart(inner, patience=0.05)
    began = time.monotonic()
    with pytest.warns(UserWarning, match=r"Hanging: it is still busy after 0\.05 seconds"):
        drive(apart)
    assert time.monotonic() - began < 5
    assert inner.told == [("start", 0)]
    release.set()  # what is late still comes, and then the thread ends
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before
    assert [name for name, *_ in inner.told] == ["start", "log", "log", "log", "close"]


# ---------------------------------------------------------------- the config


def test_the_log_is_always_kept(tmp_path):
    (only,) = TrackersConfig().build(tmp_path, "run")
    assert isinstance(only, Jsonl)
    assert only.path == tmp_path / "log.jsonl"


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_said_before_the_run(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    config = TrackersConfig.model_validate({package: True})
    with pytest.raises(UserError, match=rf"{package} is not installed.*-e '\.\[trackers\]'"):
        config.build(tmp_path, "run")


def test_a_folder_with_the_name_of_a_package_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "trackerless").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    from stillhouse.engine.trackers import _load

    with pytest.raises(UserError, match="trackerless is not installed"):
        _load("trackerless")


# ---------------------------------------------------------------- TensorBoard


def events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0})
    return found.Reload()


def test_tensorboard_reads_back_what_was_logged_and_purges_on_resume(folder):
    pytest.importorskip("tensorboard", reason="pip install tensorboard to test it")
    first = TensorBoard(folder)
    first.start(0)
    for images in (10, 20, 30, 40):
        first.log(images, {"denoiser/loss": 1.0, "bad": math.nan})
    first.log(40, {"samples": SAMPLES})
    first.log(40, SKIP)
    # No close: the process is killed here, and what it logged is on disk.
    second = TensorBoard(folder)
    second.start(20)
    second.log(30, {"denoiser/loss": 0.5, "samples": SAMPLES})
    second.close()

    found = events(folder)
    told = [(event.step, event.value) for event in found.Scalars("denoiser/loss")]
    assert told == [(10, 1.0), (20, 1.0), (30, 0.5)]
    assert found.Tags()["scalars"] == ["denoiser/loss", "denoiser/skipped"]
    assert found.Scalars("denoiser/skipped") == []
    (picture,) = found.Images("samples")
    assert picture.step == 30
    png = folder / "back.png"
    png.write_bytes(picture.encoded_image_string)
    with Image.open(png) as image:
        assert np.array_equal(np.asarray(image.convert("RGB")), colours())


def test_what_tensorboard_was_told_is_on_disk_when_log_returns(folder):
    pytest.importorskip("tensorboard", reason="pip install tensorboard to test it")
    tracker = TensorBoard(folder)
    tracker.start(0)
    (file,) = (folder / "tensorboard").iterdir()
    tracker.log(10, {f"level/{i}": 1.0 for i in range(50)})
    there = file.stat().st_size
    tracker.close()
    assert file.stat().st_size == there


# ---------------------------------------------------------------- Weights & Biases


def wandb_records(path: Path):
    """The records of a .wandb file: LevelDB's log format after a header of seven bytes."""
    record = import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (room := 2**15 - at % 2**15) < 7:
            at += room
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        at += 7 + size
        if at > len(data):  # not all of it is there yet
            return
        parts += data[at - size : at]
        if kind in (1, 4):  # the whole record, or its last part
            yield record.FromString(parts)
            parts = b""


def wandb_rows(path: Path) -> list[dict]:
    # W&B's own process writes the file, and may still do so when the run is finished.
    deadline = time.monotonic() + 30
    while not any(record.HasField("exit") for record in wandb_records(path)):
        assert time.monotonic() < deadline, "the run has no end"
        time.sleep(0.05)
    items = [record.history.item for record in wandb_records(path) if record.history.item]
    rows = [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row} for row in items
    ]
    return [{key: row[key] for key in row if key not in ("_timestamp", "_runtime")} for row in rows]


@pytest.fixture
def wandb_offline(monkeypatch):
    pytest.importorskip("wandb", reason="pip install wandb to test it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_goes_on_with_the_same_run(folder):
    for images in (0, 20):
        tracker = WandB(folder, "project", "name")
        tracker.start(images)
        tracker.log(images + 10, {"denoiser/loss": 0.5, "bad": math.inf, "ids": [1]})
        tracker.log(images + 20, {"samples": SAMPLES})
        tracker.log(images + 20, SKIP)
        tracker.close()
    files = (folder / "wandb").glob("offline-run-*/*.wandb")
    one, two = sorted(files, key=lambda path: wandb_rows(path)[0]["_step"])
    assert one.name == two.name == f"run-{(folder / 'wandb-run').read_text()}.wandb"
    assert wandb_rows(one)[0] == {"_step": 10, "denoiser/loss": 0.5}
    assert wandb_rows(two)[0] == {"_step": 30, "denoiser/loss": 0.5}
    last = wandb_rows(two)[1]
    assert (last["_step"], last["denoiser/skipped"]) == (40, 1.0)
    (copy,) = two.parent.glob("files/media/images/*.png")
    assert copy.read_bytes() == (folder / SAMPLES).read_bytes()


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_is_told_once(folder):
    class Resumed:
        """A run that the server knows up to step 30."""

        starting_step = 31
        steps: list[int] = []  # noqa: RUF012

        def log(self, values, step):
            self.steps.append(step)

    tracker = WandB(folder, "project", "name")
    tracker._run = Resumed()
    for images in (20, 30, 40):
        tracker.log(images, {"loss": 1.0})
    assert tracker._run.steps == [40]


# ---------------------------------------------------------------- MLflow


@pytest.fixture(scope="module")
def mlflow():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        module = pytest.importorskip("mlflow", reason="pip install mlflow-skinny to test it")
        pytest.importorskip("sqlalchemy", reason="MLflow's database needs it")
        yield module


@pytest.fixture(scope="module")
def database(mlflow, tmp_path_factory) -> Path:
    """An empty one: MLflow takes seconds to make it."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.mark.slow
def test_mlflow_goes_on_with_the_same_run_and_is_told_once(folder, database):
    shutil.copy(database, folder / "mlflow.db")
    for start, value in ((0, 1.0), (20, 0.5)):
        tracker = MLflow(folder, "experiment", "name")
        tracker.start(start)
        for images in range(start + 10, start + 41, 10):
            tracker.log(images, {"denoiser/loss": value, "bad": math.nan})
        tracker.log(start + 50, {"samples": SAMPLES})
        tracker.close()
    client, run = tracker._client, (folder / "mlflow-run").read_text()
    history = client.get_metric_history(run, "denoiser/loss")
    assert [(m.step, m.value) for m in history] == [(10, 1), (20, 1), (30, 1), (40, 1), (60, 0.5)]
    found = client.get_run(run)
    assert (found.info.run_name, found.info.status) == ("name", "FINISHED")
    assert set(found.data.metrics) == {"denoiser/loss", "images"}
    assert [file.path for file in client.list_artifacts(run, "samples")] == [SAMPLES]
    (copy,) = (folder / "mlflow-artifacts").rglob("*.png")
    assert copy.read_bytes() == (folder / SAMPLES).read_bytes()
    assert len(client.search_runs([found.info.experiment_id])) == 1


@pytest.mark.slow
def test_mlflow_makes_a_new_run_where_the_old_one_is_unknown(folder, database):
    (folder / "mlflow-run").write_text("0" * 32)
    tracker = MLflow(folder, "experiment", "name", f"sqlite:///{database}")
    tracker.start(0)
    assert (folder / "mlflow-run").read_text() == tracker._run != "0" * 32
    tracker.close()


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow")
def test_a_tracking_server_that_is_down_does_not_end_the_run(folder):
    log, apart = TrackersConfig(mlflow=True, mlflow_uri="http://127.0.0.1:9").build(folder, "name")
    drive(log)
    with pytest.warns(UserWarning, match=r"MLflow: .*log\.jsonl has it all"):
        drive(apart)
    assert [line["images"] for line in read_log(folder / "log.jsonl")] == [10, 20, 30]
