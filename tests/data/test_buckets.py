"""Aspect-ratio buckets: one shape per batch, nothing lost or doubled, the position is a number."""

import io
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from data.pictures import png, write_shards
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from stillhouse.data import (
    AspectBuckets,
    BucketPlan,
    Columns,
    ControlConfig,
    DataConfig,
    Folder,
    ImageConfig,
    KeySampler,
    Parquet,
    RandomCrop,
    rows_at,
)
from stillhouse.data.buckets import bucket_shapes, nearest_shape, well_filled
from stillhouse.errors import UserError

# ---------------------------------------------------------------- shapes


@settings(deadline=None, max_examples=100)
@given(sides=st.integers(1, 40), step=st.integers(1, 64), widest=st.floats(1, 6))
def test_shapes_have_one_area_and_sides_in_steps(sides, step, widest):
    side = sides * step
    shapes = bucket_shapes(side, step, widest)
    assert (side, side) in shapes
    assert {(w, h) for h, w in shapes} == {*shapes}
    assert len({min(shape) for shape in shapes}) == len(shapes) // 2 + 1
    ratios = [w / h for h, w in shapes]
    assert ratios == sorted(ratios)
    for shape in shapes:
        short, long = sorted(shape)
        assert short % step == long % step == 0
        assert short * long <= side**2 < short * (long + step)
        assert long <= widest * short


def test_every_short_side_within_the_ratio_has_a_shape():
    short = {min(shape) for shape in bucket_shapes(64, 8, 2.0)}
    assert short == {48, 56, 64}  # 40 x 96 is wider than 2
    assert bucket_shapes(64, 8, 2.0) == ((80, 48), (72, 56), (64, 64), (56, 72), (48, 80))


@settings(deadline=None, max_examples=100)
@given(
    aspects=st.lists(st.floats(0.1, 10), min_size=1, max_size=30),
    sides=st.integers(1, 12),
    widest=st.floats(1, 4),
)
def test_an_image_goes_to_the_nearest_shape(aspects, sides, widest):
    shapes = bucket_shapes(sides * 8, 8, widest)
    for aspect, place in zip(aspects, nearest_shape(np.array(aspects), shapes), strict=True):
        far = [abs(math.log(w / h) - math.log(aspect)) for h, w in shapes]
        assert far[place] <= min(far) + 1e-12


@settings(deadline=None, max_examples=100)
@given(
    aspects=st.lists(st.floats(0.2, 5), min_size=1, max_size=60),
    least=st.integers(1, 20),
)
def test_scarce_shapes_give_their_images_away(aspects, least):
    table = bucket_shapes(64, 8, 4.0)
    shapes, where = well_filled(np.array(aspects), table, least)
    filled = np.bincount(where, minlength=len(shapes))
    assert filled.sum() == len(aspects)
    assert len(shapes) == 1 or filled.min() >= least
    assert {*shapes} <= {*table}
    assert np.array_equal(where, nearest_shape(np.array(aspects), shapes))
    before = np.bincount(nearest_shape(np.array(aspects), table), minlength=len(table))
    rich = {shape for shape, count in zip(table, before, strict=True) if count >= least}
    assert rich <= {*shapes}


def test_the_square_must_be_a_shape():
    with pytest.raises(UserError, match=r"--data\.image\.size 60 is not a multiple"):
        bucket_shapes(60, 8, 2.0)


# ---------------------------------------------------------------- order


def make_plan(counts, batch, seed=0):
    rows = np.random.default_rng(seed).permutation(sum(counts))
    members = [np.sort(part) for part in np.split(rows, np.cumsum(counts)[:-1])]
    shapes = [(8 * (i + 1), 8) for i in range(len(counts))]
    return BucketPlan(shapes, members, batch, seed)


def shown(plan, start, stop, rank=0, world=1):
    """(shape, rows) of every step of a process."""
    sampler = KeySampler(plan.batch, start * plan.batch, stop * plan.batch, rank, world)
    found = []
    for keys in sampler:
        rows, shape = plan(keys)
        assert len(rows) == len(keys)
        found.append((shape, list(rows)))
    return found


plans = st.builds(
    make_plan,
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(0, 1000),
)


@settings(deadline=None, max_examples=60)
@given(plan=plans, epochs=st.integers(1, 4))
def test_no_image_is_lost_or_shown_twice_for_an_epoch(plan, epochs):
    steps = plan.first_step(epochs)
    at = {shape: bucket for bucket, shape in enumerate(plan.shapes)}
    batches = {}
    for step, (shape, rows) in enumerate(shown(plan, 0, steps)):
        bucket, number = plan.batch_at(step)
        assert at[shape] == bucket
        assert (bucket, number) not in batches
        batches[bucket, number] = rows
    for bucket, members in enumerate(plan.members):
        n = len(members)
        whole = epochs * n // plan.batch
        stream = [row for number in range(whole) for row in batches.pop((bucket, number))]
        # The stream of a bucket is one shuffled epoch after the other, but for what waits.
        assert epochs * n - len(stream) < plan.batch
        for epoch in range(epochs):
            part = stream[epoch * n : (epoch + 1) * n]
            assert len({*part}) == len(part)
            assert {*part} <= {*members.tolist()}
            assert len(part) == n or len(stream) < (epoch + 1) * n
    assert not batches


