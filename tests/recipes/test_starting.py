"""Runs that start from a checkpoint of another resolution, data set or process."""

import json
import shutil

import pytest
import torch
from data.pictures import write_shards
from metrics.shared import weights_folder

from stillhouse.data import Columns, DataConfig, ImageConfig, Parquet
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.objectives.configs import DenoisingConfig, FlowConfig, LogNormal, UniformTime
from stillhouse.pipelines import load_denoiser
from stillhouse.process import Condition
from stillhouse.recipes.train.networks import Backbone, Pretrained
from stillhouse.recipes.train.processes import Edm, RectifiedFlow, Vp
from stillhouse.recipes.train.starting import Carry, shifted
from stillhouse.recipes.train.training import TrainRun, build_learner, build_loader, run
from stillhouse.recipes.train.watching import Preview

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
    assert "levels times 2\n" in told
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


def test_a_run_that_has_begun_needs_its_first_checkpoint_no_more(large, small):
    run(large)
    shutil.rmtree(small.out)
    assert run(changed(large, images=32)) == 32
    assert load_denoiser(large.out / "model").scaling.shift_scale == 2
    with pytest.raises(UserError, match=r"neither a directory nor a hub id|could not be fetched"):
        run(changed(large, out=large.out.with_name("anew")))


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


@pytest.fixture
def vp(small) -> TrainRun:
    """At 8 pixels, told a timestep."""
    density = UniformTime()
    config = changed(small, process=Vp(), objective=DenoisingConfig(density=density))
    run(config)
    return config


def enlarged(config: TrainRun, tmp_path, **changes) -> TrainRun:
    """At twice the side, from the model of a run."""
    data = config.data.model_copy(update={"image": ImageConfig(size=16)})
    begun = {"data": data, "init_from": str(config.out / "model"), "out": tmp_path / "large"}
    return changed(config, **begun | changes)


def test_in_a_vp_process_every_timestep_has_twice_the_noise_and_is_told_as_before(vp, tmp_path):
    here = shifted(enlarged(vp, tmp_path))
    assert here.process.shift == 2
    assert here.objective.density.shift == 1  # timesteps are drawn as before; they mean more noise
    run(here)
    before, after = (load_denoiser(c.out / "model").scaling for c in (vp, here))
    times = torch.arange(0, 1000, 7)
    torch.testing.assert_close(after.sigma_at(times), 2 * before.sigma_at(times), rtol=1e-6, atol=0)
    drawn = here.objective.density.build(after).quantile(torch.tensor([0.3005, 0.9005]))
    torch.testing.assert_close(drawn, after.sigma_at(torch.tensor([300, 900])))


def test_densities_that_name_their_levels_are_shifted_in_a_vp_process_too(vp, tmp_path):
    named = changed(vp, objective=DenoisingConfig(density=LogNormal()))
    assert shifted(enlarged(named, tmp_path)).objective.density.shift == 2


def test_a_shifted_vp_process_is_what_diffusers_makes_of_its_config(tmp_path):
    from diffusers import DDIMScheduler

    for process in (Vp(shift=2), Vp(shift=3, zero_snr=True, prediction="v")):
        made = DDIMScheduler.from_config(process.scheduler()).alphas_cumprod.double()
        ours = process.build().scaling.alphas_cumprod
        torch.testing.assert_close(made, ours, rtol=2e-4, atol=1e-9)
        plain = process.model_copy(update={"shift": 1.0}).build().scaling.alphas_cumprod
        snr, shifted_snr = (abar / (1 - abar) for abar in (plain, ours))
        torch.testing.assert_close(snr, process.shift**2 * shifted_snr)


def test_a_written_vp_run_goes_on_and_other_betas_are_refused(vp, tmp_path):
    here = enlarged(vp, tmp_path)
    run(here)
    record = json.loads((here.out / "run.json").read_text())["config"]
    assert run(changed(TrainRun.model_validate(record), images=32)) == 32
    other = changed(here, process=Vp(betas="scaled_linear"), out=tmp_path / "other")
    with pytest.raises(UserError, match="a run with other settings"):
        run(changed(other, out=here.out))
    with pytest.raises(UserError, match="other noise levels"):
        shifted(other)
    with pytest.raises(UserError, match="was trained as VP"):
        learner(changed(other, init=Carry(shift=False)))


