"""Adapters: the pipeline stays as it is, and diffusers opens what was learnt."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import loaded
import numpy as np
import pytest
import torch
import warm
from recipes.test_training import final_tensors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import random_condition, save_pipeline, unit_noise
from tunable import FAMILIES, HERE, tuning

from stillhouse.cli.train import _next_step
from stillhouse.engine.ema import ConstantDecay
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.sharding import Spread
from stillhouse.engine.trackers import read_log
from stillhouse.errors import UserError
from stillhouse.pipelines import load_denoiser
from stillhouse.recipes.train.catalogue import RECIPES
from stillhouse.recipes.train.training import TrainRun, build_learner, build_loader, run
from stillhouse.recipes.train.tuning import Tuned, fitted

pytestmark = pytest.mark.usefixtures("cache")
LORA = Tuned(method="lora", rank=4, alpha=6.0)
QUICK = AdamW(lr=1e-2)

# What somebody does who has diffusers and the folders.
ELSEWHERE = """
import sys, torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

def draw(model, folder):
    pipe = DiffusionPipeline.from_pretrained(model)
    network = getattr(pipe, "unet", None) or pipe.transformer
    if hasattr(pipe, "load_lora_weights"):
        pipe.load_lora_weights(f"{folder}/run/model")
    else:
        from peft import PeftModel
        network = PeftModel.from_pretrained(network, f"{folder}/run/model")
    told = load_file(f"{folder}/given")
    x, time = told.pop("x"), told.pop("time")
    sizes = ("text_embeds", "time_ids", "resolution", "aspect_ratio")
    added = {k: told.pop(k) for k in sizes if k in told}
    told |= {"added_cond_kwargs": added} if added else {}
    with torch.no_grad():
        save_file({"y": network(x, timestep=time, **told).sample}, f"{folder}/found")