@settings(deadline=None, max_examples=30)
@given(counts=st.lists(st.integers(5, 20), min_size=1, max_size=4), batch=st.integers(2, 5))
def test_no_image_waits_for_more_than_an_epoch(counts, batch):
    """Where every bucket fills a batch, as `well_filled` sees to."""
    plan = make_plan(counts, batch)
    counted = Counter()
    for epoch in range(1, 5):
        first, last = plan.first_step(epoch - 1), plan.first_step(epoch)
        counted.update(row for _, rows in shown(plan, first, last) for row in rows)
        for members in plan.members:
            times = [counted[row] for row in members.tolist()]
            assert {*times} <= {epoch - 1, epoch}
            assert times.count(epoch - 1) < batch


@settings(deadline=None, max_examples=40)
@given(plan=plans, world=st.integers(1, 4), start=st.integers(0, 300), steps=st.integers(1, 6))
def test_any_number_of_processes_shares_the_same_batches(plan, world, start, steps):
    assume(world <= plan.batch)
    whole = shown(plan, start, start + steps)
    parts = [shown(plan, start, start + steps, rank, world) for rank in range(world)]
    assert {len(part) for part in parts} == {steps}
    for step in range(steps):
        together = [part[step] for part in parts]
        assert {shape for shape, _ in together} == {whole[step][0]}
        assert [row for _, rows in together for row in rows] == whole[step][1]


@settings(deadline=None, max_examples=30)
@given(plan=plans, start=st.integers(0, 300), cut=st.integers(0, 12))
def test_a_resume_goes_on_with_the_very_next_batch(plan, start, cut):
    again = BucketPlan(plan.shapes, plan.members, plan.batch, plan.seed)
    middle, end = start + cut, start + 12
    parts = shown(plan, start, middle) + shown(again, middle, end)
    assert parts == shown(plan, start, end)


def test_one_bucket_is_the_usual_order():
    plan = BucketPlan([(8, 8)], [np.arange(37)], 5, seed=3)
    rows = [sorted(rows) for _, rows in shown(plan, 0, 7)]
    usual = [sorted(rows_at(range(at, at + 5), 37, 3)) for at in range(0, 35, 5)]
    assert sorted(rows) == sorted(usual)


def test_shapes_are_mixed_and_epochs_differ():
    plan = make_plan([400, 400], 4)
    first, second = ([shape for shape, _ in shown(plan, at, at + 200)] for at in (0, 200))
    assert first != second
    changes = sum(a != b for a, b in pairwise(first))
    assert 70 < changes < 130  # 100 of a fair coin, four standard deviations
    assert Counter(first) == Counter(second) == dict.fromkeys(plan.shapes, 100)


