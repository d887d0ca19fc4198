"""The same features through torchmetrics, torch-fidelity and prdc: relative 1e-6, shares exact."""

import numpy as np
import pytest
import torch
from metrics.parity import run_reference

from stillhouse.metrics.frechet import frechet_distance
from stillhouse.metrics.kernels import kernel_distance, polynomial_mmd
from stillhouse.metrics.moments import Moments
from stillhouse.metrics.neighbours import prdc
from stillhouse.metrics.scores import ClassScore, clip_score

BOUND = 1e-6
SEED = 2020

# Features as float64 wherever the package lets its arithmetic follow: it would round otherwise.
SCRIPT = """
import contextlib, io, warnings
warnings.simplefilter("ignore")
import torch_fidelity.metric_fid, torch_fidelity.metric_isc, torch_fidelity.metric_kid
from prdc import compute_prdc
from torchmetrics.functional.multimodal.clip_score import clip_score
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.inception import InceptionScore
from torchmetrics.image.kid import KernelInceptionDistance

SEED = 2020

class Same(torch.nn.Module):
    num_features = given["real"].shape[1]
    def forward(self, x):
        return x

real, fake = (torch.from_numpy(given[name]).double() for name in ("real", "fake"))
logits = torch.from_numpy(given["logits"]).double()

metric = FrechetInceptionDistance(feature=Same())
for part in real.split(100):
    metric.update(part, real=True)
metric.update(fake, real=False)
metric.orig_dtype = torch.float64  # of the answer
found["fid_torchmetrics"] = metric.compute()

statistics = [torch_fidelity.metric_fid.fid_features_to_statistics(x) for x in (real, fake)]
answer = torch_fidelity.metric_fid.fid_statistics_to_metric(*statistics, False)
found["fid_fidelity"] = answer["frechet_inception_distance"]

size = min(len(real), len(fake))
metric = KernelInceptionDistance(feature=Same(), subsets=1, subset_size=size)
metric.update(real[:size], real=True)
metric.update(fake[:size], real=False)
found["kid_torchmetrics"] = metric.compute()[0]

kid = torch_fidelity.metric_kid.kid_features_to_metric(
    real, fake, kid_subsets=7, kid_subset_size=60, rng_seed=SEED, verbose=False)
found["kid_fidelity"] = list(kid.values())

for splits in (1, 10):
    isc = torch_fidelity.metric_isc.isc_features_to_metric(logits, splits, True, SEED)
    found[f"isc_fidelity_{splits}"] = list(isc.values())
    metric = InceptionScore(feature=Same(), splits=splits)
    metric.update(logits)
    torch.manual_seed(SEED)
    found[f"isc_torchmetrics_{splits}"] = metric.compute()[0]

for name in ("random", "tied", "repeated"):
    for k in (3, 5):
        with contextlib.redirect_stdout(io.StringIO()):
            answer = compute_prdc(given["real_" + name], given["fake_" + name], nearest_k=k)
        found[f"prdc_{name}_{k}"] = [
            answer[part] for part in ("precision", "recall", "density", "coverage")]

class Looked:  # a CLIP whose features are known
    config = None
    def to(self, device):
        return self
    def get_image_features(self, rows):
        return torch.from_numpy(given["images"])[rows.long()]
    def get_text_features(self, rows, mask):
        return torch.from_numpy(given["texts"])[rows.long()]

def processor(images=None, text=None, **_):
    rows = torch.tensor([int(x.flatten()[0]) for x in images] if images else [int(x) for x in text])
    return {"pixel_values": rows, "input_ids": rows, "attention_mask": rows[:, None]}

count = len(given["images"])
found["clip"] = [
    clip_score(torch.full((3, 1, 1), i), str(i), lambda: (Looked(), processor)).item()
    for i in range(count)]
"""


