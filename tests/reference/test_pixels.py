"""The models of small images that later work starts from are what their cards say."""

import json
from pathlib import Path
from typing import NamedTuple

import diffusers
import pytest
import torch
from pydantic import TypeAdapter

from stillhouse.data import Columns, DataConfig, ImageConfig, Parquet
from stillhouse.objectives import Draws, log_edges, validate
from stillhouse.objectives.configs import ObjectiveConfig
from stillhouse.pipelines import load_denoiser, read_facts

ROOT = Path(__file__).parents[2]


class Model(NamedTuple):
    name: str
    megabytes: float
    classes: tuple[int | None, int | None]  # with that for none, and which it is
    sigma_data: float
    image: ImageConfig
    label: str

    @property
    def folder(self) -> Path:
        return ROOT / "reference" / self.name


MODELS = [
    Model("fashion", 8, (11, 10), 0.7, ImageConfig(size=28, mode="grey"), "label"),
    Model("cifar10", 12, (None, None), 1.0, ImageConfig(size=32, mode="rgb"), ""),
]
each = pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)


@each
def test_it_is_small_and_both_libraries_read_it(model: Model):
    files = model.folder.rglob("*")
    assert sum(f.stat().st_size for f in files if f.is_file()) <= 1e6 * model.megabytes
    theirs = diffusers.UNet2DModel.from_pretrained(model.folder, low_cpu_mem_usage=False)
    assert sum(p.numel() for p in theirs.parameters()) <= 4e6
    ours = load_denoiser(model.folder)
    assert (ours.network.classes, ours.network.null_label) == model.classes
    assert ours.scaling.sigma_data == model.sigma_data


@each
def test_its_card_says_what_it_is(model: Model):
    facts, card = read_facts(model.folder), (model.folder / "README.md").read_text()
    assert f"{facts['images']:,}, in batches" in card
    curves = json.loads((model.folder / "curves.json").read_text())
    assert curves["validation/loss"][-1][0] == facts["images"]
    assert f"{curves['validation/loss'][-1][1]:.4f}" in card
    assert all((model.folder / name).is_file() for name in ("grid.png", "curves.png"))


@each
def test_it_denoises_what_it_has_not_seen(model: Model):
    """Within 10% of its card on other test images; its loss without training is at least 1."""
    data_of_it = ROOT.parent / "shared" / "data" / model.name
    if not data_of_it.is_dir():
        pytest.skip(f"{data_of_it} is not on this machine")
    data = DataConfig(
        source=Parquet(files=(str(data_of_it / "test*.parquet"),)),
        columns=Columns(label=model.label),
        image=model.image,
    )
    denoiser, facts = load_denoiser(model.folder), read_facts(model.folder)
    config = TypeAdapter(ObjectiveConfig).validate_python(facts["config"]["objective"])
    objective = config.build(denoiser.scaling, 1)
    batches = (item.batch for item in data.build(batch=128, seed=5, stop=512))
    with torch.no_grad():
        curve = validate(objective, denoiser, batches, Draws(0), log_edges(0.002, 80.0, 20))
    said = json.loads((model.folder / "curves.json").read_text())["validation/loss"][-1][1]
    assert curve.overall == pytest.approx(said, rel=0.1)
