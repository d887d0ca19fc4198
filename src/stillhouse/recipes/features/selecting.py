"""`stillhouse features select MODEL`: from all activations to a few, as a file for other commands.

| step | needs | leaves |
|---|---|---|
| the paper's rules | the network alone | what by its place is neither noisy nor local |
| a gate by scores | `--images` | the better share within each resolution |
| a probe | `--data` with masks | the few that together tell labels best |
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, PositiveInt

from stillhouse.data import Columns
from stillhouse.data.annotated import Masks
from stillhouse.engine.world import world
from stillhouse.errors import UserError
from stillhouse.features.activation import Activation
from stillhouse.features.catalogue import Catalogue
from stillhouse.features.probe import Points, Step, features_at, forward_selection
from stillhouse.features.properties import Images, Scores, score
from stillhouse.features.segmentation import labelled_pixels
from stillhouse.features.selection import gate, keep_by_rule
from stillhouse.recipes.claims import write_output
from stillhouse.recipes.features.images import Format, Pictures, find_place, open_pictures
from stillhouse.recipes.features.reading import (
    Chosen,
    FeatureModel,
    Reading,
    SelectionFile,
    load_model,
    pool,
)
from stillhouse.recipes.progress import progress_bar

By = Literal["eta", "eta_lo", "eta_hi", "position"]


class SelectRun(Reading):
    """A selection."""

    rules: bool = True
    """Begin with what the paper's rules leave."""
    images: str = ""
    """Images to score activations by; without them there is no gate."""
    columns: Columns = Columns()
    """Of data sets that are given as files."""
    count: PositiveInt = 16
    """Images to score by."""
    by: By = "eta_hi"
    """The score of the gate; less is better."""
    share: float = Field(default=0.5, gt=0, le=1)
    """What the gate leaves within each resolution."""
    data: str = ""
    """Images with masks for the probe; without them there is none."""
    format: Format = "auto"
    """Of the masks."""
    train_count: PositiveInt = 20
    test_count: PositiveInt = 20
    """Images that the probe learns from, and is judged by."""
    pixels: PositiveInt = 64
    """Of each of them."""
    most: PositiveInt = 4
    """Activations that the probe chooses."""
    out: Path = Path("selection.json")


def run(config: SelectRun) -> SelectionFile:
    """Writes the selection and returns it."""
    if config.out.suffix != ".json":
        raise UserError(f"--out {config.out} should end in .json: other commands know it by that")
    with world(config.device) as here:
        if here.size > 1:
            raise UserError("a selection is made by one process: run it without torchrun")
        model = load_model(config, here.device)
        found = select(config, model)
    write_output(config.out, found.model_dump_json(indent=1, exclude_none=True).encode())
    return found


def select(config: SelectRun, model: FeatureModel) -> SelectionFile:
    """Step by step, each on what the one before has left."""
    ids, why = pool(model, config), "a candidate"
    if config.rules:
        ids, why = keep_by_rule(model.known, ids), "left by the rules"
        if not ids:
            raise UserError("the rules leave nothing of these: give --rules false")
    sigma = model.sigma(Chosen(ids=(), sigma=config.sigma[0] if config.sigma else None))
    reasons = dict.fromkeys(ids, why)
    if config.images:
        pictures = open_pictures(config.images, config.columns, config.count)
        scores = scores_of(model, ids, sigma, pictures, config)
        ids = gate(scores, model.known, by=config.by, share=config.share)
        reasons = {n: f"{why}, {config.by} {getattr(scores[n], config.by):.3f}" for n in ids}
    if config.data:
        steps = probed(config, model, ids, sigma)
        reasons = {s.id: f"{reasons[s.id]}, accuracy with it {s.accuracy:.3f}" for s in steps}
    part = Chosen(
        ids=tuple(reasons),
        model=config.model,
        sigma=sigma,
        prompt=config.prompt or None,
        label=config.label,
    )
    return SelectionFile(parts=(part,), why=reasons)


