"""What tests of features share: a small network of pixels, pictures of noise, the commands."""

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
from PIL import Image
from small_models import small_unet

from stillhouse.cli import main


def save_model(folder: Path, seed: int = 0) -> Path:
    small_unet(seed).save_pretrained(folder / "unet")
    diffusers.DDIMScheduler(clip_sample=False).save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text('{"_class_name": "DDIMPipeline"}')
    return folder


def picture(seed: int, width: int = 12, height: int = 10) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def features(*words: Any) -> None:
    main(["features", *map(str, words)])
