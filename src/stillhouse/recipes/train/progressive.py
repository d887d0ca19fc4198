"""Low resolution first: a run in stages, each of which goes on from the model of the one before.

    RUN/16px/    a whole run          RUN/32px/    the next, carried over (see `starting`)

Noise levels are those of the first stage times how much larger images have become. Local crops are
at the scale of the last stage, which so sees whole images.
"""

from typing import TYPE_CHECKING

from pydantic import NonNegativeInt, PositiveInt

from stillhouse.config import Config
from stillhouse.data import LocalCrop
from stillhouse.data.crops import Crop
from stillhouse.errors import UserError
from stillhouse.pipelines import read_facts

if TYPE_CHECKING:
    from stillhouse.recipes.train.training import TrainRun


class Stage(Config):
    """What one stage has of its own; all else is the run's."""

    size: PositiveInt
    """Pixels a side."""
    images: PositiveInt
    """To train on in this stage."""
    batch: NonNegativeInt = 0
    """Images per step; 0: the run's."""
    shards: str = ""
    """What `stillhouse prepare` has made at this size, where the run reads prepared shards."""
    held_out: str = ""
    """The same of what is not trained on."""


def check_flags(recipe: "TrainRun", config: "TrainRun") -> None:
    """What stages say is not said for the whole run: it would not be heard."""
    if not config.stages or config.stages != recipe.stages:
        return
    if _said(recipe) != _said(config):
        example = ", ".join(f'{{"size": {s.size}, "images": {s.images}}}' for s in config.stages)
        raise UserError(
            "the stages say how many images there are, and of which size: give --stages "
            f"'[{example}]' with other numbers, and leave --images, --data.image.size and "
            "--crop.scale out"
        )


def _said(config: "TrainRun") -> tuple[float, ...]:
    """How many images, of which size, at which scale where crops are local; points have none."""
    if config.data.kind == "points":
        return (config.images,)
    image = config.data.image
    return config.images, image.size, getattr(image.crop, "scale", LocalCrop().scale)


def legs(config: "TrainRun") -> list["TrainRun"]:
    """A run per stage, or the run itself."""
    from stillhouse.recipes.train.starting import enlargement, moved

    if not config.stages:
        return [config]
    if config.network.kind == "tuned":
        raise UserError("a pipeline is fine-tuned at its own resolution: leave --stages out")
    names = [f"{stage.size}px" for stage in config.stages]
    if len(set(names)) < len(names):
        raise UserError(f"stages are known by their size, and two are the same: {', '.join(names)}")
    shift, first = config.init.shift, config.stages[0]
    # Of a run that itself begins with another model: how much larger its first stage is.
    grown = enlargement(at(first, config)) if config.init_from and shift else 1.0
    carried = config.init.model_copy(update={"shift": False})  # it is already
    found: list[TrainRun] = []
    for stage in config.stages:
        scale = grown * stage.size / first.size if shift else 1.0
        start = str(found[-1].out / "model") if found else config.init_from
        leg = at(stage, moved(config, scale))
        found.append(leg.model_copy(update={"init_from": start, "init": carried}))
    return found


def at(stage: Stage, config: "TrainRun") -> "TrainRun":
    """The run of this stage alone."""
    data = config.data
    if data.kind == "points":
        raise UserError("points have no resolution to begin low with: leave --stages out")
    crop = _cropped(data.image.crop, config.stages[-1].size / stage.size)
    image = data.image.model_copy(update={"size": stage.size, "crop": crop})
    source, held_out = data.source, config.validation.source
    if stage.shards:
        source = source.model_copy(update={"path": stage.shards})
    if stage.held_out:
        held_out = held_out.model_copy(update={"path": stage.held_out})
    return config.model_copy(
        update={
            "stages": (),
            "data": data.model_copy(update={"image": image, "source": source}),
            "validation": config.validation.model_copy(update={"source": held_out}),
            "images": stage.images,
            "batch": stage.batch or config.batch,
            "out": config.out / f"{stage.size}px",
            "checkpoints": f"{config.checkpoints}/{stage.size}px" if config.checkpoints else "",
        }
    )


def _cropped(crop: Crop, larger: float) -> Crop:
    """Of a stage: a local crop is at the scale of the last, which is so many times as large."""
    return LocalCrop(scale=max(1.0, larger)) if isinstance(crop, LocalCrop) else crop


def run_stages(config: "TrainRun") -> "TrainRun":
    """Trains what is left of each; returns the last, which is trained when all are."""
    from stillhouse.recipes.train.training import run

    every = legs(config)
    for leg in every:
        if leg is every[-1] or seen(leg) < leg.images:
            run(leg)
    return every[-1]


def seen(leg: "TrainRun") -> int:
    """Images that the model of a stage was trained on; 0 where there is none."""
    model = leg.out / "model"
    return int(read_facts(model).get("images", 0)) if (model / "config.json").is_file() else 0
