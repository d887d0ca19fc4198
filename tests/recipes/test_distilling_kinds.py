"""Every kind of teacher can be distilled, and how its student is made."""

import json
from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from pipelines.plain_diffusers import watch
from recipes.students import CLASSES, EDM, FLOW, VP, WEIGHTS, bare, distilling, losses
from safetensors.torch import load_file
from small_models import (
    build_network,
    network_config,
    relative_error,
    save_scheduler,
    small_autoencoder,
    unit_noise,
)

from stillhouse.distill.grids import Native
from stillhouse.engine.ema import HalfLife
from stillhouse.pipelines import load_denoiser
from stillhouse.pipelines.few_steps import read_walk
from stillhouse.process import NetworkDenoiser
from stillhouse.recipes.distill.distilling import run
from stillhouse.recipes.distill.methods import Sfd, SfdV
from stillhouse.recipes.parts import ClassifierFree
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.solvers import sample_euler


def latents(folder: Path) -> Path:
    """A bare U-Net of latents, with its autoencoder beside it."""
    bare(folder, EDM, in_channels=4, out_channels=4)
    small_autoencoder(4).save_pretrained(folder / "vae")
    return folder


def transformer(folder: Path) -> Path:
    """A DiT of classes, likewise."""
    build_network(network_config("dit-xl-2", reduced=True)).save_pretrained(folder)
    save_scheduler(folder, VP)
    small_autoencoder(4).save_pretrained(folder / "vae")
    return folder


TEACHERS: dict[str, Callable[[Path], Path]] = {
    "edm": lambda folder: bare(folder, EDM),
    "vp": lambda folder: bare(folder, VP),
    "flow": lambda folder: bare(folder, FLOW),
    "edm-classes": lambda folder: bare(folder, EDM, **CLASSES),
    "vp-classes": lambda folder: bare(folder, VP, **CLASSES),
    "flow-classes": lambda folder: bare(folder, FLOW, **CLASSES),
    "latents": latents,
    "dit": transformer,
}


@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize("method", [Sfd(refinement=2), SfdV(refinement=2)], ids=["sfd", "sfd-v"])
def test_any_process_can_be_distilled(kind, method, tmp_path):
    teacher = TEACHERS[kind](tmp_path / "teacher")
    before = load_file(teacher / WEIGHTS)
    config = distilling(teacher, tmp_path / "run", method=method, evaluations="1..2")
    run(config)
    after = load_file(tmp_path / "run/model" / WEIGHTS)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for steps in (1, 2):
        out = tmp_path / f"drawn{steps}"
        sample(SampleRun(model=str(tmp_path / "run/model"), count=2, steps=steps, out=out))
        assert json.loads((out / "record.json").read_text())["evaluations_per_sample"] == steps


@pytest.mark.parametrize(
    ("scheduler", "pipeline"),
    [(EDM, "ConsistencyModelPipeline"), (VP, "DDIMPipeline")],
    ids=["edm", "vp"],
)
def test_plain_diffusers_takes_the_walk_of_an_exportable_student(scheduler, pipeline, tmp_path):
    """Measured: 3e-5 of EDM, 2e-7 of VP, of the largest value; 0.2 before the lesson."""
    teacher, model = bare(tmp_path / "teacher", scheduler), tmp_path / "run/model"
    run(distilling(teacher, tmp_path / "run", exportable=True))
    ours = load_denoiser(model)
    grid, noise = ours.scaling.native_grid(2), unit_noise((2, 3, 8, 8), seed=5)
    first = Native(ours.scaling).start(noise, float(grid[0]))
    wanted = sample_euler(ours, first, grid)
    pipe = diffusers.DiffusionPipeline.from_pretrained(model)
    assert type(pipe).__name__ == pipeline
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler.set_timesteps(2)
    if scheduler is VP:  # a pipeline that draws its noise itself
        told = {"generator": torch.Generator().manual_seed(5)}
    else:
        told = {"latents": first / pipe.scheduler.init_noise_sigma}
    reached = watch(pipe.scheduler)
    pipe(batch_size=2, num_inference_steps=2, output_type="np", **told)
    untaught = NetworkDenoiser(load_denoiser(teacher).network, ours.scaling, ours.prediction)
    assert relative_error(reached[-1], wanted) < 1e-4
    before = sample_euler(untaught.eval(), first, grid)
    assert relative_error(before, wanted) > 1e-2  # it has learnt something


def test_a_student_is_not_clipped_where_its_teacher_is(tmp_path):
    teacher = bare(tmp_path / "teacher", VP)
    assert load_denoiser(teacher).clip == 1.0
    run(distilling(teacher, tmp_path / "run"))
    assert load_denoiser(tmp_path / "run/model").clip is None


def test_a_student_is_not_clipped_by_its_schedulers_default_either(tmp_path):
    teacher = bare(tmp_path / "teacher", VP)
    config = json.loads((teacher / "scheduler_config.json").read_text())
    del config["clip_sample"]
    (teacher / "scheduler_config.json").write_text(json.dumps(config))
    run(distilling(teacher, tmp_path / "run"))
    assert load_denoiser(teacher).clip == 1.0
    assert load_denoiser(tmp_path / "run/model").clip is None


def test_guidance_is_learnt_from_the_teacher(tmp_path):
    """Of weight 1 it changes nothing, of weight 4 it does."""
    teacher, seen = bare(tmp_path / "teacher", EDM, num_class_embeds=8), {}
    for weight in (0.0, 1.0, 4.0):
        guidance = {"guidance": ClassifierFree(weight=weight)} if weight else {}
        config = distilling(teacher, tmp_path / f"run{weight}", null_label=7, **guidance)
        run(config)
        seen[weight] = losses(config.out)
    torch.testing.assert_close(seen[1.0], seen[0.0], rtol=1e-4, atol=0)
    assert abs(seen[4.0][0] / seen[0.0][0] - 1) > 0.01
    walk = read_walk(tmp_path / "run4.0/model")
    assert walk.guidance["kind"] == "classifier-free"
    assert walk.guidance["weight"] == 4


def test_a_student_is_averaged_and_its_teacher_in_bfloat16_if_asked_for(teacher, tmp_path):
    plain, rough, averaged = (
        distilling(teacher, tmp_path / name, **changes)
        for name, changes in {
            "plain": {},
            "rough": {"teacher": "bfloat16"},
            "averaged": {"averages": (HalfLife(images=1000, ramp=0),)},
        }.items()
    )
    for config in (plain, rough, averaged):
        run(config)
    assert losses(rough.out) != losses(plain.out)
    assert losses(rough.out) == pytest.approx(losses(plain.out), rel=0.05)
    assert losses(averaged.out) == losses(plain.out)
    began, ended, mean = (
        load_file(folder / WEIGHTS)
        for folder in (teacher, plain.out / "model", averaged.out / "model")
    )
    moved = [(mean[k] - began[k]).norm() / (ended[k] - began[k]).norm() for k in began]
    assert 0 < max(float(share) for share in moved if share.isfinite()) < 0.1
