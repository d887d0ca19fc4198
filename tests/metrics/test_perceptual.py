"""LPIPS is the package's, to its documented numbers; diversity compares what belongs together."""

import math
import sys

import pytest
import torch
from metrics.parity import parity_folder, run_reference
from metrics.shared import cifar, planted, weights_folder
from safetensors.torch import load_file

from stillhouse.errors import UserError
from stillhouse.metrics.networks import FOLDER, SqueezeNet
from stillhouse.metrics.perceptual import Lpips, _pair, choose_pairs, diversity


def with_package(folder, patch, weights=None):
    """A package lpips that holds its weights and must not be imported."""
    place = folder / "lpips" / "weights" / "v0.1"
    place.mkdir(parents=True)
    (folder / "lpips" / "__init__.py").write_text("raise AssertionError('imported')")
    content = weights or (parity_folder() / "lpips/weights/v0.1/squeeze.pth").read_bytes()
    (place / "squeeze.pth").write_bytes(content)
    patch.syspath_prepend(folder)
    patch.setenv(FOLDER, str(weights_folder()))


@pytest.fixture(scope="module")
def lpips(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        with_package(tmp_path_factory.mktemp("site"), patch)
        loaded = Lpips.load()
    assert "lpips" not in sys.modules
    return loaded


def test_the_documented_example(lpips):
    """torchmetrics' documentation, net_type='squeeze': tensor([0.1024, 0.0938])."""
    draw = torch.Generator().manual_seed(42)
    a, b = (torch.rand(2, 3, 100, 100, generator=draw) * 2 - 1 for _ in range(2))
    assert [round(float(d), 4) for d in lpips(a, b)] == [0.1024, 0.0938]


def test_as_a_loss_it_has_the_slope_of_its_values(lpips):
    """Along its gradient; and a finite one where an image is flat, and hardly a unit answers."""
    generator = torch.Generator().manual_seed(0)
    a = (torch.rand(1, 3, 32, 32, generator=generator) - 0.5).requires_grad_()
    flat = torch.full((1, 3, 32, 32), -1.0)
    lpips.distance(a, flat).sum().backward()
    steepest = float(a.grad.norm())
    ends = [lpips((a + h * a.grad / steepest).detach(), flat) for h in (1e-3, -1e-3)]
    assert steepest == pytest.approx(float(ends[0] - ends[1]) / 2e-3, rel=0.005)
    black = flat.requires_grad_()
    lpips.distance(black, a.detach()).sum().backward()
    assert bool(torch.isfinite(black.grad).all())


@pytest.mark.slow
def test_it_is_the_packages(lpips):
    state = {
        n: t.numpy() for n, t in load_file(weights_folder() / "squeezenet1_1.safetensors").items()
    }
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.rand(3, 3, 40, 61, generator=draw) * 2 - 1 for _ in range(2))
    b[0] = a[0] * 0.9
    script = """
import torchvision
weights = {n: torch.from_numpy(v).float() for n, v in given.items() if n not in "ab"}
original = torchvision.models.squeezenet1_1
def squeezenet(*_, **__):
    model = original(weights=None)
    model.load_state_dict(weights)
    return model
torchvision.models.squeezenet1_1 = squeezenet
import lpips
model = lpips.LPIPS(net="squeeze", verbose=False)
with torch.no_grad():
    found["d"] = model(torch.from_numpy(given["a"]), torch.from_numpy(given["b"])).flatten().numpy()
"""
    theirs = torch.from_numpy(run_reference(script, a=a.numpy(), b=b.numpy(), **state)["d"])
    torch.testing.assert_close(lpips(a, b), theirs, rtol=1e-5, atol=1e-7)


def test_it_is_a_distance(lpips):
    images, _ = cifar("test", 8)
    a, b = images[:4], images[4:]
    assert torch.equal(lpips(a, a), torch.zeros(4))
    torch.testing.assert_close(lpips(a, b), lpips(b, a))
    assert (lpips(a, b) > 0.01).all()
    alone = torch.cat([lpips(x[None], y[None]) for x, y in zip(a, b, strict=True)])
    torch.testing.assert_close(alone, lpips(a, b), rtol=1e-5, atol=1e-7)


def test_bytes_and_numbers_are_the_same_images(lpips):
    images, _ = cifar("test", 4)
    numbers = images / 127.5 - 1
    torch.testing.assert_close(lpips(numbers[:2], numbers[2:]), lpips(images[:2], images[2:]))


def test_other_images_are_refused(lpips):
    images = torch.zeros(2, 3, 32, 32)
    with pytest.raises(ValueError, match="of one shape"):
        lpips(images, images[:1])
    with pytest.raises(ValueError, match=r"float in \[-1, 1\]"):
        lpips(images + 2, images)
    with pytest.raises(ValueError, match=r"float in \[-1, 1\]"):
        lpips(images * torch.nan, images)
    with pytest.raises(ValueError, match="RGB"):
        lpips(images[:, :1], images[:, :1])
    with pytest.raises(UserError, match="at least 17 pixels a side, not 16"):
        lpips(images[..., :16], images[..., :16])
    assert lpips(images[..., :17], images[..., :17]).shape == (2,)


