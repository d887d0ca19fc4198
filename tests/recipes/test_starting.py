"""Runs that start from a checkpoint of another resolution, data set or process."""

import json

import pytest
import torch
from data.pictures import write_shards

from stillhouse.data import Columns, DataConfig, ImageConfig, Parquet
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.objectives.configs import DenoisingConfig, FlowConfig
from stillhouse.pipelines import load_denoiser
from stillhouse.process import Condition
from stillhouse.recipes.networks import Backbone, Pretrained
from stillhouse.recipes.processes import Edm, RectifiedFlow
from stillhouse.recipes.starting import Carry, shifted
from stillhouse.recipes.training import TrainRun, build_learner, build_loader, run
from stillhouse.recipes.watching import Preview

HERE = World(0, 1, torch.device("cpu"))


@pytest.fixture
def small(tmp_path) -> TrainRun:
    """A run at 8 pixels, of a network with positions."""
    return TrainRun(
        data=DataConfig(
            source=Parquet(files=(write_shards(tmp_path / "data", "parquet", [20]),)),
            columns=Columns(label="label"),
            image=ImageConfig(size=8),
        ),
        network=Backbone(name="dit", size="tiny"),
        process=RectifiedFlow(),
        objective=FlowConfig(),
        images=16,
        batch=8,
        averages=(HalfLife(images=100),),
        log_every=8,
        checkpoint_every=16,
        preview=Preview(every=16, count=1, steps=1),
        out=tmp_path / "small",
    )


@pytest.fixture
def large(small, tmp_path) -> TrainRun:
    """The same at 16, from its model."""
    run(small)
    return changed(
        small,
        data=small.data.model_copy(update={"image": ImageConfig(size=16)}),
        init_from=str(small.out / "model"),
        out=tmp_path / "large",
    )


def changed(config: TrainRun, **changes) -> TrainRun:
    return config.model_copy(update=changes)


def learner(config: TrainRun):
    return build_learner(config, HERE, build_loader(config, HERE, ()))


def test_a_run_at_twice_the_side_starts_from_the_weights_with_the_noise_shifted(
    large, small, capsys
):
    before = load_denoiser(small.out / "model").network
    begun = learner(large).denoiser.network
    kept = {n: v for n, v in begun.state_dict().items() if "pos_embed.pos_embed" not in n}
    assert all(torch.equal(before.state_dict()[name], value) for name, value in kept.items())
    run(large)
    told = capsys.readouterr().out
    assert "100.0% of the weights were carried over" in told
    assert "resampled" in told
    record = json.loads((large.out / "run.json").read_text())["config"]
    assert record["objective"]["density"]["shift"] == 2
    assert record["process"]["shift"] == 2
    after = load_denoiser(large.out / "model")
    assert after.network.data_shape == (3, 16, 16)
    assert after.scaling.shift_scale == 2


def test_positions_lie_between_or_beyond_those_of_the_small_network(large):
    x, time = torch.randn(1, 3, 16, 16), torch.tensor([500.0])
    label = Condition(label=torch.tensor([1]))
    found = []
    for how in ("resample", "extrapolate"):
        network = learner(changed(large, init=Carry(positions=how))).denoiser.network
        torch.nn.init.normal_(network.model.proj_out_2.weight)
        for block in network.model.transformer_blocks:  # which begin as nothing
            torch.nn.init.normal_(block.norm1.linear.weight, generator=torch.manual_seed(0))
        found.append(network(x, time, label))
    assert not torch.allclose(*found)


def test_the_same_command_goes_on_and_the_written_run_is_not_shifted_again(large):
    run(large)
    assert run(changed(large, images=32)) == 32
    record = json.loads((large.out / "run.json").read_text())["config"]
    again = TrainRun.model_validate(record)
    assert shifted(again) == again
    assert run(changed(again, images=48)) == 48
    drawn = load_denoiser(large.out / "model").network
    assert drawn.data_shape == (3, 16, 16)


def test_edm_is_shifted_where_it_draws_from_and_where_it_starts(small, tmp_path):
    config = changed(small, process=Edm(), objective=DenoisingConfig())
    run(config)
    image = config.data.model_copy(update={"image": ImageConfig(size=24)})
    here = changed(config, data=image, init_from=str(config.out / "model"), out=tmp_path / "large")
    moved = shifted(here)
    assert moved.objective.density.shift == 3
    assert moved.process.sigma_max == 240
    assert shifted(changed(here, init=Carry(shift=False))).process.sigma_max == 80


def test_a_checkpoint_of_another_process_or_a_second_start_is_refused(large):
    other = changed(large, process=Edm(), objective=DenoisingConfig())
    with pytest.raises(UserError, match="was trained as Flow"):
        learner(other)
    both = changed(large, network=Pretrained(path=large.init_from))
    with pytest.raises(UserError, match=r"give one of them|was made for data of shape"):
        learner(both)


def test_another_kind_of_network_is_refused(large):
    other = changed(large, network=Backbone(name="mmdit", size="tiny"))
    with pytest.raises(UserError, match="cannot go on from a DiTTransformer2DModel"):
        learner(other)
