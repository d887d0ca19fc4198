"""Draws samples of a text-to-emoji model beside the nearest emoji that it was trained on.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python docs/figures/neighbours.py reference/emoji

Writes MODEL/neighbours.png, and MODEL/neighbours.json with the prompts, the captions of what was
found and the distances: 1 - cosine of features of MobileNetV2, to all emoji of the training set.
`typical` is the distance of a training emoji to the nearest one with another caption: a sample that
is much nearer than that to an emoji is, as far as these features see, a copy of it.
"""

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from style import plots
from torch import Tensor

from stillhouse.metrics.detectors import MobileNetV2Config
from stillhouse.recipes.known_data import parquet
from stillhouse.recipes.parts import ClassifierFree
from stillhouse.recipes.pictures import to_pil
from stillhouse.recipes.sampling import SampleRun, draw_batch
from stillhouse.recipes.subjects import Wish, load_subject

PROMPTS = (
    *("red apple", "smiling face", "blue car", "green heart"),
    *("orange cat", "yellow star", "house", "slice of pizza"),
)
EACH, NEAREST, STEPS, WEIGHT = 3, 3, 20, 3.0  # a sample in each style; guidance


def main() -> None:
    model = Path(sys.argv[1])
    samples = draw(str(model))
    rows = emoji()
    side = samples.shape[-1]
    known = torch.stack([pixels(row, side) for row in rows])
    detector: Any = MobileNetV2Config().build()
    ours, theirs = (features(detector, x) for x in (samples, known))
    far = 1 - ours @ theirs.T
    found = far.topk(NEAREST, largest=False)
    captions = [row["caption"] for row in rows]
    record = {
        "typical": round(float(apart(theirs, captions).median()), 4),
        "samples": [
            {
                "prompt": PROMPTS[i % len(PROMPTS)],
                "nearest": [captions[j] for j in found.indices[i].tolist()],
                "distance": [round(d, 4) for d in found.values[i].tolist()],
            }
            for i in range(len(samples))
        ],
    }
    (model / "neighbours.json").write_text(json.dumps(record, indent=1) + "\n")
    picture(samples, known, found.indices, captions, model / "neighbours.png")


def draw(model: str) -> Tensor:
    """Every prompt in every style."""
    guidance = ClassifierFree(weight=WEIGHT)
    wish = Wish(guidance, (), None, torch.float32, torch.device("cpu"), PROMPTS)
    subject = load_subject(model, wish)
    run = SampleRun(model=model, steps=STEPS)
    grid = run.grid.build(subject.scaling, STEPS)  # type: ignore[union-attr]
    indices = list(range(EACH * len(PROMPTS)))
    return subject.decode(draw_batch(run, subject, grid, indices, wish.device)).clamp(-1, 1)


def emoji() -> list[Any]:
    import datasets

    found = datasets.load_dataset("parquet", data_files=parquet("emoji", "train").shards())["train"]
    return list(found.cast_column("image", datasets.Image(decode=False)))


def pixels(row: Any, side: int) -> Tensor:
    image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
    image = image.resize((side, side), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()).float() / 127.5 - 1


def features(detector: Any, images: Tensor) -> Tensor:
    whole = ((images + 1) * 127.5).round().to(torch.uint8)
    found = torch.cat([detector(part).features for part in whole.split(64)]).float()
    return torch.nn.functional.normalize(found)


def apart(known: Tensor, captions: list[str]) -> Tensor:
    """Of each emoji, the distance to the nearest with another caption; of some of them."""
    some = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))[:500]
    number = {caption: place for place, caption in enumerate(dict.fromkeys(captions))}
    which = torch.tensor([number[caption] for caption in captions])
    far = 1 - known[some] @ known.T
    return far.masked_fill(which[some, None] == which, 2.0).min(1).values


def picture(samples: Tensor, known: Tensor, nearest: Tensor, captions: Any, target: Path) -> None:
    """A row for each prompt: samples in the three styles, each with its nearest emoji."""
    columns = EACH * (1 + NEAREST)
    figure, axes = plots().subplots(
        len(PROMPTS), columns, figsize=(1.05 * columns, 1.25 * len(PROMPTS)), layout="constrained"
    )
    for at, axis in enumerate(axes.flat):
        prompt, place = divmod(at, columns)
        style, which = divmod(place, 1 + NEAREST)
        sample = style * len(PROMPTS) + prompt
        axis.axis("off")
        if which == 0:
            axis.imshow(to_pil(samples[sample]))
            axis.set_title(PROMPTS[prompt], fontsize=8, fontweight="bold")
        else:
            found = int(nearest[sample, which - 1])
            axis.imshow(to_pil(known[found]))
            axis.set_title(captions[found][:18], fontsize=6, color="#777777")
    figure.savefig(target, dpi=100)


if __name__ == "__main__":
    main()
