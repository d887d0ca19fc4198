"""Couplings in a run: logged, resumed to the bit, and one pool over processes."""

import json

import loaded
import pytest
import torch
from data.pictures import pixels, write_shards
from PIL import Image
from recipes.test_training import TINY, final_tensors

from stillhouse.couplings.configs import AssignmentConfig, ConditionalConfig, NearestConfig
from stillhouse.data import (
    AspectBuckets,
    Columns,
    DataConfig,
    Folder,
    ImageConfig,
    Parquet,
    PointsConfig,
)
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.trackers import read_log
from stillhouse.errors import UserError
from stillhouse.recipes.plan.planning import describe
from stillhouse.recipes.train.coupled import check_coupling, coupling_note
from stillhouse.recipes.train.processes import Edm
from stillhouse.recipes.train.training import TrainRun, run
from stillhouse.recipes.train.watching import Preview


@pytest.fixture
def config(tmp_path) -> TrainRun:
    files = (write_shards(tmp_path / "data", "parquet", [20, 20]),)
    return TrainRun(
        data=DataConfig(
            source=Parquet(files=files),
            columns=Columns(label="label"),
            image=ImageConfig(size=8),
        ),
        classes=5,
        network=TINY,
        process=Edm(),
        images=64,
        batch=16,
        averages=(HalfLife(images=100),),
        log_every=16,
        checkpoint_every=32,
        preview=Preview(every=64, count=2, steps=2),
        coupling=AssignmentConfig(),
        out=tmp_path / "run",
    )


def changed(config: TrainRun, **changes) -> TrainRun:
    return config.model_copy(update=changes)


def numbers(config: TrainRun, name: str) -> list[float]:
    return [line[name] for line in read_log(config.out / "log.jsonl") if name in line]


@pytest.mark.parametrize(
    "coupling",
    [
        AssignmentConfig(),
        NearestConfig(k=4),
        ConditionalConfig(),
        ConditionalConfig(mode="soft"),
    ],
)
def test_a_coupling_is_logged(config, coupling):
    here = changed(config, coupling=coupling)
    run(here)
    reductions = numbers(here, "coupling/reduction")
    assert len(reductions) == len(numbers(here, "coupling/seconds")) == 4
    assert all(reduction > 0 for reduction in reductions)
    leaks, chances = numbers(here, "coupling/leak"), numbers(here, "coupling/chance")
    assert len(leaks) == len(chances) == 3  # the first batch is learnt only
    assert all(0 <= leak <= 1 for leak in leaks)
    assert all(0 < chance < 0.6 for chance in chances)


def test_images_of_several_shapes_are_paired_and_probed_by_shape(config, tmp_path):
    folder = tmp_path / "shapes"
    for number in range(48):
        sides = ((16, 8), (8, 16), (8, 8))[number % 3]
        place = folder / "abcde"[number % 5]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number, *sides)).save(place / f"{number:02d}.png")
    data = DataConfig(
        source=Folder(path=str(folder)),
        columns=Columns(label="label"),
        image=ImageConfig(size=8),
        buckets=AspectBuckets(step=4),
    )
    here = changed(config, data=data)
    run(here)
    assert all(reduction > 0 for reduction in numbers(here, "coupling/reduction"))
    assert numbers(here, "coupling/leak")


@pytest.mark.parametrize(
    ("coupling", "said"),
    [
        (AssignmentConfig(), "tells something of the class"),
        (NearestConfig(), "--coupling conditional lets it tell less"),
        (ConditionalConfig(), ""),
    ],
)
def test_a_coupling_that_tells_the_class_is_doubted(config, coupling, said):
    here = changed(config, coupling=coupling, images=16)
    run(here)
    message = " ".join(numbers(here, "message"))
    assert said in message
    assert bool(said) == ("noise by" in message)


@pytest.mark.parametrize("coupling", [ConditionalConfig(), ConditionalConfig(mode="soft")])
def test_a_conditional_coupling_without_conditions_is_refused_at_once(config, coupling):
    data = config.data.model_copy(update={"columns": Columns()})
    here = changed(config, data=data, classes=0, coupling=coupling)
    with pytest.raises(UserError, match="classes or captions, and the network is told neither"):
        describe(here, processes=1)
    with pytest.raises(UserError, match="choose --coupling assignment"):
        run(here)
    assert not (here.out / "checkpoints").exists()
    points = changed(config, data=PointsConfig(), classes=0, coupling=coupling)
    assert not points.labelled
    assert changed(points, data=PointsConfig(labels=True)).labelled
    with pytest.raises(UserError, match=r"--coupling\.mode soft"):
        check_coupling(ConditionalConfig(), classes=False, captions=True)


def test_captions_are_doubted_in_their_own_words():
    said = coupling_note(AssignmentConfig(), classes=False, captions=True)
    assert "something of the caption" in said
    assert "--coupling conditional --coupling.mode soft" in said
    assert coupling_note(AssignmentConfig(), classes=False, captions=False) == ""


def test_independent_noise_logs_nothing_and_trains_otherwise(config, tmp_path):
    run(config)
    plain = changed(config, out=tmp_path / "plain", coupling=TrainRun().coupling)
    run(plain)
    assert numbers(plain, "coupling/reduction") == []
    assert numbers(plain, "denoiser/loss") != numbers(config, "denoiser/loss")


@pytest.mark.parametrize("coupling", [AssignmentConfig(), NearestConfig(), ConditionalConfig()])
def test_a_resumed_run_meets_the_same_noise(config, tmp_path, coupling):
    whole = changed(config, coupling=coupling, out=tmp_path / "whole")
    run(whole)
    parts = changed(whole, out=tmp_path / "parts")
    run(changed(parts, images=32))
    run(parts)
    first, second = (final_tensors(c.out, 64) for c in (whole, parts))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert numbers(whole, "denoiser/loss") == numbers(parts, "denoiser/loss")


@pytest.mark.slow
def test_one_pool_over_two_processes_is_that_of_one(config, tmp_path):
    pool = AssignmentConfig(pool="global")
    alone = changed(config, coupling=pool, out=tmp_path / "alone")
    run(alone)
    both = changed(alone, out=tmp_path / "both")
    file = tmp_path / "both.json"
    file.write_text(json.dumps(both.model_dump(mode="json")))
    done = loaded.run("-m", "stillhouse", "train", str(file), processes=2, timeout=240)
    assert done.returncode == 0, done.stderr
    losses = [numbers(c, "denoiser/loss") for c in (alone, both)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    reductions = [numbers(c, "coupling/reduction") for c in (alone, both)]
    assert reductions[1] == pytest.approx(reductions[0], rel=1e-6)


def test_the_same_noise_for_another_coupling_is_another_run(config):
    run(config)
    with pytest.raises(UserError, match=r"coupling\.kind: assignment -> nearest"):
        run(changed(config, coupling=NearestConfig()))