def rows(count, dims, seed, scale=1.0, shift=0.0):
    rng = np.random.default_rng(seed)
    return (shift + scale * rng.standard_normal((count, dims))).astype(np.float32)


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(5)
    mixing = rng.standard_normal((24, 24))
    texts = rows(12, 16, 9)
    return {
        "real": (rows(300, 24, 0) @ mixing).astype(np.float32),
        "fake": (rows(280, 24, 1, 1.1, 0.2) @ mixing).astype(np.float32),
        "logits": rows(500, 10, 2, 3.0),
        "real_random": rows(210, 8, 3),
        "fake_random": rows(190, 8, 4, 0.9, 0.3),
        # Whole numbers: many distances are equal, and many rows too.
        "real_tied": rng.integers(0, 3, (150, 4)).astype(np.float32),
        "fake_tied": rng.integers(0, 4, (130, 4)).astype(np.float32),
        # Samples that are the reference's own rows: on edges of balls, exactly.
        "real_repeated": rows(120, 64, 6, 2.0, 1.0),
        "fake_repeated": np.concatenate([rows(120, 64, 6, 2.0, 1.0)[:80], rows(20, 64, 7, 2.0)]),
        "images": texts + rows(12, 16, 10, 5.0),  # cosines of both signs
        "texts": texts,
    }


@pytest.fixture(scope="module")
def found(given):
    return run_reference(SCRIPT, **given)


def tensors(given, *names):
    return [torch.from_numpy(given[name]) for name in names]


@pytest.mark.parametrize("package", ["torchmetrics", "fidelity"])
def test_frechet_distance(given, found, package):
    ours = frechet_distance(*map(Moments.of, tensors(given, "real", "fake")))
    assert ours == pytest.approx(float(found[f"fid_{package}"]), rel=BOUND)


def test_kernel_distance_of_all_rows(given, found):
    real, fake = tensors(given, "real", "fake")
    size = min(len(real), len(fake))
    ours = polynomial_mmd(real[:size], fake[:size])
    assert ours == pytest.approx(float(found["kid_torchmetrics"]), rel=BOUND)
    assert kernel_distance(real[:size], fake[:size], subsets=1).mean == pytest.approx(ours)


def test_kernel_distance_of_subsets(given, found):
    ours = kernel_distance(*tensors(given, "real", "fake"), subsets=7, size=60, seed=SEED)
    assert list(ours) == pytest.approx(found["kid_fidelity"].tolist(), rel=BOUND)


@pytest.mark.parametrize("splits", [1, 10])
def test_inception_score(given, found, splits):
    logits = torch.from_numpy(given["logits"])
    total = len(logits)

    def ours(order):  # image order[i] is at position i
        return ClassScore.of(logits[order], torch.arange(total), total, splits).value()

    fidelity = ours(np.random.RandomState(SEED).permutation(total))
    assert list(fidelity) == pytest.approx(found[f"isc_fidelity_{splits}"].tolist(), rel=BOUND)
    generator = torch.Generator().manual_seed(SEED)
    torchmetrics = ours(torch.randperm(total, generator=generator))
    expected = float(found[f"isc_torchmetrics_{splits}"])
    assert torchmetrics.mean == pytest.approx(expected, rel=BOUND)


@pytest.mark.parametrize("k", [3, 5])
@pytest.mark.parametrize("name", ["random", "tied", "repeated"])
def test_precision_recall_density_coverage(given, found, name, k):
    ours = prdc(*tensors(given, f"real_{name}", f"fake_{name}"), k=k)
    expected = found[f"prdc_{name}_{k}"]
    assert list(ours) == pytest.approx(expected.tolist(), rel=1e-14)
    assert expected.min() > 0  # a value that could differ


def test_clip_score(given, found):
    ours = clip_score(*tensors(given, "images", "texts"))
    assert ours.tolist() == pytest.approx(found["clip"].tolist(), rel=BOUND)
    assert 0 < int((ours == 0).sum()) < len(ours)
