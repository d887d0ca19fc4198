"""`stillhouse sample` from Python: image i is the same at any batch size and world size."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import diffusers
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from stillhouse.errors import UserError
from stillhouse.process import starting_noise
from stillhouse.recipes import parts
from stillhouse.recipes.sampling import SampleRun, run


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
    draw(unet, tmp_path / "whole", count=20, batch=20)
    draw(unet, tmp_path / "parts", count=20, batch=size)
    whole, parts_ = samples(tmp_path / "whole"), samples(tmp_path / "parts")
    assert (whole - parts_).abs().max() <= 1e-5 * max(1.0, float(whole.abs().max()))


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
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={29500 + os.getpid() % 2000}"]
    command += ["-m", "stillhouse", "sample", str(unet), "--out", str(out), "--tensors"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *more], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_two_processes_draw_the_same_bits_as_one(unet, tmp_path):
    options = ["--count", "20", "--batch", "4", "--steps", "3", "--solver", "euler-ancestral"]
    done = torchrun(unet, tmp_path / "two", 2, *options)
    assert done.returncode == 0, done.stderr
    draw(unet, tmp_path / "one", count=20, batch=4, solver=parts.EulerAncestral())
    assert torch.equal(samples(tmp_path / "one"), samples(tmp_path / "two"))
    names = sorted(p.name for p in (tmp_path / "two" / "images").iterdir())
    assert names == [f"{i:06d}.png" for i in range(20)]
    assert json.loads((tmp_path / "two" / "record.json").read_text())["drawn_now"] == 20


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
    command = [sys.executable, "-m", "stillhouse", "sample", str(unet), "--tensors"]
    command += ["--out", str(tmp_path / "cut"), "--count", "64", "--batch", "2", "--steps", "10"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    images = tmp_path / "cut" / "images"
    deadline = time.monotonic() + 120
    while len(list(images.glob("*.png"))) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list(images.glob("*.png")))
    assert 6 <= done < 64
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    record = json.loads((tmp_path / "cut" / "record.json").read_text())
    assert 0 < record["drawn_now"] <= 64 - done + 2
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
    with pytest.raises(UserError, match="weights"):
        draw(model, tmp_path / "out", count=1)


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
    with pytest.raises(UserError, match="label 4 is not among the model's 4 classes"):
        draw(model, tmp_path / "bad", labels=(4,))
    guided = parts.ClassifierFree(weight=3.0)
    with pytest.raises(UserError, match="--null-label"):
        draw(model, tmp_path / "guided", guidance=guided)
    draw(model, tmp_path / "guided", count=4, batch=4, guidance=guided, null_label=0)
    assert not torch.equal(samples(tmp_path / "guided")[1], every[1])
    # Class 0 is the null label itself: guided towards it from it, nothing changes.
    torch.testing.assert_close(samples(tmp_path / "guided")[0], every[0], rtol=0, atol=1e-5)


def test_autoguidance_loads_its_guide(unet, tmp_path):
    same = parts.Autoguidance(model=str(unet), weight=3.0)
    draw(unet, tmp_path / "same", count=2, guidance=same)
    draw(unet, tmp_path / "plain", count=2)
    # A guide that is the model itself pushes nowhere.
    torch.testing.assert_close(
        samples(tmp_path / "same"), samples(tmp_path / "plain"), rtol=0, atol=1e-5
    )
    with pytest.raises(UserError, match=r"--guidance\.model"):
        draw(unet, tmp_path / "none", guidance=parts.Autoguidance())


@pytest.mark.parametrize("name", ["moons", "ring", "spiral", "checkerboard"])
def test_toys_draw_their_trajectories(tmp_path, name):
    pytest.importorskip("matplotlib")
    draw(f"toy:{name}", tmp_path, count=80, batch=80, steps=40, solver=parts.Heun())
    assert Image.open(tmp_path / "trajectories.png").size[0] > 600
    from stillhouse.process import TOYS

    toy = TOYS[name]()
    ends = samples(tmp_path).double()
    nearest = torch.cdist(ends, toy.means).min(1).values
    assert float((nearest < 4 * toy.stds[0]).double().mean()) > 0.95


def test_unknown_models_are_named():
    with pytest.raises(UserError, match="toy:moons"):
        run(SampleRun(model="toy:mons"))
    with pytest.raises(UserError, match="name what to sample"):
        run(SampleRun())
