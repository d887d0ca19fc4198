"""What cannot be read ends in one sentence, and nothing in a checkpoint is ever run."""

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import rewrite, save_bare, save_pipeline, small_autoencoder, small_unet

from stillhouse.pipelines import (
    UnreadableCheckpoint,
    checkpoint_files,
    load_codec,
    load_denoiser,
)
from stillhouse.pipelines.schedules import SCHEDULERS, read_schedule

WEIGHTS = "diffusion_pytorch_model.safetensors"


def refusal(path: Any, load: Any = load_denoiser, **options: Any) -> str:
    """The sentence that loading ends in, which is all that a person sees."""
    with pytest.raises(UnreadableCheckpoint) as raised:
        load(path, **options)
    text = str(raised.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert "Traceback" not in text
    return text


@pytest.fixture
def bare(tmp_path) -> Path:
    save_bare(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- no checkpoint, or not a whole one


def test_no_checkpoint(tmp_path):
    assert "neither model_index.json nor config.json (found: nothing)" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert refusal(tmp_path) == (
        f"{tmp_path} is no diffusers checkpoint: it has neither model_index.json nor config.json "
        "(found: notes.txt)."
    )


def test_a_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert refusal(file) == f"{file} is a file; give the diffusers directory that it belongs to."


@pytest.mark.parametrize("text", ["nowhere", "/no/such/place", "./here/there", "a/b/c", "~/a"])
def test_neither_directory_nor_hub_id(text):
    assert refusal(text) == f"{text} is neither a directory nor a hub id of the form owner/name."


def test_bare_model_without_scheduler(bare):
    (bare / "scheduler_config.json").unlink()
    text = refusal(bare)
    assert text.startswith(f"{bare} holds a network but no scheduler_config.json, which says what")


def test_pipeline_without_its_parts(tmp_path):
    save_pipeline(tmp_path, "sd15")
    (tmp_path / "scheduler" / "scheduler_config.json").unlink()
    assert refusal(tmp_path) == f"{tmp_path} has no {Path('scheduler/scheduler_config.json')}."
    (tmp_path / "unet" / "config.json").unlink()
    assert refusal(tmp_path) == (
        f"{tmp_path} is a StableDiffusionPipeline without a unet or transformer folder."
    )


@pytest.mark.parametrize("name", ["config.json", "scheduler_config.json"])
@pytest.mark.parametrize("content", [b'{"_class_name": ', b"\xff\xfe", b""], ids=str)
def test_broken_json(name, content, bare):
    (bare / name).write_bytes(content)
    assert refusal(bare).startswith(f"{bare / name} cannot be read as JSON: ")


def test_broken_model_index(tmp_path):
    (tmp_path / "model_index.json").write_text("<html>")
    assert "model_index.json cannot be read as JSON: " in refusal(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "scheduler_config.json"])
def test_json_that_is_no_object(name, bare):
    (bare / name).write_text("[1, 2]")
    assert refusal(bare) == f"{bare / name} is not a JSON object."


# ---------------------------------------------------------------- networks


def test_unsupported_network_class(bare):
    for name in ("FluxTransformer2DModel", None, ["UNet2DModel"]):
        rewrite(bare / "config.json", _class_name=name)
        assert refusal(bare).startswith(f"{bare} holds a {name}; supported: DiTTransformer2DModel,")


def test_unsupported_autoencoder_class(tmp_path):
    small_autoencoder(4).save_pretrained(tmp_path / "vae")
    rewrite(tmp_path / "vae" / "config.json", _class_name="AutoencoderKLWan")
    assert refusal(tmp_path, load_codec) == (
        f"{tmp_path / 'vae'} holds a AutoencoderKLWan; supported: AsymmetricAutoencoderKL, "
        "AutoencoderDC, AutoencoderKL, AutoencoderTiny, VQModel."
    )


def test_legacy_class_of_another_kind(bare):
    """Transformer2DModel was also the name of networks that are neither DiT nor PixArt."""
    network = diffusers.Transformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=4, norm_num_groups=2
    )
    network.save_pretrained(bare)
    assert f"{bare} holds a Transformer2DModel of a kind that is none of" in refusal(bare)


