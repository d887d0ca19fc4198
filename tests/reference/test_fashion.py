"""The model that later work starts from is what its card says."""

import json
from pathlib import Path

import diffusers
import pytest
import torch

from stillhouse.data import Columns, DataConfig, ImageConfig, Parquet
from stillhouse.objectives import Draws, log_edges, validate
from stillhouse.objectives.configs import DenoisingConfig
from stillhouse.pipelines import load_denoiser, read_facts

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "reference" / "fashion"
DATA = ROOT.parent / "shared" / "data" / "fashion"


def test_it_is_small_and_both_libraries_read_it():
    assert sum(f.stat().st_size for f in FOLDER.glob("*.safetensors")) <= 8e6
    theirs = diffusers.UNet2DModel.from_pretrained(FOLDER, low_cpu_mem_usage=False)
    assert sum(p.numel() for p in theirs.parameters()) <= 4e6
    ours = load_denoiser(FOLDER)
    assert (ours.network.classes, ours.network.null_label) == (11, 10)
    assert ours.scaling.sigma_data == 0.7


def test_its_card_says_what_it_is():
    facts, card = read_facts(FOLDER), (FOLDER / "README.md").read_text()
    assert f"{facts['images']:,} " in card.replace(",", ",")
    curves = json.loads((FOLDER / "curves.json").read_text())
    assert curves["validation/loss"][-1][0] == facts["images"]
    assert f"{curves['validation/loss'][-1][1]:.4f}" in card
    assert all((FOLDER / name).is_file() for name in ("grid.png", "curves.png"))


def test_it_denoises_clothes_it_has_not_seen():
    """Within 10% of its card on other test images; its loss without training is 1."""
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not on this machine")
    data = DataConfig(
        source=Parquet(files=(str(DATA / "test*.parquet"),)),
        columns=Columns(label="label"),
        image=ImageConfig(size=28, mode="grey"),
    )
    denoiser, facts = load_denoiser(FOLDER), read_facts(FOLDER)
    objective = DenoisingConfig.model_validate(facts["config"]["objective"]).build(
        denoiser.scaling, 1
    )
    batches = (item.batch for item in data.build(batch=128, seed=5, stop=512))
    with torch.no_grad():
        curve = validate(objective, denoiser, batches, Draws(0), log_edges(0.002, 80.0, 20))
    said = json.loads((FOLDER / "curves.json").read_text())["validation/loss"][-1][1]
    assert curve.overall == pytest.approx(said, rel=0.1)
