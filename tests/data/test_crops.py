"""What is told of a crop leads back to where its pixels come from."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import png, write_shards, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from stillhouse.data import (
    CentreCrop,
    Columns,
    ControlConfig,
    DataConfig,
    Frame,
    GlobalCrop,
    ImageConfig,
    Layout,
    LocalCrop,
    Parquet,
    RandomCrop,
    Squash,
    Style,
    Tars,
    numbered_captions,
    source_points,
)
from stillhouse.data.crops import REPORTS
from stillhouse.errors import UserError

SHARED = Path(__file__).parents[3] / "shared" / "data"
EVERYTHING = ControlConfig(composition=tuple(REPORTS))
CROPS = {
    Squash(): 1.0,
    CentreCrop(): 1.0,
    RandomCrop(): 1.0,
    RandomCrop(zoom=1.5): 1.5,
    GlobalCrop(): 1.0,
    LocalCrop(): 2.0,
    LocalCrop(scale=3): 3.0,
}  # with how much larger than need be the image is made
ROOMY = [RandomCrop(zoom=1.5), GlobalCrop(), LocalCrop()]


def coordinates(size):
    """An image whose red is twice x and whose green is twice y: means of blocks are whole."""
    y, x = np.mgrid[: size[0], : size[1]]
    return Image.fromarray(np.stack([2 * x, 2 * y, 0 * x], -1).astype(np.uint8))


def told(layout) -> Frame:
    """The frame rebuilt from the reported numbers alone."""
    values = dict(zip(REPORTS, EVERYTHING.values(layout), strict=True))

    def pair(*names):
        return torch.tensor([[int(values[name]) for name in names]])

    assert values["aspect"] == values["width"] / values["height"]
    return Frame(
        pair("height", "width"),
        pair("resized_height", "resized_width"),
        pair("crop_top", "crop_left"),
        torch.tensor([values["flip"] == 1]),
    )


def leads_back(pixels, layout) -> bool:
    """Whether every pixel comes from where the metadata says."""
    points = torch.cartesian_prod(*(torch.arange(side) for side in pixels.shape[1:]))
    source = source_points(told(layout), points[None])[0]
    seen = pixels[[1, 0]].reshape(2, -1).T.astype(float)
    return np.array_equal(seen, 2 * source.numpy())


@st.composite
def cases(draw):
    """A crop of a known shape from an image that is a whole number of times too large."""
    crop, zoom = draw(st.sampled_from(list(CROPS.items())))
    size = draw(st.tuples(st.integers(2, 8), st.integers(2, 8)))
    resized = [round(side * zoom) for side in size]
    if not isinstance(crop, Squash):
        resized[draw(st.integers(0, 1))] += draw(st.integers(0, 9))
    # Squeezing may differ between the sides; all others keep the aspect ratio.
    down = draw(st.integers(1, 3))
    across = draw(st.integers(1, 3)) if isinstance(crop, Squash) else down
    return crop, size, (resized[0], resized[1]), (down, across)


@settings(deadline=None, max_examples=200)
@given(case=cases(), key=st.integers(0, 2**50))
def test_source_coordinates_are_rebuilt_from_what_is_told(case, key):
    crop, size, resized, times = case
    source = (resized[0] * times[0], resized[1] * times[1])
    config = ImageConfig(crop=crop, flip=True, filter="box")
    pixels, layout = config.apply(coordinates(source), key, 0, size)
    assert pixels.shape == (3, *size)
    assert (layout.source, layout.resized) == (source, resized)
    assert leads_back(pixels, layout)


@pytest.mark.parametrize("crop", ROOMY, ids=repr)
def test_a_flip_after_the_crop_would_be_noticed(crop):
    """The mistake of public code: the place of the crop is noted, then the crop is mirrored."""
    source, noticed = (12, 40), 0
    plain, config = (ImageConfig(size=6, crop=crop, flip=flip) for flip in (False, True))
    for key in range(40):
        upright, layout = plain.apply(coordinates(source), key, 0)
        right, told_flip = config.apply(coordinates(source), key, 0)
        assert layout.crop == told_flip.crop
        wrong = upright[..., ::-1] if told_flip.flipped else upright
        middle = 2 * layout.crop[1] == layout.resized[1] - 6  # where the order makes no difference
        if layout.resized == source:
            assert leads_back(right, told_flip)
            assert leads_back(wrong, told_flip) == (middle or not told_flip.flipped)
            noticed += not leads_back(wrong, told_flip)
        else:  # filtered pixels are not exact, but whether the two orders agree is
            noticed += not np.array_equal(wrong, right)
    assert noticed > 5


def test_the_two_ways_of_pretraining_see_the_whole_and_a_part():
    image = coordinates((48, 96))
    config = ImageConfig(size=12)
    seen = {}
    for crop in (GlobalCrop(), LocalCrop(scale=4)):
        how = config.model_copy(update={"crop": crop})
        layouts = [how.apply(image, key, 0)[1] for key in range(300)]
        assert {layout.resized for layout in layouts} == {
            (12, 24) if crop.kind == "global" else (48, 96)
        }
        seen[crop.kind] = {layout.crop for layout in layouts}
    assert seen["global"] == {(0, left) for left in range(13)}
    tops, lefts = zip(*seen["local"], strict=True)
    assert (min(tops), max(tops)) == (0, 36)
    assert max(lefts) > 80


def test_random_places_are_those_of_earlier_versions():
    """A run that was begun with an earlier version goes on with the same images."""
    config = ImageConfig(size=8, crop=RandomCrop(zoom=1.5), flip=True)
    layouts = [config.apply(Image.new("RGB", (40, 24)), key, 0)[1] for key in range(6)]
    places = [(0, 4), (3, 7), (4, 3), (2, 3), (3, 6), (2, 12)]
    assert [layout.crop for layout in layouts] == places
    assert [layout.flipped for layout in layouts] == [True] * 4 + [False, True]


def test_an_uncropped_image_tells_nothing_but_its_size():
    names = {"composition": ("flip", "crop_top", "crop_left", "aspect"), "detail": ("height",)}
    values = ControlConfig.model_validate(names).values(Layout.whole((64, 96)), [2.0])
    assert values == (0, 0, 0, 1.5, 2, 64)


def test_a_number_is_told_once():
    with pytest.raises(ValidationError, match="flip is named twice"):
        ControlConfig(composition=("flip", "aspect"), detail=("flip",))


# ---------------------------------------------------------------- in batches


CONTROL = ControlConfig(
    composition=("flip", "crop_top", "crop_left"), detail=("height", "width", "aspect")
)
STYLE = Style(column="label", values=tuple("edcba"))


@pytest.fixture
def config(tmp_path):
    files = (write_shards(tmp_path / "data", "parquet", [9, 8]),)
    return DataConfig(
        source=Parquet(files=files),
        columns=Columns(text="caption"),
        image=ImageConfig(size=8, crop=RandomCrop(zoom=1.5), flip=True),
    )


def with_control(config, **columns):
    columns = config.columns.model_copy(update={"styles": (STYLE,), **columns})
    return config.model_copy(update={"control": CONTROL, "columns": columns})


def take(config, steps, **options):
    loader = iter(config.build(seed=7, **options))
    return [next(loader) for _ in range(steps)]


def test_nothing_is_told_unless_asked_for(config):
    (item,) = take(config, 1, batch=8)
    assert item.batch.condition is None
    (labelled,) = take(config.model_copy(update={"columns": Columns(label="label")}), 1, batch=8)
    assert labelled.batch.condition.control is None


@pytest.mark.parametrize("streaming", [False, True])
def test_control_is_composition_then_styles_then_detail(config, streaming):
    source = config.source.model_copy(update={"streaming": streaming})
    config = with_control(config.model_copy(update={"source": source}), label="label")
    (item,) = take(config, 1, batch=16)
    control, frame = item.batch.condition.control, item.frame
    assert control.dtype == torch.float32
    assert torch.equal(control[:, 0], frame.flipped.float())
    assert torch.equal(control[:, 1:3], frame.crop.float())
    # The styles are listed in another order than the labels are numbered.
    assert torch.equal(control[:, 3], 4.0 - item.batch.condition.label)
    assert torch.equal(control[:, 4:6], frame.source.float())
    assert torch.equal(control[:, 6], torch.ones(16))
    assert len({*control[:, 0].tolist()}) == 2


def test_control_belongs_to_the_image_of_the_run(config):
    config = with_control(config)

    def by_key(items):
        return {
            int(key): row
            for item in items
            for key, row in zip(item.batch.key, item.batch.condition.control, strict=True)
        }

    whole = by_key(take(config, 6, batch=6))
    split = by_key(take(config.model_copy(update={"workers": 2}), 2, batch=6))
    state = take(config, 2, batch=6)[-1].state
    for rank in range(3):
        split |= by_key(take(config, 4, batch=6, rank=rank, world=3, resume=[state]))
    assert whole.keys() == split.keys()
    assert all(torch.equal(whole[key], split[key]) for key in whole)


# ---------------------------------------------------------------- styles


def write_styles(path, values, feature=None):
    import datasets

    features = {"image": datasets.Image(), "style": feature or datasets.Value("string")}
    image = [{"bytes": png(np.zeros((8, 8, 3), np.uint8)), "path": None}] * len(values)
    data = datasets.Dataset.from_dict(
        {"image": image, "style": values}, features=datasets.Features(features)
    )
    data.to_parquet(path)
    return Parquet(files=(str(path),))


def styled(source, *values):
    columns = Columns(styles=(Style(column="style", values=values),))
    return DataConfig(source=source, columns=columns, image=ImageConfig(size=8))


def test_a_row_without_a_style_says_nothing(tmp_path):
    import datasets

    text = write_styles(tmp_path / "a.parquet", ["b", None, "a", "b"])
    label = datasets.ClassLabel(names=["a", "b"])
    coded = write_styles(tmp_path / "b.parquet", [1, None, 0, -1], label)
    for source, expected in ((text, [0, None, 1, 0]), (coded, [0, None, 1, None])):
        (item,) = take(styled(source, "b", "a"), 1, batch=4)
        found = dict(zip(item.batch.ids.tolist(), item.batch.condition.control[:, 0], strict=True))
        assert [None if found[i].isnan() else int(found[i]) for i in range(4)] == expected


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("streaming", [False, True])
def test_an_unknown_style_is_refused(tmp_path, streaming, workers):
    source = write_styles(tmp_path / "a.parquet", ["b", "a", "z"])
    config = styled(source.model_copy(update={"streaming": streaming}), "a", "b")
    with pytest.raises(UserError, match=r"'style' .*z.*--data\.columns\.styles") as error:
        take(config.model_copy(update={"workers": workers}), 1, batch=3)
    assert "Traceback" not in str(error.value)


def test_styles_without_values_are_told_what_the_data_has(tmp_path):
    source = write_styles(tmp_path / "a.parquet", ["b", "a", None, "a"])
    with pytest.raises(UserError) as error:
        styled(source).build(batch=2, seed=0)
    said = str(error.value).split("--data.columns.styles ")[1].strip("'")
    assert json.loads(said) == [{"column": "style", "values": ["a", "b"]}]
    with pytest.raises(UserError, match="without its values"):
        styled(source.model_copy(update={"streaming": True})).build(batch=2, seed=0)
    with pytest.raises(UserError, match=r"no column 'style' .* Name it as --data\.columns\.styles"):
        styled(Parquet(files=(write_shards(tmp_path / "data", "parquet", [3]),)), "a").build(
            batch=2, seed=0
        )


def test_a_column_of_many_values_is_not_listed_whole(tmp_path):
    source = write_styles(tmp_path / "a.parquet", [f"caption {i:03d}" for i in range(100)])
    with pytest.raises(UserError, match="and 87 more") as error:
        styled(source, "caption 000").build(batch=2, seed=0)
    assert len(str(error.value)) < 600


# ---------------------------------------------------------------- captions


def test_captions_are_found_by_the_ids_of_a_batch(tmp_path):
    files = (write_shards(tmp_path / "data", "parquet", [9, 8], broken=(3,)),)
    config = DataConfig(
        source=Parquet(files=files), columns=Columns(text="caption"), image=ImageConfig(size=8)
    )
    loader = config.build(batch=17, seed=0)
    captions = numbered_captions(loader)
    assert captions.texts == tuple(sorted(f"picture {i}" for i in range(17)))
    item = next(iter(loader))
    places = captions.of(item.batch.ids)
    assert places.dtype == torch.int64
    assert tuple(captions.texts[place] for place in places) == item.text
    assert "picture 3" not in item.text  # damaged: its neighbour is shown, with its own caption


def test_equal_captions_are_one(tmp_path):
    import datasets

    image = [{"bytes": png(np.zeros((8, 8, 3), np.uint8)), "path": None}] * 4
    texts = ["cat", None, "a dog", "cat"]
    datasets.Dataset.from_dict({"image": image, "text": texts}).to_parquet(tmp_path / "a.parquet")
    source = Parquet(files=(str(tmp_path / "a.parquet"),))
    loader = DataConfig(source=source, columns=Columns(text="text")).build(batch=2, seed=0)
    captions = numbered_captions(loader)
    assert captions.texts == ("", "a dog", "cat")
    assert captions.of_row.tolist() == [2, 0, 1, 2]


def test_captions_of_a_stream_cannot_be_listed(tmp_path, config):
    write_tar(tmp_path / "a.tar", 0, 4)
    tars = DataConfig(
        source=Tars(files=(str(tmp_path / "a.tar"),)), columns=Columns(image="png", text="txt")
    )
    with pytest.raises(UserError, match="indexed source"):
        numbered_captions(tars.build(batch=2, seed=0))
    silent = config.model_copy(update={"columns": Columns()})
    with pytest.raises(UserError, match=r"--data\.columns\.text"):
        numbered_captions(silent.build(batch=2, seed=0))


def test_the_emoji_with_their_styles():
    if not (SHARED / "emoji").is_dir():
        pytest.skip(f"{SHARED / 'emoji'} is not on this machine")
    styles = (Style(column="style", values=("fluent-3d", "noto", "twemoji")),)
    config = DataConfig(
        source=Parquet(files=(str(SHARED / "emoji" / "train.parquet"),)),
        columns=Columns(text="caption", styles=styles),
        image=ImageConfig(size=64),
    )
    loader = config.build(batch=64, seed=0)
    captions = numbered_captions(loader)
    assert (len(captions.texts), len(captions.of_row)) == (1906, 5666)
    item = next(iter(loader))
    assert set(item.batch.condition.control.flatten().tolist()) == {0.0, 1.0, 2.0}
    assert tuple(captions.texts[i] for i in captions.of(item.batch.ids)) == item.text
