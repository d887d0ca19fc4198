"""Fine-tuning a pipeline: told, noised and saved as diffusers would, encoded once."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from recipes.test_training import final_tensors
from safetensors.torch import load_file, save_file
from small_models import rewrite
from tunable import COLOURS, FAMILIES, SIDE, pipeline, prepared, tuning, write_images

from stillhouse.cli import main
from stillhouse.cli.parse import parse
from stillhouse.couplings.configs import AssignmentConfig
from stillhouse.engine.trackers import read_log
from stillhouse.errors import UserError
from stillhouse.objectives.configs import DenoisingConfig, FlowConfig
from stillhouse.pipelines import load_denoiser
from stillhouse.pipelines.save import save_pipeline
from stillhouse.process import Condition
from stillhouse.recipes.prompting import PipelineText
from stillhouse.recipes.train.processes import Own
from stillhouse.recipes.train.progressive import Stage
from stillhouse.recipes.train.training import run
from stillhouse.recipes.train.tuning import fitted

pytestmark = pytest.mark.usefixtures("cache")


def captions(batch) -> list[str]:
    return [f"a {list(COLOURS)[i % 3]} {chr(97 + i)}" for i in batch.ids.tolist()]


EVERY = pytest.mark.parametrize("family", FAMILIES)


# ---------------------------------------------------------------- what the network is told


@EVERY
def test_captions_reach_the_network_as_prompts_do_in_the_pipeline(models, images, tmp_path, family):
    _, batch, told = prepared(tuning(models[family], images, tmp_path / "run", drop=0.0))
    pipe, options = pipeline(models[family]), {}
    if family == "sd3":
        options = {"prompt_2": None, "prompt_3": None}
    wanted = pipe.encode_prompt(
        prompt=captions(batch),
        device="cpu",
        num_images_per_prompt=1,
        do_classifier_free_guidance=True,
        **options,
    )
    cond = told.condition
    if family == "pixart-alpha":
        text, mask = wanted[:2]
        assert torch.equal(cond.text_mask, mask.bool())
        text = text * mask[..., None]  # what is masked is not kept
    else:
        text = wanted[0]
        assert cond.text_mask is None
    torch.testing.assert_close(cond.text, text, rtol=0, atol=1e-5)
    if family in ("sdxl", "sd3"):
        torch.testing.assert_close(cond.pooled, wanted[2], rtol=0, atol=1e-5)
    else:
        assert cond.pooled is None


@EVERY
def test_a_dropped_caption_is_what_the_pipeline_guides_away_from(models, images, tmp_path, family):
    _, _, told = prepared(tuning(models[family], images, tmp_path / "run", drop=1.0))
    options = {"prompt_2": None, "prompt_3": None} if family == "sd3" else {}
    found = pipeline(models[family]).encode_prompt(
        prompt="a cat",
        device="cpu",
        num_images_per_prompt=1,
        do_classifier_free_guidance=True,
        **options,
    )
    null = found[2] * found[3][..., None] if family == "pixart-alpha" else found[1]
    torch.testing.assert_close(told.condition.text, null.expand(4, -1, -1), rtol=0, atol=1e-5)
    if family == "sdxl":
        assert not told.condition.pooled.any()  # this one says that nothing is zero


def test_sdxl_is_told_its_sizes_and_its_crop_truly(models, images, tmp_path):
    config = tuning(models["sdxl"], images, tmp_path / "run", drop=1.0)
    _, batch, told = prepared(config)
    for row, number in zip(told.condition.control, batch.ids.tolist(), strict=True):
        height, width = 40 + 3 * number, 50
        scale = SIDE / min(height, width)
        top = (max(SIDE, round(height * scale)) - SIDE) // 2
        left = (max(SIDE, round(width * scale)) - SIDE) // 2
        assert row.tolist() == [height, width, top, left, SIDE, SIDE]


def test_previews_are_asked_for_whole(models, images, tmp_path):
    sizes = {"sdxl": [SIDE, SIDE, 0, 0, SIDE, SIDE], "pixart-alpha": [SIDE, SIDE, 1]}
    for family, wanted in sizes.items():
        learner, *_ = prepared(tuning(models[family], images, tmp_path / family))
        speech = learner.subject(learner.denoiser).speech
        assert speech.condition([0, 1]).control.tolist() == [wanted] * 2
        assert speech.null().control.tolist() == [wanted]


def test_sd3_without_its_third_encoder_is_told_zeros_in_its_place(models, images, tmp_path):
    model = shutil.copytree(models["sd3"], tmp_path / "two")
    index = json.loads((model / "model_index.json").read_text())
    index |= {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    (model / "model_index.json").write_text(json.dumps(index))
    shutil.rmtree(model / "text_encoder_3")
    _, batch, told = prepared(tuning(model, images, tmp_path / "run", drop=0.0))
    pipe = pipeline(model, text_encoder_3=None, tokenizer_3=None)
    wanted, *_ = pipe.encode_prompt(captions(batch), None, None, device="cpu")
    torch.testing.assert_close(told.condition.text, wanted, rtol=0, atol=1e-5)
    assert not told.condition.text[:, 12:].any()


# ---------------------------------------------------------------- the loss


def native_loss(model: Path, batch, cond: Condition) -> torch.Tensor:
    """As diffusers' training scripts write it, per image."""
    pipe = pipeline(model)
    sigma = batch.sigma.double()
    if hasattr(pipe, "transformer") and "SD3" in type(pipe.transformer).__name__:
        t = (sigma / (1 + sigma)).float().view(-1, 1, 1, 1)
        noisy = (1 - t) * batch.data + t * batch.noise
        with torch.no_grad():
            found = pipe.transformer(
                hidden_states=noisy,
                timestep=1000 * t.flatten(),
                encoder_hidden_states=cond.text,
                pooled_projections=cond.pooled,
            ).sample
        return (found - (batch.noise - batch.data)).square().mean((1, 2, 3))
    scheduler = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    levels = ((1 - scheduler.alphas_cumprod) / scheduler.alphas_cumprod).double().sqrt()
    times = (levels - sigma[:, None]).abs().argmin(1)
    torch.testing.assert_close(levels[times], sigma, rtol=1e-5, atol=0)  # whole timesteps
    noisy = scheduler.add_noise(batch.data, batch.noise, times)
    added = {"text_embeds": cond.pooled, "time_ids": cond.control}
    if hasattr(pipe, "transformer"):
        height_width, ratio = cond.control[:, :2], cond.control[:, 2:]
        options = {
            "encoder_attention_mask": cond.text_mask,
            "added_cond_kwargs": {"resolution": height_width, "aspect_ratio": ratio},
        }
    else:
        options = {"added_cond_kwargs": added if cond.pooled is not None else None}
    network = getattr(pipe, "unet", None) or pipe.transformer
    with torch.no_grad():
        found = network(noisy, timestep=times, encoder_hidden_states=cond.text, **options).sample
    wanted = batch.noise
    if scheduler.config.prediction_type == "v_prediction":
        wanted = scheduler.get_velocity(batch.data, batch.noise, times)
    return (found[:, :4] - wanted).square().mean((1, 2, 3))


