"""The networks are the published ones, to the number; weights fit exactly or not at all."""

import numpy as np
import pytest
import torch
from metrics.parity import run_reference
from metrics.shared import cifar, weights_folder
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from stillhouse.errors import UserError
from stillhouse.metrics.networks import (
    FOLDER,
    MobileNetV2,
    ResNet56,
    SqueezeNet,
    find_weights,
    fold_norms,
    load_weights,
    ready,
    sha256,
)
from stillhouse.metrics.preprocessing import IMAGENET, Preprocessing

FILES = {
    MobileNetV2: "mobilenet_v2.safetensors",
    SqueezeNet: "squeezenet1_1.safetensors",
    ResNet56: "resnet56_cifar10.safetensors",
}
KINDS = pytest.mark.parametrize("kind", FILES, ids=lambda kind: kind.__name__)


def loaded(kind):
    network = kind()
    load_weights(network, weights_folder() / FILES[kind], unused=("classifier.",))
    return network.eval().requires_grad_(False)


def first(output):
    return output if isinstance(output, torch.Tensor) else output[0]


@KINDS
def test_published_weights_fit(kind):
    network = kind()
    path = weights_folder() / FILES[kind]
    assert load_weights(network, path, unused=("classifier.",)) == sha256(path.read_bytes())
    given = {n: t for n, t in load_file(path).items() if not n.startswith("classifier.")}
    own = {n: t for n, t in network.state_dict().items() if not n.endswith("batches_tracked")}
    assert own.keys() == given.keys()
    assert all(torch.equal(own[name], given[name].float()) for name in own)


@KINDS
def test_folded_norms_change_nothing(kind):
    plain, images = loaded(kind), torch.randn(2, 3, 64, 64, generator=torch.manual_seed(0))
    quick = ready(loaded(kind), "cpu")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in quick.modules())
    torch.testing.assert_close(first(quick(images)), first(plain(images)), rtol=1e-4, atol=2e-5)


def test_a_norm_that_is_not_folded_would_show():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    network[1].running_mean.uniform_(-1, 1)
    network[1].running_var.uniform_(0.1, 4)
    images = torch.randn(2, 3, 8, 8)
    conv, wanted = network[0](images), network(images)
    torch.testing.assert_close(fold_norms(network)(images), wanted)
    assert (conv - wanted).abs().max() > 0.1


TORCHVISION = """
import torchvision
weights = {n: torch.from_numpy(a).float() for n, a in given.items() if n != "images"}
images = torch.from_numpy(given["images"])
model = torchvision.models.KIND(weights=None).eval()
missing, unexpected = model.load_state_dict(weights, strict=False)
assert not unexpected
found["missing"] = np.array(sorted(n for n in missing if not n.endswith("batches_tracked")))
with torch.no_grad():
    for number, layer in enumerate(model.features):
        images = layer(images)
        found[str(number)] = images.numpy()
"""


def torchvisions(kind, name, images):
    state = {n: t.numpy() for n, t in load_file(weights_folder() / FILES[kind]).items()}
    return run_reference(TORCHVISION.replace("KIND", name), images=images.numpy(), **state)


