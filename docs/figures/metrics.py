"""Draws docs/figures/metrics.png: a metric that is to be trusted rises when images get worse.

python docs/figures/metrics.py         measures (a quarter of an hour on a core) and draws
python docs/figures/metrics.py draw    draws the numbers of docs/figures/metrics.json again

CIFAR-10 against CIFAR-10 that is noisy, blurred, compressed, or lacks classes. Needs CIFAR-10 (from
the hub, or below $STILLHOUSE_DATA) and the detectors' weights (in $STILLHOUSE_WEIGHTS).
"""

import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from style import BLUE, GREY, HERE, INK, ORANGE, plots
from torch import Tensor
from torch.nn import functional as F

from stillhouse.data import Columns
from stillhouse.engine.world import world
from stillhouse.metrics.detectors import Detector, MobileNetV2Config, ResNet56Config
from stillhouse.metrics.frechet import frechet_distance
from stillhouse.metrics.kernels import kernel_distance
from stillhouse.metrics.moments import Moments
from stillhouse.metrics.neighbours import prdc
from stillhouse.recipes.judge.galleries import Pixels, Stored, find_data

SUBSETS, BATCH = 3, 250
CLASSES = 10
Numbers = dict[str, list[float]]  # values of the subsets, by metric


# ---------------------------------------------------------------- ways to spoil images


