"""`stillhouse features atlas MODEL --images DIR`: the network's inside as one HTML page.

The network is drawn stage by stage, a dot for each activation; below, each one with the first three
principal components of its features as colours, its scores, and whether the rules keep it, and why.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor

from stillhouse import __version__
from stillhouse.data import Columns
from stillhouse.engine.world import world
from stillhouse.errors import UserError
from stillhouse.features.activation import Activation
from stillhouse.features.pca import StreamingPCA
from stillhouse.features.properties import Scores, asymmetry
from stillhouse.recipes.claims import write_output
from stillhouse.recipes.features.atlas_page import SHELL, STYLE
from stillhouse.recipes.features.images import Pictures, open_pictures
from stillhouse.recipes.features.info import shape_words
from stillhouse.recipes.features.reading import Chosen, FeatureModel, Reading, load_model, pool
from stillhouse.recipes.features.selecting import OneLevel, rule_reason, scores_of
from stillhouse.recipes.pictures import data_uri, png_of

SCORES = {"eta": "noise", "eta_hi": "fine noise", "kappa": "detail", "position": "place"}
STAGES = {"in": "In", "down": "Down", "mid": "Middle", "up": "Up", "block": "Blocks", "out": "Out"}
WIDTH, ROW, MARGIN = 1200, 62, 46  # of the drawing, in pixels
# viridis from quiet to noisy
SCALE = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")


class AtlasRun(Reading):
    """A page about a model's activations."""

    sigma: OneLevel = ()
    """The noise level; if not given, timestep 50."""
    images: str = ""
    """A folder of images, a data set (cifar10, pets:test), Parquet files or tars."""
    columns: Columns = Columns()
    """Of data sets that are given as files."""
    shown: PositiveInt = 3
    """Images that are shown for each activation."""
    count: PositiveInt = 16
    """Images that scores and colours come from."""
    all: bool = False
    """Values and maps of attention, too, not only what the paper compares."""
    out: Path = Path("atlas.html")
    """The page to write."""


class Entry(NamedTuple):
    """One activation with all that the page says of it."""

    activation: Activation
    scores: Scores
    kept: bool
    why: str
    pictures: list[bytes]  # PNG


def run(config: AtlasRun) -> Path:
    """Writes the page and returns where it is."""
    with world(config.device) as here:
        if here.size > 1:
            raise UserError("an atlas is drawn by one process: run it without torchrun")
        pictures = open_pictures(config.images, config.columns, config.count)
        model = load_model(config, here.device)
        page = draw(config, model, pictures)
    write_output(config.out, page.encode())
    return config.out


def draw(config: AtlasRun, model: FeatureModel, pictures: Pictures) -> str:
    """The page."""
    ids = list(model.known) if config.all and not config.selection else pool(model, config)
    sigma = model.sigma(Chosen(ids=(), sigma=config.sigma[0] if config.sigma else None))
    scores = scores_of(model, ids, sigma, pictures, config)
    numbers = range(min(config.shown, len(pictures)))
    images = [pictures.open(number) for number in numbers]
    coloured = component_pictures(model, ids, sigma, images, config.seed)
    entries = []
    for name in ids:
        kept, why = rule_reason(model.known[name], model.known)
        entry = Entry(model.known[name], scores[name], kept, why, coloured[name])
        entries.append(entry)
    originals = "".join(
        _img(png_of(image.resize((192, 192)).convert("RGB")), "an image") for image in images
    )
    return SHELL.format(
        title=f"Inside {escape(Path(model.name).name or model.name)}",
        style=STYLE,
        state=_state(model, entries, scores, sigma, len(pictures)),
        pictures=f'<div class="images">{originals}</div>',
        drawing=network(entries),
        sections="\n".join(_sections(entries, model.latent)),
        notes=_notes(),
    )


def _state(
    model: FeatureModel,
    entries: Sequence[Entry],
    scores: Mapping[str, Scores],
    sigma: float,
    count: int,
) -> str:
    kept = sum(entry.kept for entry in entries)
    words = [
        f"{len(entries)} of {len(model.known)} activations, {kept} kept by the rules",
        f"sigma {sigma:g}",
        f"scores from {count} images of {model.reading}",
    ]
    stages = {entry.activation.stage for entry in entries}
    if {"down", "up"} <= stages:
        words.append(f"noise on the way down is {asymmetry(scores, model.known):.2f} x early up")
    return escape("; ".join(words))


def _notes() -> str:
    return (
        f"Drawn by stillhouse features atlas, version {__version__}. Noise: share of the features' "
        "variance that changes with the noise; fine noise: the same of fine detail; detail: mean "
        "frequency in cycles per cell; place: how well the place can be told from the features. "
        "Scores compare activations of one resolution only. Colours are the first three principal "
        "components, of each activation by itself: the same colour in two of them means nothing."
    )


# ---------------------------------------------------------------- pictures


def component_pictures(
    model: FeatureModel, ids: Sequence[str], sigma: float, images: Sequence[Any], seed: int
) -> dict[str, list[bytes]]:
    """The first three components of each activation as red, green and blue, a PNG per image."""
    x = model.encoded(images)
    cond = model.condition(len(images))
    found = model.extractor(ids, sigma).extract(x, cond, key=range(len(images)), seed=seed)
    return {
        name: [png_of(_image(part)) for part in components(value)] for name, value in found.items()
    }


