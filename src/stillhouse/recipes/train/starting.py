"""`--init-from`: a run that starts from the weights of a checkpoint, as far as they fit.

Another resolution, data set, condition or codec: `models.transfer` says what is carried over, and
noise levels are multiplied by the ratio of the sides, in training and in sampling. A network of a
VP process is told its timestep, as before, of which the noise is now larger; one of flow or EDM is
told the level itself.
"""

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from stillhouse.config import Config
from stillhouse.errors import UserError
from stillhouse.models import Codec, DiffusersNetwork
from stillhouse.models.positions import Positions
from stillhouse.models.transfer import Account, transfer
from stillhouse.pipelines import (
    checkpoint_files,
    load_codec,
    load_denoiser,
    read_facts,
    resolve_folder,
)
from stillhouse.process import NetworkDenoiser
from stillhouse.recipes.latents import image_side
from stillhouse.recipes.train.folders import read_record
from stillhouse.recipes.train.processes import RectifiedFlow

if TYPE_CHECKING:
    from stillhouse.pipelines.schedules import Trained
    from stillhouse.recipes.train.training import TrainRun


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
    if recorded(config) is None:
        check_levels(config)
    init = config.init.model_copy(update={"shift": False})
    return moved(config, enlargement(config)).model_copy(update={"init": init})


def moved(config: "TrainRun", scale: float) -> "TrainRun":
    """The run with all its noise levels times the scale."""
    objective: Any = config.objective
    process: Any = config.process
    density = objective.density
    if not follows(density, process):
        density = density.model_copy(update={"shift": density.shift * scale})
    ends = {name: getattr(process, name) * scale for name in MOVED if hasattr(process, name)}
    return config.model_copy(
        update={
            "objective": objective.model_copy(update={"density": density}),
            "process": process.model_copy(update=ends),
        }
    )


def moved_by(before: "TrainRun", after: "TrainRun") -> float:
    """What noise levels were multiplied by."""
    ends = [[getattr(run.process, name, 1.0) for name in MOVED] for run in (after, before)]
    return max(new / old for new, old in zip(*ends, strict=True))


def check_levels(config: "TrainRun") -> None:
    """What is shifted must be the checkpoint's own levels: it may have been shifted before."""
    own, ours = load_denoiser(config.init_from).scaling, config.process.build().scaling
    if type(own) is not type(ours):
        return  # which is refused in words of its own
    ends = [getattr(scaling, "shift_scale", scaling.sigma_max) for scaling in (own, ours)]
    if not math.isclose(*ends, rel_tol=1e-3):
        raise UserError(
            f"{config.init_from} draws from other noise levels than --process says ({ends[0]:g}, "
            f"not {ends[1]:g}): give its own --process; if it was shifted before, with "
            "--process.shift (edm: --process.sigma-max) and --objective.density.shift as they were"
        )
    objective: Any = config.objective
    density, own_shift = objective.density, trained_shift(config, objective.density)
    follow = follows(density, config.process)
    if not follow and not math.isclose(own_shift, density.shift, rel_tol=1e-3):
        raise UserError(
            f"{config.init_from} was trained on noise levels times {own_shift:g}: give "
            f"--objective.density.shift {own_shift:g}, so that they are shifted from there"
        )


def trained_shift(config: "TrainRun", ours: Any) -> float:
    """That of the checkpoint's density, where it is known and of our kind; else our own."""
    network = checkpoint_files(resolve_folder(config.init_from))["network"][0].parent
    own = read_facts(network).get("config", {}).get("objective", {}).get("density", {})
    return float(own.get("shift", 1.0)) if own.get("kind") == ours.kind else ours.shift


def recorded(config: "TrainRun") -> float | None:
    """The enlargement as its folder has it: a run that has begun needs the checkpoint no more."""
    return read_record(config.out).get("enlarged")


def enlargement(config: "TrainRun") -> float:
    """How much larger images are than those of the checkpoint, a side."""
    known = recorded(config)
    if known is not None:
        return known
    return image_side(config) / side_of(config.init_from)


@cache
def side_of(checkpoint: str) -> int:
    """Pixels a side of the images that it draws. Asked for several times, and all of it is read."""
    network: Any = load_denoiser(checkpoint).network
    codec = load_codec(checkpoint)
    return network.data_shape[-1] * (codec.downscale if codec else 1)


def follows(density: Any, process: Any) -> bool:
    """Whether a density is one of the process's own levels, and so moves with them."""
    if isinstance(process, RectifiedFlow):  # whose shift is that of the sampling grid alone
        return False
    own_ends = density.kind == "log-uniform" and not (density.sigma_min or density.sigma_max)
    return own_ends or density.kind == "uniform-time"


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
    check_process(config.init_from, found, trained, enlargement(config))
    before, source = load_codec(config.init_from), found.network
    same = (before and before.digest) == (codec and codec.digest)
    fresh = (*config.init.fresh, *(() if same else ("input", "output")))
    try:
        return transfer(source, network, positions=config.init.positions, fresh=fresh)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(f"--init-from {config.init_from}: {error}") from error


def check_process(name: str, own: NetworkDenoiser, trained: "Trained", scale: float = 1.0) -> None:
    """Weights mean nothing in another process than their own, or that shifted to `scale`."""
    sigma = torch.tensor([0.02, 0.5, 5.0])
    same = own.prediction == trained.prediction and torch.equal(
        own.scaling.input_scale(sigma), trained.scaling.input_scale(sigma)
    )
    times = [trained.scaling.time_at(sigma * shift) for shift in (1.0, scale)]
    if not same or not any(torch.allclose(own.scaling.time_at(sigma), t, 1e-6) for t in times):
        raise UserError(
            f"{name} was trained as {type(own.scaling).__name__}, predicting {own.prediction}, not "
            "as --process says: give its own (vp with its betas and prediction, flow, or edm with "
            "its sigma-data)"
        )
