"""A diffusers scheduler config read as (scaling, prediction, clip): what a network was trained as.

The scheduler's sampling method does not matter here; its description of the process does.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from stillhouse.process import EDM, VP, Flow, Prediction, Scaling, alphas_cumprod, betas
from stillhouse.process.betas import BETA_SCHEDULES

PREDICTION_NAMES: dict[str, Prediction] = {
    "epsilon": "eps",
    "v_prediction": "v",
    "sample": "x0",
    "flow_prediction": "flow",
}
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
SCHEDULERS = sorted(FLOW_CLASSES | EDM_CLASSES | VP_CLASSES)


class Trained(NamedTuple):
    """How a network was trained, as an adapter needs to know it."""

    scaling: Scaling
    prediction: Prediction
    clip: float | None


def read_schedule(config: Mapping[str, Any]) -> Trained:
    """From a `scheduler_config.json`; raises ValueError with a sentence where it cannot."""
    name = config.get("_class_name")
    if name not in SCHEDULERS:
        raise ValueError(f"scheduler {name!r}; supported: {', '.join(SCHEDULERS)}")
    full = _with_defaults(name, config)
    if full.get("thresholding"):
        raise ValueError(f"{name} with dynamic thresholding, which is not supported")
    if name in FLOW_CLASSES:
        return _flow(full)
    if name in EDM_CLASSES:
        prediction: Prediction = "edm" if full["prediction_type"] == "epsilon" else "v"
        scaling = EDM(full["sigma_data"], full["sigma_min"], full["sigma_max"], full["rho"])
        return Trained(scaling, prediction, None)
    return _variance_preserving(full)


def _with_defaults(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that a config leaves out have their class's defaults."""
    import diffusers

    scheduler = getattr(diffusers, name).from_config(dict(config))
    return {**scheduler.config, "_class_name": name}


def _flow(config: Mapping[str, Any]) -> Trained:
    if config.get("use_dynamic_shifting"):
        raise ValueError("a flow scheduler with dynamic shifting, which is not supported")
    count = float(config["num_train_timesteps"])
    scaling = Flow(config["shift"], time_scale=count, first_time=1 / count)
    return Trained(scaling, "flow", None)


def _variance_preserving(config: Mapping[str, Any]) -> Trained:
    prediction = PREDICTION_NAMES.get(config.get("prediction_type", "epsilon"))
    if prediction is None:
        raise ValueError(
            f"prediction_type {config['prediction_type']!r}; supported: "
            f"{', '.join(PREDICTION_NAMES)}"
        )
    if prediction == "flow":
        shift = config.get("flow_shift") or 1.0
        return Trained(Flow(shift), "flow", None)
    if config.get("timestep_type") == "continuous":
        # Stable Video Diffusion's way: EDM with unit data, told ln(sigma)/4, predicting v.
        low, high = config.get("sigma_min") or 0.002, config.get("sigma_max") or 700.0
        return Trained(EDM(1.0, low, high), prediction, None)
    clip = config["clip_sample_range"] if config.get("clip_sample") else None
    scaling = VP(
        _signal(config),
        spacing=config.get("timestep_spacing", "leading"),
        offset=config.get("steps_offset", 0),
    )
    return Trained(scaling, prediction, clip)


def _signal(config: Mapping[str, Any]) -> Any:
    schedule, trained = config["beta_schedule"], config.get("trained_betas")
    if trained is None and schedule not in BETA_SCHEDULES:
        raise ValueError(f"beta_schedule {schedule!r}; supported: {', '.join(BETA_SCHEDULES)}")
    table = trained
    if table is None:
        count = config["num_train_timesteps"]
        table = betas(schedule, count, config["beta_start"], config["beta_end"])
    zero_snr = bool(config.get("rescale_betas_zero_snr"))
    return alphas_cumprod(table, zero_terminal_snr=zero_snr)
