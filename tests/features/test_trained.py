"""A trained network: diffusion noise is strong on the way down and late on the way up, not between.

An untrained one of the same shape has that by far less. The noisiest place has 11.7 times the noise
of the quietest one in the trained network, and 2.01, 1.80, 1.51 and 1.30 times in untrained ones of
the seeds 0 to 3: smooth images and averages of neighbours alone do that. A factor below 1.5, which
was expected of them, is met by one of the four; the bound here is that of the worst.
"""

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from metrics.shared import SHARED
from PIL import Image

from stillhouse.features.extractor import Extractor
from stillhouse.features.properties import Images, score
from stillhouse.models import DiffusersNetwork
from stillhouse.pipelines import load_denoiser
from stillhouse.process import Condition, NetworkDenoiser

REFERENCE = Path(__file__).parents[2] / "reference" / "fashion"
STAGES = [
    *(f"down-level{i}-repeat0-res-out" for i in range(3)),
    "mid-repeat1-res-out",
    *(f"up-level{i}-repeat1-res-out" for i in range(3)),
]
COUNT = 24
UNTRAINED = 2.1  # noisiest / quietest; measured 2.01 with the seed below


def images():
    folder = SHARED / "data" / "fashion"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not on this machine")
    table = pq.read_table(sorted(folder.glob("test*.parquet"))[0]).slice(0, COUNT)
    pixels = [np.array(Image.open(io.BytesIO(row["bytes"]))) for row in table["image"].to_pylist()]
    return torch.from_numpy(np.stack(pixels))[:, None] / 127.5 - 1


def noise_by_stage(denoiser):
    nobody = Condition(label=torch.full((COUNT,), 10))
    batch = Images(images(), range(COUNT), nobody)
    found = score(Extractor(denoiser, STAGES, sigma=0.3), [batch])
    return [found[name].eta for name in STAGES]


@pytest.mark.slow
def test_noise_falls_to_the_middle_and_rises_again_where_a_network_was_trained():
    trained = load_denoiser(REFERENCE)
    eta = noise_by_stage(trained)
    down, middle, up = eta[:3], eta[3], eta[4:]
    assert down == sorted(down, reverse=True)
    assert up == sorted(up)
    assert max(middle, up[0]) < min(down[:2] + up[1:])
    assert max(eta) / min(eta) > 3
    torch.manual_seed(0)
    fresh = type(trained.network.model).from_config(trained.network.model.config)
    untrained = NetworkDenoiser(DiffusersNetwork(fresh), trained.scaling, trained.prediction)
    other = noise_by_stage(untrained.eval())
    assert max(other) / min(other) < UNTRAINED
    assert max(eta) / min(eta) > 3 * max(other) / min(other)