def test_network_that_needs_another_image(bare):
    small_unet(in_channels=7).save_pretrained(bare)
    assert refusal(bare) == (
        f"{bare} holds a network that takes 7 channels and predicts 3: it needs another image "
        "beside the noise, which is not supported."
    )


def test_config_that_builds_no_network_leaves_no_trace(bare):
    rewrite(bare / "config.json", block_out_channels=[8])
    text = refusal(bare, dtype=torch.bfloat16)
    assert text.startswith(f"the UNet2DModel in {bare} could not be loaded (ValueError: Must prov")
    assert torch.get_default_dtype() == torch.float32


# ---------------------------------------------------------------- weights


def test_missing_tensor(bare):
    tensors = load_file(bare / WEIGHTS)
    del tensors["conv_in.weight"]
    save_file(tensors, bare / WEIGHTS, metadata={"format": "pt"})
    assert refusal(bare) == (
        f"the weights in {bare} do not fit its config: 1 missing keys (first: conv_in.weight)."
    )


def test_wrong_shapes(bare):
    rewrite(bare / "config.json", block_out_channels=[8, 24])
    text = refusal(bare)
    assert text.startswith(f"the UNet2DModel in {bare} could not be loaded (")
    assert re.search("size mismatch for|expected shape", text)  # without and with accelerate


@pytest.mark.parametrize("kept", [0, 5, 1000, -10])
def test_truncated_weights(kept, bare):
    content = (bare / WEIGHTS).read_bytes()
    (bare / WEIGHTS).write_bytes(content[:kept])
    text = refusal(bare)
    assert text.startswith(f"the UNet2DModel in {bare} could not be loaded (OSError: ")
    assert str(bare / WEIGHTS) in text


def test_shard_that_is_not_there(bare):
    (bare / WEIGHTS).unlink()
    small_unet().save_pretrained(bare, max_shard_size="60KB")
    gone = sorted(bare.glob("*.safetensors"))[-1]
    gone.unlink()
    text = refusal(bare)
    assert text.startswith(f"the UNet2DModel in {bare} could not be loaded (FileNotFoundError: ")
    assert gone.name in text


def test_pointer_instead_of_weights(bare):
    """What a clone without git-lfs holds."""
    (bare / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git-lfs" in refusal(bare)


def test_no_weights(bare):
    (bare / WEIGHTS).unlink()
    expected = f"{bare} has no {WEIGHTS} (found: none). Pickled weights are not loaded: "
    assert refusal(bare).startswith(expected)
    assert refusal(bare, checkpoint_files).startswith(expected)


# ---------------------------------------------------------------- pickles


class Payload:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path_factory, monkeypatch) -> Path:
    """A folder that would exist had a planted pickle been run; no pickle may even be opened."""

    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", opened)
    return tmp_path_factory.mktemp("outside") / "was-here"


def plant(file: Path, mark: Path) -> None:
    payload = pickle.dumps(Payload(mark))
    pickle.loads(payload)  # it works
    assert mark.is_dir()
    mark.rmdir()
    file.write_bytes(payload)


def test_pickled_weights_are_refused_and_not_run(bare, mark):
    (bare / WEIGHTS).unlink()
    plant(bare / "diffusion_pytorch_model.bin", mark)
    assert refusal(bare) == (
        f"{bare} has no {WEIGHTS} (found: diffusion_pytorch_model.bin). Pickled weights are not "
        "loaded: convert them with diffusers' save_pretrained first."
    )
    assert not mark.exists()


def test_pickle_beside_safetensors_is_not_run(bare, mark):
    for name in ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.bin", "code.py"):
        plant(bare / name, mark)
    load_denoiser(bare)
    assert not mark.exists()


@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_pickle_named_by_an_index_of_shards_is_not_run(variant, bare, mark):
    plant(bare / "shard.bin", mark)
    if variant:
        (bare / WEIGHTS).rename(bare / "diffusion_pytorch_model.fp16.safetensors")
    index = bare / f"{WEIGHTS}.index{variant}.json"
    names = list(small_unet().state_dict())
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "shard.bin")}))
    assert refusal(bare) == (
        f"{index} names shard.bin among its shards; only .safetensors of its own folder are loaded."
    )
    assert not mark.exists()