for model, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    draw(model, folder)
assert "stillhouse" not in sys.modules
"""


def adapting(model: Path, images: Path, out: Path, **changes) -> TrainRun:
    return tuning(model, images, out, **{"network": LORA, "optim": QUICK, **changes})


def trained_network(config: TrainRun):
    """Ours, as the checkpoint has it."""
    config = fitted(config)
    network = build_learner(config, HERE, build_loader(config, HERE, ())).denoiser.network
    stored, prefix = final_tensors(config.out, config.images), "denoiser.network.network."
    named = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
    network.load_state_dict(named)
    return network.eval()


def native_names(family: str, cond) -> dict[str, torch.Tensor]:
    told = {"encoder_hidden_states": cond.text}
    if family == "sdxl":
        told |= {"text_embeds": cond.pooled, "time_ids": cond.control}
    if family == "sd3":
        told["pooled_projections"] = cond.pooled
    if family == "pixart-alpha":
        sizes = {"resolution": cond.control[:, :2], "aspect_ratio": cond.control[:, 2:]}
        told |= {k: v.contiguous() for k, v in sizes.items()}
    return told


@pytest.fixture(scope="module")
def adapted(models, images, tmp_path_factory) -> dict[str, Path]:
    """A tuned run of each, with what its network draws from a file `given`, by diffusers alone."""
    root = tmp_path_factory.mktemp("adapted")
    places = {family: root / family for family in FAMILIES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STILLHOUSE_CACHE", str(root / "cache"))
        for family, folder in places.items():
            run(adapting(models[family], images, folder / "run"))
            network = load_denoiser(models[family]).network
            x, time = unit_noise((2, *network.data_shape)), torch.tensor([300.0, 700.0])
            cond = random_condition(network.condition_shapes, 2)
            save_file({"x": x, "time": time, **native_names(family, cond)}, folder / "given")
    words = [str(word) for family in FAMILIES for word in (models[family], places[family])]
    done = warm.run("-c", ELSEWHERE, *words, timeout=None)
    assert done.returncode == 0, done.stderr
    return places


@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_opens_the_adapters_and_draws_the_same(models, images, adapted, family):
    network = trained_network(adapting(models[family], images, adapted[family] / "run"))
    given = load_file(adapted[family] / "given")
    cond = random_condition(network.condition_shapes, 2)
    with torch.no_grad():
        ours = network(given["x"], given["time"], cond)
        plain = load_denoiser(models[family]).network.eval()(given["x"], given["time"], cond)
    theirs = load_file(adapted[family] / "found")["y"][:, : ours.shape[1]]
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert (ours - plain).abs().max() > 1e-3


def test_the_weights_themselves_stay_to_the_bit(models, images, tmp_path):
    before = {p: p.read_bytes() for p in models["sd15"].rglob("*") if p.is_file()}
    config = adapting(models["sd15"], images, tmp_path / "run")
    run(config)
    assert before == {p: p.read_bytes() for p in models["sd15"].rglob("*") if p.is_file()}
    network = trained_network(config)
    old = load_denoiser(models["sd15"]).network.state_dict()
    kept = {k.replace(".base_layer", ""): v for k, v in network.named_parameters()}
    for name, weight in old.items():
        assert torch.equal(kept[name], weight)
    learnt = {k: v for k, v in network.state_dict().items() if "lora_B" in k}
    assert learnt
    assert all(weight.any() for weight in learnt.values())


def test_adapters_alone_are_updated_averaged_and_stored(models, images, tmp_path):
    config = adapting(models["sd15"], images, tmp_path / "run", averages=(ConstantDecay(),))
    run(config)
    stored = final_tensors(config.out, config.images)
    for kind in ("network", "optimiser.state", "averages"):
        found = [name for name in stored if name.startswith(f"denoiser.{kind}")]
        assert found
        assert all(".lora_" in name for name in found if "progress" not in name)
    average = {k: v for k, v in stored.items() if ".averages." in k and ".lora_B" in k}
    with safe_open(config.out / "model/pytorch_lora_weights.safetensors", "pt") as file:
        exported = {k: file.get_tensor(k) for k in file.keys() if "lora_B" in k}  # noqa: SIM118
        facts = json.loads(file.metadata()["stillhouse"])
    assert len(exported) == len(average)
    for weight in exported.values():  # what is shown and exported is the average
        assert any(torch.equal(weight, other) for other in average.values())
    assert facts["config"]["data"]["source"]["path"] == "/".join(images.parts[-2:])
    assert str(images.parents[1]) not in json.dumps(facts)


def test_stopping_and_going_on_is_the_same_as_not_stopping(models, images, tmp_path):
    whole = adapting(models["sd15"], images, tmp_path / "whole", averages=(ConstantDecay(),))
    run(whole)
    parts = whole.model_copy(update={"out": tmp_path / "parts", "images": 8})
    run(parts)
    run(parts.model_copy(update={"images": 16}))
    first, second = (final_tensors(tmp_path / name, 16) for name in ("whole", "parts"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("part", ["unet", "vae"])
def test_a_run_goes_on_with_no_other_pipeline_of_the_same_name(models, images, tmp_path, part):
    model = shutil.copytree(models["sd15"], tmp_path / "model")
    longer = adapting(model, images, tmp_path / "run")
    run(longer.model_copy(update={"images": 8}))
    file = model / part / "diffusion_pytorch_model.safetensors"
    mine = load_file(file)
    save_file({k: w + 0.01 for k, w in mine.items()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="fine-tuned from another pipeline of the same name"):
        run(longer)
    save_file(mine, file, metadata={"format": "pt"})
    assert run(longer) == 16


# ---------------------------------------------------------------- several processes


def two_processes(config: TrainRun, tmp_path: Path) -> None:
    file = tmp_path / "run-two.json"
    file.write_text(config.model_dump_json())
    done = loaded.run("-m", "stillhouse", "train", str(file), processes=2, timeout=None)
    assert done.returncode == 0, done.stderr[-2000:]


def losses(config: TrainRun) -> torch.Tensor:
    lines = read_log(config.out / "log.jsonl")
    return torch.tensor([line["denoiser/loss"] for line in lines if "denoiser/loss" in line])


def moved(model: Path, weights: dict[str, torch.Tensor]) -> float:
    """How far training went: adapters from zero, weights from those of the pipeline."""
    old = load_file(model / "unet/diffusion_pytorch_model.safetensors")
    squares = ((w - old.get(key, torch.zeros(()))) ** 2 for key, w in weights.items())
    return float(sum(square.sum() for square in squares)) ** 0.5


def latents_below(cache: Path) -> dict[str, Any]:
    """All that is kept, by the name of its folder, whoever wrote which part."""
    folders = list((cache / "encoded").glob("latents-*"))
    assert folders
    return {
        f.name: np.concatenate([np.load(part) for part in sorted(f.glob("latents-*.npy"))])
        for f in folders
    }


@pytest.mark.slow
@pytest.mark.parametrize(("method", "sharding"), [("lora", "ddp"), ("full", "fsdp")])
def test_two_processes_tune_as_one_does(models, images, tmp_path, monkeypatch, method, sharding):
    network = Tuned(method=method, rank=4)
    one = tuning(models["sd15"], images, tmp_path / "one", network=network, optim=AdamW(lr=1e-3))
    spread = {"out": tmp_path / "two", "spread": Spread(sharding=sharding)}
    two_processes(one.model_copy(update=spread), tmp_path)  # which also fill the cache together
    cached = latents_below(tmp_path / "cache")
    monkeypatch.setenv("STILLHOUSE_CACHE", str(tmp_path / "other"))
    run(one)
    alone = latents_below(tmp_path / "other")
    assert cached.keys() == alone.keys()
    assert all(np.array_equal(cached[key], alone[key]) for key in alone)
    two = one.model_copy(update=spread)
    torch.testing.assert_close(losses(two), losses(one), rtol=1e-5, atol=0)
    name = "pytorch_lora_weights.safetensors"
    name = name if method == "lora" else "unet/diffusion_pytorch_model.safetensors"
    first, second = (load_file(config.out / "model" / name) for config in (one, two))
    assert first.keys() == second.keys()
    # Adam's first steps are signs of gradients: where one is nearly zero, rounding decides.
    apart = sum(float((second[key] - weight).square().sum()) for key, weight in first.items())
    assert apart**0.5 < 1e-3 * moved(models["sd15"], first)


# ---------------------------------------------------------------- what is refused


def test_layers_that_are_not_there_are_refused(models, images, tmp_path):
    network = Tuned(method="lora", targets=("to_nowhere",))
    with pytest.raises(UserError, match=r"--network\.targets to_nowhere"):
        run(adapting(models["sd15"], images, tmp_path / "run", network=network))


def test_a_pipeline_of_another_class_is_refused(images, tmp_path):
    save_pipeline(tmp_path / "dit", "dit-xl-2")
    with pytest.raises(UserError, match="is a DiTPipeline; pipelines that can be fine-tuned are"):
        run(adapting(tmp_path / "dit", images, tmp_path / "run"))


def test_without_peft_the_line_to_run_is_told(models, images, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[finetune\]'"):
        run(adapting(models["sd15"], images, tmp_path / "run"))


def test_the_recipes_are_what_their_names_say():
    full, lora, paper = (
        RECIPES[name]("full") for name in ("finetune", "finetune-lora", "finetune-immiscible")
    )
    assert (full.network.method, full.optim.lr) == ("full", 1e-5)
    assert (lora.network.method, lora.optim.lr) == ("lora", 1e-4)
    for config in (full, lora, paper):
        assert TrainRun.model_validate(config.model_dump()) == config
    assert (paper.batch, paper.images // paper.batch, paper.coupling.kind) == (
        512,
        5000,
        "assignment",
    )


def test_the_command_line_says_how_adapters_are_opened(tmp_path):
    config = RECIPES["finetune-lora"]("tiny").model_copy(update={"out": tmp_path})
    config = config.model_copy(update={"network": LORA.model_copy(update={"path": "mine"})})
    model = str(tmp_path / "model")
    assert _next_step(config) == f"its adapters, for mine: pipeline.load_lora_weights({model!r})"
    (tmp_path / "model").mkdir()
    (tmp_path / "model/adapter_config.json").write_text("{}")  # as PixArt's are
    assert f"peft.PeftModel.from_pretrained(pipeline.transformer, {model!r})" in _next_step(config)
