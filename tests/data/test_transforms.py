"""Pixels end up where the layout says they come from."""

import io

import numpy as np
import pytest
import torch
from data.pictures import png
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stillhouse.data import CentreCrop, Frame, ImageConfig, RandomCrop, Squash, source_points
from stillhouse.data.faults import Corrupt
from stillhouse.data.transforms import decode, to_float

CROPS = [Squash(), CentreCrop(), RandomCrop(), RandomCrop(zoom=1.5)]


def coordinates(height, width, step=1):
    """An image whose red says x and whose green says y."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * step, y * step, 0 * x], -1).astype(np.uint8)


def crop_and_points(image, config, key, seed=0):
    pixels, layout = config.apply(Image.fromarray(image), key, seed)
    size = config.size
    points = torch.cartesian_prod(torch.arange(size), torch.arange(size))
    source = source_points(Frame.of([layout]), points[None])[0]
    seen = pixels[[1, 0]].reshape(2, -1).T.astype(float)
    return seen, source.numpy(), layout


@settings(deadline=None, max_examples=60)
@given(
    height=st.integers(8, 40),
    width=st.integers(8, 40),
    crop=st.sampled_from([CentreCrop(), RandomCrop()]),
    key=st.integers(0, 2**50),
)
def test_source_coordinates_are_exact_without_resizing(height, width, crop, key):
    config = ImageConfig(size=min(height, width), crop=crop, flip=True)
    seen, source, layout = crop_and_points(coordinates(height, width), config, key)
    assert np.array_equal(seen, source)
    assert layout.source == layout.resized == (height, width)


@pytest.mark.parametrize("crop", CROPS, ids=repr)
@pytest.mark.parametrize("shape", [(64, 64), (64, 96), (100, 60)])
def test_source_coordinates_survive_resizing(crop, shape):
    config = ImageConfig(size=16, crop=crop, flip=True, filter="box")
    for key in range(8):
        seen, source, _ = crop_and_points(coordinates(*shape, step=2), config, key)
        # box edges need not fall on pixel edges: a pixel of the source, in steps of two
        assert np.abs(seen / 2 - source).max() < 1.0


def test_halving_is_exact():
    config = ImageConfig(size=16, crop=Squash(), flip=True, filter="box")
    seen, source, _ = crop_and_points(coordinates(32, 32, step=2), config, key=1)
    assert np.array_equal(seen, 2 * source)


def test_both_flips_and_many_places_occur_and_repeat():
    config = ImageConfig(size=8, crop=RandomCrop(), flip=True)
    image = Image.fromarray(coordinates(8, 24))
    layouts = [config.apply(image, key, seed=0)[1] for key in range(400)]
    assert {layout.flipped for layout in layouts} == {True, False}
    assert {layout.crop[1] for layout in layouts} == set(range(17))
    assert layouts == [config.apply(image, key, seed=0)[1] for key in range(400)]
    assert layouts != [config.apply(image, key, seed=1)[1] for key in range(400)]


def test_images_of_the_right_size_stay_lossless():
    array = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    pixels, _ = ImageConfig(size=32).apply(decode(png(array), "rgb"), 0, 0)
    assert np.array_equal(pixels, array.transpose(2, 0, 1))


def test_floats_span_minus_one_to_one():
    out = to_float(torch.tensor([0, 255], dtype=torch.uint8))
    assert out.dtype == torch.float32
    assert out.tolist() == [-1.0, 1.0]


def test_grey():
    array = np.full((4, 4), 77, np.uint8)
    config = ImageConfig(size=4, mode="grey")
    pixels, _ = config.apply(decode(png(array), "grey"), 0, 0)
    assert pixels.shape == config.shape == (1, 4, 4)
    assert (pixels == 77).all()


def test_transparency_is_laid_on_white():
    array = np.zeros((4, 4, 4), np.uint8)
    assert np.asarray(decode(png(array), "rgb")).min() == 255


def test_16_bits_are_scaled_not_clipped():
    array = np.full((4, 4), 0x4000, np.uint16)
    assert np.asarray(decode(png(array), "grey")).tolist() == [[0x40] * 4] * 4


def test_cameras_held_sideways():
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right to see it upright
    Image.fromarray(coordinates(4, 8)).save(buffer, "png", exif=exif)
    assert decode(buffer.getvalue(), "rgb").size == (4, 8)


@pytest.mark.parametrize("cut", [0, 5, 30, -60])
def test_damage_is_one_kind_of_error(cut):
    with pytest.raises(Corrupt):
        decode(png(coordinates(32, 32))[:cut], "rgb")


@pytest.mark.parametrize("format", ["png", "jpeg", "webp", "gif", "bmp", "tiff", "ppm"])
def test_common_formats_are_read(format):
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4), "white").save(buffer, format)
    assert decode(buffer.getvalue(), "rgb").size == (6, 4)


def test_formats_that_run_interpreters_are_not():
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4), "white").save(buffer, "eps")
    with pytest.raises(Corrupt, match="not an image in a known format"):
        decode(buffer.getvalue(), "rgb")