def test_what_was_carried_over_is_looked_at_before_the_first_step(vp, tmp_path):
    held_out = vp.validation.model_copy(update={"source": vp.data.source, "images": 16})
    here = enlarged(vp, tmp_path, validation=held_out)
    run(here)
    lines = [json.loads(line) for line in (here.out / "log.jsonl").read_text().splitlines()]
    looked = [line for line in lines if line["images"] == 0 and "validation/loss" in line]
    assert len(looked) == 1
    assert (here.out / "samples/images-000000000000.png").exists()
    run(changed(here, images=32))  # which goes on, and does not look again
    lines = [json.loads(line) for line in (here.out / "log.jsonl").read_text().splitlines()]
    assert [line["images"] for line in lines if "validation/loss" in line] == [0, 16, 32]


def test_levels_that_were_shifted_before_are_shifted_from_there(large, tmp_path):
    run(large)  # at 16 pixels, shifted by 2
    data = large.data.model_copy(update={"image": ImageConfig(size=32)})
    onward = changed(large, data=data, init_from=str(large.out / "model"), out=tmp_path / "third")
    with pytest.raises(UserError, match=r"other noise levels than --process says \(2, not 1\)"):
        shifted(onward)
    half = changed(onward, process=RectifiedFlow(shift=2))
    with pytest.raises(UserError, match=r"give --objective\.density\.shift 2, so that they"):
        shifted(half)
    density = half.objective.density.model_copy(update={"shift": 2.0})
    objective = half.objective.model_copy(update={"density": density})
    told = shifted(changed(half, objective=objective))
    assert told.process.shift == told.objective.density.shift == 4


def test_schedulers_of_diffusers_start_a_shifted_process_at_a_finite_level():
    from diffusers import EulerDiscreteScheduler

    config = Vp(shift=2, zero_snr=True, prediction="v").scheduler()
    made = EulerDiscreteScheduler.from_config(config)
    made.set_timesteps(4)
    assert made.sigmas[0].isfinite()


# ---------------------------------------------------------------- codecs

HEADS = {
    f"model.{layer}.{part}"
    for layer in ("pos_embed.proj", "proj_out_2")
    for part in ("weight", "bias")
}


@pytest.fixture(scope="module")
def taesd() -> str:
    return str(weights_folder() / "taesd")


@pytest.fixture(scope="module")
def another(taesd, tmp_path_factory) -> str:
    """A codec of the same shape, whose latents mean something else."""
    from diffusers import AutoencoderTiny

    folder, made = tmp_path_factory.mktemp("another"), AutoencoderTiny.from_pretrained(taesd)
    with torch.no_grad():
        made.encoder.layers[-1].weight.neg_()
    made.save_pretrained(folder)
    return str(folder)


def of_codec(config: TrainRun, codec: str, **changes) -> TrainRun:
    """At 64 pixels, which are 8 x 8 latents."""
    data = config.data.model_copy(update={"image": ImageConfig(size=64)})
    return changed(config, data=data, codec=codec, **changes)


def fates(config: TrainRun) -> tuple[set[str], set[str]]:
    """Names of what starts anew, and of all else."""
    account = learner(config).account
    fresh = {entry.name for entry in account.of("fresh")}
    return fresh, {entry.name for fate in ("kept", "resampled") for entry in account.of(fate)}


def test_for_another_codec_what_reads_and_writes_latents_starts_anew(
    small, taesd, another, tmp_path, capsys
):
    before = of_codec(small, taesd, out=tmp_path / "before")
    run(before)
    begun = {"init_from": str(before.out / "model"), "out": tmp_path / "after"}
    same, other = (of_codec(small, codec, **begun) for codec in (taesd, another))
    nothing, kept = fates(same)
    assert not nothing
    assert kept > HEADS
    assert fates(other) == (HEADS, kept - HEADS)
    capsys.readouterr()
    run(other)
    told = capsys.readouterr().out
    fresh = " ".join(line for line in told.splitlines() if line.startswith("fresh"))
    assert all(name in fresh for name in HEADS)
    assert "levels times 1\n" in told


def test_from_pixels_to_latents_levels_follow_the_side_of_the_images(small, taesd, tmp_path):
    run(small)  # 8 x 8 pixels
    begun = {"init_from": str(small.out / "model"), "out": tmp_path / "after"}
    here = of_codec(small, taesd, **begun)
    fresh, kept = fates(here)
    assert fresh == HEADS
    assert "model.transformer_blocks.0.attn1.to_q.weight" in kept
    assert shifted(here).process.shift == 64 / 8
    assert shifted(changed(here, init=Carry(shift=False))).process.shift == 1
