"""Draws docs/figures/leak.png: what noise tells of the class of the image that it was given to.

python docs/figures/leak.py         measures (seven minutes on a core) and draws
python docs/figures/leak.py draw    draws the numbers of docs/figures/leak.json again

CIFAR-10 in [-1, 1] (from the hub, or below $STILLHOUSE_DATA); noise is paired as in training. On
the left the noise that each class met, averaged; on the right how often the probe of the training
log (`coupling/leak`) names the class. Half of the images teach the probe, the others meet noise.
"""

import json
import sys
import time
from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch
from metrics import cifar
from style import BLUE, GREY, HERE, INK, ORANGE, plots
from torch import Tensor
from torch.nn.functional import cosine_similarity

from stillhouse.couplings import (
    Assignment,
    Conditional,
    Coupling,
    Independent,
    Leak,
    LeakProbe,
    Nearest,
    Pairing,
)
from stillhouse.objectives import Draws, pair_noise
from stillhouse.process import Batch, Condition
from stillhouse.recipes.report.charts import spread

IMAGES, PROBED = 20_000, 9_216
SIZES, SEEDS = (128, 256, 1024), 6
MEANS, POOL = 300, 1024  # batches that noise is averaged over, and their size
COUPLINGS: dict[str, Coupling] = {
    "independent": Independent(),
    "assignment": Assignment(),
    "nearest": Nearest(k=4),
    "soft": Conditional(mode="soft"),
    "within-class": Conditional(),
}
CLASSES = ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Images:
    """Pixels in [-1, 1] and classes."""

    x: Tensor
    labels: Tensor

    def __getitem__(self, rows: Tensor | slice) -> "Images":
        return Images(self.x[rows], self.labels[rows])


