"""What the README of the weights says of them, on real images."""

import io
from types import SimpleNamespace

import pytest
import torch
from metrics.shared import cifar, through_pil, weights_folder
from PIL import Image, ImageFilter

from stillhouse.metrics.detectors import (
    MobileNetV2Config,
    ResNet56Config,
)
from stillhouse.metrics.frechet import frechet_distance
from stillhouse.metrics.moments import Moments


def features(detector, images, size=100):
    return torch.cat([detector(batch).features for batch in images.split(size)])


def jpeg(quality):
    def change(image):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        return Image.open(buffer)

    return change


def noisy(images, scale):
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images / 255 + scale * noise).clamp(0, 1).mul(255).round().to(torch.uint8)


@pytest.fixture(scope="module")
def resnet():
    detector = ResNet56Config(
        weights=str(weights_folder() / "resnet56_cifar10.safetensors")
    ).build()
    images, labels = cifar("train", 2000)
    return SimpleNamespace(
        detector=detector,
        reference=Moments.of(features(detector, images)),
        images=images,
        labels=labels,
    )


def distance_of(resnet, images):
    return frechet_distance(Moments.of(features(resnet.detector, images)), resnet.reference)


@pytest.mark.slow
def test_resnets_floor(resnet):
    """Real against real: 0.038 for 10,000 of each, and it goes as 1/n + 1/m: all bias."""
    images, _ = cifar("train", 1500, start=2000)
    seen = features(resnet.detector, images)
    for count in (500, 1500):
        found = frechet_distance(Moments.of(seen[:count]), resnet.reference)
        assert found == pytest.approx(0.038 * (1 / count + 1 / 2000) / (2 / 10_000), rel=0.3)


@pytest.mark.slow
def test_resnets_distance_grows_with_what_is_wrong(resnet):
    """For 10,000 test images the README has 12.5 for noise, 25 for a blur, 2.7 for JPEG 75."""
    images, _ = cifar("test", 300)
    floor = distance_of(resnet, images)
    worse = {
        "noise": [noisy(images, scale) for scale in (0.02, 0.05, 0.1)],
        "blur": [
            through_pil(images, lambda image, r=radius: image.filter(ImageFilter.GaussianBlur(r)))
            for radius in (0.5, 1, 2)
        ],
        "jpeg": [through_pil(images, jpeg(quality)) for quality in (95, 75, 40)],
    }
    found = {name: [distance_of(resnet, row) for row in rows] for name, rows in worse.items()}
    for distances in found.values():
        assert [floor, *distances] == sorted([floor, *distances])
    assert found["noise"][1] == pytest.approx(12.5, rel=0.25)
    assert found["blur"][1] == pytest.approx(24, rel=0.25)
    assert found["jpeg"][1] == pytest.approx(2.7, abs=1.0)


@pytest.mark.slow
def test_resnet_misses_classes(resnet):
    """Five classes only: 9.1 in the README."""
    images, labels = cifar("test", 1000)
    seen = features(resnet.detector, images)
    found = [
        frechet_distance(Moments.of(seen[labels < classes]), resnet.reference)
        for classes in (10, 9, 7, 5, 2)
    ]
    assert found == sorted(found)
    assert found[3] == pytest.approx(9.1, rel=0.15)


@pytest.mark.slow
def test_mobilenets_features_tell_real_from_damaged():
    """Too few images for its Gaussian, so by the distance of means against its spread."""
    detector = MobileNetV2Config(weights=str(weights_folder() / "mobilenet_v2.safetensors")).build()
    images, _ = cifar("train", 240)
    seen = features(detector, images, 40)
    reference, other = seen[:120], seen[120:]
    spread = (reference.mean(0) - other.mean(0)).norm()
    for damaged in (noisy(images[120:], 0.1), through_pil(images[120:], jpeg(30))):
        moved = (features(detector, damaged, 40).mean(0) - reference.mean(0)).norm()
        assert moved > 1.5 * spread
