"""`--init-from`: a run that starts from the weights of a checkpoint, as far as they fit.

Another resolution, data set, condition or codec: `models.transfer` says what is carried over, and
noise levels are multiplied by the ratio of the sides, in training and in sampling.
"""

from typing import TYPE_CHECKING, Any

import torch

from stillhouse.config import Config
from stillhouse.errors import UserError
from stillhouse.models import Codec, DiffusersNetwork
from stillhouse.models.positions import Positions
from stillhouse.models.transfer import Account, transfer
from stillhouse.pipelines import load_codec, load_denoiser
from stillhouse.process import NetworkDenoiser
from stillhouse.recipes.latents import image_side

if TYPE_CHECKING:
    from stillhouse.pipelines.schedules import Trained
    from stillhouse.recipes.training import TrainRun


MOVED = ("shift", "sigma_max")  # settings of processes that say where sampling starts


class Carry(Config):
    """How the checkpoint of --init-from is carried over."""

    positions: Positions = "resample"
    """Those of a larger image lie between those of the smaller, or beyond (extrapolate)."""
    fresh: tuple[str, ...] = ()
    """What starts anew although it would fit: classes, input, output, text, or names of weights."""
    shift: bool = True
    """Multiply noise levels by how much larger the images are."""


def shifted(config: "TrainRun") -> "TrainRun":
    """The run with noise levels for its resolution; one that was shifted already stays so."""
    if not config.init_from or not config.init.shift:
        return config
    network: Any = load_denoiser(config.init_from).network
    codec = load_codec(config.init_from)
    before = network.data_shape[-1] * (codec.downscale if codec else 1)
    scale = image_side(config) / before
    objective: Any = config.objective
    process: Any = config.process
    density = objective.density.model_copy(update={"shift": objective.density.shift * scale})
    moved = {name: getattr(process, name) * scale for name in MOVED if hasattr(process, name)}
    return config.model_copy(
        update={
            "objective": objective.model_copy(update={"density": density}),
            "process": process.model_copy(update=moved),
            "init": config.init.model_copy(update={"shift": False}),
        }
    )


def start_from(
    config: "TrainRun", network: DiffusersNetwork, trained: "Trained", codec: Codec | None
) -> Account | None:
    """Carries the checkpoint over; None where there is none."""
    if not config.init_from:
        return None
    if config.network.kind == "pretrained":
        raise UserError(
            "--network pretrained goes on with a network as it is, --init-from carries one over to "
            "another: give one of them"
        )
    found = load_denoiser(config.init_from)
    check_process(config.init_from, found, trained)
    before, source = load_codec(config.init_from), found.network
    same = (before and before.digest) == (codec and codec.digest)
    fresh = (*config.init.fresh, *(() if same else ("input", "output")))
    try:
        return transfer(source, network, positions=config.init.positions, fresh=fresh)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(f"--init-from {config.init_from}: {error}") from error


def check_process(name: str, own: NetworkDenoiser, trained: "Trained") -> None:
    """Weights mean nothing in another process than their own."""
    sigma = torch.tensor([0.02, 0.5, 5.0])
    same = own.prediction == trained.prediction and torch.equal(
        own.scaling.time_at(sigma), trained.scaling.time_at(sigma)
    )
    if not same or not torch.equal(
        own.scaling.input_scale(sigma), trained.scaling.input_scale(sigma)
    ):
        raise UserError(
            f"{name} was trained as {type(own.scaling).__name__}, predicting {own.prediction}, not "
            "as --process says: give its own (vp with its betas and prediction, flow, or edm with "
            "its sigma-data)"
        )
