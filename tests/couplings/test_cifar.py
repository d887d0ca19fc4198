"""On CIFAR-10: the published reductions, the variance of the noise, and the condition leak."""

from itertools import product

import pytest
import torch
from couplings.checks import keyed
from metrics.shared import cifar
from torch.nn.functional import normalize

from stillhouse.couplings import Assignment, Conditional, Leak, LeakProbe, Nearest
from stillhouse.process import Condition

SHAPE = (3, 32, 32)


@pytest.fixture(scope="module")
def data():
    images, labels = cifar("train", 5120)
    return images.float() / 127.5 - 1, labels


def scaled(x, kind):
    if kind == "[0, 1]":
        return x / 2 + 0.5
    if kind == "standardised":
        return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)
    return x


def met_noise(coupling, x, labels, first=0):
    draws = keyed(len(x), first)
    noise = draws(SHAPE, draws.key)
    found = coupling(x, noise, Condition(label=labels), draws)
    return found, found.noise(noise, draws)


@pytest.mark.parametrize(
    ("kind", "at_128", "at_1024"),
    [("[-1, 1]", 0.0158, 0.0196), ("standardised", 0.0192, 0.0241), ("[0, 1]", 0.0074, 0.0093)],
)
def test_distances_fall_as_published_for_their_scaling(data, kind, at_128, at_1024):
    x, labels = scaled(data[0], kind), data[1]
    small = [met_noise(Assignment(), x[i : i + 128], labels, i)[0] for i in range(0, 1024, 128)]
    mean = sum(found.reduction for found in small) / len(small)
    assert mean == pytest.approx(at_128, rel=0.06)
    large = met_noise(Assignment(), x[:1024], labels)[0].reduction
    assert large == pytest.approx(at_1024, rel=0.04)
    assert large > mean


def test_blocks_of_a_pool_keep_the_share_that_was_measured(data):
    x, labels = data
    whole = met_noise(Assignment(), x[:1024], labels)[0].reduction
    parts = [met_noise(Assignment(block=b), x[:1024], labels)[0].reduction for b in (128, 512)]
    assert parts[0] / whole == pytest.approx(0.80, abs=0.03)
    assert parts[1] / whole == pytest.approx(0.94, abs=0.03)


def test_few_pixels_keep_most_of_the_gain(data):
    x, noise = data[0][:256], keyed(256)(SHAPE, torch.arange(256))
    whole = Assignment()(x, noise).reduction
    met = noise[Assignment(side=8)(x, noise).index]
    found = 1 - float((x - met).flatten(1).norm(dim=1).mean()) / Assignment()(x, noise).cost_before
    assert found / whole == pytest.approx(0.86, abs=0.04)


@pytest.mark.parametrize(("metric", "unit"), [("cosine", True), ("l2", False)])
def test_the_variance_of_real_pairings(data, metric, unit):
    _, noise = met_noise(Nearest(8, metric), data[0][:64], data[1][:64])
    error = (2 / noise.numel()) ** 0.5
    assert (abs(float(noise.double().var()) - 1) < 3 * error) is unit


# ---------------------------------------------------------------- the leak


def probed(coupling, x, labels, n, directions):
    """Share of noises whose nearest class mean is that of the datum they were given to."""
    right = []
    for seed, start in product(range(2), range(0, len(x), n)):
        rows = slice(start, start + n)
        _, noise = met_noise(coupling, x[rows], labels[rows], start + seed * len(x))
        right.append((noise.flatten(1) @ directions.T).argmax(1) == labels[rows])
    return float(torch.cat(right).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize(("n", "expected"), [(128, 0.188), (256, 0.201), (1024, 0.213)])
def test_plain_assignment_tells_the_class_and_conditional_does_not(data, n, expected):
    x, labels = data
    count = 5120 if n < 1024 else 3072
    x, labels = x[:count], labels[:count]
    means = torch.stack([x[labels == c].flatten(1).mean(0) for c in range(10)])
    directions = normalize(means, dim=1)
    error = (0.2 * 0.8 / count) ** 0.5
    assert probed(Assignment(), x, labels, n, directions) == pytest.approx(expected, abs=3 * error)
    error = (0.1 * 0.9 / count) ** 0.5
    within = probed(Conditional(), x, labels, n, directions)
    assert within == pytest.approx(0.1, abs=3 * error)
    if n == 256:
        soft = probed(Conditional(mode="soft"), x, labels, n, directions)
        assert within - 2 * error < soft < 0.14


@pytest.mark.slow
def test_the_probe_of_the_log_agrees(data):
    """It knows the classes from earlier batches only."""
    x, labels = data
    found = {}
    for name, coupling in {"plain": Assignment(), "within": Conditional()}.items():
        probe, leak = LeakProbe(), Leak()
        for start in range(0, 4096, 256):
            rows = slice(start, start + 256)
            _, noise = met_noise(coupling, x[rows], labels[rows], start)
            leak = leak + probe(x[rows], noise, labels[rows])
        assert leak.asked == 4096 - 256
        assert leak.chance == pytest.approx(0.1, abs=0.01)
        found[name] = leak.accuracy
    assert 0.15 < found["plain"] < 0.25
    assert found["within"] == pytest.approx(0.1, abs=3 * (0.09 / 3840) ** 0.5)
