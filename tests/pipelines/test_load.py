"""Checkpoints as diffusers saves them are read as the denoisers that they are."""

import json
import os
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects
from small_models import (
    MODELS,
    network_config,
    part,
    random_condition,
    save_bare,
    save_pipeline,
    save_scheduler,
    small_autoencoder,
    small_unet,
    unit_noise,
)
from torch import Tensor

from stillhouse.models import DiffusersNetwork
from stillhouse.pipelines import (
    UnreadableCheckpoint,
    checkpoint_files,
    load_codec,
    load_denoiser,
    resolve_folder,
)
from stillhouse.pipelines.load import CODEC_FILES, HUB_FILES, HUB_SKIPPED, fetch
from stillhouse.pipelines.schedules import SCHEDULERS, read_schedule
from stillhouse.process import EDM, VP, Flow, NetworkDenoiser, Scaling, alphas_cumprod, betas
from stillhouse.solvers import sample_dpmpp_3m, sample_euler


def weight_files(folder):
    """The weights that count among what a checkpoint is read from."""
    config, *weights = checkpoint_files(folder)["network"]
    assert config.name == "config.json"
    return weights


pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")

STABLE_DIFFUSION = VP(alphas_cumprod(betas("scaled_linear", 1000, 0.00085, 0.012)), "leading", 1)
LINEAR = alphas_cumprod(betas("linear", 1000, 0.0001, 0.02))
SCALINGS: dict[str, Scaling] = {
    "sd15": STABLE_DIFFUSION,
    "sdxl": STABLE_DIFFUSION,
    "pixart-alpha": VP(LINEAR, "linspace", open_end=True),
    "sd3": Flow(3.0),
    "dit-xl-2": VP(LINEAR, "leading"),
}


def draw(denoiser: NetworkDenoiser, solver: Any = sample_euler, steps: int = 4) -> Tensor:
    """Two samples on the model's own grid, under a random condition."""
    network: Any = denoiser.network
    grid = denoiser.scaling.native_grid(steps)
    cond = random_condition(network.condition_shapes, 2)
    return solver(denoiser, float(grid[0]) * unit_noise((2, *network.data_shape)), grid, cond)


def direct(network: Any, scaling: Scaling, prediction: Any = "eps") -> NetworkDenoiser:
    return NetworkDenoiser(DiffusersNetwork(network), scaling, prediction)


def same_weights(loaded: NetworkDenoiser, network: Any) -> bool:
    """Whether every parameter has the same bits."""
    expected = network.state_dict()
    found = loaded.network.model.state_dict()  # type: ignore[union-attr]
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


# ---------------------------------------------------------------- published layouts


@pytest.mark.parametrize("model", MODELS)
def test_pipelines_sample_as_the_network_itself(model, tmp_path):
    network = save_pipeline(tmp_path, model)
    loaded = load_denoiser(tmp_path)
    expected = direct(network, SCALINGS[model], "flow" if model == "sd3" else "eps")
    assert not loaded.training
    for solver in (sample_dpmpp_3m, sample_euler):
        samples = draw(loaded, solver)
        assert bool(torch.isfinite(samples).all())
        assert torch.equal(samples, draw(expected, solver))
    codec = load_codec(tmp_path)
    assert codec is not None
    assert codec.decode(samples).shape == (2, 3, 32, 32)


@pytest.mark.parametrize("model", ["dit-xl-2", "pixart-alpha"])
def test_published_class_name_is_understood(model, tmp_path):
    """Published configs say Transformer2DModel, and have keys of that class only."""
    network = save_pipeline(tmp_path, model)
    config = network_config(model, reduced=True)
    assert config["_class_name"] == "Transformer2DModel"
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    loaded = load_denoiser(tmp_path)
    assert type(loaded.network.model) is type(network)
    assert torch.equal(draw(loaded), draw(direct(network, SCALINGS[model])))


def test_published_scheduler_files_are_read_as_they_are(tmp_path):
    for model in MODELS:
        path = tmp_path / model / "scheduler_config.json"
        small_unet().save_pretrained(path.parent)
        path.write_text(json.dumps(part(model, "scheduler")))
        loaded, expected = load_denoiser(path.parent).scaling, SCALINGS[model]
        torch.testing.assert_close(loaded.native_grid(10), expected.native_grid(10))


def test_network_folder_inside_a_pipeline(tmp_path, monkeypatch):
    network = save_pipeline(tmp_path, "sd15")
    assert same_weights(load_denoiser(tmp_path / "unet"), network)
    monkeypatch.chdir(tmp_path / "unet")
    assert same_weights(load_denoiser("."), network)
    monkeypatch.chdir(tmp_path.parent)
    assert same_weights(load_denoiser(f"{tmp_path.name}/unet"), network)


