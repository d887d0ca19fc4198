"""The pictures of a card: samples of the model that is handed on, and how its training went."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillhouse.recipes import pictures
from stillhouse.recipes.sampling import SampleRun, build_grid, check_finite, draw_batch, walked
from stillhouse.recipes.subjects import Subject

CPU = torch.device("cpu")


def draw_grid(subject: Subject, run: SampleRun, target: Path, kinds: int) -> None:
    """Samples 0, 1, ... of seed 0, as `stillhouse sample` draws; a class or prompt per column."""
    run = walked(run, subject)
    if subject.toy is not None:
        backdrop = subject.toy.sample(2000, torch.Generator().manual_seed(0))
        return pictures.save_points(torch.cat(list(_drawn(subject, run))), backdrop, target)
    columns = kinds if 1 < kinds <= 16 else None
    tiles = [pictures.to_pil(s) for batch in _drawn(subject, run) for s in subject.decode(batch)]
    return pictures.save_tiles(tiles, target, columns=columns)


def _drawn(subject: Subject, run: SampleRun) -> Iterator[Tensor]:
    """Batch by batch: one of all samples would take too much memory."""
    grid = build_grid(run, subject, CPU)
    for first in range(0, run.count, run.batch):
        indices = list(range(first, min(first + run.batch, run.count)))
        samples = draw_batch(run, subject, grid, indices, CPU)
        check_finite(samples, indices)
        yield samples


def curves(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The numbers behind the picture: series over images, and the last losses per noise level."""
    names = ("denoiser/loss", "validation/loss", "denoiser/lr")
    series = {n: [[line["images"], line[n]] for line in log if n in line] for n in names}
    levels = {
        n: [line[n] for line in log if n in line][-1:] for n in ("levels", "validation/levels")
    }
    return {**series, **{name: found[0] for name, found in levels.items() if found}}


def draw_curves(log: Sequence[dict[str, Any]], target: Path) -> None:
    """Loss over images, and held-out loss per noise level from early to late."""
    plt = pictures.pyplot()
    found = curves(log)
    figure, (loss, levels) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, label, look in (
        ("denoiser/loss", "training", {"lw": 0.8, "color": "#7f8c9b"}),
        (
            "validation/loss",
            "held out, averaged weights",
            {"marker": "o", "ms": 3, "color": "#1d5b8f"},
        ),
    ):
        if found[name]:
            loss.plot(*zip(*found[name], strict=True), label=label, **look)
    top = 2 * min((value for _, value in found["denoiser/loss"]), default=1.0)
    loss.set(xlabel="images", ylabel="loss", ylim=(None, top))
    loss.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
    loss.legend(fontsize=8)
    key = "validation/levels" if "validation/levels" in found else "levels"
    lines = [line for line in log if key in line]
    chosen = sorted({round(i * (len(lines) - 1) / 4) for i in range(5)}) if lines else []
    for i, line in enumerate(lines[k] for k in chosen):
        edges = line[key]["edges"]
        middles = [(a * b) ** 0.5 for a, b in pairwise(edges)]
        values = [float("nan") if v is None else v for v in line[key]["loss"]]
        shade = plt.cm.viridis(0.9 - 0.8 * i / max(1, len(chosen) - 1))
        levels.plot(middles, values, color=shade, lw=1.2, label=f"{line['images']:,}")
    levels.set(xscale="log", xlabel="noise level σ", ylabel="loss")
    levels.legend(title="images", fontsize=7, title_fontsize=7)
    figure.savefig(target, dpi=110)
    plt.close(figure)
