"""Detectors: real weights where they are here, small ones through the same door elsewhere."""

import hashlib
from pathlib import Path

import pytest
import torch
from metrics.shared import weights_folder
from metrics.tiny import pictures, write_models
from pydantic import TypeAdapter, ValidationError

from stillhouse.errors import UserError
from stillhouse.metrics.detectors import (
    ClipConfig,
    DetectorConfig,
    Dinov2Config,
    InceptionConfig,
    MobileNetV2Config,
    ResNet56Config,
)
from stillhouse.metrics.networks import FOLDER


@pytest.fixture(scope="module", autouse=True)
def _weights():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(Path(__file__).parents[3] / "shared" / "weights"))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


KINDS = ("mobilenet-v2", "resnet56-cifar10", "dinov2", "clip")


@pytest.fixture(scope="module")
def build(folders):
    def make(kind):
        if kind in folders:
            return config({"kind": kind, "model": str(folders[kind])}).build("cpu")
        weights_folder()
        return config({"kind": kind}).build("cpu")

    return make


def config(content):
    return TypeAdapter(DetectorConfig).validate_python(content)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_detector_sees_does_not_depend_on_the_batch(build, kind):
    detector, images = build(kind), pictures()
    whole = detector(images)
    assert whole.features.shape == (8, detector.dims)
    assert whole.features.dtype == torch.float32
    assert whole.features.std(0).mean() > 1e-4  # images are told apart
    for size in (1, 3):
        parts = [detector(batch) for batch in images.split(size)]
        features = torch.cat([part.features for part in parts])
        torch.testing.assert_close(features, whole.features, rtol=1e-5, atol=1e-5)
        if whole.logits is not None:
            logits = torch.cat([part.logits for part in parts])
            torch.testing.assert_close(logits, whole.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_it_is(build, kind):
    name, dims, size, classes = {
        "mobilenet-v2": ("MobileNetV2", 1280, 128, None),
        "resnet56-cifar10": ("ResNet56", 64, 32, 10),
        "dinov2": ("DINOv2 (32-d)", 32, 224, None),
        "clip": ("CLIP (16-d, 48 px)", 16, 48, None),
    }[kind]
    detector = build(kind)
    assert (detector.name, detector.dims) == (name, dims)
    assert f" to {size}x{size} px, " in detector.preprocessing
    assert "\n" not in detector.preprocessing
    logits = detector(pictures(1)).logits
    assert (logits is None) if classes is None else (logits.shape == (1, classes))


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_around_changes_nothing(build, kind):
    """Neither gradients nor a training's autocast reach the features."""
    detector, images = build(kind), pictures(2)
    alone = detector(images).features
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        inside = detector(images).features
    assert torch.equal(alone, inside)
    assert not inside.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_other_images_are_refused(build, kind):
    detector = build(kind)
    with pytest.raises(ValueError, match="uint8"):
        detector(pictures().float())
    with pytest.raises(ValueError, match=r"not \[8, 1, 40, 56\]"):
        detector(pictures()[:, :1])
    with pytest.raises(ValueError, match=r"not \[3, 40, 56\]"):
        detector(pictures()[0])


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("mobilenet-v2", "mobilenet_v2.safetensors"),
        ("resnet56-cifar10", "resnet56_cifar10.safetensors"),
        ("dinov2", "model.safetensors"),
        ("clip", "model.safetensors"),
    ],
)
def test_the_digest_is_that_of_the_weights(build, folders, kind, file):
    path = folders.get(kind, weights_folder()) / file
    assert build(kind).digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_configs_are_told_apart_by_kind():
    kinds = (InceptionConfig, Dinov2Config, ClipConfig, MobileNetV2Config, ResNet56Config)
    for kind in kinds:
        assert config(kind().model_dump()) == kind()
    with pytest.raises(ValidationError):
        config({"kind": "inception", "model": "x"})
    with pytest.raises(ValidationError):
        config({"kind": "vgg"})


@pytest.mark.parametrize("kind", KINDS[:2])
def test_without_weights_it_says_what_to_do(kind, monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER)
    with pytest.raises(UserError, match=r"--detector\.weights.*STILLHOUSE_WEIGHTS"):
        config({"kind": kind}).build("cpu")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(UserError, match="no weights at"):
        config({"kind": kind}).build("cpu")
    weights_folder()
    other = weights_folder() / "squeezenet1_1.safetensors"
    with pytest.raises(UserError, match="does not hold the weights of"):
        config({"kind": kind, "weights": str(other)}).build("cpu")
