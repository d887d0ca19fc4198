"""Runs in stages, low resolution first."""

import json

import loaded
import numpy as np
import pytest
import torch
from data.pictures import write_shards
from PIL import Image

from stillhouse.cli import main
from stillhouse.data import (
    Columns,
    DataConfig,
    GlobalCrop,
    ImageConfig,
    LocalCrop,
    Parquet,
    PointsConfig,
    Prepared,
)
from stillhouse.engine.ema import HalfLife
from stillhouse.errors import UserError
from stillhouse.objectives.configs import DenoisingConfig, FlowConfig, UniformTime
from stillhouse.pipelines import load_denoiser
from stillhouse.recipes.train.networks import Backbone
from stillhouse.recipes.train.processes import RectifiedFlow, Vp
from stillhouse.recipes.train.progressive import Stage, legs, run_stages, seen
from stillhouse.recipes.train.starting import Carry
from stillhouse.recipes.train.training import TrainRun, run
from stillhouse.recipes.train.tuning import Tuned
from stillhouse.recipes.train.watching import Preview


@pytest.fixture
def config(tmp_path) -> TrainRun:
    return TrainRun(
        data=DataConfig(
            source=Parquet(files=(write_shards(tmp_path / "data", "parquet", [20]),)),
            columns=Columns(label="label"),
            image=ImageConfig(size=64),
        ),
        network=Backbone(name="dit", size="tiny"),
        process=RectifiedFlow(),
        objective=FlowConfig(),
        batch=8,
        averages=(HalfLife(images=100),),
        log_every=8,
        checkpoint_every=16,
        preview=Preview(every=16, count=1, steps=1),
        stages=(
            Stage(size=8, images=16),
            Stage(size=16, images=8, batch=4),
            Stage(size=32, images=8),
        ),
        out=tmp_path / "run",
    )


def changed(config: TrainRun, **changes) -> TrainRun:
    return config.model_copy(update=changes)


def log(leg: TrainRun) -> list[dict]:
    return [json.loads(line) for line in (leg.out / "log.jsonl").read_text().splitlines()]


def test_each_stage_goes_on_from_the_one_before_with_the_noise_of_its_size(config):
    low, middle, high = legs(config)
    assert [leg.data.shape[-1] for leg in (low, middle, high)] == [8, 16, 32]
    assert [leg.images for leg in (low, middle, high)] == [16, 8, 8]
    assert [leg.batch for leg in (low, middle, high)] == [8, 4, 8]
    assert [leg.process.shift for leg in (low, middle, high)] == [1, 2, 4]
    assert [leg.objective.density.shift for leg in (low, middle, high)] == [1, 2, 4]
    assert low.init_from == ""
    assert high.init_from == str(middle.out / "model")


def test_levels_stay_where_that_was_asked_for(config):
    found = legs(changed(config, init=Carry(shift=False)))
    assert {leg.process.shift for leg in found} == {1.0}
    assert {leg.objective.density.shift for leg in found} == {1.0}


def test_all_stages_are_trained_and_weights_arrive_in_the_last(config):
    last = run_stages(config)
    _, middle, high = legs(config)
    assert last == high
    found = load_denoiser(last.out / "model")
    assert found.network.data_shape == (3, 32, 32)
    assert found.scaling.shift_scale == 4
    # One step of the last stage at most lies between its weights and those of the stage before.
    before = load_denoiser(middle.out / "model").network.state_dict()
    after = found.network.state_dict()
    name = "model.transformer_blocks.0.ff.net.2.weight"
    torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-3)
    assert not torch.equal(after[name], before[name])


@pytest.mark.slow
def test_the_same_command_goes_on_in_the_stage_where_it_was(config):
    low, middle, high = legs(config)
    run(low)
    run(changed(middle, images=4))  # as far as it came
    sessions = len(log(low))
    run_stages(config)
    assert len(log(low)) == sessions  # nothing was done to what was finished
    assert [leg.images for leg in (low, middle, high)] == [seen(leg) for leg in (low, middle, high)]
    assert [line["images"] for line in log(middle) if "session" in line] == [0, 4]


def test_a_vp_process_is_shifted_once_per_stage(config):
    vp = changed(config, process=Vp(), objective=DenoisingConfig(density=UniformTime()))
    last = run_stages(vp)
    sigmas = [
        load_denoiser(leg.out / "model").scaling.sigma_at(torch.tensor(500)) for leg in legs(vp)
    ]
    assert sigmas[1] / sigmas[0] == pytest.approx(2, rel=1e-6)
    assert sigmas[2] / sigmas[0] == pytest.approx(4, rel=1e-6)
    assert last.process.shift == 4


