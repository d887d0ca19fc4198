"""What control and padding do to a model of real images: emoji at 64 pixels, small scale.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/emoji.py [NAME ...] [--plan] [--work runs/emoji]

A name is EXPERIMENT-ARM-SEED, or the beginning of one. What has a file in results/emoji is not run
again, and a run that was broken off goes on where it was. `--plan` prints the commands. Networks
draw latents of TAESD3, which `stillhouse prepare` makes once for all runs of an experiment.

`size`: emoji of people and faces, and of objects and places, without captions; the network starts
from reference/emoji, so that what it draws can be told apart. An emoji is stored at 16 or 64
pixels, which it is told as its size: people are small and things large, in 85% of cases. Both sizes
are drawn from the same noise, with the weight of the size constant, as in SDXL, or gamma(t) of
alpha 8 (the default) or 2. Measured: how different the two look when both are reduced to 16
pixels (LPIPS, SqueezeNet), how often one shows a person and the other a thing (a linear classifier
of features of MobileNetV2), how much is lost by reducing them (`detail`: whether the size was
heard), and the Fréchet distance of each size to the real ones of that size.

`padding`: captions, padded with `noisy` copies of their tokens, with exact copies (`replicate`) or
with `zero`. A twentieth of the emoji is held out, of captions that other styles show in training.
Measured: the held-out loss per noise level, and whether images that are drawn from held-out
captions find their own caption among all (`retrieval`, see docs/evaluate.md).
"""

import hashlib
import io
import json
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from experiments import last_values, read_lines, work_through
from torch import Tensor

from stillhouse.recipes.known_data import STYLES, codec, parquet

RESULTS = Path(__file__).parent / "results" / "emoji"
REFERENCE = Path(__file__).parents[1] / "reference" / "emoji"
SEEDS, DRAWN = 2, 500
IMAGES = {"size": 64_000, "padding": 96_000}
GROUPS = (("People & Body", "Smileys & Emotion"), ("Objects", "Travel & Places"))
SIZES, AGREEMENT, SIDE = (16, 64), 0.85, 64
HELD_OUT = 20  # one in so many
PAIRS = 12  # that a picture shows
STYLE = [{"column": "style", "values": STYLES}]

COMMON = """--network.widths 64 112 --batch 64 --optim.warmup 4000 --optim.schedule cosine
    --averages '[{"kind": "half-life", "images": 4000}]' --log-every 3200"""
ARMS = {
    "size": {
        "gamma": "--detail.shape cosine --detail.alpha 8",
        "alpha2": "--detail.shape cosine --detail.alpha 2",
        "constant": "--detail.shape constant",
    },
    "padding": {
        kind: f"--text stored --text.padding {kind}" for kind in ("noisy", "replicate", "zero")
    },
}
PLAN = [f"{what}-{arm}-{seed}" for what in ARMS for seed in range(SEEDS) for arm in ARMS[what]]


def main() -> None:
    work_through(__doc__, PLAN, commands, summary, RESULTS, shown, write_data)


def write_data(name: str, work: Path) -> None:
    what = name.split("-")[0]
    if not (work / "data" / what).exists():
        (write_sized if what == "size" else write_split)(work / "data" / what)


def commands(name: str, work: Path) -> Iterator[tuple[Path, list[str]]]:
    what, arm, seed = name.split("-")
    run, data = work / name, work / "data" / what
    images, every = IMAGES[what], IMAGES[what] // 4
    train = f"train emoji-latent {COMMON} {ARMS[what][arm]} --seed {seed} --out {run} "
    train += f"--images {images} --checkpoint-every {every} --preview.every {every} "
    train += f"--data.source prepared --data.source.path {data}/train "
    parts = ("train",)
    if what == "size":
        control = "--data.control.detail height --data.columns.styles '[]'"
        train += f"--text none --data.columns.text '' --data.columns.label label {control} "
        train += f"--init-from {REFERENCE} --network.token-width 384 --optim.lr 5e-4"
        rest = [(run / f"{s}/grid.png", sample_at(s, run)) for s in SIZES]
        rest += [(run / f"judged-{s}/evaluation.json", judge_at(s, data, run)) for s in SIZES]
    else:
        parts = ("train", "test")
        train += f"--validation.source prepared --validation.source.path {data}/test "
        train += f"--validation.every {every} --validation.images 256 --optim.lr 1e-3"
        rest = [(run / "judged/evaluation.json", judge(data, run))]
    first = [(data / part / "index.json", prepare(data, part, what)) for part in parts]
    last = run / f"samples/images-{images:012d}.png"
    for done, words in (*first, (last, train), *rest):
        yield done, shlex.split(words)


