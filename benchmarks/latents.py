"""Images per second of training on latents, beside pixels of the same resolution.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/latents.py [--quick]

Last line, JSON, also in results/latents.json unless --quick. The U-Net of the emoji recipe at 64
pixels, told a class, in turn on pixels, on latents of TAESD3 that are encoded on the way
(`encoded`) and on latents that `stillhouse prepare` has made (`prepared`): images/s of each over
that of pixels, alternately, median over rounds. The widths are the same; on latents (16 x 8 x 8)
every layer has a sixty-fourth of the places.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from coupling import ENDLESS, Training
from timing import alternately, ratio

from stillhouse.data import Columns, ImageConfig, Parquet, Prepared
from stillhouse.recipes import preparing
from stillhouse.recipes.known_data import codec, parquet
from stillhouse.recipes.preparing import PrepareRun
from stillhouse.recipes.train.catalogue import RECIPES
from stillhouse.recipes.train.networks import Backbone
from stillhouse.recipes.train.training import TrainRun

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="lat-", dir="/tmp") as folder:
        os.environ.setdefault("RAY_TMPDIR", folder)
        data, shards = write_data(Path(folder), 64 if quick else 2048)
        result = measure(arms(data, shards, quick), rounds=2 if quick else 11)
    result |= {"quick": quick, "cores": os.cpu_count(), "torch": torch.__version__}
    if not quick:
        (RESULTS / "latents.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def write_data(folder: Path, count: int) -> tuple[str, str]:
    """So many photos of pets in a file, and prepared."""
    import datasets

    found = datasets.load_dataset("parquet", data_files=parquet("pets", "train").shards())
    data = folder / "pets.parquet"
    found["train"].select(range(count)).to_parquet(data)  # type: ignore[index]
    preparing.run(
        PrepareRun(source=str(data), out=str(folder / "shards"), codec=codec("taesd3")).model_copy(
            update={"resolution": 64, "columns": Columns(label="label")}
        )
    )
    return str(data), str(folder / "shards")


def arms(data: str, shards: str, quick: bool) -> dict[str, TrainRun]:
    encoded = RECIPES["pets-latent"]("tiny")
    source = Parquet(files=(data,))
    encoded = encoded.model_copy(
        update={
            "network": Backbone(name="unet", size="tiny" if quick else "small"),
            "data": encoded.data.model_copy(
                update={"source": source, "image": ImageConfig(size=64)}
            ),
            "batch": 8 if quick else 32,
            "images": ENDLESS,
            "log_every": ENDLESS,
        }
    )
    stored = encoded.data.model_copy(update={"source": Prepared(path=shards)})
    return {
        "pixels": encoded.model_copy(update={"codec": ""}),
        "encoded": encoded,
        "prepared": encoded.model_copy(update={"data": stored}),
    }


def measure(configs: dict[str, TrainRun], rounds: int, block: int = 2) -> dict[str, Any]:
    runs = {name: Training(config) for name, config in configs.items()}
    try:
        steps = {name: lambda run=run: run.steps(block) for name, run in runs.items()}
        seconds = alternately(steps, repeats=rounds)
    finally:
        for run in runs.values():
            run.feed.close()
    batch = configs["pixels"].batch
    return {
        **{name: round(ratio(seconds["pixels"], seconds[name]), 3) for name in configs},
        "images_per_second": {
            name: round(batch * block / statistics.median(those), 1)
            for name, those in seconds.items()
        },
        "rounds": rounds,
        "batch": batch,
    }


if __name__ == "__main__":
    main()