@pytest.mark.slow
def test_mobilenet_is_torchvisions():
    images = torch.randn(2, 3, 96, 128, generator=torch.manual_seed(1))
    theirs = torchvisions(MobileNetV2, "mobilenet_v2", images)
    assert list(theirs["missing"]) == ["classifier.1.bias", "classifier.1.weight"]
    wanted = torch.from_numpy(theirs["18"]).mean((2, 3))
    torch.testing.assert_close(loaded(MobileNetV2)(images), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_squeezenet_is_torchvisions():
    images = torch.randn(2, 3, 65, 100, generator=torch.manual_seed(1))
    theirs = torchvisions(SqueezeNet, "squeezenet1_1", images)
    assert len(theirs["missing"]) == 0
    for ours, layer in zip(loaded(SqueezeNet)(images), SqueezeNet.ends, strict=True):
        torch.testing.assert_close(ours, torch.from_numpy(theirs[str(layer)]), rtol=1e-4, atol=1e-4)


def test_squeezenet_says_how_small_an_image_may_be():
    network, least = SqueezeNet(), SqueezeNet.smallest
    assert [stage.shape[1] for stage in network(torch.zeros(1, 3, least, least))] == [
        *SqueezeNet.widths
    ]
    with pytest.raises(RuntimeError):
        network(torch.zeros(1, 3, least - 1, least - 1))


def test_option_a_shortcuts():
    """With the convolutions silenced, a block is its shortcut: every other pixel, zeros around."""
    block = ResNet56().eval().layer2[0]
    nn.init.zeros_(block.conv2.weight)
    images = torch.rand(1, 16, 8, 8)
    found = block(images)
    assert found.shape == (1, 32, 4, 4)
    assert torch.equal(found[:, 8:24], images[:, :, ::2, ::2])
    assert not found[:, :8].any()
    assert not found[:, 24:].any()


@pytest.mark.slow
def test_resnet56_is_the_classifier_it_is_said_to_be():
    """93.1% of the 5,000 test images here; 1,000 of them tell 90% from a wrong network."""
    images, labels = cifar("test", 1000)
    network = ready(loaded(ResNet56), "cpu")
    prepare = Preprocessing(32, "bilinear", *IMAGENET)
    logits = torch.cat([network(prepare(batch)).logits for batch in images.split(100)])
    assert (logits.argmax(1) == labels).float().mean() > 0.92


def test_resnet56_was_trained_with_imagenets_mean_and_std():
    """Accuracy hardly tells (93.1% with CIFAR-10's own); the first norm's statistics do.

    They are those of training images: a random crop of the image with 4 black pixels around.
    """
    images, _ = cifar("test", 600)
    draw = torch.Generator().manual_seed(0)
    offsets = torch.randint(0, 9, (len(images), 2), generator=draw).tolist()
    padded = F.pad(images, (4, 4, 4, 4))
    crops = torch.stack(
        [p[:, i : i + 32, j : j + 32] for p, (i, j) in zip(padded, offsets, strict=True)]
    )
    network = loaded(ResNet56)

    def misfit(mean, std):
        seen = network.conv1(Preprocessing(32, "bilinear", mean, std)(crops)).var((0, 2, 3))
        return float((seen / network.bn1.running_var).log().abs().mean())

    assert misfit(*IMAGENET) < 0.06
    assert misfit((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)) > 0.12
    assert misfit((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)) > 0.12


# ---------------------------------------------------------------- weights that do not fit


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def write(path, **changes):
    state = {n: t for n, t in small().state_dict().items() if not n.endswith("batches_tracked")}
    state |= {name.replace("_", ".", 1): tensor for name, tensor in changes.items()}
    save_file({n: t for n, t in state.items() if t is not None}, path)
    return path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"1_running_mean": None, "0_bias": None}, r"2 tensors missing \(first: 0.bias\)"),
        ({"9_weight": torch.ones(2)}, r"1 tensors unexpected \(first: 9.weight\)"),
        ({"0_bias": torch.ones(5)}, r"1 tensors of another shape \(first: 0.bias\)"),
        ({"0_bias": torch.full((4,), torch.nan)}, r"1 tensors not finite \(first: 0.bias\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, changes, reason):
    load_weights(small(), write(tmp_path / "right.safetensors"))
    with pytest.raises(UserError, match=f"does not hold the weights of Sequential: {reason}"):
        load_weights(small(), write(tmp_path / "wrong.safetensors", **changes))


@pytest.mark.parametrize("content", [b"", b"not weights at all", None])
def test_files_that_are_not_safetensors_are_refused(tmp_path, content):
    path = write(tmp_path / "half.safetensors")
    path.write_bytes(path.read_bytes()[:-7] if content is None else content)
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_weights(small(), path)


def test_nothing_given_says_where_weights_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(
        UserError, match=r"name the file with --detector\.weights, or name the folder"
    ):
        find_weights("", "a.safetensors", "--detector.weights")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(UserError, match=r"no weights at .*a.safetensors.*STILLHOUSE_WEIGHTS"):
        find_weights("", "a.safetensors", "--detector.weights")
    with pytest.raises(UserError, match=r"or correct --detector\.weights"):
        find_weights(str(tmp_path / "b"), "a.safetensors", "--detector.weights")
    (tmp_path / "a.safetensors").write_bytes(b"")
    assert find_weights("", "a.safetensors", "-") == tmp_path / "a.safetensors"


def test_digests_are_sha256():
    assert sha256(np.arange(0).tobytes()).startswith("sha256:e3b0c44298fc1c14")
