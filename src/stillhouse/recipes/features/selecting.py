"""`stillhouse features select MODEL`: from all activations to a few, as a file for other commands.

| step | needs | leaves |
|---|---|---|
| the paper's rules | the network alone | what by its place is neither noisy nor local |
| a gate by scores | `--images` | the better share within each resolution |
| a probe | `--data` with masks | the few that together tell labels best |

Labels are those of the training split: the test split is left to `stillhouse features evaluate`.
"""

from collections.abc import Callable, Iterator, Sequence
from math import isnan
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import interpolate

from stillhouse.data import Columns
from stillhouse.data.annotated import IGNORE, Masks, spread
from stillhouse.engine.world import world
from stillhouse.errors import UserError
from stillhouse.features.activation import Activation
from stillhouse.features.catalogue import Catalogue
from stillhouse.features.probe import Points, Step, features_at, forward_selection
from stillhouse.features.properties import Images, Scores, score
from stillhouse.features.segmentation import labelled_pixels
from stillhouse.features.selection import gate, keep_by_rule
from stillhouse.recipes.claims import write_output
from stillhouse.recipes.features.images import (
    Format,
    Pictures,
    check_whole,
    find_place,
    open_pictures,
)
from stillhouse.recipes.features.reading import (
    Chosen,
    FeatureModel,
    Outline,
    Reading,
    SelectionFile,
    load_model,
    pool,
    read_outline,
)
from stillhouse.recipes.progress import progress_bar

By = Literal["eta", "eta_lo", "eta_hi", "position", "locality"]


def _one(levels: tuple[float, ...]) -> tuple[float, ...]:
    if len(levels) > 1:
        raise ValueError("activations are compared at one noise level: give one --sigma")
    return levels


OneLevel = Annotated[tuple[NonNegativeFloat, ...], AfterValidator(_one)]


class SelectRun(Reading):
    """A selection."""

    sigma: OneLevel = ()
    """The noise level; if not given, timestep 50."""
    rules: bool = True
    """Begin with what the paper's rules leave."""
    images: str = ""
    """Images to score activations by; without them there is no gate."""
    columns: Columns = Columns()
    """Of data sets that are given as files."""
    count: PositiveInt = 16
    """Images to score by."""
    by: By = "eta_hi"
    """The score of the gate; less is better. `locality` asks for labels: its images are --data."""
    share: float = Field(default=0.5, gt=0, le=1)
    """What the gate leaves within each resolution."""
    data: str = ""
    """Images with masks for the probe; without them there is none."""
    format: Format = "auto"
    """Of the masks."""
    train_count: PositiveInt = 20
    """Images of the training split that the probe learns from."""
    held_count: PositiveInt = 20
    """Others of the same split that it is judged by."""
    pixels: PositiveInt = 64
    """Of each of them."""
    most: PositiveInt = 4
    """Activations that the probe chooses."""
    out: Path = Path("selection.json")
    """The file to write."""


def run(config: SelectRun) -> SelectionFile:
    """Writes the selection and returns it."""
    if config.out.suffix != ".json":
        raise UserError(f"--out {config.out} should end in .json: other commands know it by that")
    with world(config.device) as here:
        if here.size > 1:
            raise UserError("a selection is made by one process: run it without torchrun")
        looks = config.images or config.data or config.by == "locality"
        model = load_model(config, here.device) if looks else read_outline(config)
        found = select(config, model)
    write_output(config.out, found.model_dump_json(indent=1, exclude_none=True).encode())
    return found


def select(config: SelectRun, model: Outline) -> SelectionFile:
    """Step by step, each on what the one before has left; the rules need no weights."""
    ids, why = pool(model, config), "a candidate"
    if config.rules:
        ids, why = keep_by_rule(model.known, ids), "left by the rules"
        if not ids:
            raise UserError("the rules leave nothing of these: give --rules false")
    sigma = model.sigma(Chosen(ids=(), sigma=config.sigma[0] if config.sigma else None))
    reasons = dict.fromkeys(ids, why)
    if config.images or config.by == "locality":
        assert isinstance(model, FeatureModel)
        values = gated(config, model, ids, sigma)
        ids = list(values)
        reasons = {n: f"{why}, {config.by} {_number(value)}" for n, value in values.items()}
    if config.data:
        assert isinstance(model, FeatureModel)
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


