"""The text-to-emoji model is what its card says, and draws from a prompt."""

import json
from pathlib import Path

import diffusers
import numpy as np
from PIL import Image

from stillhouse.pipelines import load_codec, load_denoiser, read_facts
from stillhouse.recipes.sampling import SampleRun, run

FOLDER = Path(__file__).parents[2] / "reference" / "emoji"


def test_it_is_small_and_diffusers_opens_both_parts():
    assert sum(f.stat().st_size for f in FOLDER.rglob("*.safetensors")) <= 12e6
    network = diffusers.UNet2DConditionModel.from_pretrained(FOLDER, low_cpu_mem_usage=False)
    assert network.config.cross_attention_dim == 384  # of MiniLM
    diffusers.AutoencoderTiny.from_pretrained(FOLDER / "vae")
    assert load_denoiser(FOLDER).network.data_shape == (16, 8, 8)
    assert load_codec(FOLDER).latent_shape((3, 64, 64)) == (16, 8, 8)


def test_its_card_says_what_it_is_and_shows_its_neighbours():
    facts, card = read_facts(FOLDER), (FOLDER / "README.md").read_text()
    assert f"{facts['images']:,}, in batches" in card
    found = json.loads((FOLDER / "neighbours.json").read_text())
    assert {sample["prompt"] for sample in found["samples"]} >= {"red apple", "blue car"}
    assert all((FOLDER / n).is_file() for n in ("grid.png", "curves.png", "neighbours.png"))


def test_a_red_apple_is_red_and_a_green_heart_is_green(tmp_path):
    guidance = {"kind": "classifier-free", "weight": 3.0}
    prompts = ("red apple", "green heart")
    config = {"model": str(FOLDER), "prompt": prompts, "guidance": guidance, "out": tmp_path}
    run(SampleRun(count=6, steps=10, **config))
    images = [Image.open(tmp_path / "images" / f"{i:06d}.png") for i in range(6)]
    assert images[0].size == (64, 64)
    middles = np.stack([np.asarray(i.crop((24, 24, 40, 40))) for i in images])
    red, green, _ = middles.mean((1, 2)).T
    assert (red[0::2] > green[0::2] + 50).all()
    assert (green[1::2] > red[1::2] + 10).all()