@EVERY
def test_the_first_loss_is_that_of_diffusers(models, images, tmp_path, family):
    learner, _, batch = prepared(tuning(models[family], images, tmp_path / "run"))
    wanted = native_loss(models[family], batch, batch.condition)
    with torch.no_grad():
        found = learner.objective(learner.denoiser, batch, learner.draws)
    torch.testing.assert_close(found.per_sample, wanted, rtol=1e-4, atol=0)


def test_the_first_loss_of_a_velocity_is_that_of_diffusers_too(models, images, tmp_path):
    model = shutil.copytree(models["sd15"], tmp_path / "model")
    rewrite(model / "scheduler/scheduler_config.json", prediction_type="v_prediction")
    learner, _, batch = prepared(tuning(model, images, tmp_path / "run"))
    wanted = native_loss(model, batch, batch.condition)
    with torch.no_grad():
        found = learner.objective(learner.denoiser, batch, learner.draws)
    torch.testing.assert_close(found.per_sample, wanted, rtol=1e-4, atol=0)


def test_noise_levels_are_those_that_each_scheduler_stands_for(models, images, tmp_path):
    run_ = fitted(tuning(models["sd3"], images, tmp_path / "run"))
    assert isinstance(run_.objective, FlowConfig)
    assert run_.objective.density.kind == "logit-normal"
    assert run_.objective.density.shift == 3.0
    run_ = fitted(tuning(models["sd15"], images, tmp_path / "run"))
    assert isinstance(run_.objective, DenoisingConfig)
    assert (run_.objective.weighting, run_.objective.density.kind) == ("eps", "uniform-time")


# ---------------------------------------------------------------- whole runs


@EVERY
def test_the_tuned_pipeline_opens_in_diffusers(models, images, tmp_path, family):
    config = tuning(models[family], images, tmp_path / "run")
    run(config)
    pipe, before = pipeline(config.out / "model"), pipeline(models[family])
    network = getattr(pipe, "unet", None) or pipe.transformer
    old = (getattr(before, "unet", None) or before.transformer).state_dict()
    trained = final_tensors(config.out, config.images)
    changed = 0
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, trained[f"denoiser.network.network.model.{name}"])
        changed += not torch.equal(weight, old[name])
    assert changed > 20
    for part in ("vae", "text_encoder"):
        pairs = zip(
            getattr(pipe, part).parameters(), getattr(before, part).parameters(), strict=True
        )
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert str(tmp_path) not in (config.out / "model/model_index.json").read_text()
    assert list((config.out / "samples").glob("*.png"))
    if family == "pixart-alpha":  # tells sizes to networks of 1024 pixels only
        return
    drawn = pipe("a red cat", num_inference_steps=2, height=SIDE, width=SIDE, output_type="np")
    assert drawn.images.shape == (1, SIDE, SIDE, 3)


