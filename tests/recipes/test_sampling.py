"""`stillhouse sample` from Python: image i is the same at any batch size and world size."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import diffusers
import loaded
import pytest
import torch
import warm
from PIL import Image
from safetensors.torch import load_file

from stillhouse.errors import UserError
from stillhouse.pipelines import load_denoiser
from stillhouse.process import TOYS, KeyedNoise, levels, starting_noise
from stillhouse.recipes import parts
from stillhouse.recipes.sampling import SampleRun, run
from stillhouse.solvers import SOLVERS, search_grid


def save_unet(folder: Path, *, classes: int | None = None, size: int = 16) -> Path:
    """A small random pixel U-Net with a DDIM scheduler, as diffusers saves it."""
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=size,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        num_class_embeds=classes,
    )
    scheduler = diffusers.DDIMScheduler(timestep_spacing="trailing", clip_sample=False)
    diffusers.DDIMPipeline(model, scheduler).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def unet(tmp_path_factory) -> Path:
    return save_unet(tmp_path_factory.mktemp("models") / "unet")


def samples(folder: Path) -> torch.Tensor:
    files = sorted((folder / "tensors").glob("*.safetensors"))
    return torch.cat([load_file(file)["samples"] for file in files])


def draw(model: Path | str, out: Path, **options) -> dict:
    return run(SampleRun(model=str(model), out=out, **{"steps": 3, "tensors": True, **options}))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_sample_i_is_the_same_at_any_batch_size(unet, tmp_path, size):
    """Bit-identical noise; images within 1e-5 in float32, where kernels may differ."""
    draw(unet, tmp_path / "whole", count=70, batch=70)
    draw(unet, tmp_path / "parts", count=70, batch=size)
    whole, parts_ = samples(tmp_path / "whole"), samples(tmp_path / "parts")
    assert (whole - parts_).abs().max() <= 1e-5 * max(1.0, float(whole.abs().max()))


def test_a_run_stands_for_the_model_in_it(unet, tmp_path):
    shutil.copytree(unet, tmp_path / "run/model")
    (tmp_path / "run/run.json").write_text("{}")
    for model, out in ((unet, "a"), (tmp_path / "run", "b")):
        draw(model, tmp_path / out, count=2)
    assert torch.equal(samples(tmp_path / "a"), samples(tmp_path / "b"))


def test_first_state_is_the_keyed_noise_times_sigma_max(unet, tmp_path, monkeypatch):
    from stillhouse.recipes import sampling

    seen = {}
    real = sampling.starting_noise

    def spy(shape, indices, *, seed):
        noise = real(shape, indices, seed=seed)
        seen.update(zip(indices, noise, strict=True))
        return noise

    monkeypatch.setattr(sampling, "starting_noise", spy)
    draw(unet, tmp_path / "out", count=9, batch=4, seed=7)
    expected = starting_noise((3, 16, 16), range(9), seed=7)
    assert all(torch.equal(seen[i], expected[i]) for i in range(9))


def torchrun(unet: Path, out: Path, processes: int, *more: str) -> subprocess.CompletedProcess:
    words = ["-m", "stillhouse", "sample", str(unet), "--out", str(out), "--tensors", *more]
    return loaded.run(*words, processes=processes)


@pytest.mark.slow
def test_two_processes_draw_the_same_bits_as_one(unet, tmp_path):
    options = ["--count", "20", "--batch", "4", "--steps", "3", "--solver", "euler-ancestral"]
    done = torchrun(unet, tmp_path / "two", 2, *options)
    assert done.returncode == 0, done.stderr
    draw(unet, tmp_path / "one", count=20, batch=4, solver=parts.EulerAncestral())
    assert torch.equal(samples(tmp_path / "one"), samples(tmp_path / "two"))
    names = sorted(p.name for p in (tmp_path / "two" / "images").iterdir())
    assert names == [f"{i:06d}.png" for i in range(20)]
    record = json.loads((tmp_path / "two" / "record.json").read_text())
    assert record["sessions"][0]["drawn"] == 20


@pytest.mark.slow
def test_a_refusal_under_torchrun_is_said_once(unet, tmp_path):
    draw(unet, tmp_path, count=2)
    done = torchrun(unet, tmp_path, 2, "--count", "2", "--steps", "4")
    assert done.returncode != 0
    assert done.stderr.count("holds samples of another run") == 1
    assert "Connection closed by peer" not in done.stderr


def test_the_same_run_again_draws_only_what_is_missing(unet, tmp_path):
    out = tmp_path / "out"
    assert draw(unet, out, count=10, batch=4)["drawn_now"] == 10
    before = samples(out)
    (out / "images" / "000005.png").unlink()
    kept = (out / "images" / "000001.png").stat().st_mtime_ns
    assert draw(unet, out, count=10, batch=4)["drawn_now"] == 4  # its whole batch: same shape
    assert (out / "images" / "000001.png").stat().st_mtime_ns == kept
    assert torch.equal(samples(out), before)
    assert draw(unet, out, count=14, batch=4)["drawn_now"] == 6  # more of the same run


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_images(unet, tmp_path):
    draw(unet, tmp_path / "whole", count=64, batch=2, steps=10)
    command = warm.command("-m", "stillhouse", "sample", str(unet), "--tensors")
    command += ["--out", str(tmp_path / "cut"), "--count", "64", "--batch", "2", "--steps", "10"]
    process = subprocess.Popen(command, env=warm.environment())
    images = tmp_path / "cut" / "images"
    deadline = time.monotonic() + 120
    while len(list(images.glob("*.png"))) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert warm.kill(process) == -signal.SIGKILL
    done = len(list(images.glob("*.png")))
    assert 6 <= done < 64
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    record = json.loads((tmp_path / "cut" / "record.json").read_text())
    assert 0 < record["sessions"][-1]["drawn"] <= 64 - done + 2
    assert torch.equal(samples(tmp_path / "cut"), samples(tmp_path / "whole"))
    for name in ("000000.png", "000063.png"):
        whole = (tmp_path / "whole" / "images" / name).read_bytes()
        assert (images / name).read_bytes() == whole
    assert not list((tmp_path / "cut").rglob("*.partial"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": 4}, "steps: 3 -> 4"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"solver": parts.Dpmpp3M(variant="exact")}, "solver.variant: compat -> exact"),
        ({"grid": parts.PolynomialGrid()}, "grid.kind: native -> polynomial"),
        ({"dtype": "bfloat16"}, "dtype: float32 -> bfloat16"),
        ({"batch": 2}, "batch: 16 -> 2"),  # its tensors are stored by batch
    ],
)
def test_a_folder_of_another_run_is_refused(unet, tmp_path, change, named):
    draw(unet, tmp_path, count=2)
    with pytest.raises(UserError, match=named):
        draw(unet, tmp_path, count=2, **change)


def test_changed_weights_are_noticed(tmp_path):
    model = save_unet(tmp_path / "model")
    draw(model, tmp_path / "out", count=1)
    torch.manual_seed(1)
    network = diffusers.UNet2DModel.from_pretrained(model / "unet")
    torch.nn.init.normal_(network.conv_out.weight)
    network.save_pretrained(model / "unet")
    with pytest.raises(UserError, match="network: sha256"):
        draw(model, tmp_path / "out", count=1)


def test_a_changed_guide_is_noticed(unet, tmp_path):
    guide = save_unet(tmp_path / "guide", size=16)
    guidance = parts.Autoguidance(model=str(guide), weight=2.0)
    draw(unet, tmp_path / "out", count=1, guidance=guidance)
    network = diffusers.UNet2DModel.from_pretrained(guide / "unet")
    torch.nn.init.normal_(network.conv_out.weight)
    network.save_pretrained(guide / "unet")
    with pytest.raises(UserError, match="guide network: sha256"):
        draw(unet, tmp_path / "out", count=1, guidance=guidance)


def test_images_equal_diffusers_own_pipeline(unet, tmp_path, monkeypatch):
    """The same starting noise through DDIMPipeline: the same PNG to a grey level."""
    draw(unet, tmp_path, count=4, batch=4, steps=10, solver=parts.Euler())
    pipeline = diffusers.DDIMPipeline.from_pretrained(unet)
    noise = starting_noise((3, 16, 16), range(4), seed=0)
    module = sys.modules[diffusers.DDIMPipeline.__module__]
    monkeypatch.setattr(module, "randn_tensor", lambda *a, **k: noise.clone())
    theirs = pipeline(4, num_inference_steps=10).images
    for i, image in enumerate(theirs):
        ours = torch.tensor(list(Image.open(tmp_path / "images" / f"{i:06d}.png").tobytes()))
        assert (ours - torch.tensor(list(image.tobytes()))).abs().max() <= 1


def test_images_of_unknown_origin_are_not_adopted(unet, tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "images" / "000000.png")
    with pytest.raises(UserError, match=r"holds images but no record\.json"):
        draw(unet, tmp_path, count=1)


def test_a_run_that_drew_nothing_does_not_claim_its_folder(unet, tmp_path, monkeypatch):
    from stillhouse.recipes import sampling

    with monkeypatch.context() as patched:
        patched.setattr(sampling, "draw_batch", lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            draw(unet, tmp_path, count=1, steps=2)
    assert draw(unet, tmp_path, count=1, steps=3)["drawn_now"] == 1


def test_another_spelling_and_another_batch_still_resume(unet, tmp_path, monkeypatch):
    draw(unet, tmp_path / "out", count=3, batch=3, tensors=False)
    monkeypatch.chdir(unet.parent)
    again = draw(f"./{unet.name}", tmp_path / "out", count=5, batch=1, tensors=False)
    assert again["drawn_now"] == 2


def test_one_toy_does_not_continue_another(tmp_path):
    draw("toy:ring", tmp_path, count=4)
    with pytest.raises(UserError, match="model: toy:ring -> toy:moons"):
        draw("toy:moons", tmp_path, count=4)


def test_a_longer_toy_run_has_all_its_samples(tmp_path):
    draw("toy:ring", tmp_path, count=20)
    draw("toy:ring", tmp_path, count=40)
    assert len(samples(tmp_path)) == 40


def test_samples_that_are_not_finite_are_no_images(tmp_path):
    model = save_unet(tmp_path / "model")
    network = diffusers.UNet2DModel.from_pretrained(model / "unet")
    torch.nn.init.constant_(network.conv_out.bias, torch.nan)
    network.save_pretrained(model / "unet")
    with pytest.raises(UserError, match="not finite"):
        draw(model, tmp_path / "out", count=1)
    assert not list((tmp_path / "out" / "images").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_a_sentence_and_resumes(unet, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], check=True)
    try:
        with pytest.raises(UserError, match="run the same command again"):
            draw(unet, disk, count=64, batch=4)
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert 0 < draw(unet, disk, count=64, batch=4)["drawn_now"] < 64
        assert len(samples(disk)) == 64
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_labels_for_a_model_without_classes_are_refused(unet, tmp_path):
    with pytest.raises(UserError, match="knows no classes"):
        draw(unet, tmp_path, labels=(1,))
    with pytest.raises(UserError, match="knows neither classes nor prompts"):
        draw(unet, tmp_path, guidance=parts.ClassifierFree())


def test_a_guide_must_fit(unet, tmp_path):
    other = save_unet(tmp_path / "other", size=32)
    with pytest.raises(UserError, match="cannot guide: its data_shape"):
        draw(unet, tmp_path / "out", guidance=parts.Autoguidance(model=str(other)))


def test_a_broken_record_is_named(unet, tmp_path):
    draw(unet, tmp_path, count=1)
    (tmp_path / "record.json").write_text('{"run": ')
    with pytest.raises(UserError, match=r"record\.json cannot be read"):
        draw(unet, tmp_path, count=1)


def test_the_record_repeats_the_run(unet, tmp_path):
    record = draw(
        unet, tmp_path / "a", count=3, seed=5, solver=parts.Heun(), grid=parts.PolynomialGrid()
    )
    assert record["evaluations_per_sample"] == 2 * 3 - 1
    assert len(record["sigmas"]) == 4
    again = SampleRun(**record["run"], out=tmp_path / "b")
    run(again)
    assert torch.equal(samples(tmp_path / "a"), samples(tmp_path / "b"))


def test_images_and_grid_show_the_samples(unet, tmp_path):
    draw(unet, tmp_path, count=5, batch=5)
    pixels = torch.tensor(list(Image.open(tmp_path / "images" / "000003.png").tobytes()))
    expected = ((samples(tmp_path)[3].clamp(-1, 1) + 1) * 127.5).round().movedim(0, -1).flatten()
    assert torch.equal(pixels.float(), expected)
    width, height = Image.open(tmp_path / "grid.png").size
    assert width == 3 * (64 + 2) + 2  # three columns of 16 px images, four times enlarged
    assert height == 2 * (64 + 2) + 2


def test_labels_are_dealt_in_turn_and_checked(tmp_path):
    model = save_unet(tmp_path / "model", classes=4)
    draw(model, tmp_path / "two", count=4, batch=4, labels=(1, 3))
    draw(model, tmp_path / "all", count=4, batch=4)
    two, every = samples(tmp_path / "two"), samples(tmp_path / "all")
    assert torch.equal(two[3], every[3])  # sample 3 is class 3 in both
    assert not torch.equal(two[0], every[0])
    with pytest.raises(UserError, match=r"label 4 is not among the model's 4 classes: .* 0 to 3"):
        draw(model, tmp_path / "bad", labels=(4,))
    with pytest.raises(UserError, match=r"label 9 is not among the model's 3 classes: .* 0 to 2"):
        draw(model, tmp_path / "bad", labels=(9,), null_label=3)  # which is none to give
    guided = parts.ClassifierFree(weight=3.0)
    with pytest.raises(UserError, match="--null-label"):
        draw(model, tmp_path / "guided", guidance=guided)
    draw(model, tmp_path / "guided", count=4, batch=4, guidance=guided, null_label=0)
    assert not torch.equal(samples(tmp_path / "guided")[1], every[1])
    # The null label is no class to draw: labels are 1, 2, 3, 1.
    draw(model, tmp_path / "plain", count=4, batch=4, labels=(1, 2, 3))
    unguided = parts.ClassifierFree(weight=1.0)
    draw(model, tmp_path / "one", count=4, batch=4, guidance=unguided, null_label=0)
    assert torch.equal(samples(tmp_path / "one"), samples(tmp_path / "plain"))
    with pytest.raises(UserError, match="--null-label 9"):
        draw(model, tmp_path / "nine", null_label=9)


def test_autoguidance_loads_its_guide(unet, tmp_path):
    same = parts.Autoguidance(model=str(unet), weight=3.0)
    draw(unet, tmp_path / "same", count=2, guidance=same)
    draw(unet, tmp_path / "plain", count=2)
    # A guide that is the model itself pushes nowhere.
    torch.testing.assert_close(
        samples(tmp_path / "same"), samples(tmp_path / "plain"), rtol=0, atol=1e-5
    )
    # Another guide does push, and only inside its interval.
    other = save_unet(tmp_path / "other")
    network = diffusers.UNet2DModel.from_pretrained(other / "unet")
    torch.nn.init.normal_(network.conv_out.weight, std=0.1)
    network.save_pretrained(other / "unet")
    pushing = parts.Autoguidance(model=str(other), weight=3.0)
    nowhere = parts.Autoguidance(model=str(other), weight=3.0, low=500.0)
    draw(unet, tmp_path / "pushed", count=2, guidance=pushing)
    draw(unet, tmp_path / "nowhere", count=2, guidance=nowhere)
    plain = samples(tmp_path / "plain")
    assert (samples(tmp_path / "pushed") - plain).abs().max() > 0.1
    assert torch.equal(samples(tmp_path / "nowhere"), plain)
    with pytest.raises(UserError, match=r"--guidance\.model"):
        draw(unet, tmp_path / "none", guidance=parts.Autoguidance())


def test_a_searched_grid_is_the_searchs_own(tmp_path):
    grid = parts.SearchedGrid(fine=21, samples=32, sigma_min=0.01, to_zero=False)
    record = draw("toy:ring", tmp_path, count=4, steps=5, grid=grid, seed=6)
    fine = levels.polynomial(21, 0.01, 80.0)
    x = 80.0 * starting_noise((2,), range(32), seed=7)  # not the noise of the samples themselves
    found = search_grid(TOYS["ring"](), x, fine, [6], batch=16)[6]
    assert record["sigmas"] == pytest.approx(found.tolist())
    assert record["sigmas"] != pytest.approx(levels.polynomial(6, 0.01, 80.0).tolist())


def test_a_stochastic_solver_follows_the_seed(unet, tmp_path):
    for seed in (0, 1):
        solver = parts.EulerAncestral()
        draw(unet, tmp_path / f"{seed}", count=2, seed=seed, solver=solver)
    record = json.loads((tmp_path / "1" / "record.json").read_text())
    grid = torch.tensor(record["sigmas"], dtype=torch.float64)
    x = math.sqrt(1 + float(grid[0]) ** 2) * starting_noise((3, 16, 16), range(2), seed=1)
    noise = KeyedNoise(range(2), seed=1)
    y = SOLVERS["euler-ancestral"](load_denoiser(unet), x, grid, generator=noise)
    torch.testing.assert_close(samples(tmp_path / "1"), y, rtol=0, atol=1e-5 * float(y.abs().max()))


def test_the_network_runs_in_the_precision_asked_for(unet, tmp_path):
    draw(unet, tmp_path / "half", count=2, dtype="bfloat16")
    draw(unet, tmp_path / "full", count=2)
    miss = (samples(tmp_path / "half") - samples(tmp_path / "full")).abs().max()
    assert 1e-4 < float(miss) < 0.5 * float(samples(tmp_path / "full").abs().max())


@pytest.mark.parametrize("name", ["moons", "ring", "spiral", "checkerboard"])
def test_toys_draw_their_trajectories(tmp_path, name):
    pytest.importorskip("matplotlib")
    draw(f"toy:{name}", tmp_path, count=80, batch=80, steps=40, solver=parts.Heun())
    assert Image.open(tmp_path / "trajectories.png").size[0] > 600
    toy = TOYS[name]()
    ends = samples(tmp_path).double()
    nearest = torch.cdist(ends, toy.means).min(1).values
    assert float((nearest < 4 * toy.stds[0]).double().mean()) > 0.95


def test_unknown_models_are_named():
    with pytest.raises(UserError, match="toy:moons"):
        run(SampleRun(model="toy:mons"))
    with pytest.raises(UserError, match="name what to sample"):
        run(SampleRun())
