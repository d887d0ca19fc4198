"""The few-step student of the text-to-emoji model draws an emoji in three evaluations."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from stillhouse.pipelines.few_steps import FewStepPipeline, read_walk
from stillhouse.recipes.sampling import SampleRun, run

FOLDER = Path(__file__).parents[2] / "reference" / "emoji-student"
TEACHER = FOLDER.with_name("emoji")


def test_it_is_small_and_knows_two_to_five_evaluations():
    weights = "vae/diffusion_pytorch_model.safetensors"
    assert (FOLDER / weights).read_bytes() == (TEACHER / weights).read_bytes()  # stored once by git
    assert sum(f.stat().st_size for f in FOLDER.glob("*.safetensors")) <= 12e6
    assert read_walk(FOLDER).evaluations == (2, 3, 4, 5)


def test_three_evaluations_draw_what_was_asked_for(tmp_path):
    prompts = ("red apple", "green heart")
    run(SampleRun(model=str(FOLDER), prompt=prompts, count=6, steps=3, out=tmp_path))
    assert json.loads((tmp_path / "record.json").read_text())["evaluations_per_sample"] == 3
    images = [Image.open(tmp_path / "images" / f"{i:06d}.png") for i in range(6)]
    middles = np.stack([np.asarray(i.crop((24, 24, 40, 40))) for i in images])
    red, green, _ = middles.mean((1, 2)).T
    assert (red[0::2] > green[0::2] + 50).all()
    assert (green[1::2] > red[1::2] + 10).all()


def test_it_comes_nearer_to_its_teachers_long_walk_than_as_few_steps_of_its_teacher(tmp_path):
    """From the same noise: two of its evaluations, and two guided steps of the teacher."""
    prompts = ("red apple", "house", "smiling face", "green heart")
    guidance = {"kind": "classifier-free", "weight": 3.0}

    def drawn(name, **how):
        run(SampleRun(prompt=prompts, count=8, out=tmp_path / name, **how))
        files = sorted((tmp_path / name / "images").glob("*.png"))
        return np.stack([np.asarray(Image.open(f), dtype=float) for f in files])

    goal = drawn("goal", model=str(TEACHER), guidance=guidance, steps=30)
    short = drawn("short", model=str(TEACHER), guidance=guidance, steps=2)
    student = drawn("student", model=str(FOLDER), steps=2)
    assert ((student - goal) ** 2).mean() < 0.5 * ((short - goal) ** 2).mean()


def test_the_pipeline_class_opens_it():
    images = FewStepPipeline.from_pretrained(FOLDER)("red apple", num_inference_steps=2)
    assert images[0].size == (64, 64)
