"""The data sets that are known by name: from a local copy, or else from the hub."""

import os
from pathlib import Path
from typing import Literal

from stillhouse.data import Columns, Parquet

# Where a data set is: in a folder of this name below $STILLHOUSE_DATA, or else on the hub.
HUB = {
    "fashion": "hf://datasets/zalando-datasets/fashion_mnist/fashion_mnist",
    "cifar10": "hf://datasets/uoft-cs/cifar10/plain_text",
}
HUB_IMAGE = {"fashion": "image", "cifar10": "img"}


def local_data() -> Path | None:
    """The folder of local copies, if there is one."""
    folder = os.environ.get("STILLHOUSE_DATA")
    return Path(folder) if folder else None


def parquet(name: str, split: Literal["train", "test"]) -> Parquet:
    """A data set's files: a local copy where there is one."""
    folder = local_data()
    here = folder is not None and (folder / name).is_dir()
    return Parquet(files=(f"{folder / name if here and folder else HUB[name]}/{split}*.parquet",))


def columns(name: str) -> Columns:
    """Local copies name the image column `image`."""
    folder = local_data()
    here = folder is not None and (folder / name).is_dir()
    return Columns(image="image" if here else HUB_IMAGE[name], label="label")
