"""Data sets and codecs that are known by name: from a local copy, or else from the hub."""

import os
from pathlib import Path
from typing import Literal

from stillhouse.data import Columns, Parquet, Style

# Where a data set is: in a folder of this name below $STILLHOUSE_DATA, or else on the hub.
HUB = {
    "fashion": "hf://datasets/zalando-datasets/fashion_mnist/fashion_mnist",
    "cifar10": "hf://datasets/uoft-cs/cifar10/plain_text",
    **{name: name for name in ("emoji", "pets", "birds")},  # folders of your own
}
HUB_IMAGE = {"cifar10": "img"}  # others call it image
CODECS = {"taesd": "madebyollin/taesd", "taesd3": "madebyollin/taesd3"}
STYLES = ("noto", "twemoji", "fluent-3d")  # of emoji


def local_copy(name: str) -> Path | None:
    """The folder of a local copy, if there is one."""
    folder = os.environ.get("STILLHOUSE_DATA")
    copy = Path(folder) / name if folder else None
    return copy if copy is not None and copy.is_dir() else None


def parquet(name: str, split: Literal["train", "test"]) -> Parquet:
    """A data set's files: a local copy where there is one."""
    return Parquet(files=(f"{local_copy(name) or HUB[name]}/{split}*.parquet",))


def columns(name: str) -> Columns:
    """Local copies name the image column `image`."""
    if name == "emoji":
        return Columns(text="caption", styles=(Style(column="style", values=STYLES),))
    image = "image" if local_copy(name) else HUB_IMAGE.get(name, "image")
    return Columns(image=image, label="label")


def codec(name: str) -> str:
    """A folder of this name below $STILLHOUSE_WEIGHTS where there is one, else the hub's id."""
    folder = Path(os.environ.get("STILLHOUSE_WEIGHTS", ""), name)
    return str(folder) if os.environ.get("STILLHOUSE_WEIGHTS") and folder.is_dir() else CODECS[name]