# ---------------------------------------------------------------- scores


def scores_of(
    model: FeatureModel, ids: list[str], sigma: float, pictures: Pictures, config: Reading
) -> dict[str, Scores]:
    """Of all these activations, from one pass over the pictures with two noises each."""
    with progress_bar(f"scores by {pictures.name}", len(pictures), "images") as advance:

        def batches() -> Iterator[Images]:
            for numbers in _batches(len(pictures), config.batch):
                x = model.encoded([pictures.open(n) for n in numbers])
                yield Images(x, numbers, model.condition(len(numbers)))
                advance(len(numbers))

        return score(model.extractor(ids, sigma), batches(), seeds=(config.seed, config.seed + 1))


def _batches(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


# ---------------------------------------------------------------- probe


def probed(config: SelectRun, model: FeatureModel, ids: list[str], sigma: float) -> list[Step]:
    """Forward selection with a linear probe on labelled pixels."""
    place = find_place(config.data, config.format)
    train = _points(place.masks("train"), config.train_count, config, model, ids, sigma)
    test = _points(place.masks("test"), config.test_count, config, model, ids, sigma)
    # A class that only the test has cannot be told; numbers without gaps keep the probe small.
    classes = train.labels.unique()
    known = torch.isin(test.labels, classes)
    return forward_selection(
        Points(train.features, torch.searchsorted(classes, train.labels)),
        Points(
            {name: rows[known] for name, rows in test.features.items()},
            torch.searchsorted(classes, test.labels[known]),
        ),
        ids,
        count=config.most,
    )


def _points(
    masks: Masks, count: int, config: SelectRun, model: FeatureModel, ids: list[str], sigma: float
) -> Points:
    extractor = model.extractor(ids, sigma)
    labels: list[torch.Tensor] = []
    features: dict[str, list[torch.Tensor]] = {name: [] for name in ids}
    for numbers in _batches(min(count, len(masks.names)), config.batch):
        x = model.encoded([masks.open(n) for n in numbers])
        found = extractor.extract(x, model.condition(len(x)), key=numbers, seed=config.seed)
        for row, number in enumerate(numbers):
            mask = masks.mask(number)
            pixels, label = labelled_pixels(mask, config.pixels, key=number, seed=config.seed)
            height, width = mask.shape
            places = (pixels + 0.5) / torch.tensor([width, height])
            labels.append(label)
            for name, value in found.items():
                rows = features_at(value[row : row + 1], places[None].to(value.device))
                features[name].append(rows.cpu())
    return Points({name: torch.cat(rows) for name, rows in features.items()}, torch.cat(labels))


# ---------------------------------------------------------------- reasons


def rule_reason(activation: Activation, known: Catalogue) -> tuple[bool, str]:
    """Whether the rules keep it, and why or why not."""
    if keep_by_rule(known, [activation.id]):
        if activation.stage == "block":
            return True, "neither of self-attention nor an increment"
        late = activation.kind == "self-k"
        return True, "late keys: locality keeps noise out" if late else "early enough on the way up"
    if activation.stage in ("in", "out"):
        return False, "what the network takes or gives"
    if activation.is_map:
        return False, "a map of attention, not a feature"
    if activation.is_increment:
        return False, "an increment: high-frequency noise"
    if activation.stage in ("down", "mid"):
        where = "on the way down" if activation.stage == "down" else "in the middle"
        return False, f"{where}: diffusion noise"
    if activation.kind.startswith(("self-", "dual-")):
        return False, "self-attention follows the place"
    return False, "late on the way up: diffusion noise"


def listed(found: SelectionFile) -> str:
    """For the terminal."""
    (part,) = found.parts
    width = max(map(len, part.ids))
    lines = [f"  {name:<{width}}  {found.why[name]}" for name in part.ids]
    assert part.sigma is not None
    return "\n".join([f"{len(part.ids)} activations at sigma {part.sigma:g}", *lines])
