"""Real weights and images beside the repository; a test that needs them is skipped elsewhere."""

import io
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

SHARED = Path(__file__).parents[3] / "shared"


def _folder(path: Path) -> Path:
    if not path.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is missing, and CI has it")
        pytest.skip(f"{path} is not on this machine")
    return path


def weights_folder() -> Path:
    return _folder(SHARED / "weights")


def cifar(split: str, count: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 32, 32] and labels."""
    rows = _table(split).slice(start, count).to_pydict()
    pixels = [_pixels(Image.open(io.BytesIO(row["bytes"]))) for row in rows["image"]]
    return torch.stack(pixels), torch.tensor(rows["label"])


@cache
def _table(split: str):
    return pq.read_table(_folder(SHARED / "data" / "cifar10") / f"{split}.parquet")


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def through_pil(images: Tensor, change) -> Tensor:
    """Each image as PIL's, changed."""
    pictures = (Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images)
    return torch.stack([_pixels(change(picture)) for picture in pictures])


class Gadget:
    """Unpickled without restriction, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def planted(mark: Path) -> bytes:
    """A file of torch.save that leaves a mark."""
    buffer = io.BytesIO()
    torch.save({"fc.weight": Gadget(mark)}, buffer)
    return buffer.getvalue()
