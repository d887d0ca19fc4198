"""`stillhouse features evaluate MODEL --task T --data D`: what features are good for.

| task | asks | measured |
|---|---|---|
| `correspondence` | where is this point in that image | PCK per point and image, box and image |
| `few-labels` | what does each pixel show; 30 labelled images, ten MLPs vote | mean IoU |
| `segmentation` | the same from all labelled images, with a linear head | mean IoU |

    OUT/record.json     numbers and where they come from      OUT/pictures.png   some of the answers
    OUT/features/       what was read, to go on after a stop
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from stillhouse import __version__
from stillhouse.data.annotated import Keypoints, Masks, Pair, spread
from stillhouse.engine.world import World, world
from stillhouse.features.matching import Window, match
from stillhouse.features.segmentation import HEADS, Ensemble, fit, labelled_pixels, pixel_features
from stillhouse.features.store import StoredFeatures
from stillhouse.files import write_whole
from stillhouse.metrics.iou import Confusion
from stillhouse.metrics.pck import KeypointScore, are_right
from stillhouse.recipes.features.drawing import Shown, draw_matches, draw_segments
from stillhouse.recipes.features.extracting import extract
from stillhouse.recipes.features.images import Format, Pictures, Place, check_whole, find_place
from stillhouse.recipes.features.reading import Reading
from stillhouse.recipes.progress import progress_bar

FEW = 30  # labelled images, and as many to judge by
BATCH, STEPS, PASSES = 256, 1000, 10  # of a head: pixels at a time, how often at least

Record = dict[str, Any]


class TaskRun(Reading):
    """A task that features are put to."""

    task: Literal["correspondence", "few-labels", "segmentation"] = "correspondence"
    """Match points of two images, or learn what pixels show, of few images or by a linear head."""
    data: str = ""
    """The folder of an annotated data set, or its name below $STILLHOUSE_DATA."""
    format: Format = "auto"
    """Of its annotations."""
    count: NonNegativeInt = 0
    """Pairs, or images to judge by, evenly over the test split; 0: all, of few-labels 30."""
    train_count: NonNegativeInt = 0
    """Labelled images to learn from, evenly over the training split; 0: all, of few-labels 30."""
    alphas: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = (0.1, 0.05)
    """Thresholds of PCK."""
    window: NonNegativeInt = 0
    """Correspondence: pixels around the best that a soft answer is taken from; 0: the best."""
    temperature: float = Field(default=0.02, gt=0)
    """Of the soft answer."""
    pixels: PositiveInt = 500
    """Labelled pixels of each image to learn from, at most."""
    most_pixels: PositiveInt = 200_000
    """Of all images together, which share them: memory is 2 bytes times the channels for each."""
    steps: NonNegativeInt = 0
    """Of each head, with 256 pixels each; 0: ten times through all of them, 1000 at least."""
    members: PositiveInt = 10
    """Heads that vote in few-labels."""
    pictures: NonNegativeInt = 6
    """Answers that are drawn."""
    out: Path = Path("task")
    """The folder to write."""


def run(config: TaskRun) -> Record:
    """The record (at the first process)."""
    check_whole(config.fit)
    place = find_place(config.data, config.format)
    with world(config.device) as here:
        work = _correspondence if config.task == "correspondence" else _segmentation
        return work(config, place, here)


def _conclude(config: TaskRun, stored: StoredFeatures, results: Record) -> Record:
    facts = stored.facts
    record = {
        "task": config.task,
        "data": config.data,
        "results": results,
        "features": {
            "parts": [part.model_dump() for part in facts.parts],
            "reading": facts.reading,
        },
        "shapes": {name: list(shape) for name, shape in stored.shapes.items()},
        "seed": config.seed,
        "versions": {"stillhouse": __version__, "torch": torch.__version__},
    }
    write_whole(config.out / "record.json", json.dumps(record, indent=1).encode())
    return record


# ---------------------------------------------------------------- correspondence


def _correspondence(config: TaskRun, place: Place, here: World) -> Record:
    data = place.keypoints()
    pairs = [pair for pair in data.pairs if len(pair.source.points)]
    pairs = [pairs[number] for number in spread(len(pairs), config.count)]
    some = Keypoints.of(pairs, data.open)
    pictures = Pictures(
        config.data, some.names, lambda n: some.open(some.names[n]), place.fingerprint
    )
    stored = extract(config, pictures, here, config.out / "features")
    if stored is None:
        return {}
    window = Window(config.window, config.temperature) if config.window else None
    found = _match_all(stored, pairs, window, here.device)
    results = {
        "pairs": len(pairs),
        "points": sum(len(pair.source.points) for pair in pairs),
        "pck": {str(alpha): _pck(pairs, found, alpha) for alpha in config.alphas},
        "same_place": {
            str(alpha): _pck(pairs, [_same_place(pair) for pair in pairs], alpha)
            for alpha in config.alphas
        },
        "by_category": _by_category(pairs, found, config.alphas[0]),
    }
    if config.pictures:
        chosen = range(0, len(pairs), -(-len(pairs) // config.pictures))
        shown = [_shown(some, pairs[n], found[n], config.alphas[0]) for n in chosen]
        draw_matches(shown, config.out / "pictures.png")
    return _conclude(config, stored, results)


def _match_all(
    stored: StoredFeatures, pairs: Sequence[Pair], window: Window | None, device: torch.device
) -> list[Tensor]:
    found = []
    with progress_bar("matches", len(pairs), "pairs") as advance:
        for pair in pairs:
            maps = [
                [value.to(device).float() for value in stored.of(side.image).values()]
                for side in (pair.source, pair.target)
            ]
            sizes = (pair.source.size, pair.target.size)
            found.append(match(maps[0], maps[1], pair.source.points, sizes, window).cpu())
            advance(1)
    return found


def _pck(pairs: Sequence[Pair], found: Sequence[Tensor], alpha: float) -> dict[str, Any]:
    sums = KeypointScore(alpha)
    for pair, points in zip(pairs, found, strict=True):
        target = pair.target
        sums.update(points, target.points, box=target.box, size=target.size)
    return {name: share._asdict() for name, share in sums.result()._asdict().items()}


def _by_category(pairs: Sequence[Pair], found: Sequence[Tensor], alpha: float) -> dict[str, Any]:
    names = dict.fromkeys(pair.category for pair in pairs)
    both = list(zip(pairs, found, strict=True))
    parts = {name: [two for two in both if two[0].category == name] for name in names}
    return {
        name: _pck([pair for pair, _ in part], [points for _, points in part], alpha)
        for name, part in parts.items()
    }


def _same_place(pair: Pair) -> Tensor:
    """What a guess without looking would be worth."""
    scale = torch.tensor(pair.target.size).double() / torch.tensor(pair.source.size)
    return pair.source.points * scale


def _shown(data: Keypoints, pair: Pair, found: Tensor, alpha: float) -> Shown:
    x1, y1, x2, y2 = pair.target.box
    right = are_right(found, pair.target.points, alpha * max(x2 - x1, y2 - y1))
    images = (data.open(pair.source.image), data.open(pair.target.image))
    return Shown(*images, pair.source.points, found, right)


# ---------------------------------------------------------------- segmentation


def _segmentation(config: TaskRun, place: Place, here: World) -> Record:
    few = FEW if config.task == "few-labels" else 0
    train, seen = _labelled(config, place, "train", config.train_count or few, here)
    test, judged = _labelled(config, place, "test", config.count or few, here)
    # Learnt once, so that all processes judge by the same head.
    learnt = _learn(config, train, seen, here.device).cpu() if here.rank == 0 else None
    head = here.gather(learnt)[0]
    assert head is not None
    results = _judge(config, test, judged, head.to(here.device), here)
    if here.rank:
        return {}
    return _conclude(config, judged, {"train_images": len(seen), **results})


def _labelled(
    config: TaskRun, place: Place, which: Literal["train", "test"], count: int, here: World
) -> tuple[Masks, StoredFeatures]:
    """So many images of a split, and what was read of them."""
    whole = place.masks(which)
    masks = whole.some(spread(len(whole.names), count))
    pictures = Pictures(f"{config.data} {which}", masks.names, masks.open, place.fingerprint)
    folder = config.out / "features" / which
    extract(config, pictures, here, folder)
    return masks, StoredFeatures(folder)


def _maps(stored: StoredFeatures, number: int, device: torch.device) -> list[Tensor]:
    return [value.to(device).float() for value in stored[number].values()]


def _learn(config: TaskRun, masks: Masks, stored: StoredFeatures, device: torch.device) -> Ensemble:
    rows, labels = _rows(config, masks, stored, device)
    few = config.task == "few-labels"
    return fit(
        HEADS["mlp" if few else "linear"],
        rows,
        labels,
        masks.classes,
        members=config.members if few else 1,
        steps=config.steps or max(STEPS, PASSES * len(rows) // BATCH),
        batch=BATCH,
        lr=1e-3 if few else 1e-2,
        seed=config.seed,
    )


def _rows(
    config: TaskRun, masks: Masks, stored: StoredFeatures, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Features of labelled pixels [N, C] and their labels [N], in memory that is taken once."""
    count = min(config.pixels, max(1, config.most_pixels // len(stored)))
    channels = sum(shape[0] for shape in stored.shapes.values())
    rows = torch.empty(len(stored) * count, channels, device=device, dtype=torch.float16)
    labels, filled = torch.empty(len(rows), dtype=torch.int64, device=device), 0
    for number in range(len(stored)):
        mask = masks.mask(number)
        pixels, label = labelled_pixels(mask, count, key=number, seed=config.seed)
        size = (mask.shape[1], mask.shape[0])
        place = slice(filled, filled + len(label))
        rows[place] = pixel_features(_maps(stored, number, device), pixels, size)
        labels[place] = label.to(device)
        filled += len(label)
    return rows[:filled], labels[:filled]


def _judge(
    config: TaskRun, masks: Masks, stored: StoredFeatures, head: Ensemble, here: World
) -> Record:
    """Of all images, of which each process takes its share."""
    sums, drawn = Confusion(masks.classes), []
    mine = range(here.rank, len(stored), here.size)
    with progress_bar("masks", len(mine), "images", shown=here.rank == 0) as advance:
        for number in mine:
            mask = masks.mask(number)
            size = (mask.shape[1], mask.shape[0])
            found = head.segment(_maps(stored, number, here.device), size).cpu()
            sums.update(found, mask)
            if here.rank == 0 and len(drawn) < config.pictures:
                drawn.append((masks.open(number), mask, found))
            advance(1)
    sums.counts = here.sum(sums.counts).long()
    if drawn:
        draw_segments(drawn, config.out / "pictures.png")
    iou = [None if value != value else value for value in sums.iou().tolist()]
    return {
        "test_images": len(stored),
        "mean_iou": sums.mean_iou(),
        "accuracy": sums.accuracy(),
        "iou": iou,
    }


# ---------------------------------------------------------------- words


def summary(record: Record) -> str:
    """The numbers, for the terminal."""
    results = record["results"]
    if "mean_iou" in results:
        return (
            f"mean IoU {100 * results['mean_iou']:.1f}%, {100 * results['accuracy']:.1f}% of the "
            f"pixels right ({results['train_images']} images to learn from, "
            f"{results['test_images']} to judge by)"
        )
    lines = [f"{results['pairs']} pairs, {results['points']} points; in brackets the same place"]
    for alpha, found in results["pck"].items():
        base = results["same_place"][alpha]
        shares = (
            f"{kind} {100 * found[kind][how]:.1f}% ({100 * base[kind][how]:.1f}) {words}"
            for how, words in (("per_point", "per point"), ("per_image", "per image"))
            for kind in ("box", "image")
        )
        lines.append(f"PCK@{alpha}: {', '.join(shares)}")
    return "\n".join(lines)