def components(features: Tensor, count: int = 3) -> Tensor:
    """[B, C, H, W] -> [B, 3, H, W] in [0, 1]; what has fewer components is filled with the last."""
    sums = StreamingPCA(features.shape[1])
    sums.update(features.float())
    able = min(count, sums.channels, sums.moments.count - 1)
    shown = sums.components(able).project(features.float()) if able else features[:, :1].float()
    shown = torch.cat([shown] + [shown[:, -1:]] * (count - shown.shape[1]), 1)
    flat = shown.transpose(0, 1).flatten(1)
    low, high = (flat.quantile(q, dim=1)[:, None, None] for q in (0.02, 0.98))
    return ((shown - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)


def _image(pixels: Tensor) -> Any:
    from PIL import Image

    return Image.fromarray((255 * pixels).round().to(torch.uint8).movedim(0, -1).cpu().numpy())


def _img(content: bytes, what: str) -> str:
    return f'<img alt="{escape(what)}" src="{data_uri(content)}">'


# ---------------------------------------------------------------- the network


def network(entries: Sequence[Entry]) -> str:
    """A dot for each activation: to the right in the order of computation, lower where coarser."""
    scales = sorted({entry.activation.scale for entry in entries}, reverse=True)
    noise = [entry.scores.eta for entry in entries if math.isfinite(entry.scores.eta)]
    most = max(noise, default=1.0) or 1.0
    step = (WIDTH - 2 * MARGIN) / max(1, len(entries) - 1)
    radius = max(2.5, min(7.0, 0.42 * step))
    places = [
        (MARGIN + number * step, 40 + ROW * scales.index(entry.activation.scale))
        for number, entry in enumerate(entries)
    ]
    height = 40 + ROW * (len(scales) - 1) + 56
    path = "M" + "L".join(f"{x:.1f} {y}" for x, y in places)
    dots = "".join(
        _dot(entry, place, radius, most) for entry, place in zip(entries, places, strict=True)
    )
    labels = "".join(
        f'<text x="6" y="{40 + ROW * row + 4}">{_scale_words(scale)}</text>'
        for row, scale in enumerate(scales)
    )
    return (
        f'<figure class="drawing"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="the network, a dot for each activation"><path class="path" d="{path}"/>'
        f"{labels}{_stage_words(entries, places)}{dots}{_legend(height, most)}</svg></figure>"
    )


def _scale_words(scale: Any) -> str:
    return "1" if scale == 1 else f"{scale.numerator}/{scale.denominator}"


def _stage_words(entries: Sequence[Entry], places: Sequence[tuple[float, float]]) -> str:
    both = list(zip(entries, places, strict=True))
    words = []
    for stage, group in groupby(both, key=lambda two: two[0].activation.stage):
        across = [place[0] for _, place in group]
        if stage in ("down", "mid", "up", "block"):
            middle = (across[0] + across[-1]) / 2
            words.append(f'<text x="{middle:.0f}" y="18" text-anchor="middle">{stage}</text>')
    return "".join(words)


def _dot(entry: Entry, place: tuple[float, float], radius: float, most: float) -> str:
    name, eta = entry.activation.id, entry.scores.eta
    at = f'cx="{place[0]:.1f}" cy="{place[1]}"'
    ring = f'<circle class="k" {at} r="{radius + 3:.1f}"/>' if entry.kept else ""
    told = escape(f"{name}: noise {eta:.3f}, {entry.why}")
    return (
        f'<a href="#{escape(name)}">{ring}<circle {at} r="{radius:.1f}" '
        f'fill="{colour(eta / most)}"><title>{told}</title></circle></a>'
    )


def colour(share: float) -> str:
    """From quiet (0) to noisy (1); grey where it could not be measured."""
    if not math.isfinite(share):
        return "#9aa4af"
    return SCALE[min(len(SCALE) - 1, max(0, int(share * len(SCALE))))]


def _legend(height: int, most: float) -> str:
    left, y = WIDTH - 330, height - 16
    cells = "".join(
        f'<rect x="{left + 70 + 18 * n}" y="{y - 9}" width="18" height="10" fill="{fill}"/>'
        for n, fill in enumerate(SCALE)
    )
    end = left + 70 + 18 * len(SCALE) + 6
    return (
        f'<text x="{left + 64}" y="{y}" text-anchor="end">noise 0</text>{cells}'
        f'<text x="{end}" y="{y}">{most:.2f}</text>'
        f'<circle class="k" cx="{end + 62}" cy="{y - 4}" r="6"/>'
        f'<text x="{end + 72}" y="{y}">kept</text>'
    )


# ---------------------------------------------------------------- cards


def _sections(entries: Sequence[Entry], latent: tuple[int, int]) -> Iterator[str]:
    def stage(entry: Entry) -> tuple[str, int]:
        activation = entry.activation
        return activation.stage, activation.level

    for (name, level), group in groupby(entries, key=stage):
        found = list(group)
        numbered = name in ("down", "up")
        title = f"{STAGES[name]}, level {level}" if numbered else STAGES[name]
        kept = sum(entry.kept for entry in found)
        cards = "".join(_card(entry, latent) for entry in found)
        yield (
            f'<section><h2>{title}</h2><p class="quiet">{len(found)} activations, {kept} kept</p>'
            f'<div class="cards">{cards}</div></section>'
        )


def _card(entry: Entry, latent: tuple[int, int]) -> str:
    activation = entry.activation
    name = escape(activation.id)
    strip = "".join(_img(content, f"components of {activation.id}") for content in entry.pictures)
    shares = "".join(
        f"<dt>{word}</dt><dd>{_number(getattr(entry.scores, score))}</dd>"
        for score, word in SCORES.items()
    )
    verdict = "kept" if entry.kept else "dropped"
    return (
        f'<article id="{name}" class="{verdict}"><h3>{name}</h3>'
        f'<p class="quiet">{shape_words(activation, latent)}; {escape(activation.module)}</p>'
        f'<div class="strip">{strip}</div><dl>{shares}</dl>'
        f'<p class="why">{verdict}: {escape(entry.why)}</p></article>'
    )


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "none"
