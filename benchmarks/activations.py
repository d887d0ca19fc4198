"""What activations are worth, each alone and several together: where points are, what pixels show.

`See` is all that is asked of a network: features of images, by their names. Similarities of all
activations are computed once for a pair, so that an arm, which is some of them together, costs
nothing beyond its mean.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.data.annotated import Keypoints, Masks, Pair
from stillhouse.features.matching import similarity
from stillhouse.features.probe import Points, forward_selection
from stillhouse.features.segmentation import fit, labelled_pixels, pixel_features, pixel_mlp
from stillhouse.metrics.iou import Confusion
from stillhouse.metrics.networks import MobileNetV2, find_weights, load_weights, ready
from stillhouse.metrics.pck import KeypointScore, are_right
from stillhouse.metrics.preprocessing import IMAGENET, Preprocessing
from stillhouse.recipes.features.drawing import Shown

ALPHA = 0.1
PIXELS = 250  # labelled pixels of an image, to learn from or to judge by
MEMBERS, STEPS, BATCH = 5, 300, 128  # of the pixels' MLPs
HELD = 1 / 3  # of the images to learn from, what the probe is judged by
MOST = 4  # activations that are chosen in the end
MOBILENET = ["layer6", "layer13", "layer17"]  # with 32, 96 and 320 channels
AT_ONCE = 16  # pairs or images whose activations are held

Ids = Sequence[str]
See = Callable[[Ids, int], dict[str, Tensor]]  # images by name, and a seed -> id -> [B, C, H, W]


# ---------------------------------------------------------------- correspondence


def drawn_pairs(pairs: Sequence[Pair], count: int, draw: int, draws: int) -> list[Pair]:
    """As many of each species, with points; each draw has other species.

    Those of a species follow each other, so that most images are in two pairs.
    """
    species: dict[str, list[Pair]] = {}
    for pair in pairs:
        if len(pair.source.points):
            species.setdefault(pair.category, []).append(pair)
    chosen = [species[name] for name in sorted(species)][draw::draws]
    each = -(-count // max(1, len(chosen)))
    return [pair for some in chosen for pair in some[:each]][:count]


def likeness(see: See, pairs: Sequence[Pair], seed: int) -> Iterator[tuple[list[str], Tensor]]:
    """Of each pair, ids and the cosines [ids, points, height, width] in the target."""
    for start in range(0, len(pairs), AT_ONCE):
        some = pairs[start : start + AT_ONCE]
        names = list(dict.fromkeys(side.image for pair in some for side in pair[:2]))
        features = see(names, seed)
        for pair in some:
            one, other = (names.index(side.image) for side in pair[:2])
            sizes = (pair.source.size, pair.target.size)
            alike = [
                similarity([maps[one].float()], [maps[other].float()], pair.source.points, sizes)
                for maps in features.values()
            ]
            yield list(features), torch.stack(alike)


def best_pixels(alike: Tensor) -> Tensor:
    """(x, y) [..., 2] of the largest of [..., height, width]."""
    best = alike.flatten(-2).argmax(-1)
    return torch.stack([best % alike.shape[-1], best // alike.shape[-1]], -1).double()


def matched(
    see: See, pairs: Sequence[Pair], arms: Mapping[str, Ids], seed: int
) -> dict[str, list[Tensor]]:
    """Points that are found, pair by pair: by each activation alone, and by those of each arm."""
    found: dict[str, list[Tensor]] = {}
    for ids, alike in likeness(see, pairs, seed):
        for name, points in zip(ids, best_pixels(alike), strict=True):
            found.setdefault(name, []).append(points)
        for arm, names in arms.items():
            together = alike[[ids.index(name) for name in names]].mean(0)
            found.setdefault(arm, []).append(best_pixels(together))
    return found


def pck(pairs: Sequence[Pair], found: Sequence[Tensor]) -> tuple[float, float]:
    """By the box: per point, per image."""
    sums = KeypointScore(ALPHA)
    for pair, points in zip(pairs, found, strict=True):
        sums.update(points, pair.target.points, box=pair.target.box, size=pair.target.size)
    return sums.result().box


def greedy(see: See, pairs: Sequence[Pair], ids: Ids, seed: int) -> list[str]:
    """Adds the activation that helps most, by PCK on these pairs, until none does."""
    seen = [alike[[there.index(n) for n in ids]] for there, alike in likeness(see, pairs, seed)]
    totals = [torch.zeros_like(one[0]) for one in seen]
    chosen: list[str] = []
    reached = 0.0
    while len(chosen) < min(MOST, len(ids)):
        tried = {
            name: pck(pairs, [best_pixels(t + a[i]) for t, a in zip(totals, seen, strict=True)])[0]
            for i, name in enumerate(ids)
            if name not in chosen
        }
        best = max(tried, key=lambda name: tried[name])
        if chosen and tried[best] <= reached:
            break
        chosen.append(best)
        reached = tried[best]
        totals = [t + one[ids.index(best)] for t, one in zip(totals, seen, strict=True)]
    return chosen


def shown(data: Keypoints, pair: Pair, found: Tensor) -> Shown:
    x1, y1, x2, y2 = pair.target.box
    right = are_right(found, pair.target.points, ALPHA * max(x2 - x1, y2 - y1))
    images = (data.open(pair.source.image), data.open(pair.target.image))
    return Shown(*images, pair.source.points, found, right)


# ---------------------------------------------------------------- segmentation


def pixels_of(see: See, masks: Masks, numbers: Sequence[int], seed: int) -> Points:
    """Labelled pixels of these images, and what each activation says of them."""
    labels: list[Tensor] = []
    features: dict[str, list[Tensor]] = {}
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        found = see([masks.names[n] for n in some], seed)
        for row, number in enumerate(some):
            mask = masks.mask(number)
            places, label = labelled_pixels(mask, PIXELS, key=number)
            size = (mask.shape[1], mask.shape[0])
            labels.append(label)
            for name, maps in found.items():
                rows = pixel_features([maps[row]], places, size)
                features.setdefault(name, []).append(rows.half())  # thousands of channels in all
    return Points({name: torch.cat(rows) for name, rows in features.items()}, torch.cat(labels))


def part_of(points: Points, start: int, stop: int | None) -> Points:
    some = {name: rows[start:stop] for name, rows in points.features.items()}
    return Points(some, points.labels[start:stop])


def probed(train: Points, ids: Ids) -> list[str]:
    """By the library's linear probe, with no more labelled images than the heads learn from."""
    end = round(len(train.labels) * (1 - HELD))
    fitted, held = part_of(train, 0, end), part_of(train, end, None)
    return [step.id for step in forward_selection(fitted, held, ids, count=MOST)]


