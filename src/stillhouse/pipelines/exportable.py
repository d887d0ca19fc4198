"""Students that open in plain diffusers: trained on a grid that one of its schedulers generates.

No scheduler stores a grid, and the number of steps is an argument of the call. So such a student is
trained on the native grid of its scheduler, which ends at 0, without an analytical first step and
without being told the steps; `pipe(num_inference_steps=n, guidance_scale=1)` is then our Euler.

| student | process | pipeline | scheduler |
|---|---|---|---|
| Stable Diffusion, SDXL, PixArt | VP | its own | `EulerDiscreteScheduler` |
| | EDM | its own | `EDMEulerScheduler` |
| Stable Diffusion 3 | flow | its own | `FlowMatchEulerDiscreteScheduler` |
| `UNet2DModel` of pixels | VP | `DDIMPipeline` | `DDIMScheduler` |
| the same, of classes | VP | `ConsistencyModelPipeline` | `EulerDiscreteScheduler` |
| the same, of classes or not | EDM | `ConsistencyModelPipeline` | `EDMEulerScheduler` |
| DiT with an `AutoencoderKL` | VP | `DiTPipeline` | `DDIMScheduler` |

DDIM goes from t to t - T // n, whatever its next timestep is: it keeps to its own grid only where n
divides the T timesteps. For other n, `DPMSolverMultistepScheduler` of first order is the same walk
(in a `DDPMPipeline`, where DDIM's takes no other). Where the signal of the first timestep vanishes,
all schedulers but DDIM put a level of 4096 in its place: there DDIM is taken in every pipeline.

A one-step generator begins at a level of its own, so its scheduler is that of a process which ends
there: EDM's `sigma_max`, or as many of the betas as lead to that timestep. Flow has no such end,
as its schedulers begin at pure noise.

Pipelines begin with unit noise times their scheduler's `init_noise_sigma`: sigma for Euler, sqrt(1
+ sigma^2) for EDM and DDIM. Ours is sqrt(1 + sigma^2) for VP and sigma for EDM, and for one-step
generators always sigma: where they differ, give them `latents` to begin with the same state.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.models import Codec, DiffusersNetwork
from stillhouse.pipelines.families import FAMILIES, INDEX, read_index
from stillhouse.pipelines.few_steps import save_walk
from stillhouse.pipelines.load import checkpoint_files, load_codec, read_json
from stillhouse.pipelines.save import save_codec, save_denoiser, save_pipeline, save_scheduler
from stillhouse.pipelines.schedules import read_schedule
from stillhouse.process import EDM, SIGMA_CAP, VP, Flow, Scaling, betas

# How a discrete VP process can be walked at first order, on the timesteps of trailing spacing.
EULER = {"_class_name": "EulerDiscreteScheduler", "final_sigmas_type": "zero"}
DDIM = {"_class_name": "DDIMScheduler", "clip_sample": False, "set_alpha_to_one": True}
FIRST_ORDER = {
    "_class_name": "DPMSolverMultistepScheduler",
    "algorithm_type": "dpmsolver++",
    "solver_order": 1,
    "final_sigmas_type": "zero",
}
PROCESS = ("num_train_timesteps", "prediction_type", "rescale_betas_zero_snr")
BETAS = ("beta_schedule", "beta_start", "beta_end", "trained_betas")
KNOWN_BETAS = ("linear", "scaled_linear", "squaredcos_cap_v2")  # to each of the three
LEAST = 5.0  # of generators' levels where pipelines begin with more noise: from there 2% or less
# What each family's pipeline can walk: SD3's does not scale its input, the others know no flow.
WALKED: dict[str, tuple[type, ...]] = {
    name: (Flow,) if name == "StableDiffusion3Pipeline" else (VP, EDM) for name in FAMILIES
}


# ---------------------------------------------------------------- schedulers


def exportable_scheduler(
    config: Mapping[str, Any], vp: Mapping[str, Any] = EULER
) -> dict[str, Any]:
    """The scheduler's config that a student of this teacher is trained on and saved with.

    Betas, prediction, shift and levels stay; `vp` says how a discrete process is walked. What it is
    read as by `read_schedule` has the native grid that the scheduler walks.
    """
    trained = read_schedule(config)
    scaling = trained.scaling
    if isinstance(scaling, EDM):
        return {
            "_class_name": "EDMEulerScheduler",
            "prediction_type": "epsilon" if trained.prediction == "edm" else "v_prediction",
            **{key: getattr(scaling, key) for key in ("sigma_data", "sigma_min", "sigma_max")},
            "rho": scaling.rho,
        }
    if isinstance(scaling, Flow):
        return {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "num_train_timesteps": int(scaling.time_scale),
            "shift": scaling.shift_scale,
        }
    return {**vp, "timestep_spacing": "trailing", **_discrete(config)}


def ending_at(config: Mapping[str, Any], sigma: float) -> dict[str, Any]:
    """The scheduler of the same process, up to the level of it that is nearest to `sigma`."""
    scaling = read_schedule(config).scaling
    if isinstance(scaling, EDM):
        return {**exportable_scheduler(config), "sigma_max": sigma}
    if not isinstance(scaling, VP):
        raise _refused("one step of a flow from anywhere but pure noise")
    count = int(scaling.time_at(torch.tensor(sigma, dtype=torch.float64)).round()) + 1
    abar = scaling.alphas_cumprod[:count]
    steps = 1 - abar / torch.cat([abar.new_ones(1), abar[:-1]])
    kept = _discrete(config)
    return {
        **{key: value for key, value in config.items() if key not in BETAS},
        "num_train_timesteps": count,
        "prediction_type": kept["prediction_type"],
        "rescale_betas_zero_snr": False,  # they are as they were rescaled
        "trained_betas": steps.tolist(),
    }


def _discrete(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a discrete process, as any of its schedulers takes it."""
    import diffusers

    full = getattr(diffusers, config["_class_name"]).from_config(dict(config)).config
    kept = {key: full[key] for key in (*PROCESS, *BETAS) if full.get(key) is not None}
    if "trained_betas" in kept or kept["beta_schedule"] in KNOWN_BETAS:
        return kept
    table = betas(
        kept["beta_schedule"], kept["num_train_timesteps"], kept["beta_start"], kept["beta_end"]
    )
    return {key: kept[key] for key in PROCESS if key in kept} | {"trained_betas": table.tolist()}