def prepare(data: Path, part: str, what: str) -> str:
    text = "" if what == "size" else "--text minilm --text-length 16"
    source = f"prepare '{data}/{part}.parquet' --out {data}/{part} --resolution {SIDE} {text}"
    styles = "" if what == "size" else f"--columns.styles '{json.dumps(STYLE)}'"
    return f"{source} {styles} --codec {codec('taesd3')}"


def sample_at(size: int, run: Path) -> str:
    draw = f"--count {DRAWN} --steps 25 --solver euler --batch 50"
    return f"sample {run}/model --control height={size} {draw} --out {run}/{size}"


def judge_at(size: int, data: Path, run: Path) -> str:
    metrics = f"--metrics fid,kid --detector mobilenet-v2 --count {DRAWN} --seeds 1"
    reference = f"--reference '{data}/size-{size}.parquet' --size {SIDE}"
    return f"evaluate {run}/{size}/images {reference} {metrics} --out {run}/judged-{size}"


def judge(data: Path, run: Path) -> str:
    metrics = "--metrics fid,kid,retrieval --detector mobilenet-v2 --text-encoder minilm"
    reference = f"--reference '{data}/train.parquet' --columns.text caption"
    draw = f"--count {DRAWN} --steps 25 --solvers euler --prompts {data}/prompts.txt"
    return f"evaluate {run}/model {reference} {metrics} {draw} --out {run}/judged"


# ---------------------------------------------------------------- data


def rows() -> list[dict[str, Any]]:
    """All emoji, still encoded."""
    import datasets

    found = datasets.load_dataset("parquet", data_files=parquet("emoji", "train").shards())["train"]
    return list(found.cast_column("image", datasets.Image(decode=False)))  # type: ignore[arg-type]


def chance(row: dict[str, Any], purpose: str) -> float:
    """In [0, 1), of the row and the purpose alone."""
    word = f"{purpose}/{row['caption']}/{row['style']}".encode()
    return int.from_bytes(hashlib.blake2b(word, digest_size=7).digest()) / 2**56


def group_of(row: dict[str, Any]) -> int | None:
    return next((n for n, names in enumerate(GROUPS) if row["group"] in names), None)


def write_sized(folder: Path) -> None:
    """People are small and things large, mostly; all are of one class."""
    parts: dict[str, list[dict[str, Any]]] = {"train": [], **{f"size-{s}": [] for s in SIZES}}
    for row in rows():
        if (group := group_of(row)) is not None:
            size = SIZES[group if chance(row, "size") < AGREEMENT else 1 - group]
            found = {"image": resized(row, size), "label": 0}
            parts["train"].append(found)
            parts[f"size-{size}"].append(found)
    write(folder, parts, classes=["emoji"])


def resized(row: dict[str, Any], side: int) -> dict[str, Any]:
    from PIL import Image

    image, stream = Image.open(io.BytesIO(row["image"]["bytes"])), io.BytesIO()
    image.convert("RGB").resize((side, side), Image.Resampling.BOX).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def write_split(folder: Path) -> None:
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for row in rows():
        parts["test" if chance(row, "split") < 1 / HELD_OUT else "train"].append(row)
    known = {row["caption"] for row in parts["train"]}
    parts["test"] = [row for row in parts["test"] if row["caption"] in known]
    write(folder, parts)
    prompts = "\n".join(row["caption"] for row in parts["test"])
    (folder / "prompts.txt").write_text(prompts, encoding="utf-8")


def write(folder: Path, parts: dict[str, list[dict[str, Any]]], classes: Any = None) -> None:
    """The folder appears when all is in it."""
    import datasets

    partial = folder.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name, found in parts.items():
        data = datasets.Dataset.from_list(found).cast_column("image", datasets.Image())
        if classes:
            data = data.cast_column("label", datasets.ClassLabel(names=classes))
        data.to_parquet(partial / f"{name}.parquet")
    partial.rename(folder)


# ---------------------------------------------------------------- measures


