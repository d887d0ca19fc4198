"""The data sets beside the repository, as they will be used."""

from pathlib import Path

import pytest
import torch

from stillhouse.data import Columns, DataConfig, ImageConfig, Parquet, Prefetch

FOLDER = Path(__file__).parents[3] / "shared" / "data"


def files(name):
    if not (FOLDER / name).is_dir():
        pytest.skip(f"{FOLDER / name} is not on this machine")
    return (str(FOLDER / name / "test*.parquet"),)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "mode", "size"), [("fashion", "grey", 28), ("cifar10", "rgb", 32)]
)
def test_a_few_batches(name, mode, size, streaming):
    config = DataConfig(
        source=Parquet(files=files(name), streaming=streaming),
        columns=Columns(label="label"),
        image=ImageConfig(size=size, mode=mode, flip=True),
    )
    loader = config.build(batch=64, seed=0)
    with Prefetch(loader) as prefetch:
        batches = [next(prefetch).batch for _ in range(4)]
    data = torch.cat([b.data for b in batches])
    assert data.shape == (256, *config.image.shape)
    assert data.min() == -1
    assert data.max() == 1
    assert set(torch.cat([b.condition.label for b in batches]).tolist()) == set(range(10))
    assert len(set(torch.cat([b.ids for b in batches]).tolist())) == 256
    assert len(loader.log) == 0


def test_captions():
    source = Parquet(files=(str(FOLDER / "emoji" / "train.parquet"),), streaming=True)
    files("emoji")
    config = DataConfig(
        source=source, columns=Columns(text="caption"), image=ImageConfig(size=64), buffer=64
    )
    item = next(iter(config.build(batch=8, seed=0)))
    assert all(item.text)
    assert item.batch.condition is None