def test_without_the_package_it_says_what_to_install():
    with pytest.raises(UserError, match=r"lpips is not installed.*-e '\.\[metrics\]'"):
        Lpips.load()


def test_without_a_backbone_it_says_where_it_is_looked_for(tmp_path, monkeypatch):
    with_package(tmp_path, monkeypatch)
    monkeypatch.delenv(FOLDER)
    with pytest.raises(UserError, match=r"squeezenet1_1\.safetensors.*STILLHOUSE_WEIGHTS"):
        Lpips.load()


@pytest.mark.parametrize("what", ["planted", "garbage", "other"])
def test_linear_weights_are_tensors_or_refused(what, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    torch.save({f"lin{n}.model.1.weight": torch.ones(1, 3, 1, 1) for n in range(7)}, tmp_path / "o")
    content = {
        "planted": planted(mark),
        "garbage": b"no weights",
        "other": (tmp_path / "o").read_bytes(),
    }
    with_package(tmp_path, monkeypatch, content[what])
    with pytest.raises(UserError, match="does not hold LPIPS's linear weights: reinstall lpips"):
        Lpips.load()
    assert not mark.exists()


# ---------------------------------------------------------------- diversity


def apart(a, b):
    return (a - b).flatten(1).abs().mean(1)


def test_pairs_are_numbered_without_gaps():
    pairs = [_pair(number) for number in range(math.comb(12, 2))]
    assert sorted(pairs) == [(low, high) for low in range(12) for high in range(low + 1, 12)]
    low, high = _pair(math.comb(2**40, 2) - 1)  # no rounding for large groups
    assert (low, high) == (2**40 - 2, 2**40 - 1)


def test_all_pairs_give_the_mean_itself():
    """Two groups on a line: 0, 1, 3 and 10, 14."""
    images = torch.tensor([0.0, 10, 1, 14, 3]).view(5, 1, 1, 1)
    found = diversity(apart, images, ["a", "b", "a", "b", "a"], 100)
    distances = torch.tensor([1.0, 3, 2, 4])
    assert (found.pairs, found.groups) == (4, 2)
    assert found.mean == pytest.approx(float(distances.mean()))
    assert found.std == pytest.approx(float(distances.std()))


def test_pairs_stay_within_groups_and_are_shared_out():
    groups = [number % 7 for number in range(100)]
    chosen = choose_pairs(groups, 70, seed=3)
    assert len(set(map(frozenset, chosen))) == 70
    counts = [sum(groups[a] == group for a, _ in chosen) for group in range(7)]
    assert all(groups[a] == groups[b] and a != b for a, b in chosen)
    assert counts == [10] * 7
    assert choose_pairs(groups, 70, seed=3) == chosen
    assert choose_pairs(groups, 70, seed=4) != chosen


def test_what_a_small_group_cannot_give_a_large_one_does():
    groups = ["small"] * 2 + ["single"] + ["large"] * 20
    chosen = choose_pairs(groups, 30, seed=0)
    assert [groups[a] for a, _ in chosen].count("small") == 1
    assert len(chosen) == 30


def test_few_pairs_are_of_different_groups():
    groups = [number // 3 for number in range(60)]
    chosen = choose_pairs(groups, 5, seed=0)
    assert len({groups[a] for a, _ in chosen}) == 5


def test_the_batch_does_not_matter():
    images = torch.rand(30, 3, 8, 8, generator=torch.manual_seed(0))
    groups = [number % 3 for number in range(30)]
    found = [diversity(apart, images, groups, 50, 1, batch=size) for size in (1, 7, 64)]
    for other in found[1:]:
        assert other == pytest.approx(found[0])


@pytest.mark.parametrize("groups", [[], ["a"], ["a", "b", "c"]])
def test_one_image_of_each_has_no_diversity(groups):
    with pytest.raises(UserError, match="sample at least two of each"):
        diversity(apart, torch.rand(len(groups), 3, 8, 8), groups, 10)


@pytest.mark.slow
def test_a_collapsed_model_is_less_diverse(lpips):
    images, labels = cifar("test", 60)
    collapsed = images.clone()
    for label in range(10):
        rows = (labels == label).nonzero().flatten()
        collapsed[rows] = images[rows[:1]]
    whole = diversity(lpips, images, labels.tolist(), 60)
    assert whole.mean > 0.05
    assert diversity(lpips, collapsed, labels.tolist(), 60).mean == 0


def test_stages_are_as_wide_as_the_linear_weights(lpips):
    assert [line.shape[1] for line in lpips.weights] == [*SqueezeNet.widths]
    assert lpips.digest.count("sha256:") == 2
