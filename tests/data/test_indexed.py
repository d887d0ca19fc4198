"""Indexed sources: the images seen are the whole position."""

import pytest
import torch
from data.pictures import numbers, write_folder, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.data import (
    Columns,
    DataConfig,
    FaultConfig,
    Folder,
    ImageConfig,
    KeySampler,
    Parquet,
    RandomCrop,
    rows_at,
)
from stillhouse.errors import UserError

COUNT = 37


@settings(deadline=None, max_examples=100)
@given(
    batch=st.integers(3, 40),
    world=st.integers(1, 3),
    start=st.integers(0, 1000),
    steps=st.integers(1, 4),
)
def test_processes_share_the_keys_of_each_batch(batch, world, start, steps):
    stop = start + steps * batch
    parts = [list(KeySampler(batch, start, stop, rank, world)) for rank in range(world)]
    joined = [key for step in zip(*parts, strict=True) for keys in step for key in keys]
    assert joined == list(range(start, stop))


@settings(deadline=None, max_examples=50)
@given(n=st.integers(1, 200), seed=st.integers(0, 1000), epoch=st.integers(0, 50))
def test_each_epoch_holds_every_row_once(n, seed, epoch):
    assert sorted(rows_at(range(epoch * n, (epoch + 1) * n), n, seed)) == list(range(n))


@settings(deadline=None, max_examples=50)
@given(n=st.integers(2, 100), cut=st.integers(1, 299))
def test_rows_do_not_depend_on_the_split(n, cut):
    assert rows_at(range(cut), n, 5) + rows_at(range(cut, 300), n, 5) == rows_at(range(300), n, 5)


def test_a_last_batch_may_be_short():
    whole = [list(keys) for keys in KeySampler(4, 0, 10)]
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    second = [list(keys) for keys in KeySampler(4, 0, 10, rank=1, world=2)]
    assert second == [[2, 3], [6, 7]]


@pytest.fixture
def config(tmp_path):
    files = (write_shards(tmp_path / "data", "parquet", [20, 17]),)
    crop = RandomCrop(zoom=1.5)
    return DataConfig(
        source=Parquet(files=files),
        columns=Columns(label="label"),
        image=ImageConfig(size=8, crop=crop, flip=True),
    )


def take(config, steps, **options):
    """What each key sees: row, pixels, layout."""
    loader = iter(config.build(seed=7, **options))
    seen = {}
    for _ in range(steps):
        item = next(loader)
        for row, key in enumerate(item.batch.key.tolist()):
            one = item.batch[row : row + 1]
            layout = torch.cat([item.frame.crop[row], item.frame.flipped[row : row + 1].long()])
            seen[key] = (int(one.ids), int(one.condition.label), one.data, layout)
    return seen, item.state


def same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key][:2] == b[key][:2]
        assert torch.equal(a[key][2], b[key][2])
        assert torch.equal(a[key][3], b[key][3])


def test_any_number_of_processes_and_any_resume_see_the_same(config):
    whole, state = take(config, 10, batch=12)
    assert state == {"kind": "indexed", "images": 120, "rows": 37}
    first, state = take(config, 4, batch=12)
    split = dict(first)
    for rank in range(3):  # resumed on three processes
        part, middle = take(config, 3, batch=12, rank=rank, world=3, resume=[state])
        split |= part
    for rank in range(2):  # and then on two, unevenly sized to taste
        split |= take(config, 3, batch=12, rank=rank, world=2, resume=[middle])[0]
    same(whole, split)


def test_workers_change_nothing(config):
    with_workers = config.model_copy(update={"workers": 2})
    same(take(config, 6, batch=8)[0], take(with_workers, 6, batch=8)[0])


def test_the_global_generator_is_left_alone(config):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    take(config.model_copy(update={"workers": 1}), 2, batch=8)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_corrupt_image_changes_its_own_key_only(kind, tmp_path):
    configs = []
    for name, broken in (("good", ()), ("bad", (5, 6, 30))):
        folder = tmp_path / name
        if kind == "folder":
            write_folder(folder, COUNT, broken)
            source = Folder(path=str(folder))
        else:
            source = Parquet(files=(write_shards(folder, "parquet", [20, 17], broken),))
        configs.append(DataConfig(source=source, image=ImageConfig(size=8)))
    loaders = [config.build(batch=COUNT, seed=1, stop=COUNT) for config in configs]
    (good,), (bad,) = map(list, loaders)
    shown = dict(zip(numbers(good.batch), numbers(bad.batch), strict=True))
    changed = {a: b for a, b in shown.items() if a != b}
    assert changed.keys() == {5, 6, 30}
    ids = dict(zip(numbers(bad.batch), bad.batch.ids.tolist(), strict=True))
    assert len(ids) == COUNT - 3  # ids tell what is really shown
    log = loaders[1].log
    assert len(log) == 3
    assert "is shown instead" in log.report()
    if kind == "parquet":
        assert changed == {5: 7, 6: 7, 30: 31}
        assert "image 5: not an image in a known format" in log.report()
    else:
        assert "000030.png" in log.report()


def test_too_many_faults_stop_with_names(tmp_path):
    files = (write_shards(tmp_path / "data", "parquet", [20], broken=(1, 3, 5, 7)),)
    source, image = Parquet(files=files), ImageConfig(size=8)
    for workers in (0, 1):
        config = DataConfig(
            source=source, image=image, workers=workers, faults=FaultConfig(limit=3, named=2)
        )
        with pytest.raises(UserError) as error:
            list(config.build(batch=20, seed=0, stop=20))
        message = str(error.value)
        assert message.startswith("4 faults in the data: image ")
        assert "and 2 more; the limit is 3." in message
        assert "Traceback" not in message


def test_a_column_without_images_stops(tmp_path):
    files = (write_shards(tmp_path / "data", "parquet", [40]),)
    config = DataConfig(source=Parquet(files=files), columns=Columns(image="caption"))
    with pytest.raises(UserError, match="images in a row cannot be used"):
        next(iter(config.build(batch=4, seed=0)))


def test_empty_and_broken_files_are_left_out_and_told(tmp_path):
    glob = write_shards(tmp_path / "data", "parquet", [0, 10, 10, 0])
    broken = tmp_path / "data" / "shard-002.parquet"
    broken.write_bytes(broken.read_bytes()[:200])
    loader = DataConfig(source=Parquet(files=(glob,)), image=ImageConfig(size=8)).build(
        batch=10, seed=0
    )
    assert sorted(numbers(next(iter(loader)).batch)) == list(range(10))
    assert len(loader.log) == 3
    assert "shard-000.parquet: no rows" in loader.log.report()
    assert "shard-002.parquet: ArrowInvalid" in loader.log.report()


def test_a_batch_smaller_than_the_processes(config):
    with pytest.raises(UserError, match="no row for each of 3"):
        next(iter(config.build(batch=2, seed=0, rank=0, world=3)))