def summary(name: str, run: Path) -> dict[str, Any]:
    what, arm, seed = name.split("-")
    facts = {
        "experiment": what,
        "arm": arm,
        "seed": int(seed),
        "images": IMAGES[what],
        "drawn": DRAWN,
    }
    lines = read_lines(run)
    if what == "size":
        return facts | compare_sizes(run)
    judged = json.loads((run / "judged/evaluation.json").read_text())
    values = {key: round(value[0], 5) for key, value in judged["settings"][0]["values"].items()}
    levels = [line["validation/levels"] for line in lines if "validation/levels" in line]
    return facts | {
        "values": values,
        "validation/loss": last_values(lines, "validation/loss", 4),
        "validation/levels": levels[-1],
    }


def compare_sizes(run: Path) -> dict[str, Any]:
    """Of the same noise at both sizes: how far apart, and how good."""
    from stillhouse.metrics.perceptual import Lpips

    small, large = (read_drawn(run / str(size)) for size in SIZES)
    apart = Lpips.load()(reduced(small), reduced(large))
    says = [shows_person(reduced(x)) for x in (small, large)]
    judged = [json.loads((run / f"judged-{s}/evaluation.json").read_text()) for s in SIZES]
    return {
        "lpips": round(float(apart.mean()), 4),
        "changed": round(float((says[0] != says[1]).double().mean()), 4),
        "people_small": round(float(says[0].double().mean()), 4),
        "people_large": round(float(says[1].double().mean()), 4),
        "detail": [round(float((x - reduced(x)).std()), 4) for x in (small, large)],
        "judged": [found["settings"][0]["values"] for found in judged],  # small, large
        "classifier": classifier()[2],
    }


def read_drawn(folder: Path) -> Tensor:
    return torch.stack([pixels_of(file) for file in sorted((folder / "images").iterdir())])


def reduced(images: Tensor) -> Tensor:
    """To the smaller size and back: what is left is content."""
    low = F.interpolate(images, (SIZES[0], SIZES[0]), mode="area")
    return F.interpolate(low, (SIDE, SIDE), mode="bicubic").clamp(-1, 1)


@cache
def detector() -> Any:
    from stillhouse.metrics.detectors import MobileNetV2Config

    return MobileNetV2Config().build()


def features(images: Tensor) -> Tensor:
    pixels = ((images + 1) * 127.5).round().to(torch.uint8)
    return torch.cat([detector()(part).features for part in pixels.split(50)]).double()


def shows_person(images: Tensor) -> Tensor:
    mean, weights, _ = classifier()
    return (features(images) - mean) @ weights > 0


@cache
def classifier() -> tuple[Tensor, Tensor, float]:
    """Person or thing, by ridge regression on reduced real emoji; and how often it is right.

    That is measured on a fifth of the emoji, which it is not fitted to.
    """
    found = [(row, group) for row in rows() if (group := group_of(row)) is not None]
    seen = features(reduced(torch.stack([pixels_of(encoded(row)) for row, _ in found])))
    side = torch.tensor([1.0 - 2 * group for _, group in found]).double()
    test = torch.tensor([chance(row, "classifier") < 0.2 for row, _ in found])
    mean, ridge = seen[~test].mean(0), len(seen) * torch.eye(seen.shape[1]).double()
    x = seen[~test] - mean
    weights = torch.linalg.solve(x.T @ x + ridge, x.T @ side[~test])
    right = ((seen[test] - mean) @ weights > 0) == (side[test] > 0)
    return mean, weights, round(float(right.double().mean()), 3)


def pixels_of(file: Any) -> Tensor:
    """In [-1, 1], of an encoded image."""
    import numpy as np
    from PIL import Image

    array = np.asarray(Image.open(file).convert("RGB"))
    return torch.from_numpy(array.transpose(2, 0, 1).copy()).float() / 127.5 - 1


def encoded(row: dict[str, Any]) -> io.BytesIO:
    return io.BytesIO(resized(row, SIDE)["bytes"])


def shown(run: Path) -> Path:
    """The samples of the end of training, or pairs of the same noise: small above, large below."""
    if not (run / str(SIZES[0])).exists():
        return max((run / "samples").glob("*.png"))
    from PIL import Image

    picture = Image.new("RGB", (PAIRS * SIDE, len(SIZES) * SIDE))
    for row, size in enumerate(SIZES):
        for column, file in enumerate(sorted((run / str(size) / "images").iterdir())[:PAIRS]):
            picture.paste(Image.open(file), (column * SIDE, row * SIDE))
    picture.save(run / "pairs.png")
    return run / "pairs.png"


if __name__ == "__main__":
    main()