def mean_iou(train: Points, test: Points, ids: Ids, seed: int) -> float:
    """Of MLPs that vote, on the labelled pixels of the test images."""
    rows, judged = (p.joined(ids).float() for p in (train, test))
    head = fit(
        pixel_mlp, rows, train.labels, 2, members=MEMBERS, steps=STEPS, batch=BATCH, seed=seed
    )
    sums = Confusion(2)
    for some, true in zip(judged.split(4096), test.labels.split(4096), strict=True):
        sums.update(head(some), true)
    return sums.mean_iou()


# ---------------------------------------------------------------- a network with labels


def mobilenet(open: Callable[[str], Any]) -> See:
    """Three of its stages, of the picture made 256."""
    import numpy as np

    network = MobileNetV2()
    load_weights(network, find_weights("", "mobilenet_v2.safetensors"))
    layers = ready(network, "cpu").features
    assert isinstance(layers, nn.Sequential)
    prepare = Preprocessing(256, "bilinear", *IMAGENET)

    @torch.no_grad()
    def see(names: Ids, seed: int) -> dict[str, Tensor]:
        pixels = [torch.from_numpy(np.array(open(name).convert("RGB"))) for name in names]
        x, found = prepare(torch.stack(pixels).permute(0, 3, 1, 2)), {}
        for number, layer in enumerate(layers):
            x = layer(x)
            if (name := f"layer{number}") in MOBILENET:
                found[name] = x
        return found

    return see
