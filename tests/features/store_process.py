"""One process of an extraction: `store_process.py OUT COUNT SLOW`, alone or under torchrun.

A small U-Net reads images that follow from their numbers. With SLOW seconds per batch a test can
kill it in the middle; each process leaves its id in OUT.pids/RANK.
"""

import os
import sys
import time
from pathlib import Path

import torch
from small_models import small_unet
from torch import Tensor

from stillhouse.engine.world import world
from stillhouse.features.extractor import Extractor
from stillhouse.features.store import Facts, Part, Read, extract_all
from stillhouse.models import DiffusersNetwork
from stillhouse.process import EDM, NetworkDenoiser, keyed_normal

IDS = ("up-level0-repeat0-res-out", "up-level1-repeat1-res-out")


def facts(count: int, **changes) -> Facts:
    part = Part(model="small", digest="sha256:0", ids=IDS, sigma=0.5)
    given = {"source": "noise", "fingerprint": "0", "reading": "as it is", "shard": 20, "batch": 8}
    return Facts(**({"parts": (part,), "count": count} | given | changes))


def names(count: int) -> list[str]:
    return [f"image {number}" for number in range(count)]


def reader(slow: float = 0.0) -> Read:
    network = DiffusersNetwork(small_unet())
    extractor = Extractor(
        NetworkDenoiser(network, EDM(sigma_data=0.5), "edm").eval(), IDS, sigma=0.5
    )

    def read(numbers: range) -> dict[str, Tensor]:
        time.sleep(slow)
        x = keyed_normal(network.data_shape, numbers, seed=0, purpose="image")
        return extractor.extract(x, key=numbers)

    return read


def main(out: Path, count: int, slow: float) -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        pids = out.with_suffix(".pids")
        pids.mkdir(exist_ok=True, parents=True)
        (pids / str(here.rank)).write_text(str(os.getpid()))
        extract_all(out, facts(count), names(count), lambda: reader(slow), here)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