def _walker(scaling: Scaling, walk: FewSteps, *, scales: bool) -> Mapping[str, Any]:
    """Of a discrete process; `scales`: the pipeline scales noise and input as Euler needs it."""
    if not isinstance(scaling, VP):
        return EULER
    count = len(scaling.alphas_cumprod)
    whole = all(count % evaluations == 0 for evaluations in walk.evaluations)
    vanishes = scaling.sigma_max >= SIGMA_CAP
    if vanishes and not whole:
        raise UserError(
            "with a zero terminal SNR, diffusers walks as we do only in numbers of steps that "
            f"divide the {count} timesteps: take such numbers, or leave --exportable out"
        )
    if vanishes or (whole and not scales):
        return DDIM
    return EULER if scales else FIRST_ORDER


# ---------------------------------------------------------------- pipelines


class Plain(NamedTuple):
    """How plain diffusers opens a student."""

    pipeline: str  # the class
    scheduler: dict[str, Any]  # the config


def plain_pipeline(source: Path, network: DiffusersNetwork, walk: FewSteps) -> Plain:
    """For students of the teacher in `source`, or a sentence why there is none.

    Ask before training: the student is trained on `read_schedule(plain.scheduler).scaling`.
    """
    _check_walk(walk)
    files = checkpoint_files(source)
    config = read_json(files["scheduler"][0])
    if walk.grid == "single":
        config = ending_at(config, walk.sigma_max)
    scaling = read_schedule(config).scaling
    if network.conditioning is not None:
        raise _refused("a network that is told more than its class of diffusers takes")
    family, kind = str(_index(source).get("_class_name")), type(network.model).__name__
    if family in FAMILIES:
        _check_family(family, network, scaling)
        pipeline, vp = family, _walker(scaling, walk, scales=True)
    elif kind == "UNet2DModel" and "vae" not in files:
        pipeline, vp = _of_pixels(network, scaling, walk)
    elif kind == "DiTTransformer2DModel" and isinstance(scaling, VP):
        _check_latents(load_codec(source), network)
        pipeline, vp = "DiTPipeline", _walker(scaling, walk, scales=False)
    else:
        raise _refused(f"a {kind} of {type(scaling).__name__} by itself")
    plain = Plain(pipeline, exportable_scheduler(config, vp))
    _check_start(walk, plain)
    return plain


def _index(source: Path) -> dict[str, Any]:
    """Of a whole pipeline; a bare model has none."""
    return read_index(source) if (source / INDEX).is_file() else {}


