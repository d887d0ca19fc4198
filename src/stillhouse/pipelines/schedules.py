"""A diffusers scheduler config read as (scaling, prediction, clip): what a network was trained as.

The scheduler's sampling method does not matter here; its description of the process does.
"""

import inspect
import warnings
from collections.abc import Mapping
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar, get_args

from torch import Tensor

from stillhouse.process import (
    EDM,
    SIGMA_CAP,
    VP,
    Flow,
    Prediction,
    Scaling,
    alphas_cumprod,
    betas,
)
from stillhouse.process.adapters import Spacing
from stillhouse.process.betas import BetaSchedule

T = TypeVar("T")

PREDICTION_NAMES: dict[str, Prediction] = {
    "epsilon": "eps",
    "v_prediction": "v",
    "sample": "x0",
    "flow_prediction": "flow",
}
# diffusers' EDM schedulers say epsilon for EDM's own F, which is minus v.
EDM_PREDICTION_NAMES: dict[str, Prediction] = {"epsilon": "edm", "v_prediction": "v"}
SPACINGS: dict[str, Spacing] = {name: name for name in get_args(Spacing)}
BETAS: dict[str, BetaSchedule] = {name: name for name in get_args(BetaSchedule)}
FLOW_CLASSES = {"FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"}
EDM_CLASSES = {"EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"}
VP_CLASSES = {
    "DDIMScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
}
# These take one level more than asked for and leave out the last, except in trailing spacing.
OPEN_ENDED = {
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "UniPCMultistepScheduler",
}
GRIDS_NOT_FOLLOWED = (
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_lu_lambdas",
    "use_flow_sigmas",
    "shift_terminal",
)
SCHEDULERS = sorted(FLOW_CLASSES | EDM_CLASSES | VP_CLASSES)


class Trained(NamedTuple):
    """How a network was trained, as an adapter needs to know it."""

    scaling: Scaling
    prediction: Prediction
    clip: float | None


def read_schedule(config: Mapping[str, Any]) -> Trained:
    """From a `scheduler_config.json`; raises ValueError with a sentence where it cannot."""
    try:
        return _read(config)
    except (ArithmeticError, LookupError, RuntimeError, TypeError) as error:
        reason = shorten(f"{type(error).__name__}: {error}", 120, placeholder=" ...")
        raise ValueError(f"its values make no noise schedule ({reason})") from error


def _read(config: Mapping[str, Any]) -> Trained:
    name = config.get("_class_name")
    if name not in SCHEDULERS:
        raise ValueError(f"scheduler {name!r} is not supported; supported: {', '.join(SCHEDULERS)}")
    full = _with_defaults(name, config)
    if full.get("thresholding"):
        raise ValueError(f"{name} with dynamic thresholding is not supported")
    if full.get("use_dynamic_shifting"):
        raise ValueError(f"{name} with dynamic shifting is not supported")
    _warn_of_grids(name, full)
    if name in FLOW_CLASSES:
        return _flow(full, full["shift"])
    if name in EDM_CLASSES:
        prediction = _lookup(full, "prediction_type", EDM_PREDICTION_NAMES)
        scaling = EDM(full["sigma_data"], full["sigma_min"], full["sigma_max"], full["rho"])
        return Trained(scaling, prediction, None)
    return _variance_preserving(full, open_end=name in OPEN_ENDED)


def _with_defaults(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that a config leaves out have their class's defaults; keys unknown to it say nothing.

    Read from the signature: building the scheduler would refuse in its own words.
    """
    import diffusers

    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    return {
        key: config.get(key, parameter.default)
        for key, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }


def _warn_of_grids(name: str, config: Mapping[str, Any]) -> None:
    """Sampling grids that a config asks for and native grids here do not follow."""
    karras = ("use_karras_sigmas",) if name in FLOW_CLASSES else ()
    asked = [key for key in (*GRIDS_NOT_FOLLOWED, *karras) if config.get(key)]
    if config.get("sigma_schedule") == "exponential":
        asked.append("sigma_schedule")
    if asked:
        warnings.warn(
            f"{name}: {', '.join(asked)} is not followed; native grids are spaced without it",
            stacklevel=4,
        )


def _lookup(config: Mapping[str, Any], key: str, known: Mapping[str, T]) -> T:
    if config[key] not in known:
        raise ValueError(f"{key} {config[key]!r} is not supported; supported: {', '.join(known)}")
    return known[config[key]]


def _flow(config: Mapping[str, Any], shift: float) -> Trained:
    if config.get("invert_sigmas"):
        raise ValueError("a flow that counts its time from noise to data is not supported")
    count = float(config["num_train_timesteps"])
    return Trained(Flow(shift, time_scale=count, first_time=1 / count), "flow", None)


def _variance_preserving(config: Mapping[str, Any], *, open_end: bool) -> Trained:
    prediction = _lookup(config, "prediction_type", PREDICTION_NAMES)
    if prediction == "flow":
        return _flow(config, config.get("flow_shift") or 1.0)
    if config.get("timestep_type") == "continuous" and prediction == "v":
        # Stable Video Diffusion's way: EDM with unit data, told ln(sigma)/4, predicting v.
        low, high = config.get("sigma_min") or 0.002, config.get("sigma_max") or 700.0
        return Trained(EDM(1.0, low, high), prediction, None)
    # The one class without this key spaces its steps evenly from end to end.
    spacing = _lookup({"timestep_spacing": "linspace", **config}, "timestep_spacing", SPACINGS)
    offset = config.get("steps_offset", 0)
    karras = bool(config.get("use_karras_sigmas"))
    scaling = VP(_signal(config), spacing, offset, open_end, karras)
    if prediction == "eps" and scaling.sigma_max >= SIGMA_CAP:
        raise ValueError(
            "epsilon prediction with zero terminal SNR is not supported: at the noisy end the "
            "output says nothing about the image; models of v_prediction or sample can be read"
        )
    clip = config["clip_sample_range"] if config.get("clip_sample") else None
    return Trained(scaling, prediction, clip)


def _signal(config: Mapping[str, Any]) -> Tensor:
    table = config.get("trained_betas")
    if table is None:
        schedule = _lookup(config, "beta_schedule", BETAS)
        table = betas(
            schedule, config["num_train_timesteps"], config["beta_start"], config["beta_end"]
        )
    zero_snr = bool(config.get("rescale_betas_zero_snr"))
    return alphas_cumprod(table, zero_terminal_snr=zero_snr)