def means(values: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([values[labels == c].mean(0) for c in range(len(CLASSES))])


# ---------------------------------------------------------------- measuring


class Met(NamedTuple):
    """A batch with the noise that it met."""

    images: Images
    noise: Tensor
    pairing: Pairing
    seconds: float  # of computing, for drawing noise and choosing among it


def meet(coupling: Coupling, images: Images, n: int, count: int, seed: int) -> Iterator[Met]:
    """`count` batches of n images in random order, which have other noise every time."""
    order = torch.Generator().manual_seed(seed)
    rows = iter(torch.empty(0))
    for step in range(count):
        if step % (len(images.x) // n) == 0:
            rows = iter(torch.randperm(len(images.x), generator=order).split(n))
        part = images[next(rows)]
        key = torch.arange(step * n, (step + 1) * n)
        began = time.process_time()
        batch, pairing = pair_noise(
            Batch(part.x, Condition(label=part.labels), key=key), coupling, Draws(seed)
        )
        assert batch.noise is not None
        yield Met(part, batch.noise, pairing, time.process_time() - began)


def probe(coupling: Coupling, known: Images, images: Images, n: int) -> dict[str, Any]:
    """What the probe finds, seed by seed, and what the coupling gained and cost."""
    leaks, met = [], []
    for seed in range(SEEDS):
        ask, leak = LeakProbe(), Leak()
        ask(known.x, known.x, known.labels)  # the first call only learns
        for one in meet(coupling, images, n, PROBED // n, seed):
            leak += ask(one.images.x, one.noise, one.images.labels)
            met.append((one.pairing.reduction, one.seconds))
        leaks.append(leak)
    gains, seconds = zip(*met, strict=True)
    return {
        "accuracy": [round(leak.accuracy, 5) for leak in leaks],
        "chance": round(fmean(leak.chance for leak in leaks), 5),
        "reduction": round(fmean(gains), 5),
        "cpu_ms": round(1e3 * median(seconds), 2),
    }


def mean_noise(coupling: Coupling, images: Images) -> tuple[Tensor, float]:
    """Of each class, and how far the mean of all noise is from 0."""
    sums, counts = torch.zeros(len(CLASSES), *images.x.shape[1:]), torch.zeros(len(CLASSES))
    for one in meet(coupling, images, POOL, MEANS, seed=0):
        sums.index_add_(0, one.images.labels, one.noise)
        counts.index_add_(0, one.images.labels, torch.ones(POOL))
    whole, total = sums.sum(0) / counts.sum(), float(counts.sum())
    squared = float((whole**2).sum()) - whole.numel() / total  # less what chance adds
    return sums / counts.view(-1, 1, 1, 1), max(squared, 0) ** 0.5


def measure(file: Path) -> None:
    torch.set_num_threads(1)
    pixels, labels = cifar(IMAGES)
    images = Images(pixels / 127.5 - 1, labels)
    found: dict[str, Any] = {"probe": defaultdict(dict), "likeness": {}, "shift": {}, "tiles": {}}
    for name, coupling in COUPLINGS.items():
        for n in SIZES:
            known, asked = images[: IMAGES // 2], images[IMAGES // 2 :]
            found["probe"][name][n] = result = probe(coupling, known, asked, n)
            print(name, n, result, flush=True)
    typical = means(images.x, labels) - images.x.mean(0)
    found["tiles"]["class"] = packed(typical)
    for name in ("assignment", "within-class", "nearest"):
        noise, shift = mean_noise(COUPLINGS[name], images)
        likeness = cosine_similarity(noise.flatten(1), typical.flatten(1)).tolist()
        found["likeness"][name] = [round(value, 3) for value in likeness]
        found["shift"][name] = round(shift, 3)
        print(name, found["likeness"][name], found["shift"][name], flush=True)
        if name != "nearest":
            found["tiles"][name] = packed(noise)
    file.write_text(json.dumps(found, indent=1) + "\n")


def packed(values: Tensor) -> dict[str, Any]:
    """Rounded to 8 bits: a step of 1/127 of the largest."""
    unit = float(values.abs().max()) / 127
    numbers = (values / unit).round().to(torch.int8)
    return {"unit": unit, "base64": b64encode(numbers.numpy().tobytes()).decode()}


def unpacked(stored: dict[str, Any]) -> Tensor:
    numbers = torch.frombuffer(bytearray(b64decode(stored["base64"])), dtype=torch.int8)
    return stored["unit"] * numbers.view(len(CLASSES), 3, 32, 32)


# ---------------------------------------------------------------- the picture

ROWS = {
    "class": "class mean,\nless that of all",
    "assignment": "its noise:\nassignment",
    "within-class": "its noise:\nwithin class",
}
LOOKS = {
    "assignment": ("assignment", ORANGE),
    "nearest": ("nearest of 4", BLUE),
    "soft": ("soft", "#3c8d7d"),
    "within-class": ("within class", INK),
    "independent": ("independent", "#8b94a0"),
}
CONTRAST = 3.2  # standard deviations of the strongest row, from grey to white


def draw_means(figure: Any, tiles: dict[str, Any]) -> None:
    """Both rows of noise on one scale, or noise would look as strong as a picture."""
    shown = {name: unpacked(stored) for name, stored in tiles.items()}
    reach = {name: CONTRAST * float(values.std()) for name, values in shown.items()}
    reach["within-class"] = reach["assignment"]
    axes = figure.subplots(len(ROWS), len(CLASSES), gridspec_kw={"wspace": 0.05, "hspace": 0.05})
    for line, (name, title) in zip(axes, ROWS.items(), strict=True):
        for axis, values in zip(line, shown[name], strict=True):
            pixels = (0.5 + values / reach[name] / 2).clamp(0, 1).permute(1, 2, 0)
            axis.imshow(pixels, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        line[0].set_ylabel(title, rotation=0, ha="right", va="center", labelpad=6)
    for axis, name in zip(axes[0], CLASSES, strict=True):
        axis.set_title(name, fontsize=8, pad=3)


def draw_probe(axis: Any, found: dict[str, dict[str, Any]]) -> None:
    ends = []
    for name, (_, colour) in LOOKS.items():
        values = [[100 * a for a in found[name][str(n)]["accuracy"]] for n in SIZES]
        mean, error = ([of(each) for each in values] for of in (fmean, stdev))
        look = {"color": colour, "lw": 1.5, "marker": "o", "ms": 4, "capsize": 2.5}
        if name == "independent":  # a ring: within a class the numbers are the same
            look |= {"lw": 0, "elinewidth": 0, "capsize": 0, "ms": 8, "mfc": "none"}
        axis.errorbar(range(len(SIZES)), mean, error, **look)
        ends.append(mean[-1])
    below = spread([-end for end in ends], 1.25, -30, -8)  # labels that would overlap move down
    for place, (title, colour) in zip(below, LOOKS.values(), strict=True):
        axis.text(2.22, -place, title, color=colour, va="center")
    axis.axhline(10, color=INK, ls="--", lw=0.8, zorder=0)
    axis.text(0.5, 9.7, "chance", color=INK, ha="center", va="top", fontsize=8)
    axis.set_xticks(range(len(SIZES)), [str(n) for n in SIZES])
    axis.set(xlim=(-0.25, 2.2), ylim=(8, 22), xlabel="images in the pool")
    axis.set_title("class named from the noise alone, %", loc="left", fontsize=9)
    axis.set_yticks((10, 15, 20))
    axis.grid(color=GREY, lw=0.4, axis="y")


def picture(found: dict[str, Any]) -> None:
    figure = plots().figure(figsize=(10.6, 2.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2.7, 1), wspace=0.02)
    draw_means(left, found["tiles"])
    draw_probe(right.subplots(), found["probe"])
    figure.savefig(HERE / "leak.png")


def main() -> None:
    file = HERE / "leak.json"
    if "draw" not in sys.argv[1:]:
        measure(file)
    picture(json.loads(file.read_text()))


if __name__ == "__main__":
    main()