def test_stopping_and_going_on_is_the_same_as_not_stopping(models, images, tmp_path):
    whole = tuning(models["sd15"], images, tmp_path / "whole", coupling=AssignmentConfig())
    run(whole)
    parts = whole.model_copy(update={"out": tmp_path / "parts", "images": 8})
    run(parts)
    run(parts.model_copy(update={"images": 16}))
    first, second = (final_tensors(tmp_path / name, 16) for name in ("whole", "parts"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any("coupling/reduction" in line for line in read_log(whole.out / "log.jsonl"))


def test_a_unet_tuned_at_another_size_says_so_and_keeps_its_own(models, images, tmp_path, capsys):
    config = tuning(models["sd15"], images, tmp_path / "run")
    image = config.data.image.model_copy(update={"size": 48})
    config = config.model_copy(update={"data": config.data.model_copy(update={"image": image})})
    run(config)
    said = capsys.readouterr().err
    assert "images of 32 pixels and is trained on 48: --data.image.size 32" in said
    assert pipeline(config.out / "model").unet.config.sample_size == 16
    capsys.readouterr()
    fitted(tuning(models["sd15"], images, tmp_path / "run"))
    assert capsys.readouterr().err == ""


def test_weights_of_the_hubs_cache_are_linked_and_configs_copied(models, tmp_path):
    """There, files are links to others that are named by their digest."""
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(p for p in models["sd15"].rglob("*") if p.is_file()):
        place = snapshot / file.relative_to(models["sd15"])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(shutil.copyfile(file, blobs / str(number)))
    network: Any = load_denoiser(snapshot).network
    save_pipeline(tmp_path / "out", snapshot, network, network.state_dict(), facts={})
    weights, config = "vae/diffusion_pytorch_model.safetensors", "vae/config.json"
    assert (tmp_path / "out" / weights).samefile(snapshot / weights)
    assert not (tmp_path / "out" / config).samefile(snapshot / config)


# ---------------------------------------------------------------- what is refused


def other_weights(model: Path, part: str) -> None:
    file = model / part / "diffusion_pytorch_model.safetensors"
    save_file({k: w + 0.01 for k, w in load_file(file).items()}, file, metadata={"format": "pt"})


def test_the_codec_is_that_of_the_pipeline(models, images, tmp_path):
    model = shutil.copytree(models["sd15"], tmp_path / "model")
    config = tuning(models["sd15"], images, tmp_path / "run", codec=str(model))
    assert fitted(config).codec == str(model)  # a copy is as good
    other_weights(model, "vae")
    with pytest.raises(UserError, match=r"--codec .*model is not the vae of .*sd15: leave it out"):
        fitted(config)


def test_text_and_process_may_be_named_apart_if_they_are_the_same(models, images, tmp_path):
    other = shutil.copytree(models["sd15"], tmp_path / "other")
    apart = {"text": PipelineText(path=str(other)), "process": Own(path=str(other))}
    config = tuning(models["sd15"], images, tmp_path / "run", **apart)
    found = fitted(config)
    assert (found.text.path, found.process.path) == (str(other), str(other))
    rewrite(other / "scheduler/scheduler_config.json", prediction_type="v_prediction")
    with pytest.raises(UserError, match="predicting eps, not as --process says"):
        prepared(config)
    rewrite(other / "text_encoder/config.json", layer_norm_eps=1e-3)
    with pytest.raises(UserError, match=r"--text\.path .*other has other text encoders than"):
        fitted(config)


def test_stages_are_not_for_pipelines(models, images, tmp_path):
    config = tuning(models["sd15"], images, tmp_path / "run", stages=(Stage(size=16, images=4),))
    with pytest.raises(UserError, match="leave --stages out"):
        fitted(config)


def test_a_pipeline_of_the_hub_is_asked_for_once(models, images, tmp_path, monkeypatch):
    asked = []

    def download(name, allow_patterns, ignore_patterns):
        asked.append("text_encoder*/model*.safetensors" in allow_patterns)
        return str(models["sd15"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = tuning(Path("nobody/asked-once"), images, tmp_path / "run")
    for _ in range(2):
        assert fitted(config).model == "nobody/asked-once"
    assert asked == [True]


# ---------------------------------------------------------------- the guide


def test_min_snr_as_the_guide_has_it_keeps_the_pipelines_timesteps(models, images, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    (flags,) = re.findall(r"`(--objective [^`]*)`", page)
    config = tuning(models["sd15"], images, tmp_path / "run")
    found = fitted(parse(config, flags.split(), prog="train")).objective
    assert isinstance(found, DenoisingConfig)
    assert (found.weighting, found.density.kind) == ("min-snr", "uniform-time")


@pytest.mark.slow
def test_the_commands_of_the_guide_run_as_written(models, tmp_path, monkeypatch):
    """At the tiny scale, with a small pipeline."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos")
    page = (Path(__file__).parents[2] / "docs" / "finetune.md").read_text()
    commands = re.findall(r"^stillhouse (train .*)$", page, flags=re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        words = command.replace("PIPELINE", str(models["sd15"])).split()
        main([*words, "--data.image.size", str(SIDE), "--scale", "tiny"])
    (code,) = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    names: dict = {}
    exec(compile(code.replace("PIPELINE", str(models["sd15"])), "finetune.md", "exec"), names)
    assert names["pipeline"].get_active_adapters() == ["default_0"]