def test_pickle_that_calls_itself_safetensors_is_not_run(bare, mark):
    plant(bare / WEIGHTS, mark)
    assert "could not be loaded" in refusal(bare)
    assert not mark.exists()


@pytest.mark.parametrize("shards", [None, 3, ["shard.bin"]], ids=str)
def test_nonsense_index_of_shards(shards, bare):
    index = bare / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert refusal(bare) == f"{index} has no weight_map."


# ---------------------------------------------------------------- schedulers

FLOW, EULER = "FlowMatchEulerDiscreteScheduler", "EulerDiscreteScheduler"
ZERO_SNR = {"rescale_betas_zero_snr": True}
UNSUPPORTED = {
    "class": (
        {"_class_name": "LCMScheduler"},
        f"scheduler 'LCMScheduler' is not supported; supported: {', '.join(SCHEDULERS)}",
    ),
    "no class": ({"_class_name": None}, "scheduler None is not supported; supported: DDIM"),
    "thresholding": (
        {"thresholding": True},
        "DDIMScheduler with dynamic thresholding is not supported",
    ),
    "dynamic shifting": (
        {"_class_name": FLOW, "use_dynamic_shifting": True},
        f"{FLOW} with dynamic shifting is not supported",
    ),
    "dynamic shifting of another class": (
        {
            "_class_name": "UniPCMultistepScheduler",
            "prediction_type": "flow_prediction",
            "use_dynamic_shifting": True,
        },
        "UniPCMultistepScheduler with dynamic shifting is not supported",
    ),
    "inverted flow": (
        {"_class_name": FLOW, "invert_sigmas": True},
        "a flow that counts its time from noise to data is not supported",
    ),
    "beta schedule": (
        {"beta_schedule": "laplace"},
        "beta_schedule 'laplace' is not supported; supported: linear, scaled_linear, "
        "squaredcos_cap_v2, sigmoid",
    ),
    "prediction": (
        {"prediction_type": "original_sample"},
        "prediction_type 'original_sample' is not supported; supported: epsilon, v_prediction, "
        "sample, flow_prediction",
    ),
    "EDM's prediction": (
        {"_class_name": "EDMEulerScheduler", "prediction_type": "sample"},
        "prediction_type 'sample' is not supported; supported: epsilon, v_prediction",
    ),
    "spacing": (
        {"timestep_spacing": "log"},
        "timestep_spacing 'log' is not supported; supported: leading, trailing, linspace",
    ),
    "table": ({"trained_betas": [0.1, 1.5]}, "alphas_cumprod must be one row, decreasing"),
    "word for a number": (
        {"beta_start": "small"},
        "its values make no noise schedule (TypeError: ",
    ),
    "list for a word": (
        {"prediction_type": ["sample"]},
        "its values make no noise schedule (TypeError: ",
    ),
    "no timesteps": (
        {"num_train_timesteps": 0},
        "its values make no noise schedule (IndexError: ",
    ),
    "no timesteps of a flow": (
        {"_class_name": FLOW, "num_train_timesteps": 0},
        "its values make no noise schedule (ZeroDivisionError: ",
    ),
    "half a timestep": (
        {"num_train_timesteps": 1.5},
        "its values make no noise schedule (TypeError: ",
    ),
    "eps at zero SNR": (ZERO_SNR, "epsilon prediction with zero terminal SNR is not supported"),
    # diffusers' Euler walks on from a signal of 2^-24; what the network says there means as little.
    "eps at zero SNR, Euler": (
        {"_class_name": EULER, **ZERO_SNR},
        "epsilon prediction with zero terminal SNR is not supported",
    ),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_schedule(what, bare):
    changes, expected = UNSUPPORTED[what]
    file = bare / "scheduler_config.json"
    rewrite(file, **changes)
    assert refusal(bare).startswith(f"{file} cannot be used: {expected}")
    with pytest.raises(ValueError, match=re.escape(expected)):
        read_schedule(json.loads(file.read_text()))


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
def test_zero_snr_is_read_where_the_output_says_something(prediction, bare):
    rewrite(bare / "scheduler_config.json", prediction_type=prediction, **ZERO_SNR)
    assert load_denoiser(bare).scaling.sigma_max == 1e5
