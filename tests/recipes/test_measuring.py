"""Metrics during training: right values, an untouched run, mistakes that are told at its start."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from metrics.shared import weights_folder
from recipes.test_evaluating import write_images
from recipes.test_training import pictures, points
from resilience.runs import BATCH, Run, assert_same_end, small, write_data

from stillhouse.cli import main
from stillhouse.data import DataConfig, Folder, ImageConfig
from stillhouse.engine.sharding import Spread
from stillhouse.engine.trackers import read_log
from stillhouse.errors import UserError
from stillhouse.metrics.detectors import MobileNetV2Config, ResNet56Config
from stillhouse.objectives.configs import ConsistencyConfig
from stillhouse.recipes.judge import evaluating
from stillhouse.recipes.judge.evaluating import EvaluateRun
from stillhouse.recipes.report.report import report
from stillhouse.recipes.train import measuring
from stillhouse.recipes.train.measuring import Evaluation, Finite
from stillhouse.recipes.train.training import TrainRun, run

COUNT = 40  # in batches of 16: a third round is for the first of two processes alone


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("measuring")


@pytest.fixture(scope="module")
def real(place) -> Path:
    return write_images(place / "real", 60, size=8)


@pytest.fixture
def evaluation(place, real) -> Evaluation:
    return Evaluation(
        every=32,
        reference=str(real),
        metrics=("fid", "kid", "prdc", "is"),
        detector=ResNet56Config(weights=str(weights_folder() / "resnet56_cifar10.safetensors")),
        count=COUNT,
        steps=2,
        batch=16,
        cache=place / "cache",
    )


@pytest.fixture
def config(tmp_path, real, evaluation) -> TrainRun:
    data = DataConfig(source=Folder(path=str(real)), image=ImageConfig(size=8))
    return pictures(tmp_path / "run", data, evaluation=evaluation)


def changed(config: TrainRun, **changes) -> TrainRun:
    """With another evaluation."""
    wanted = config.evaluation.model_copy(update=changes)
    return config.model_copy(update={"evaluation": wanted})


def evaluations(out: Path) -> list[dict]:
    return [line for line in read_log(out / "log.jsonl") if "evaluation/count" in line]


# ---------------------------------------------------------------- right numbers


def test_the_last_values_are_those_of_the_exported_model(config, evaluation, tmp_path):
    run(config)
    first, last = evaluations(config.out)
    assert (first["images"], last["images"]) == (32, 64)
    alone = EvaluateRun(
        model=str(config.out),
        out=tmp_path / "alone",
        steps=(2,),
        batch=evaluation.batch,
        **evaluation.model_dump(include={"reference", "metrics", "detector", "count", "cache"}),
    )
    record = evaluating.run(alone)
    values = {name: value for name, (value,) in record["settings"][0]["values"].items()}
    logged = {f"evaluation/{name}": pytest.approx(v, rel=1e-6) for name, v in values.items()}
    assert last == {"images": 64, "evaluation/count": COUNT, **logged}
    about = first["evaluation/about"]
    assert about["floor"] == record["floor"]
    assert about["notes"] == record["warnings"][:-1]  # all but that on seeds


def test_the_report_shows_the_curve_and_that_it_is_no_fid(config):
    run(config)
    text = report(config.out).read_text()
    for name in ("FD-ResNet56", "KD-ResNet56", "precision", "class score ResNet56"):
        assert f"<figcaption>{name}</figcaption>" in text
    assert "real / real" in text
    assert "these distances are not FID" in text


def test_a_consistency_model_draws_in_one_step(config):
    run(config.model_copy(update={"objective": ConsistencyConfig()}))
    (first, _) = evaluations(config.out)
    assert first["evaluation/about"]["drawing"].endswith(" 1 steps, seed 0")


# ---------------------------------------------------------------- an untouched run


def twins(place: Path, evaluation: Evaluation, name: str, **changes) -> tuple[Run, Run]:
    """A run with dropout, labels, flips and two averages; one that is measured, one that is not."""
    data = write_data(place / name, "indexed")
    plain = small(place / name / "plain", data, images=12 * BATCH, **changes)
    often = evaluation.model_copy(update={"every": 4 * BATCH})
    measured = plain.model_copy(update={"evaluation": often, "out": place / name / "measured"})
    cache = place / name / "cache"
    return Run(plain, cache), Run(measured, cache)


def test_a_run_that_is_measured_is_the_same_run(place, evaluation):
    plain, measured = twins(place, evaluation, "alone")
    for one in (plain, measured):
        run(one.config)
    assert len(evaluations(measured.out)) == 3
    assert_same_end(plain, measured)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_so_it_is_on_two_processes(place, evaluation, sharding):
    spread = Spread(sharding=sharding)
    plain, measured = twins(place, evaluation, sharding, spread=spread)
    for one in (plain, measured):
        one.end(processes=2)
    assert [line["evaluation/count"] for line in evaluations(measured.out)] == [COUNT] * 3
    assert_same_end(plain, measured)


def test_it_leaves_no_files(config, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    run(config)
    assert not any((tmp_path / "scratch").iterdir())


def test_a_run_may_begin_to_be_measured_later(config, evaluation):
    bare = TrainRun.model_validate({**config.model_dump(exclude={"evaluation"}), "images": 32})
    run(bare)
    run(config)
    assert [line["images"] for line in evaluations(config.out)] == [64]


def test_samples_that_are_not_finite_do_not_end_the_run(config, monkeypatch):
    class Broken(Finite):
        def __call__(self, x, sigma, cond=None):
            return super().__call__(x * torch.nan, sigma, cond)

    monkeypatch.setattr(measuring, "Finite", Broken)
    assert run(config) == 64
    lines = read_log(config.out / "log.jsonl")
    told = [line["images"] for line in lines if "not finite" in line.get("message", "")]
    assert told == [32, 64]
    assert not evaluations(config.out)


# ---------------------------------------------------------------- mistakes


def refuse(config: TrainRun, words: str) -> None:
    """Before the first step."""
    with pytest.raises(UserError, match=words):
        run(config)
    assert not (config.out / "log.jsonl").exists()


def test_a_toy_has_no_metrics_of_images(tmp_path, evaluation):
    refuse(points(tmp_path / "run", evaluation=evaluation), "points of the plane are not images")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nowhere", r"--evaluation\.reference .*nowhere is not there"),
        ("empty", "no images"),
        ("nowhere.safetensors", "does not hold the statistics"),
        ("torn", r"torn: .*0002\.png\) cannot be used"),
    ],
)
def test_a_wrong_reference_is_told_at_the_start(config, tmp_path, reference, words):
    (tmp_path / "empty").mkdir()
    write_images(tmp_path / "torn", 4)
    (tmp_path / "torn" / "0002.png").write_bytes(b"\x89PNG and then nothing")
    refuse(changed(config, reference=str(tmp_path / reference)), words)


def test_what_a_metric_refuses_is_told_at_the_start(config, tmp_path):
    few = write_images(tmp_path / "few", 5)
    refuse(changed(config, reference=str(few)), "5 nearest neighbours need more than 5 images")
    weights = str(weights_folder() / "mobilenet_v2.safetensors")
    refuse(
        changed(config, detector=MobileNetV2Config(weights=weights), metrics=("is",)),
        "MobileNetV2 is no classifier",
    )


# ---------------------------------------------------------------- the command line


def test_the_command_line_says_what_is_measured(tmp_path, capsys):
    words = ["train", "fashion-unet", "--out", str(tmp_path), "--dry-run"]
    words += ["--evaluation", "metrics", "--evaluation.every", "32000"]
    with pytest.raises(SystemExit):
        main(words)
    assert "--evaluation.reference must be given" in capsys.readouterr().err
    words += ["--evaluation.reference", "fashion:test", "--evaluation.metrics", "fid,prdc"]
    main([*words, "--evaluation.detector", "mobilenet-v2"])
    told = capsys.readouterr().out
    assert "8 evaluations, each of 1024 samples against fashion:test" in told
    assert "['fid', 'prdc']" in told


def test_an_evaluation_survives_the_record(config):
    assert TrainRun.model_validate(json.loads(config.model_dump_json())) == config
