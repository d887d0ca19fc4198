"""Inception is torch-fidelity's, loaded from tensors only; other weights never make an FID."""

import hashlib

import pytest
import torch
from metrics.parity import run_reference
from metrics.shared import planted
from metrics.tiny import pictures

from stillhouse.errors import UserError
from stillhouse.metrics.detectors import (
    InceptionConfig,
)

RANDOM = """
import warnings
from pathlib import Path
from unittest.mock import patch
from torch_fidelity import feature_extractor_inceptionv3 as module
from stillhouse.errors import UserError
from stillhouse.metrics import detectors
from stillhouse.metrics.detectors import InceptionConfig
folder = Path(str(given["folder"]))
torch.hub.set_dir(str(folder / "hub"))
file = folder / "random.pth"
kind = module.FeatureExtractorInceptionV3
with patch.object(kind, "load_state_dict"), patch.object(module, "load_state_dict_from_url"):
    torch.manual_seed(0)
    torch.save(kind("x", ["2048"]).state_dict(), file)

def refused(**fields):
    try:
        InceptionConfig(**fields).build()
    except UserError as error:
        return np.array(str(error))
"""


def test_without_torch_fidelity_it_says_what_to_install():
    with pytest.raises(UserError, match=r"pip install -e '\.\[metrics\]'"):
        InceptionConfig().build()


@pytest.mark.slow
def test_inception_is_torch_fidelitys(tmp_path):
    """Through its real loading path, with random weights of the right shapes."""
    script = """
images = torch.from_numpy(given["images"])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    detector = InceptionConfig(weights=str(file)).build()
found["said"] = np.array([str(w.message) for w in said if "Inception" in str(w.message)])
found["name"], found["digest"] = np.array(detector.name), np.array(detector.digest)
found["dims"], found["line"] = np.array(detector.dims), np.array(detector.preprocessing)
for size in (1, 3):
    outputs = [detector(batch) for batch in images.split(size)]
    found[f"features{size}"] = torch.cat([o.features for o in outputs]).numpy()
    found[f"logits{size}"] = torch.cat([o.logits for o in outputs]).numpy()
theirs = kind("x", ["2048", "logits_unbiased"], str(file))
found["features"], found["logits"] = (t.numpy() for t in theirs(images))

detectors.STANDARD = detector.digest[7:15]
with warnings.catch_warnings():
    warnings.simplefilter("error", UserWarning)
    found["standard"] = np.array(InceptionConfig(weights=str(file)).build().name)
    cached = folder / "hub" / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(file.read_bytes())
    found["cached"] = np.array(InceptionConfig().build().name)
"""
    images = pictures(3, 32, 40).numpy()
    found = run_reference(RANDOM + script, images=images, folder=str(tmp_path))
    content = (tmp_path / "random.pth").read_bytes()
    assert found["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert (found["name"], found["dims"]) == ("Inception (own weights)", 2048)
    assert len(found["said"]) == 1
    assert "not FID" in found["said"][0]
    assert "no antialias" in str(found["line"])
    assert found["features3"].shape == (3, 2048)
    assert found["logits3"].shape == (3, 1008)
    for what in ("features", "logits"):
        wanted = torch.from_numpy(found[what])
        assert torch.equal(torch.from_numpy(found[f"{what}3"]), wanted)
        scale = float(wanted.abs().max())
        one = torch.from_numpy(found[f"{what}1"])
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5 * scale)
        assert wanted.std(0).mean() > 0
    assert (found["standard"], found["cached"]) == ("Inception", "Inception")


@pytest.mark.slow
def test_inceptions_weights_are_tensors_or_refused(tmp_path):
    (tmp_path / "planted.pth").write_bytes(planted(tmp_path / "mark"))
    script = """
from urllib.error import URLError
found["planted"] = refused(weights=str(folder / "planted.pth"))
found["mark"] = np.array((folder / "mark").exists())
(folder / "half.pth").write_bytes(file.read_bytes()[:1000])
found["half"] = refused(weights=str(folder / "half.pth"))
torch.save({"fc.weight": torch.ones(3)}, folder / "other.pth")
found["other"] = refused(weights=str(folder / "other.pth"))
found["absent"] = refused(weights=str(folder / "absent.pth"))
with patch("torch.hub.download_url_to_file", side_effect=URLError("no network")):
    found["offline"] = refused()
cached = folder / "hub" / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
cached.write_bytes(file.read_bytes())
found["damaged"] = refused()
kind("x", ["2048"], str(file))
try:
    kind("x", ["2048"], str(folder / "planted.pth"))
except Exception:
    pass
found["careless"] = np.array((folder / "mark").exists())
"""
    found = run_reference(RANDOM + script, folder=str(tmp_path))
    assert not found["mark"]
    assert found["careless"]  # torch-fidelity itself unpickles anything
    for what in ("planted", "half", "other"):
        assert f"{what}.pth does not hold the weights of torch-fidelity's Inception" in str(
            found[what]
        )
    assert "there are no weights at" in str(found["absent"])
    for part in ("https://", "6726825d.pth", "--detector.weights", "no network"):
        assert part in str(found["offline"])
    assert "is damaged: remove it" in str(found["damaged"])