def test_stages_that_begin_with_another_model_are_shifted_from_its_size(config):
    run(legs(config)[0])  # at 8 pixels
    stages = (Stage(size=16, images=8), Stage(size=32, images=8))
    onward = changed(config, stages=stages, init_from=str(config.out / "8px/model"))
    middle, high = legs(onward)
    assert (middle.process.shift, high.process.shift) == (2, 4)
    assert middle.init_from == onward.init_from
    assert not middle.init.shift


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    "flags", ["--images 100", "--data.image.size 64", "--crop local --crop.scale 3"]
)
def test_what_stages_say_is_not_said_for_the_whole_run(command, flags, capsys):
    dry = ["--dry-run"] if command == "train" else []
    words = [command, "cifar10-progressive", "--scale", "tiny", *flags.split(), *dry]
    with pytest.raises(SystemExit):
        main(words)
    assert """--stages '[{"size": 16, "images": 640}, """ in capsys.readouterr().err


def test_stages_may_be_given_with_other_numbers(capsys):
    stages = '[{"size": 16, "images": 1280}, {"size": 32, "images": 64}]'
    words = ["train", "cifar10-progressive", "--scale", "tiny", "--stages", stages, "--dry-run"]
    main(words)
    told = capsys.readouterr().out
    assert "1280 images in" in told
    assert "640 images in" not in told


def cropped(config: TrainRun, crop) -> list[ImageConfig]:
    """How the stages make their images."""
    image = config.data.image.model_copy(update={"crop": crop})
    data = config.data.model_copy(update={"image": image})
    return [leg.data.image for leg in legs(changed(config, data=data))]


def test_local_crops_are_at_the_scale_of_the_last_stage_which_sees_whole_images(config):
    source = Image.fromarray(np.arange(32 * 32, dtype=np.uint16).astype(np.uint8).reshape(32, 32))
    made = [image.apply(source.convert("RGB"), 0, 0) for image in cropped(config, LocalCrop())]
    assert [pixels.shape for pixels, _ in made] == [(3, 8, 8), (3, 16, 16), (3, 32, 32)]
    assert [layout.resized for _, layout in made] == [(32, 32)] * 3
    assert np.array_equal(made[-1][0][0], np.asarray(source))


def test_global_crops_show_whole_images_at_every_stage(config):
    made = [
        image.crop.sizes((image.size,) * 2, (64, 64)) for image in cropped(config, GlobalCrop())
    ]
    assert made == [(8, 8), (16, 16), (32, 32)]


def test_a_stage_after_the_largest_sees_whole_images_too(config):
    stages = (Stage(size=16, images=8), Stage(size=8, images=8))
    assert [i.crop.scale for i in cropped(changed(config, stages=stages), LocalCrop())] == [1, 1]


@pytest.mark.parametrize("words", [["--crop", "local"], ["--crop=local"]])
def test_crops_have_a_short_name(words, capsys):
    main(["train", "cifar10-progressive", "--scale", "tiny", *words, "--dry-run"])
    shown = [line.split()[-1] for line in lines_of(capsys, "data.image.crop.scale")]
    assert shown == ["2.0", "1.0"]
    main(["train", "cifar10-dit", "--scale", "tiny", *words, "--crop.scale", "4", "--dry-run"])
    assert [line.split()[-1] for line in lines_of(capsys, "data.image.crop.scale")] == ["4.0"]


def lines_of(capsys, name: str) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(name)]


def test_help_names_the_crops(capsys):
    with pytest.raises(SystemExit):
        main(["train", "cifar10-progressive", "--help"])
    assert "--crop local or global" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_stages_may_have_shards_of_their_own(config):
    stages = (Stage(size=8, images=8, shards="a", held_out="b"), Stage(size=16, images=8))
    data = config.data.model_copy(update={"source": Prepared(path="z")})
    validation = config.validation.model_copy(update={"source": Prepared(path="y")})
    low, high = legs(changed(config, data=data, validation=validation, stages=stages))
    assert (low.data.source.path, low.validation.source.path) == ("a", "b")
    assert (high.data.source.path, high.validation.source.path) == ("z", "y")


def test_what_has_no_stages_is_one_run(config):
    plain = changed(config, stages=())
    assert legs(plain) == [plain]


def test_mistakes_are_said(config):
    twice = (Stage(size=8, images=8), Stage(size=8, images=8))
    with pytest.raises(UserError, match="two are the same: 8px, 8px"):
        legs(changed(config, stages=twice))
    with pytest.raises(UserError, match="points have no resolution"):
        legs(changed(config, data=PointsConfig()))
    with pytest.raises(UserError, match="fine-tuned at its own resolution"):
        legs(changed(config, network=Tuned()))
    with pytest.raises(ValueError, match="run_stages"):
        run(config)
    shards = DataConfig(source=Prepared(path="z"), image=ImageConfig(crop=LocalCrop()))
    with pytest.raises(UserError, match="not cropped any more: leave --crop out"):
        shards.build(batch=8, seed=0)


@pytest.mark.slow
def test_two_processes_go_through_the_stages_together(config, tmp_path):
    stages = [{"size": 8, "images": 16}, {"size": 16, "images": 16}]
    record = json.loads(config.model_dump_json()) | {"stages": stages, "batch": 8}
    (tmp_path / "run.yaml").write_text(json.dumps(record))
    done = loaded.run("-m", "stillhouse", "train", str(tmp_path / "run.yaml"), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "16 images; the model is in" in done.stdout
    assert load_denoiser(config.out / "16px/model").network.data_shape == (3, 16, 16)
