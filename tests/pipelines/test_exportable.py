"""Exportable students open in plain diffusers, in a process of its own, and draw what ours do."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import warm
from safetensors.torch import load_file, save_file
from small_models import (
    build_network,
    network_config,
    relative_error,
    rewrite,
    save_scheduler,
    small_autoencoder,
    small_unet,
)
from torch import Tensor
from tunable import save_whole

from stillhouse.distill.grids import Native
from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError
from stillhouse.models import DiffusersNetwork
from stillhouse.models.conditioning import Parts, conditioned
from stillhouse.pipelines import load_denoiser, read_facts
from stillhouse.pipelines.exportable import (
    DDIM,
    EULER,
    FIRST_ORDER,
    ending_at,
    exportable_scheduler,
    plain_pipeline,
    save_exportable,
)
from stillhouse.pipelines.few_steps import FewStepPipeline, read_walk, save_walk
from stillhouse.pipelines.save import save_lora
from stillhouse.pipelines.save import save_scheduler as save_scheduler_config
from stillhouse.pipelines.schedules import read_schedule
from stillhouse.process import SIGMA_CAP, VP, NetworkDenoiser
from stillhouse.solvers import sample_euler

pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")

BOUND = 1e-4  # of whole walks, relative to the largest value
SEED = 5
PROMPTS = ["a red cat", "blue"]
ELSEWHERE = Path(__file__).with_name("plain_diffusers.py")
STABLE_DIFFUSION = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
# Less noise than usual: an untrained eps would drown what comes after the first step.
DISCRETE = {"_class_name": "DDPMScheduler", "beta_end": 0.004}
EDM_SCHEDULER = {"_class_name": "EDMEulerScheduler", "sigma_max": 60.0, "sigma_data": 0.6}


def exportable(*evaluations: int) -> FewSteps:
    return FewSteps(evaluations, grid="native", afs=False)


# ---------------------------------------------------------------- schedulers


def walked(scheduler: Any, steps: int) -> Tensor:
    """The levels that a scheduler goes through, as sigma; flows are capped as they are here."""
    scheduler.set_timesteps(steps)
    name = type(scheduler).__name__
    if name == "DDIMScheduler":
        abar = scheduler.alphas_cumprod[scheduler.timesteps].double()
        levels = ((1 - abar) / abar).sqrt().clamp(max=SIGMA_CAP)
        return torch.cat([levels, levels.new_zeros(1)])
    sigmas = scheduler.sigmas.double()
    if name == "FlowMatchEulerDiscreteScheduler":
        return (sigmas / (1 - sigmas)).clamp(max=SIGMA_CAP)
    return sigmas


TEACHERS: dict[str, dict[str, Any]] = {
    "pndm": {"_class_name": "PNDMScheduler", **STABLE_DIFFUSION, "steps_offset": 1},
    "karras": {
        "_class_name": "EulerDiscreteScheduler",
        **STABLE_DIFFUSION,
        "prediction_type": "v_prediction",
        "use_karras_sigmas": True,
        "timestep_spacing": "leading",
    },
    "cosine": {"_class_name": "DDPMScheduler", "beta_schedule": "squaredcos_cap_v2"},
    "sigmoid": {"_class_name": "DDPMScheduler", "beta_schedule": "sigmoid"},
    "tabled": {
        "_class_name": "DDIMScheduler",
        "trained_betas": torch.linspace(0.02, 0.3, 40).tolist(),
        "num_train_timesteps": 40,
        "prediction_type": "sample",
    },
    "flow": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "shift": 3.0,
        "num_train_timesteps": 500,
    },
    "flow of a solver": {
        "_class_name": "DPMSolverMultistepScheduler",
        "prediction_type": "flow_prediction",
        "flow_shift": 2.0,
    },
    "edm": {**EDM_SCHEDULER, "sigma_min": 0.01, "rho": 5.0, "sigma_schedule": "exponential"},
    "edm of v": {
        "_class_name": "EulerDiscreteScheduler",
        "timestep_type": "continuous",
        "prediction_type": "v_prediction",
        "sigma_max": 500.0,
    },
}


@pytest.mark.filterwarnings("ignore:EDMEulerScheduler. sigma_schedule")
@pytest.mark.parametrize("vp", [EULER, DDIM, FIRST_ORDER], ids=lambda vp: vp["_class_name"])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_the_native_grid_is_what_the_scheduler_walks(teacher, vp):
    config = exportable_scheduler(TEACHERS[teacher], vp)
    scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
    scaling = read_schedule(config).scaling
    for steps in range(1, 9):
        ours, theirs = scaling.native_grid(steps), walked(scheduler, steps)
        # Their tables are float32, in which 1 - abar is known to 6e-8.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        assert float(theirs[-1]) == 0


ZERO_SNR = {**TEACHERS["karras"], "rescale_betas_zero_snr": True}


@pytest.mark.filterwarnings("ignore:EDMEulerScheduler. sigma_schedule")
@pytest.mark.parametrize("vp", [EULER, DDIM, FIRST_ORDER], ids=lambda vp: vp["_class_name"])
@pytest.mark.parametrize("teacher", [*TEACHERS.values(), ZERO_SNR], ids=[*TEACHERS, "zero snr"])
def test_the_process_stays_as_it_was(teacher, vp):
    """All but the spacing of its steps and a bound on what is clean."""
    before, after = read_schedule(teacher), read_schedule(exportable_scheduler(teacher, vp))
    assert (after.prediction, after.clip) == (before.prediction, None)
    if isinstance(before.scaling, VP):
        assert isinstance(after.scaling, VP)
        assert torch.equal(after.scaling.alphas_cumprod, before.scaling.alphas_cumprod)
    else:
        assert after.scaling == before.scaling


# ---------------------------------------------------------------- students of every row


@dataclass(frozen=True)
class Case:
    """A teacher, the walks of its student, and how the student is called elsewhere."""

    teacher: Callable[[Path], Any]
    pipeline: str
    scheduler: str
    steps: tuple[int, ...] = (1, 2, 3, 4)
    call: dict[str, Any] = field(default_factory=dict)
    labels: tuple[int, ...] | None = None
    latents: bool = True  # whether the pipeline takes them; else a generator
    level: float | None = None  # at which a one-step generator begins

    @property
    def walk(self) -> FewSteps:
        if self.level is None:
            return exportable(*self.steps)
        return FewSteps((1,), "emd", grid="single", afs=False, sigma_max=self.level)


def whole(family: str, scheduler: dict[str, Any] | None = None, **network: Any):
    """A pipeline of one of the families, perhaps with another scheduler."""

    def save(folder: Path) -> None:
        save_whole(folder, family)
        part = "unet" if (folder / "unet").is_dir() else "transformer"
        rewrite(folder / part / "config.json", **network)
        if scheduler is not None:
            save_scheduler(folder / "scheduler", scheduler)
            name = ["diffusers", scheduler["_class_name"]]
            rewrite(folder / "model_index.json", scheduler=name)

    return save


def bare(scheduler: dict[str, Any], **network: Any):
    """A U-Net of pixels with its scheduler beside it."""

    def save(folder: Path) -> None:
        model = small_unet(**network)
        for weight in model.parameters():  # some start at zero, which would hide mistakes
            torch.nn.init.normal_(weight, std=0.1) if not weight.any() else None
        model.save_pretrained(folder)
        save_scheduler(folder, scheduler)

    return save


def dit(folder: Path) -> None:
    """A DiT of latents, bare, with its autoencoder beside it."""
    model = build_network(network_config("dit-xl-2", reduced=True))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1) if not weight.any() else None
    model.save_pretrained(folder)
    save_scheduler(folder, DISCRETE)
    small_autoencoder(4).save_pretrained(folder / "vae")


ASKED = {"prompt": PROMPTS, "guidance_scale": 1.0}
CLASSES = {"class_labels": [3, 1]}
VELOCITY = {"_class_name": "DDIMScheduler", **STABLE_DIFFUSION, "prediction_type": "v_prediction"}
CASES = {
    "sd15": Case(whole("sd15"), "StableDiffusionPipeline", "EulerDiscreteScheduler", call=ASKED),
    "sdxl of v": Case(
        whole("sdxl", VELOCITY), "StableDiffusionXLPipeline", "EulerDiscreteScheduler", call=ASKED
    ),
    "pixart": Case(
        whole("pixart-alpha", use_additional_conditions=False),
        "PixArtAlphaPipeline",
        "EulerDiscreteScheduler",
        call={**ASKED, "use_resolution_binning": False},
    ),
    "sd3": Case(
        whole("sd3"), "StableDiffusion3Pipeline", "FlowMatchEulerDiscreteScheduler", call=ASKED
    ),
    "sd15 of zero snr": Case(
        whole("sd15", {**VELOCITY, "rescale_betas_zero_snr": True}),
        "StableDiffusionPipeline",
        "DDIMScheduler",
        (1, 2, 4),
        ASKED,
    ),
    "sd15 of edm": Case(
        whole("sd15", EDM_SCHEDULER), "StableDiffusionPipeline", "EDMEulerScheduler", call=ASKED
    ),
    "sdxl of edm": Case(
        whole("sdxl", EDM_SCHEDULER), "StableDiffusionXLPipeline", "EDMEulerScheduler", call=ASKED
    ),
    "pixart of edm": Case(
        whole("pixart-alpha", EDM_SCHEDULER, use_additional_conditions=False),
        "PixArtAlphaPipeline",
        "EDMEulerScheduler",
        call={**ASKED, "use_resolution_binning": False},
    ),
    "pixels": Case(
        bare(DISCRETE),
        "DDIMPipeline",
        "DDIMScheduler",
        (1, 2, 4),
        {"batch_size": 2},
        latents=False,
    ),
    "pixels in three steps": Case(
        bare(DISCRETE),
        "DDPMPipeline",
        "DPMSolverMultistepScheduler",
        call={"batch_size": 2},
        latents=False,
    ),
    "pixels of classes": Case(
        bare(DISCRETE, num_class_embeds=5),
        "ConsistencyModelPipeline",
        "EulerDiscreteScheduler",
        call={"batch_size": 2, **CLASSES},
        labels=(3, 1),
    ),
    "pixels of edm": Case(
        bare(EDM_SCHEDULER), "ConsistencyModelPipeline", "EDMEulerScheduler", call={"batch_size": 2}
    ),
    "classes of edm": Case(
        bare({**EDM_SCHEDULER, "prediction_type": "v_prediction"}, num_class_embeds=5),
        "ConsistencyModelPipeline",
        "EDMEulerScheduler",
        call={"batch_size": 2, **CLASSES},
        labels=(3, 1),
    ),
    "sd15 in one step": Case(
        whole("sd15"),
        "StableDiffusionPipeline",
        "EulerDiscreteScheduler",
        (1,),
        ASKED,
        level=1.6,
    ),
    "sdxl of v in one step": Case(
        whole("sdxl", VELOCITY),
        "StableDiffusionXLPipeline",
        "EulerDiscreteScheduler",
        (1,),
        ASKED,
        level=5.0,
    ),
    "pixels of classes in one step": Case(
        bare(DISCRETE, num_class_embeds=5),
        "ConsistencyModelPipeline",
        "EulerDiscreteScheduler",
        (1,),
        {"batch_size": 2, **CLASSES},
        (3, 1),
        level=2.5,
    ),
    "dit": Case(
        dit,
        "DiTPipeline",
        "DDIMScheduler",
        (1, 2, 4),
        {**CLASSES, "guidance_scale": 1.0},
        (3, 1),
        latents=False,
    ),
    "dit in three steps": Case(
        dit,
        "DiTPipeline",
        "DPMSolverMultistepScheduler",
        call={**CLASSES, "guidance_scale": 1.0},
        labels=(3, 1),
        latents=False,
    ),
}


def perturbed(network: DiffusersNetwork) -> dict[str, Tensor]:
    """The network after it learnt something; its weights by their own names."""
    generator = torch.Generator().manual_seed(7)
    for weight in network.parameters():
        weight.data += 0.02 * torch.randn(weight.shape, generator=generator)
    return network.state_dict()


@dataclass(frozen=True)
class Student:
    """A student as we draw it, the unit noise of two samples, and where it is drawn elsewhere."""

    case: Case
    ours: FewStepPipeline
    weights: dict[str, Tensor]
    noise: Tensor
    root: Path

    def start(self) -> Tensor:
        scaling = self.ours.denoiser.scaling
        first = float(scaling.native_grid(1)[0])
        if self.case.level is not None:
            assert first == pytest.approx(self.case.level, rel=0.01)
            return first * self.noise
        return Native(scaling).start(self.noise, first)

    def drawn(self, n: int) -> Tensor:
        """Our walk, before any decoding."""
        prompts = PROMPTS if "prompt" in self.case.call else None
        wanted = self.ours.wanted(prompts, self.case.labels)
        grid = self.ours.denoiser.scaling.native_grid(n)
        told = self.ours.condition(range(2), wanted)
        return sample_euler(self.ours.denoiser, self.start(), grid, told)

    def images(self, state: Tensor) -> Tensor:
        """As pipelines give them: [B, H, W, C] within [0, 1]."""
        with torch.no_grad():
            images = state if self.ours.codec is None else self.ours.codec.decode(state)
        return (images / 2 + 0.5).clamp(0, 1).movedim(1, -1)

    def job(self, folder: str, **options: Any) -> dict[str, Any]:
        """What the other process is asked to do; it begins with the same state."""
        scales = self.case.scheduler in ("EulerDiscreteScheduler", "EDMEulerScheduler")
        save_file({"state": self.start() if scales else self.noise}, self.root / "given")
        return {
            "folder": str(self.root / folder),
            "given": str(self.root / "given"),
            "found": str(self.root / "found"),
            "steps": self.case.steps,
            "call": self.case.call,
            "seed": None if self.case.latents else SEED,
            **options,
        }


def unit_noise(network: Any) -> Tensor:
    shape = (2, *network.data_shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED))


def exported(case: Case, root: Path) -> Student:
    case.teacher(root / "teacher")
    network: Any = load_denoiser(root / "teacher").network
    weights = perturbed(network)
    where = (root / "student", root / "teacher")
    save_exportable(*where, network, weights, case.walk, facts={"run": 1})
    ours = FewStepPipeline.from_pretrained(root / "student")
    return Student(case, ours, weights, unit_noise(network), root)


def adapted(root: Path) -> Student:
    """A student of Stable Diffusion that is adapters beside its teacher."""
    import peft

    case, walk = CASES["sd15"], exportable(*CASES["sd15"].steps)
    case.teacher(root / "teacher")
    save_walk(root / "teacher", walk)  # for its text encoders
    ours = FewStepPipeline.from_pretrained(root / "teacher")
    network: Any = ours.network
    plain = plain_pipeline(root / "teacher", network, walk)
    adapter = {"r": 4, "lora_alpha": 6.0, "target_modules": ["to_q", "to_v"], "bias": "none"}
    peft.inject_adapter_in_model(peft.LoraConfig(**adapter), network.model)
    torch.manual_seed(0)
    for name, weight in network.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(weight, std=0.5)
    save_lora(root / "adapters", root / "teacher", network.state_dict(), adapter, facts={})
    save_scheduler_config(root / "adapters" / "scheduler", plain.scheduler)
    trained = read_schedule(plain.scheduler)
    student = NetworkDenoiser(network, trained.scaling, trained.prediction).eval()
    ours = replace(ours, denoiser=student)
    return Student(case, ours, network.state_dict(), unit_noise(network), root)


@pytest.fixture(scope="module")
def students(tmp_path_factory) -> dict[str, Student]:
    """All of them, and what one process that has diffusers alone has drawn of them."""
    root = tmp_path_factory.mktemp("students")
    made = {name: exported(case, root / name.replace(" ", "-")) for name, case in CASES.items()}
    jobs = [student.job("student") for student in made.values()]
    made["lora"] = adapted(root / "lora")
    jobs.append(made["lora"].job("teacher", lora=str(root / "lora" / "adapters")))
    (root / "jobs.json").write_text(json.dumps(jobs))
    done = warm.run(str(ELSEWHERE), str(root / "jobs.json"), cwd=root, timeout=None)
    assert done.returncode == 0, done.stderr[-3000:]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, "lora"])
def test_plain_diffusers_draws_our_samples(students, name):
    """Measured: 2e-6 of VP, 1e-5 of flow, 2e-5 of EDM and of a vanishing signal."""
    student = students[name]
    found = load_file(student.root / "found")
    for n in student.case.steps:
        state = student.drawn(n)
        assert relative_error(found[f"state{n}"], state) < BOUND
        torch.testing.assert_close(found[f"images{n}"], student.images(state), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_exported_folder_is_whole_and_ours_too(students, name):
    case, root, weights = CASES[name], students[name].root, students[name].weights
    index = json.loads((root / "student/model_index.json").read_text())
    assert (index["_class_name"], index["scheduler"]) == (
        case.pipeline,
        ["diffusers", case.scheduler],
    )
    assert read_walk(root / "student") == case.walk
    denoiser = load_denoiser(root / "student")
    found = denoiser.network.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in found)
    assert denoiser.prediction == load_denoiser(root / "teacher").prediction
    assert read_facts(root / "student" / ("unet" if "unet" in index else "transformer")) == {
        "run": 1
    }


@pytest.mark.slow
def test_adapters_change_what_is_drawn(students):
    """Or the comparison above would say nothing of them."""
    student = students["lora"]
    bare = load_denoiser(student.root / "teacher").network.eval()
    plain = replace(student, ours=replace(student.ours, denoiser=_with(student, bare)))
    assert relative_error(plain.drawn(2), student.drawn(2)) > 100 * BOUND


def _with(student: Student, network: Any) -> NetworkDenoiser:
    own = student.ours.denoiser
    return NetworkDenoiser(network, own.scaling, own.prediction).eval()


@torch.no_grad()
def reached(scheduler: Any, model: Any, noise: Tensor) -> Tensor:
    """As DDIM's and DDPM's pipelines go: without any scaling."""
    x = noise
    for t in scheduler.timesteps:
        x = scheduler.step(model(x, t).sample, t, x).prev_sample
    return x


def test_ddim_keeps_to_its_own_grid_only_where_the_steps_divide_the_timesteps(tmp_path):
    """So it is taken for no others. Measured: 7e-4, 4e-3, 6e-3 in 3, 6, 7 steps, else 5e-7."""
    bare(DISCRETE)(tmp_path)
    denoiser: Any = load_denoiser(tmp_path)
    model, noise = denoiser.network.model, unit_noise(denoiser.network)
    for steps in range(1, 9):
        far = {}
        for vp in (DDIM, FIRST_ORDER):
            config = exportable_scheduler(DISCRETE, vp)
            scheduler = getattr(diffusers, config["_class_name"]).from_config(config)
            scheduler.set_timesteps(steps)
            scaling = read_schedule(config).scaling
            grid = scaling.native_grid(steps)
            ours = NetworkDenoiser(denoiser.network, scaling, denoiser.prediction)
            state = sample_euler(ours, scaling.start(noise, grid[0]), grid)
            far[vp["_class_name"]] = relative_error(reached(scheduler, model, noise), state)
        assert far["DPMSolverMultistepScheduler"] < BOUND
        if 1000 % steps == 0:
            assert far["DDIMScheduler"] < BOUND
        else:
            assert far["DDIMScheduler"] > 5 * BOUND


def test_pipelines_begin_with_their_schedulers_noise():
    """What the module says of `init_noise_sigma`."""
    config = exportable_scheduler(TEACHERS["pndm"])
    euler: Any = diffusers.EulerDiscreteScheduler.from_config(config)
    edm: Any = diffusers.EDMEulerScheduler.from_config(exportable_scheduler(EDM_SCHEDULER))
    scaling = read_schedule(config).scaling
    one = torch.ones((), dtype=torch.float64)
    euler.set_timesteps(4)
    sigma = scaling.sigma_max
    assert float(euler.init_noise_sigma) == pytest.approx(sigma, rel=1e-6)
    assert float(scaling.start(one, sigma)) == pytest.approx((1 + sigma**2) ** 0.5)
    assert edm.init_noise_sigma == pytest.approx((1 + 60.0**2) ** 0.5)
    assert float(read_schedule(EDM_SCHEDULER).scaling.start(one, 60.0)) == 60.0
    early = exportable_scheduler(ending_at(TEACHERS["pndm"], 1.6))  # of a one-step generator
    shorter: Any = diffusers.EulerDiscreteScheduler.from_config(early)
    shorter.set_timesteps(1)
    level = read_schedule(early).scaling.sigma_max
    assert level == pytest.approx(1.6, rel=0.01)
    assert float(shorter.init_noise_sigma) == pytest.approx(level, rel=1e-6)


# ---------------------------------------------------------------- what is refused


def refused(teacher: Callable[[Path], Any], folder: Path, walk: FewSteps | None = None) -> str:
    teacher(folder)
    network: Any = load_denoiser(folder).network
    with pytest.raises(UserError) as error:
        plain_pipeline(folder, network, walk or exportable(1, 2, 4))
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grid": "polynomial"}, "the polynomial grid"),
        ({"afs": True}, "an analytical first step"),
        ({"told": True}, "being told the number of steps"),
        ({"step": "renoise"}, "steps of the kind renoise"),
    ],
)
def test_walks_that_no_scheduler_knows_are_refused(tmp_path, change, said):
    sentence = refused(bare(DISCRETE), tmp_path, replace(exportable(2), **change))
    assert said in sentence
    assert "FewStepPipeline" in sentence


def dit_of_pixels(folder: Path) -> None:
    build_network({**network_config("dit-xl-2", reduced=True), "in_channels": 3}).save_pretrained(
        folder
    )
    save_scheduler(folder, DISCRETE)


def shifted_dit(folder: Path) -> None:
    dit(folder)
    rewrite(folder / "vae/config.json", shift_factor=0.1)


def unet_of_latents(folder: Path) -> None:
    bare(DISCRETE)(folder)  # three channels, as some autoencoders have
    small_autoencoder(3).save_pretrained(folder / "vae")


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (dit_of_pixels, "a DiT without an AutoencoderKL"),
        (shifted_dit, "a DiT whose latents are shifted"),
        (unet_of_latents, "a UNet2DModel of VP by itself"),
        (bare({"_class_name": "FlowMatchEulerDiscreteScheduler"}), "a UNet2DModel of Flow"),
        (bare(DISCRETE, in_channels=4, out_channels=4), "4 channels"),
        (bare(EDM_SCHEDULER, sample_size=(8, 16)), "sample_size is not one number"),
        (whole("sd15", TEACHERS["flow"]), "a StableDiffusionPipeline of Flow"),
        (whole("sd3", EDM_SCHEDULER), "a StableDiffusion3Pipeline of EDM"),
        (whole("pixart-alpha"), "a PixArt that is told sizes"),
    ],
)
def test_students_without_a_plain_pipeline_are_refused(tmp_path, teacher, said):
    sentence = refused(teacher, tmp_path / "teacher")
    assert said in sentence
    assert "FewStepPipeline" in sentence


def test_a_network_that_is_told_more_is_refused(tmp_path):
    whole("sd15")(tmp_path)
    network: Any = load_denoiser(tmp_path).network
    told = DiffusersNetwork(
        network.model, conditioning=conditioned(network.model, Parts(steps=True))
    )
    with pytest.raises(UserError, match="told more than its class of diffusers takes"):
        plain_pipeline(tmp_path, told, exportable(2))


def test_a_vanishing_signal_takes_steps_that_divide_the_timesteps(tmp_path):
    zero = bare({**VELOCITY, "rescale_betas_zero_snr": True})
    assert "that divide the 1000 timesteps" in refused(zero, tmp_path, exportable(2, 3))
    network: Any = load_denoiser(tmp_path).network
    assert plain_pipeline(tmp_path, network, exportable(2, 4)).pipeline == "DDIMPipeline"


def test_a_student_is_saved_over_an_older_one(tmp_path):
    """As at every checkpoint: the scheduler too, and not the teacher's."""
    whole("sd15")(tmp_path / "teacher")
    network: Any = load_denoiser(tmp_path / "teacher").network
    for _ in range(2):
        args = (tmp_path / "teacher", network, perturbed(network), exportable(2))
        save_exportable(tmp_path / "student", *args, facts={})
    weights = network.state_dict()
    again = load_denoiser(tmp_path / "student")
    assert isinstance(again.scaling, VP)
    assert again.scaling.spacing == "trailing"
    assert all(torch.equal(w, weights[key]) for key, w in again.network.state_dict().items())