@pytest.mark.parametrize("place", [".", "scheduler"])
def test_bare_model(place, tmp_path):
    network = save_bare(tmp_path)
    if place != ".":
        (tmp_path / place).mkdir()
        (tmp_path / "scheduler_config.json").rename(tmp_path / place / "scheduler_config.json")
    loaded = load_denoiser(str(tmp_path))
    assert torch.equal(draw(loaded), draw(direct(network, VP(LINEAR, "leading"))))
    assert load_codec(tmp_path) is None


def test_class_conditional_model_asks_for_a_label(tmp_path):
    save_bare(tmp_path)
    network = small_unet(num_class_embeds=10)
    network.save_pretrained(tmp_path)
    loaded = load_denoiser(tmp_path)
    assert loaded.network.condition_shapes == {"label": ()}
    assert torch.equal(draw(loaded), draw(direct(network, VP(LINEAR, "leading"))))


# ---------------------------------------------------------------- weights


def test_half_precision_is_read_where_there_is_no_other(tmp_path):
    network = save_pipeline(tmp_path, "sd15")
    folder = tmp_path / "unet"
    network.half().save_pretrained(folder, variant="fp16")
    assert weight_files(tmp_path) == [folder / "diffusion_pytorch_model.safetensors"]
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    assert weight_files(tmp_path) == [folder / "diffusion_pytorch_model.fp16.safetensors"]
    loaded = load_denoiser(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert same_weights(loaded, network.float())


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards(variant, tmp_path):
    network = save_bare(tmp_path).to(torch.float16 if variant else torch.float32)
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    network.save_pretrained(tmp_path, variant=variant, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert weight_files(tmp_path) == shards
    assert same_weights(load_denoiser(tmp_path), network.float())


def test_weights_that_are_not_read_are_not_listed(tmp_path):
    save_bare(tmp_path)
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    for name in ("diffusion_pytorch_model.non_ema", "v1-5-pruned"):
        (tmp_path / f"{name}.safetensors").write_bytes(weights.read_bytes())
    assert weight_files(tmp_path) == [weights]


def test_bfloat16(tmp_path):
    network = save_pipeline(tmp_path, "sd15").to(torch.bfloat16)
    loaded = load_denoiser(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    samples = draw(loaded)
    assert samples.dtype == torch.float32
    assert torch.equal(samples, draw(direct(network, STABLE_DIFFUSION)))
    assert torch.get_default_dtype() == torch.float32


# ---------------------------------------------------------------- autoencoders


@pytest.mark.parametrize(
    ("channels", "config"),
    [
        (4, {"scaling_factor": 0.18215}),
        (16, {"scaling_factor": 1.5305, "shift_factor": 0.0609}),
    ],
    ids=["sd", "sd3"],
)
def test_codec_applies_scaling_and_shift(channels, config, tmp_path):
    autoencoder = small_autoencoder(channels, **config)
    autoencoder.save_pretrained(tmp_path / "vae")
    codec = load_codec(tmp_path)
    assert codec is not None
    latents = unit_noise((2, channels, 8, 8))
    native = latents / config["scaling_factor"] + config.get("shift_factor", 0)
    with torch.no_grad():
        expected = autoencoder.decode(native).sample
    torch.testing.assert_close(codec.decode(latents), expected)
    half = load_codec(tmp_path, dtype=torch.bfloat16)
    assert half is not None
    assert half.decode(latents).dtype == torch.float32


def test_codec_applies_statistics_per_channel(tmp_path):
    """Playground 2.5's latents: decode(z std / scale + mean), as its pipeline does."""
    mean, std = [-1.6, 0.2, 0.1, 0.9], [8.4, 5.9, 6.0, 5.3]
    autoencoder = small_autoencoder(4, scaling_factor=0.5, latents_mean=mean, latents_std=std)
    autoencoder.save_pretrained(tmp_path / "vae")
    codec = load_codec(tmp_path)
    assert codec is not None
    latents = unit_noise((2, 4, 8, 8))
    wide = [torch.tensor(values).view(1, 4, 1, 1) for values in (mean, std)]
    with torch.no_grad():
        expected = autoencoder.decode(latents * wide[1] / 0.5 + wide[0]).sample
    torch.testing.assert_close(codec.decode(latents), expected)


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_supported_scheduler_is_read_from_its_saved_defaults(name, tmp_path):
    """A sparse config and the one that diffusers saves from it say the same."""
    save_scheduler(tmp_path, {"_class_name": name})
    saved = json.loads((tmp_path / "scheduler_config.json").read_text())
    full, sparse = read_schedule(saved), read_schedule({"_class_name": name})
    assert (full.prediction, full.clip) == (sparse.prediction, sparse.clip)
    assert torch.equal(full.scaling.native_grid(10), sparse.scaling.native_grid(10))
    assert full.clip == (1.0 if saved.get("clip_sample") else None)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [("epsilon", "eps"), ("v_prediction", "v"), ("sample", "x0"), ("flow_prediction", "flow")],
)
def test_prediction_names(prediction, expected):
    config = {"_class_name": "UniPCMultistepScheduler", "prediction_type": prediction}
    trained = read_schedule({**config, "flow_shift": 3.0})
    assert trained.prediction == expected
    assert (trained.scaling == Flow(3.0)) == (expected == "flow")


def test_continuous_time_is_told_to_v_prediction_only():
    """As diffusers' Euler does it: timesteps are ln(sigma)/4 for continuous v-prediction."""
    config = {"_class_name": "EulerDiscreteScheduler", "timestep_type": "continuous"}
    video = {**config, "prediction_type": "v_prediction", "sigma_min": 0.002, "sigma_max": 700.0}
    scheduler: Any = diffusers.EulerDiscreteScheduler.from_config(
        {**video, "use_karras_sigmas": True}
    )
    scheduler.set_timesteps(5)
    trained = read_schedule(video)
    assert trained[:2] == (EDM(1.0, 0.002, 700.0), "v")
    grid = trained.scaling.native_grid(5)
    torch.testing.assert_close(grid, scheduler.sigmas.double(), rtol=1e-5, atol=0)
    times = trained.scaling.time_at(grid[:-1])
    torch.testing.assert_close(times, scheduler.timesteps.double(), rtol=1e-5, atol=1e-6)
    assert isinstance(read_schedule(config).scaling, VP)


def test_keys_that_the_class_does_not_know_say_nothing():
    """Pipelines are often saved with keys of another scheduler left in the file."""
    foreign = {"clip_sample": True, "thresholding": True, "rescale_betas_zero_snr": True}
    trained = read_schedule({"_class_name": "PNDMScheduler", **foreign})
    assert trained.clip is None
    assert trained.scaling.sigma_max < 200


# ---------------------------------------------------------------- the hub


def fill_cache(cache: Path, pipeline: Path, commit: str = "0" * 40) -> None:
    """The layout of the hub's cache: snapshots are links to blobs, refs say which is current."""
    repository = cache / "models--owner--name"
    files = sorted(p for p in pipeline.rglob("*") if p.is_file())
    for number, file in enumerate(files):
        blob = repository / "blobs" / f"{number:040x}"
        link = repository / "snapshots" / commit / file.relative_to(pipeline)
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def test_half_precision_is_fetched_where_there_is_no_other(monkeypatch, tmp_path):
    names = [
        "unet/diffusion_pytorch_model.safetensors",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        *("text_encoder/model-00001-of-00002.safetensors", "vae/config.json"),
        "text_encoder/model.fp16-00001-of-00002.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
    ]
    asked = {}
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name: names)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **how: asked.update(how) or tmp_path
    )
    fetch("someone/something", ["*"])
    skipped = {n for n in names for p in asked["ignore_patterns"] if fnmatch(n, p)}
    assert skipped == {
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "text_encoder/model.fp16-00001-of-00002.safetensors",
    }


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """The cache of a machine that cannot reach the hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_hub_id_is_found_in_the_cache(offline, tmp_path):
    network = save_pipeline(tmp_path / "pipeline", "dit-xl-2")
    fill_cache(offline, tmp_path / "pipeline")
    assert same_weights(load_denoiser("owner/name"), network)
    assert load_codec("owner/name") is not None
    assert [f.suffix for f in weight_files(resolve_folder("owner/name"))] == [".safetensors"]


@pytest.mark.parametrize("hub_id", ["owner/unknown", "owner/no such name"])
def test_unknown_hub_id_ends_in_a_sentence(hub_id, offline):
    with pytest.raises(UnreadableCheckpoint) as raised:
        load_denoiser(hub_id)
    assert str(raised.value).startswith(
        f"{hub_id} is no local directory and could not be fetched from the hub ("
    )


def test_only_what_is_read_is_fetched():
    wanted = {
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "vae/diffusion_pytorch_model.fp16.safetensors",
        "diffusion_pytorch_model.safetensors",
    }
    unwanted = {
        "sd_xl_base_1.0.safetensors",
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.bin",
        "unet/diffusion_pytorch_model.non_ema.safetensors",
        "unet/model.py",
        "vae_1_0/diffusion_pytorch_model.safetensors",
    }
    fetched = filter_repo_objects(
        sorted(wanted | unwanted), allow_patterns=HUB_FILES, ignore_patterns=HUB_SKIPPED
    )
    assert set(fetched) == wanted
    vae = filter_repo_objects(
        sorted(wanted | unwanted), allow_patterns=CODEC_FILES, ignore_patterns=HUB_SKIPPED
    )
    networks = {name for name in wanted if re.match(r"(unet|transformer)/.*\.safetensors$", name)}
    assert set(vae) == wanted - networks