def add_noise(images: Tensor, std: float) -> Tensor:
    """Gaussian; `std` in units of white."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return to_bytes(images + 255 * std * noise)


def blur(images: Tensor, sigma: float) -> Tensor:
    """Gaussian, `sigma` in pixels; the border is mirrored."""
    reach = int(np.ceil(4 * sigma))
    kernel = torch.exp(-torch.arange(-reach, reach + 1.0).square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).expand(3, 1, 1, -1)
    pixels = F.pad(images.float(), (reach,) * 4, mode="reflect")
    pixels = F.conv2d(F.conv2d(pixels, kernel, groups=3), kernel.mT, groups=3)
    return to_bytes(pixels)


def compress(images: Tensor, quality: int) -> Tensor:
    """JPEG and back."""
    return torch.stack([_compressed(image, quality) for image in images])


def _compressed(image: Tensor, quality: int) -> Tensor:
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)


def to_bytes(pixels: Tensor) -> Tensor:
    return pixels.round().clamp(0, 255).to(torch.uint8)


class Damage(NamedTuple):
    """One way, with its strengths in growing order."""

    axis: str
    apply: Callable[[Tensor, Any], Tensor]
    strengths: tuple[float, ...]


DAMAGES = {
    "noise": Damage("noise, standard deviation", add_noise, (0.01, 0.02, 0.04, 0.08, 0.16)),
    "blur": Damage("blur, pixels", blur, (0.4, 0.5, 0.7, 1.0, 1.5)),
    "JPEG": Damage("JPEG, quality", compress, (95, 85, 70, 40, 15)),
}
MISSING = (1, 2, 4, 6, 8)


def keeps(labels: Tensor, missing: int, seed: int) -> Tensor:
    """Which images stay when some classes go: more of the same ones the more are missing."""
    order = np.random.default_rng(seed).permutation(CLASSES)
    return ~torch.isin(labels, torch.from_numpy(order[:missing]))


# ---------------------------------------------------------------- measuring


class Plan(NamedTuple):
    """How many images there is time for."""

    detector: Callable[[], Detector]
    reference: int
    pool: int  # whole images that samples are taken from
    samples: int  # in a subset
    neighbours: bool  # precision and the like as well


PLANS = {
    "ResNet56": Plan(ResNet56Config().build, 8000, 8000, 1500, True),
    "MobileNetV2": Plan(MobileNetV2Config().build, 5000, 4400, 800, False),
}


def cifar(count: int) -> tuple[Tensor, Tensor]:
    """Images and labels, a random part of the training set."""
    data = find_data("cifar10", Columns())
    assert data is not None
    gallery = Stored("cifar10", data, Pixels(), count=count, batch=BATCH, seed=0)
    with world("cpu") as here:
        shown = list(gallery.batches(here, 0, lambda _: None))
    labels = [label for part in shown for label in part.labels]
    return torch.cat([part.images for part in shown]), torch.tensor(labels)


def see(detector: Detector, images: Tensor) -> Tensor:
    return torch.cat([detector(part).features for part in images.split(BATCH)])


class Judge:
    """All metrics of samples against one reference."""

    def __init__(self, reference: Tensor, *, neighbours: bool) -> None:
        self.reference, self.moments = reference, Moments.of(reference)
        self.neighbours = neighbours

    def __call__(self, samples: Tensor) -> dict[str, float]:
        size = min(len(samples), 1000)
        values = {
            "FD": frechet_distance(Moments.of(samples), self.moments),
            "KD": kernel_distance(samples, self.reference, subsets=50, size=size).mean,
        }
        return values | (prdc(self.reference, samples)._asdict() if self.neighbours else {})


def rows_of(values: list[dict[str, float]]) -> Numbers:
    return {name: [one[name] for one in values] for name in values[0]}


def draw(count: int, total: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).permutation(total)[:count])


def measured(detector: Detector, plan: Plan) -> Iterator[tuple[str, float, Numbers]]:
    """(damage, strength, values); strength 0 is the floor: real against real."""
    images, labels = cifar(plan.reference + plan.pool)
    whole = see(detector, images)
    judge = Judge(whole[: plan.reference], neighbours=plan.neighbours)
    pool, pictures, kinds = (x[plan.reference :] for x in (whole, images, labels))
    chosen = [draw(plan.samples, plan.pool, seed) for seed in range(SUBSETS)]
    yield "floor", 0, rows_of([judge(pool[rows]) for rows in chosen])
    for missing in MISSING:
        left = [pool[keeps(kinds, missing, seed)] for seed in range(SUBSETS)]
        parts = [x[draw(plan.samples, len(x), seed)] for seed, x in enumerate(left)]
        yield "missing classes", missing, rows_of([judge(part) for part in parts])
    for name, damage in DAMAGES.items():
        for strength in damage.strengths:
            spoilt = (damage.apply(pictures[rows], strength) for rows in chosen)
            yield name, strength, rows_of([judge(see(detector, part)) for part in spoilt])


def measure(file: Path) -> None:
    found: dict[str, Any] = {}
    for name, plan in PLANS.items():
        detector, began = plan.detector(), time.perf_counter()
        found[name] = {
            "detector": detector.digest,
            "reference": plan.reference,
            "count": plan.samples,
            "values": [],
        }
        for damage, strength, values in measured(detector, plan):
            found[name]["values"].append({"damage": damage, "strength": strength, **values})
            spent, mean = time.perf_counter() - began, fmean(values["FD"])
            print(f"{name} {damage} {strength}: {mean:.4g} ({spent:.0f} s)", flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n")


# ---------------------------------------------------------------- the picture

ROWS = (
    ("FD-ResNet56", "ResNet56", {"FD": BLUE}),
    ("KD-ResNet56", "ResNet56", {"KD": BLUE}),
    ("FD-MobileNetV2", "MobileNetV2", {"FD": ORANGE}),
    ("shares, ResNet56", "ResNet56", {"precision": BLUE, "recall": ORANGE, "coverage": INK}),
)
COLUMNS = {name: damage.axis for name, damage in DAMAGES.items()}
COLUMNS |= {"missing classes": "classes missing, of 10"}


def show(axis: Any, found: list[dict[str, Any]], damage: str, metrics: dict[str, str]) -> None:
    floor = next(row for row in found if row["damage"] == "floor")
    rows = [row for row in found if row["damage"] == damage]
    for metric, colour in metrics.items():
        mean, error = ([of(row[metric]) for row in rows] for of in (fmean, stdev))
        look = {"color": colour, "lw": 1.3, "marker": "o", "ms": 3, "capsize": 2}
        axis.errorbar(range(len(rows)), mean, error, label=metric, **look)
        axis.axhline(fmean(floor[metric]), color=colour, ls="--", lw=1)
    axis.set_xticks(range(len(rows)), [f"{row['strength']:g}" for row in rows])
    axis.grid(color=GREY, lw=0.4)


def scale(axis: Any, metrics: dict[str, str]) -> None:
    """Distances over orders of magnitude; what is unbiased may be negative at the floor."""
    from matplotlib.ticker import LogLocator

    if "FD" in metrics:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_minor_formatter("")
    elif "KD" in metrics:
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ylim(bottom=-0.005)
    else:
        axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter("{x:g}")


def picture(found: dict[str, Any]) -> None:
    plt = plots()
    size = {"figsize": (10, 9), "layout": "constrained"}
    figure, axes = plt.subplots(len(ROWS), len(COLUMNS), sharex="col", sharey="row", **size)
    for line, (title, detector, metrics) in zip(axes, ROWS, strict=True):
        for axis, damage in zip(line, COLUMNS, strict=True):
            show(axis, found[detector]["values"], damage, metrics)
        scale(line[0], metrics)
        line[0].set_ylabel(title)
    for axis, label in zip(axes[-1], COLUMNS.values(), strict=True):
        axis.set_xlabel(label)
    dashed = plt.Line2D([], [], color=INK, ls="--", lw=1, label="real / real")
    axes[0][0].legend(handles=[dashed], loc="upper left", fontsize=8)
    axes[-1][0].legend(fontsize=8, loc="lower left")
    figure.align_ylabels(axes[:, 0])
    figure.savefig(HERE / "metrics.png")


def main() -> None:
    file = HERE / "metrics.json"
    if "draw" not in sys.argv[1:]:
        measure(file)
    picture(json.loads(file.read_text()))


if __name__ == "__main__":
    main()