def gated(config: SelectRun, model: FeatureModel, ids: list[str], sigma: float) -> dict[str, float]:
    """What the gate leaves, with its score."""
    pictures, mask = _to_score_by(config)
    scores = scores_of(model, ids, sigma, pictures, config, mask)
    kept = gate(scores, model.known, by=config.by, share=config.share)
    values = {name: getattr(scores[name], config.by) for name in kept}
    if all(map(isnan, values.values())):
        raise UserError(
            f"{config.by} cannot be measured from these images ({len(pictures)}): give more, as "
            "--images and --count, or gate by another score, as --by"
        )
    return values


def _to_score_by(config: SelectRun) -> tuple[Pictures, Callable[[int], Tensor] | None]:
    """Images, and the masks of those that have some."""
    if config.by != "locality":
        return open_pictures(config.images, config.columns, config.count), None
    place = find_place(config.data, config.format)
    masks = place.masks("train")
    some = masks.some(spread(len(masks.names), config.count))
    return Pictures(config.data, some.names, some.open, place.fingerprint), some.mask


def _number(value: float) -> str:
    return "not measured" if isnan(value) else f"{value:.3f}"


def scores_of(
    model: FeatureModel,
    ids: list[str],
    sigma: float,
    pictures: Pictures,
    config: Reading,
    mask: Callable[[int], Tensor] | None = None,
) -> dict[str, Scores]:
    """Of all these activations, from one pass over the pictures with two noises each."""
    with progress_bar(f"scores by {pictures.name}", len(pictures), "images") as advance:

        def batches() -> Iterator[Images]:
            for numbers in _batches(range(len(pictures)), config.batch):
                x = model.encoded([pictures.open(n) for n in numbers])
                labels = torch.stack([as_seen(model, mask(n)) for n in numbers]) if mask else None
                yield Images(x, numbers, model.condition(numbers), labels)
                advance(len(numbers))

        return score(model.extractor(ids, sigma), batches(), seeds=(config.seed, config.seed + 1))


def as_seen(model: FeatureModel, mask: Tensor) -> Tensor:
    """Labels of the pixels that the model is shown [height, width]; -1 where they are ignored."""
    config, (height, width) = model.image
    rows, columns = config.crop.sizes((height, width), (mask.shape[0], mask.shape[1]))
    resized = interpolate(mask[None, None].float(), (rows, columns), mode="nearest-exact")[0, 0]
    top, left = config.crop.place((rows - height, columns - width), 0, 0)
    seen = resized[top : top + height, left : left + width]
    return torch.where(seen == IGNORE, -1, seen)


def _batches(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


# ---------------------------------------------------------------- probe


def probed(config: SelectRun, model: FeatureModel, ids: list[str], sigma: float) -> list[Step]:
    """Forward selection with a linear probe on labelled pixels."""
    check_whole(config.fit)
    masks = find_place(config.data, config.format).masks("train")
    total = len(masks.names)
    if total < 2:
        raise UserError(f"{config.data} has {total} images to learn from: a probe needs two")
    numbers = dealt(total, config.train_count, config.held_count)
    train, held = (_points(masks, some, config, model, ids, sigma) for some in numbers)
    # A class that only these have cannot be told; numbers without gaps keep the probe small.
    classes = train.labels.unique()
    known = torch.isin(held.labels, classes)
    return forward_selection(
        Points(train.features, torch.searchsorted(classes, train.labels)),
        Points(
            {name: rows[known] for name, rows in held.features.items()},
            torch.searchsorted(classes, held.labels[known]),
        ),
        ids,
        count=config.most,
    )


def dealt(total: int, train: int, held: int) -> tuple[Sequence[int], Sequence[int]]:
    """Images to learn from and others to judge by; where there are fewer, both get their share."""
    chosen = spread(total, train + held)
    cut = max(1, len(chosen) * train // (train + held))
    return chosen[:cut], chosen[cut:]


def _points(
    masks: Masks,
    chosen: Sequence[int],
    config: SelectRun,
    model: FeatureModel,
    ids: list[str],
    sigma: float,
) -> Points:
    extractor = model.extractor(ids, sigma)
    labels: list[torch.Tensor] = []
    features: dict[str, list[torch.Tensor]] = {name: [] for name in ids}
    for numbers in _batches(chosen, config.batch):
        x = model.encoded([masks.open(n) for n in numbers])
        found = extractor.extract(x, model.condition(numbers), key=numbers, seed=config.seed)
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
