"""Stable Diffusion 1.5, SDXL, PixArt and SD3 at reduced width, distilled with their guidance."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
from recipes.together import distil_by_two
from safetensors.torch import load_file
from tunable import FAMILIES, pipeline, save_whole

from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.sharding import Spread
from stillhouse.errors import UserError
from stillhouse.pipelines.few_steps import FewStepPipeline
from stillhouse.process import starting_noise
from stillhouse.recipes.distill.comparing import Comparison
from stillhouse.recipes.distill.distilling import DistillRun, run
from stillhouse.recipes.distill.methods import Sfd, SfdV
from stillhouse.recipes.distill.watching import StudentPreview
from stillhouse.recipes.parts import ClassifierFree
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample

PROMPTS = ("a red a", "a green b", "a blue c")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: save_whole(folder / family, family) for family in FAMILIES}


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n\n")
    return file


def distilling(model: Path, prompts: Path, out: Path, **changes) -> DistillRun:
    settings = {
        "method": Sfd(refinement=2),
        "evaluations": "2",
        "guidance": ClassifierFree(weight=3.0),
        "images": 8,
        "batch": 4,
        "optim": AdamW(lr=1e-3, eps=1.0),
        "log_every": 4,
        "checkpoint_every": 8,
        "preview": StudentPreview(every=8, count=2, steps=2),
        "comparison": Comparison(count=0),
        "device": "cpu",
    }
    config = {**settings, **changes}
    return DistillRun(model=str(model), prompts=str(prompts), out=out, **config)


def losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [line["student/loss"] for line in lines if "student/loss" in line]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_is_a_pipeline_again(models, prompts, tmp_path, family):
    """With its text encoders and its vae; drawn by the command and by the class alike."""
    config = distilling(models[family], prompts, tmp_path / "run", method=SfdV(refinement=1))
    run(config)
    model, drawn = config.out / "model", tmp_path / "drawn"
    words = {"prompt": PROMPTS[:2], "steps": 2, "count": 2, "tensors": True}
    sample(SampleRun(model=str(model), out=drawn, **words))
    student = FewStepPipeline.from_pretrained(model)
    images = student(list(PROMPTS[:2]), num_inference_steps=2, count=2, seed=0, output="pt")
    from PIL import Image

    for i in range(2):
        with Image.open(drawn / f"images/{i:06d}.png") as found:
            pixels = torch.tensor(list(found.getdata())).view(*found.size, 3).movedim(-1, 0)
        wanted = ((images[i].clamp(-1, 1) + 1) * 127.5).round()
        assert (pixels - wanted).abs().max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_with_sharded_networks_distil_as_one_does(models, prompts, tmp_path, family):
    alone = distilling(models[family], prompts, tmp_path / "one")
    run(alone)
    both = alone.model_copy(update={"out": tmp_path / "two", "spread": Spread(sharding="fsdp")})
    distil_by_two(both, tmp_path)
    torch.testing.assert_close(losses(both.out), losses(alone.out), rtol=1e-4, atol=0)


def test_the_command_of_the_page_makes_a_student_for_plain_diffusers(models, prompts, tmp_path):
    config = distilling(
        models["sd15"],
        prompts,
        tmp_path / "run",
        exportable=True,
        teacher="bfloat16",
        spread=Spread(precision="bf16", checkpointing=True),
        micro_batch=2,
    )
    run(config)
    folder = config.out / "model"
    ours = FewStepPipeline.from_pretrained(folder)
    wanted = ours(list(PROMPTS[:2]), num_inference_steps=2, count=2, seed=0, output="pt")
    opened = diffusers.DiffusionPipeline.from_pretrained(folder)
    noise = starting_noise((4, 16, 16), range(2), seed=0).float()
    told = {"num_inference_steps": 2, "guidance_scale": 1, "output_type": "pt"}
    found = opened(list(PROMPTS[:2]), latents=noise, **told).images
    torch.testing.assert_close(found, (wanted.clamp(-1, 1) + 1) / 2, rtol=0, atol=1e-3)
    untaught = pipeline(models["sd15"])
    untaught.scheduler = opened.scheduler
    before = untaught(list(PROMPTS[:2]), latents=noise, **told).images
    assert (found - before).abs().max() > 0.01  # it has learnt something


def test_adapters_that_nothing_could_open_are_refused(models, prompts, tmp_path):
    with pytest.raises(UserError, match="adapters are opened by diffusers: add --exportable"):
        run(distilling(models["sd15"], prompts, tmp_path / "run", adapters=2))


def test_adapters_open_in_the_teachers_own_pipeline(models, prompts, tmp_path):
    """And change what it draws; the weights themselves are not in the file."""
    config = distilling(
        models["sd15"], prompts, tmp_path / "run", adapters=2, exportable=True, evaluations="2"
    )
    run(config)
    weights = load_file(config.out / "model/pytorch_lora_weights.safetensors")
    assert all(".lora_" in name for name in weights)
    opened = pipeline(models["sd15"])
    kind = type(opened.scheduler).load_config(config.out / "model/scheduler")["_class_name"]
    assert kind == "EulerDiscreteScheduler"
    told = {"num_inference_steps": 2, "guidance_scale": 1, "output_type": "np"}
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    before = opened("a red a", latents=noise, **told).images
    opened.load_lora_weights(str(config.out / "model"))
    after = opened("a red a", latents=noise, **told).images
    assert abs(after - before).max() > 1e-4