def test_a_place_far_on_is_found():
    plan = make_plan([7, 3, 1], 4)
    step = 10**12
    bucket, number = plan.batch_at(step)
    epoch = next(e for e in range(step * 4 // 11 - 3, step) if plan.first_step(e + 1) > step)
    assert plan.first_step(epoch) <= step
    n = len(plan.members[bucket])
    assert epoch * n // 4 <= number < (epoch + 1) * n // 4


def test_images_of_two_batches_are_not_one():
    with pytest.raises(ValueError, match="not of one batch"):
        make_plan([20], 4)(range(2, 6))


# ---------------------------------------------------------------- with images

SIZES = [(16, 16), (24, 12), (12, 24), (30, 20), (20, 31)]


def numbered(number, size):
    array = np.zeros((*size, 3), np.uint8)
    array[..., 0] = number
    return array


def write_mixed(path, count=60, broken=()):
    """A Parquet file of images of many sizes, red by number."""
    import datasets

    sizes = [SIZES[i % len(SIZES)] for i in range(count)]
    images = [
        {"bytes": b"not an image" if i in broken else png(numbered(i, size)), "path": None}
        for i, size in enumerate(sizes)
    ]
    heights, widths = zip(*sizes, strict=True)
    features = {name: datasets.Value("int64") for name in ("height", "width")}
    rows = {"image": images, "height": heights, "width": widths}
    data = datasets.Dataset.from_dict(
        rows, features=datasets.Features(image=datasets.Image(), **features)
    )
    data.to_parquet(path)
    return Parquet(files=(str(path),))


@pytest.fixture
def config(tmp_path):
    return DataConfig(
        source=write_mixed(tmp_path / "mixed.parquet"),
        image=ImageConfig(size=16, crop=RandomCrop(), flip=True),
        control=ControlConfig(composition=("crop_top", "crop_left", "aspect")),
        buckets=AspectBuckets(step=4),
    )


def take(config, steps, **options):
    loader = iter(config.build(seed=5, **options))
    return [next(loader) for _ in range(steps)]


def facts(item):
    """What a step has shown, to be compared: key -> row, shape and pixels."""
    batch = item.batch
    return {
        int(key): (int(id), tuple(image.shape), image.numpy().tobytes(), tuple(control.tolist()))
        for key, id, image, control in zip(
            batch.key, batch.ids, batch.data, batch.condition.control, strict=True
        )
    }


def test_two_workers_read_batches_of_one_shape_each(config):
    config = config.model_copy(update={"workers": 2})
    items = take(config, 30, batch=6)  # 3 epochs of 10 whole batches
    counted = Counter(int(id) for item in items for id in item.batch.ids)
    assert counted == dict.fromkeys(range(60), 3)
    shapes = [tuple(item.batch.data.shape[2:]) for item in items]
    assert {*shapes} == {(16, 16), (20, 12), (12, 20)}
    for item, shape in zip(items, shapes, strict=True):
        assert len(item.batch) == 6
        for id, image in zip(item.batch.ids.tolist(), item.batch.data, strict=True):
            assert round(float(image[0].mean() + 1) * 127.5) == id
            height, width = SIZES[id % len(SIZES)]
            assert (width > height) == (shape[1] > shape[0])
            assert (width < height) == (shape[1] < shape[0])


def test_workers_processes_and_resumes_change_nothing(config):
    whole = [facts(item) for item in take(config, 12, batch=6)]
    head = take(config.model_copy(update={"workers": 2}), 5, batch=6)
    assert [facts(item) for item in head] == whole[:5]
    state = head[-1].state
    assert state == {"kind": "indexed", "images": 30, "rows": 60, "batch": 6}
    parts = [take(config, 7, batch=6, rank=rank, world=3, resume=[state]) for rank in range(3)]
    for step, together in enumerate(zip(*parts, strict=True)):
        joined = {key: value for item in together for key, value in facts(item).items()}
        assert joined == whole[5 + step]


def test_a_place_in_other_buckets_or_batches_means_nothing(config):
    state = take(config, 2, batch=6)[-1].state
    for other in (
        {"config": config, "batch": 12},
        {"config": config.model_copy(update={"buckets": DataConfig().buckets}), "batch": 6},
    ):
        with pytest.raises(UserError, match="other buckets or batches"):
            other.pop("config").build(seed=5, resume=[state], **other)
    usual = config.model_copy(update={"buckets": DataConfig().buckets})
    state = take(usual, 2, batch=6)[-1].state
    with pytest.raises(UserError, match="other buckets or batches"):
        config.build(seed=5, batch=6, resume=[state])


def test_sizes_may_stand_in_columns(config):
    named = config.buckets.model_copy(update={"height": "height", "width": "width"})
    by_column = take(config.model_copy(update={"buckets": named}), 10, batch=6)
    assert [facts(a) for a in by_column] == [facts(b) for b in take(config, 10, batch=6)]
    wrong = config.model_copy(update={"buckets": AspectBuckets(height="tall", width="width")})
    with pytest.raises(UserError, match="no column 'tall'; the columns are: image, height, width"):
        wrong.build(batch=6, seed=0)
    with pytest.raises(ValueError, match="both the height and the width"):
        AspectBuckets(height="height")


def test_damaged_images_are_replaced_in_the_shape_of_the_batch(tmp_path, config):
    """They go with the squares, which is what these are: the buckets stay whole batches."""
    source = write_mixed(tmp_path / "bad.parquet", broken=(0, 5))
    loader = config.model_copy(update={"source": source}).build(batch=6, seed=5, stop=60)
    seen = Counter(id for item in loader for id in item.batch.ids.tolist())
    assert set(range(60)) - {*seen} == {0, 5}
    assert seen[1] == seen[6] == 2
    assert len(loader.log) == 2


def test_sizes_are_those_of_the_upright_image(tmp_path):
    (tmp_path / "data").mkdir()
    for name, orientation in (("a", 1), ("b", 6)):
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.new("RGB", (40, 20)).save(tmp_path / "data" / f"{name}.jpg", exif=exif)
    images = Folder(path=str(tmp_path / "data")).open_indexed(Columns())
    assert images.sizes().tolist() == [[20, 40], [40, 20]]


def test_pixel_arrays_and_webp_tell_their_size(tmp_path):
    import datasets

    buffer = io.BytesIO()
    Image.new("RGB", (6, 4)).save(buffer, "webp")
    rows = {"array": [numbered(0, (4, 6))], "webp": [buffer.getvalue()], "odd": [b"?"]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "a.parquet")
    source = Parquet(files=(str(tmp_path / "a.parquet"),))
    found = {name: source.open_indexed(Columns(image=name)).sizes().tolist() for name in rows}
    assert found == {"array": [[4, 6]], "webp": [[4, 6]], "odd": [[0, 0]]}


def test_a_stream_cannot_be_sorted(tmp_path):
    files = (write_shards(tmp_path / "data", "parquet", [5]),)
    config = DataConfig(source=Parquet(files=files, streaming=True), buckets=AspectBuckets())
    with pytest.raises(UserError, match=r"streaming false, or leave --data\.buckets out"):
        config.build(batch=2, seed=0)