def _of_pixels(
    network: DiffusersNetwork, scaling: Scaling, walk: FewSteps
) -> tuple[str, Mapping[str, Any]]:
    shape = network.data_shape
    if shape[0] not in (1, 3) or isinstance(scaling, Flow):
        raise _refused(f"a UNet2DModel of {type(scaling).__name__} with {shape[0]} channels")
    if isinstance(scaling, VP) and network.classes is None:
        vp = _walker(scaling, walk, scales=False)
        return "DDIMPipeline" if vp is DDIM else "DDPMPipeline", vp
    if not isinstance(network.model.config["sample_size"], int):  # type: ignore[index]
        raise _refused("a UNet2DModel whose sample_size is not one number")
    return "ConsistencyModelPipeline", _walker(scaling, walk, scales=True)


def _check_walk(walk: FewSteps) -> None:
    strange = {
        f"the {walk.grid} grid": walk.grid not in ("native", "single"),
        "an analytical first step": walk.afs,
        "being told the number of steps": walk.told,
        f"steps of the kind {walk.step}": walk.step != "euler",
    }
    for what, present in strange.items():
        if present:
            raise _refused(f"a student with {what}")


def _check_start(walk: FewSteps, plain: Plain) -> None:
    """A generator learns from noise of its level alone; Euler's pipelines begin with just that."""
    own = plain.scheduler["_class_name"] == EULER["_class_name"]
    if walk.grid == "single" and walk.sigma_max < LEAST and not own:
        raise UserError(
            f"{plain.pipeline} begins with sqrt(1 + 1/start^2) times the noise that this generator "
            f"is trained from: with --exportable, --method.start must be {LEAST:g} or more"
        )


def _check_family(pipeline: str, network: DiffusersNetwork, scaling: Scaling) -> None:
    model: Any = network.model
    if not isinstance(scaling, WALKED[pipeline]):
        raise _refused(f"a {pipeline} of {type(scaling).__name__}")
    if getattr(model, "use_additional_conditions", False) and model.config.sample_size != 128:
        raise _refused("a PixArt that is told sizes, unless it draws 1024 pixels")


def _check_latents(codec: Codec | None, network: DiffusersNetwork) -> None:
    """DiT's pipeline knows the scale of latents, not their shift, and draws `sample_size`."""
    model: Any = network.model
    if codec is None or type(codec.autoencoder).__name__ != "AutoencoderKL":
        raise _refused("a DiT without an AutoencoderKL")
    if codec.shift.any() or codec.scale.numel() > 1:
        raise _refused("a DiT whose latents are shifted")
    if network.data_shape[-1] != model.config.sample_size:
        raise _refused("a DiT that was carried to another resolution")


def _refused(what: str) -> UserError:
    return UserError(
        f"no pipeline of diffusers draws {what} as we do: leave --exportable out, and draw the "
        "student with stillhouse.pipelines.FewStepPipeline"
    )


# ---------------------------------------------------------------- saving


def save_exportable(
    folder: Path,
    source: Path,
    network: DiffusersNetwork,
    weights: Mapping[str, Tensor],
    walk: FewSteps,
    *,
    facts: Mapping[str, Any],
) -> None:
    """The student as a whole pipeline, which `DiffusionPipeline.from_pretrained` opens.

    `source` is its teacher's folder. `load_denoiser` and `FewStepPipeline` read the result too. The
    network's weights come last: a folder that has them is complete.
    """
    plain = plain_pipeline(source, network, walk)
    save_walk(folder, walk)
    if plain.pipeline in FAMILIES:
        save_pipeline(folder, source, network, weights, facts=facts, scheduler=plain.scheduler)
        return
    import diffusers

    model = type(network.model).__name__
    part = "transformer" if plain.pipeline == "DiTPipeline" else "unet"
    index: dict[str, Any] = {
        "_class_name": plain.pipeline,
        "_diffusers_version": diffusers.__version__,
        part: ["diffusers", model],
        "scheduler": ["diffusers", plain.scheduler["_class_name"]],
    }
    codec = load_codec(source) if plain.pipeline == "DiTPipeline" else None
    if codec is not None:
        save_codec(folder, codec)
        index["vae"] = ["diffusers", type(codec.autoencoder).__name__]
        index |= {k: v for k, v in _index(source).items() if k == "id2label"}  # names of classes
    save_scheduler(folder / "scheduler", plain.scheduler)
    write_whole(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    # With its scheduler beside it, the network's own folder is a model too.
    save_denoiser(folder / part, network, weights, plain.scheduler, facts=facts)
