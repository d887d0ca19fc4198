"""Resizing is PIL's; what is left out is averaged; each line says what is done."""

import pytest
import torch
from metrics.shared import through_pil
from PIL import Image
from torch.nn import functional as F

from stillhouse.metrics.preprocessing import (
    CLIP,
    IMAGENET,
    Preprocessing,
    centre_square,
    check_images,
    resize,
)

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def pictures(height, width, count=2):
    """Noise over a gradient: both small and large structures."""
    noise = torch.randint(0, 256, (count, 3, height, width), generator=torch.manual_seed(0))
    ramp = torch.linspace(0, 255, width).expand(count, 3, height, width)
    return ((noise + ramp) / 2).to(torch.uint8)


def as_pil(images, size, how):
    return through_pil(images, lambda image: image.resize((size, size), FILTERS[how])).float()


@pytest.mark.parametrize("how", FILTERS)
@pytest.mark.parametrize(
    ("height", "width", "size"), [(256, 256, 32), (32, 32, 128), (97, 64, 224), (300, 500, 128)]
)
def test_resize_is_pils(height, width, size, how):
    images = pictures(height, width)
    ours, theirs = resize(images, size, how), as_pil(images, size, how)
    assert (ours - theirs).abs().max() <= 2
    assert (ours - theirs).abs().mean() < 0.1  # sums that fall between two levels


@pytest.mark.parametrize("how", FILTERS)
def test_without_antialias_it_would_be_another_image(how):
    """The bug that FID is notorious for: stripes that should become grey stay stripes."""
    stripes = (torch.arange(256) % 3 == 0).mul(255).to(torch.uint8).expand(1, 3, 256, 256)
    careless = F.interpolate(stripes.float(), size=(32, 32), mode=how)
    ours = resize(stripes, 32, how)
    assert (careless - as_pil(stripes, 32, how)).abs().max() > 50
    assert (ours - as_pil(stripes, 32, how)).abs().max() <= 2
    assert ours[..., 4:-4].std() < 2
    assert careless.std() > 50


def test_the_size_itself_is_left_alone():
    images = pictures(32, 32)
    assert torch.equal(resize(images, 32, "bicubic"), images.float())


def test_overshoot_is_clipped():
    """Bicubic goes beyond black and white at an edge."""
    edge = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    edge[..., 8:] = 255
    resized = resize(edge, 128, "bicubic")
    assert (resized.min(), resized.max()) == (0, 255)


@pytest.mark.parametrize(("height", "width"), [(5, 9), (9, 5), (8, 5), (5, 5)])
def test_centre_square(height, width):
    images = pictures(height, width)
    square = centre_square(images)
    assert square.shape[-2:] == (5, 5)
    top, left = (height - 5) // 2, (width - 5) // 2
    assert torch.equal(square, images[..., top : top + 5, left : left + 5])


def test_whole_images_are_squeezed_and_crops_are_not():
    wide = pictures(32, 64)
    whole = Preprocessing(32, "bicubic", (0, 0, 0), (1, 1, 1))(wide) * 255
    crop = Preprocessing(32, "bicubic", (0, 0, 0), (1, 1, 1), crop=True)(wide) * 255
    assert (whole - as_pil(wide, 32, "bicubic")).abs().max() <= 2.01
    torch.testing.assert_close(crop, wide[..., 16:48].float())


def test_mean_and_std():
    colour = torch.tensor([124, 116, 104], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    pixels = Preprocessing(8, "bilinear", *IMAGENET)(colour)
    wanted = [(v / 255 - m) / s for v, m, s in zip((124, 116, 104), *IMAGENET, strict=True)]
    torch.testing.assert_close(pixels[0, :, 3, 3], torch.tensor(wanted))
    assert pixels.abs().max() < 0.02  # ImageNet's mean colour


def test_the_line_says_all_of_it():
    assert str(Preprocessing(336, "bicubic", *CLIP, crop=True)) == (
        "centre square to 336x336 px, bicubic with antialias, rounded to 8 bits; (x / 255 - mean) "
        "/ std, mean 0.48145466 0.4578275 0.40821073, std 0.26862954 0.26130258 0.27577711"
    )
    lines = {
        str(Preprocessing(size, how, *scale, crop=crop))
        for size in (32, 64)
        for how in FILTERS
        for scale in (IMAGENET, CLIP)
        for crop in (True, False)
    }
    assert len(lines) == 16


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(3, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 1, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 8, 8, 3, dtype=torch.uint8),
        torch.zeros(0, 3, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 3, 0, 8, dtype=torch.uint8),
    ],
    ids=lambda images: str(list(images.shape)),
)
def test_other_shapes_are_refused(images):
    with pytest.raises(ValueError, match=r"\[batch, 3, height, width\], not \["):
        check_images(images)


def test_other_types_are_refused():
    with pytest.raises(ValueError, match=r"uint8, 0 to 255, not torch\.float32"):
        check_images(torch.zeros(1, 3, 8, 8))
