"""Few-step students are walked as they were trained, and drawn as `stillhouse sample` draws."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from metrics.parity import minilm_folder
from models.test_text import write_bert
from PIL import Image
from small_models import (
    build_network,
    network_config,
    rewrite,
    save_bare,
    save_scheduler,
    small_unet,
)
from torch import Tensor
from tunable import FAMILIES, save_whole

from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError
from stillhouse.models import DiffusersNetwork
from stillhouse.models.conditioning import Parts, Text, conditioned
from stillhouse.models.control import Layout
from stillhouse.models.plane import PlaneNetwork
from stillhouse.models.text import TextEncoder
from stillhouse.pipelines import FewStepPipeline, UnreadableCheckpoint, load_denoiser
from stillhouse.pipelines.few_steps import FILE, read_walk, save_walk
from stillhouse.pipelines.save import save_denoiser
from stillhouse.process import Condition, keyed_normal, starting_noise
from stillhouse.recipes.parts import Euler
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample

pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")

NATIVE = FewSteps((1, 3), grid="native", afs=False)
EDM_SCHEDULER = {"_class_name": "EDMEulerScheduler"}
ALONE = {"_class_name": "DDIMScheduler", "clip_sample": False, "timestep_spacing": "trailing"}


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    "walk",
    [
        NATIVE,
        FewSteps((2, 3, 4, 5), told=True, sigma_max=60.0),
        FewSteps((1,), "consistency", "renoise", afs=False, guidance={"kind": "cfg", "scale": 4.0}),
    ],
)
def test_a_walk_is_read_as_it_was_saved(tmp_path, walk):
    save_walk(tmp_path / "model", walk)
    assert read_walk(tmp_path / "model") == walk
    assert read_walk(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"evaluations": []},
        {"evaluations": [0]},
        {"evaluations": [2.5]},
        {"evaluations": "two"},
        {"evaluations": None},
        {"grid": "linear"},
        {"step": "heun"},
        {"told": "no"},
        {"afs": 1},
        {"sigma_min": 90.0},
        {"sigma_max": "80"},
        {"solver": "euler"},
    ],
    ids=str,
)
def test_a_broken_walk_is_refused_in_a_sentence(tmp_path, change):
    save_walk(tmp_path, FewSteps((2,)))
    rewrite(tmp_path / FILE, **change)
    with pytest.raises(UnreadableCheckpoint, match=rf"{FILE} does not say how a student is walked"):
        read_walk(tmp_path)


def test_a_file_that_is_no_json_is_refused_too(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(UnreadableCheckpoint, match="cannot be read as JSON"):
        read_walk(tmp_path)
    (tmp_path / FILE).write_text(json.dumps({"method": "sfd"}))
    with pytest.raises(UnreadableCheckpoint, match="evaluations"):
        read_walk(tmp_path)


@pytest.mark.slow
def test_students_cost_nothing_to_those_who_do_not_ask_for_them():
    script = (
        "import sys, stillhouse.pipelines as p; before = 'stillhouse.distill' in sys.modules; "
        "print(before, p.FewStepPipeline.__name__, 'stillhouse.distill' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "FewStepPipeline", "True"]


# ---------------------------------------------------------------- the walk itself


def plane(folder: Path, walk: FewSteps, **parts: Any) -> Any:
    """A student of points with loud branches, saved; its denoiser."""
    torch.manual_seed(0)
    model = PlaneNetwork(width=16, depth=1)
    conditioning = conditioned(model, Parts(**parts)) if parts else None
    network = DiffusersNetwork(model, conditioning=conditioning)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.3) if not weight.any() else None
    save_denoiser(folder, network, network.state_dict(), EDM_SCHEDULER, facts={})
    save_walk(folder, walk)
    return load_denoiser(folder)


@torch.no_grad()
def test_the_papers_walk_with_its_first_step_and_its_number_of_timestamps(tmp_path):
    """The grid of four timestamps is Zhou et al.'s, to the digits that they print."""
    denoiser = plane(tmp_path, FewSteps((2, 3), told=True), steps=True)
    x = 80 * starting_noise((2,), range(5), seed=3)
    grid = [80.0, 10.929, 0.66989, 0.006]
    x = x + (grid[1] - grid[0]) * x / (1 + grid[0] ** 2) ** 0.5
    told = Condition(steps=torch.full((5,), 4))
    for sigma, after in pairwise(grid[1:]):
        clean = denoiser(x, torch.tensor(sigma, dtype=torch.float64), told)
        x = x + (after - sigma) * (x - clean) / sigma
    pipeline = FewStepPipeline.from_pretrained(tmp_path)
    found = pipeline(count=5, num_inference_steps=2, seed=3, output="pt")
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-5)
    most = pipeline(count=5, seed=3, output="pt")
    assert torch.equal(most, pipeline(count=5, num_inference_steps=3, seed=3, output="pt"))
    assert (most - found).abs().max() > 1e-3


@torch.no_grad()
def test_a_consistency_student_is_renoised_with_noise_of_its_own(tmp_path):
    walk = FewSteps((2,), "consistency", "renoise", afs=False, sigma_min=0.5)
    denoiser = plane(tmp_path, walk)
    high, middle, low = walk.levels(2, denoiser.scaling).tolist()

    def answer(x: Tensor, sigma: float) -> Tensor:
        clean = denoiser(x, torch.tensor(sigma, dtype=torch.float64))
        return clean + low / sigma * (x - clean)

    x = answer(80 * starting_noise((2,), [0, 1, 2], seed=4), high)
    anew = keyed_normal((2,), [0, 1, 2], seed=4, purpose="solver/0")
    x = answer(x + (middle**2 - low**2) ** 0.5 * anew, middle)
    found = FewStepPipeline.from_pretrained(tmp_path)(count=3, seed=4, output="pt")
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)


def test_sample_i_depends_on_its_number_alone(tmp_path):
    plane(tmp_path, FewSteps((2,)))
    pipeline = FewStepPipeline.from_pretrained(tmp_path)
    five = pipeline(count=5, output="pt")
    torch.testing.assert_close(pipeline(count=5, batch=2, output="pt"), five)
    torch.testing.assert_close(pipeline(output="pt"), five[:1])
    assert (pipeline(seed=1, output="pt") - five[:1]).abs().max() > 1e-3


def test_a_native_walk_begins_as_its_process_does(tmp_path):
    """VP's first state has unit variance in its own coordinates: sqrt(1 + sigma^2)."""
    save_bare(tmp_path, beta_end=0.004, timestep_spacing="trailing")
    save_walk(tmp_path, NATIVE)
    pipeline = FewStepPipeline.from_pretrained(tmp_path)
    sigma = pipeline.denoiser.scaling.sigma_max
    x = (1 + sigma**2) ** 0.5 * starting_noise((3, 8, 8), [0], seed=0)
    with torch.no_grad():
        clean = pipeline.denoiser(x, torch.tensor(sigma, dtype=torch.float64))
    found = pipeline(num_inference_steps=1, output="pt")
    torch.testing.assert_close(found, clean, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- as `stillhouse sample` draws


def compare(folder: Path, out: Path, count: int, asked: dict[str, Any], **told: Any) -> list[Any]:
    """The same images, to the byte, from the same seed; `asked` of ours, `told` to the command."""
    config = SampleRun(
        model=str(folder), solver=Euler(), steps=3, count=count, seed=2, out=out, **told
    )
    sample(config)  # before it is known to be a student
    save_walk(folder, NATIVE)
    found = FewStepPipeline.from_pretrained(folder)(**asked, count=count, seed=2)
    for index, image in enumerate(found):
        theirs = Image.open(out / "images" / f"{index:06d}.png")
        assert np.array_equal(np.asarray(theirs), np.asarray(image))
    assert len({image.tobytes() for image in found}) == count
    return found


def loud(model: Any) -> Any:
    """Nothing stays at zero, where it would hide mistakes."""
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1) if not weight.any() else None
    return model


def test_an_unconditional_student_draws_what_the_command_does(tmp_path):
    loud(small_unet(in_channels=1, out_channels=1)).save_pretrained(tmp_path / "model")
    save_scheduler(tmp_path / "model", EDM_SCHEDULER)
    found = compare(tmp_path / "model", tmp_path / "out", 3, {})
    assert (found[0].size, found[0].mode) == ((8, 8), "L")


@pytest.mark.parametrize("labels", [None, (4, 1)])
def test_a_student_of_classes_draws_what_the_command_does(tmp_path, labels):
    """All classes in turn if none are named, but not the one that stands for none."""
    network = DiffusersNetwork(loud(small_unet(num_class_embeds=6)), null_label=5)
    weights, folder = network.state_dict(), tmp_path / "model"
    save_denoiser(folder, network, weights, EDM_SCHEDULER, facts={"null_label": 5})
    compare(folder, tmp_path / "out", 7, {"labels": labels}, labels=labels or ())
    pipeline = FewStepPipeline.from_pretrained(folder)
    dealt: Any = pipeline.condition(range(7), pipeline.wanted(labels=labels))
    assert len(pipeline(labels=labels)) == (2 if labels else 1)
    turns = labels or range(5)
    assert dealt.label.tolist() == [turns[i % len(turns)] for i in range(7)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipelines_student_draws_what_the_command_does(tmp_path, family):
    folder, prompts = save_whole(tmp_path / "model", family), ("a red cat", "")
    found = compare(folder, tmp_path / "out", 3, {"prompt": prompts}, prompt=prompts)
    assert found[0].size == (32, 32)


def text_model(folder: Path, encoder: str, path: str) -> None:
    """A small network of ours that is told captions, a style and a size."""
    text = Text(encoder, TextEncoder(path, length=8).digest, 8)
    layout = Layout(("flip",), (("style", ("oil", "ink")),), ("height",))
    width = TextEncoder(path, length=8).width
    config = {**network_config("sd15", reduced=True), "cross_attention_dim": width}
    model = loud(build_network({**config, "in_channels": 3, "out_channels": 3, "sample_size": 8}))
    conditioning = conditioned(model, Parts(layout=layout, text=text), width)
    torch.manual_seed(1)
    network = DiffusersNetwork(model, conditioning=loud(conditioning))
    save_denoiser(folder, network, network.state_dict(), EDM_SCHEDULER, facts={})


@pytest.fixture
def bert(tmp_path) -> str:
    torch.manual_seed(0)
    write_bert(tmp_path)
    return str(tmp_path / "bert")


@pytest.mark.parametrize("packaged", [True, False])
def test_a_text_models_student_draws_what_the_command_does(tmp_path, bert, packaged):
    """Prompts in turn, padded by the sample's number; every prompt in every style."""
    encoder, path = ("minilm", minilm_folder()) if packaged else (bert, bert)
    text_model(tmp_path / "model", encoder, path)
    prompts = ("a cat", "blue")
    compare(tmp_path / "model", tmp_path / "out", 5, {"prompt": prompts}, prompt=prompts)
    pipeline = FewStepPipeline.from_pretrained(tmp_path / "model")
    assert len(pipeline(prompts)) == 2
    told: Any = pipeline.condition(range(5), pipeline.wanted(prompts), seed=2)
    assert told.control.tolist() == [[0.0, float(i // 2 % 2), 8.0] for i in range(5)]
    assert (told.pooled, told.text_mask) == (None, None)  # through attention alone, and padded


def test_a_text_encoder_may_have_moved(tmp_path, bert):
    text_model(tmp_path / "model", bert, bert)
    save_walk(tmp_path / "model", NATIVE)
    wanted = FewStepPipeline.from_pretrained(tmp_path / "model")("a cat", output="pt")
    moved = Path(bert).rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"student's text encoder: .* name it as prompt_encoder"):
        FewStepPipeline.from_pretrained(tmp_path / "model")
    pipeline = FewStepPipeline.from_pretrained(tmp_path / "model", prompt_encoder=str(moved))
    assert torch.equal(pipeline("a cat", output="pt"), wanted)
    rewrite(moved / "config.json", layer_norm_eps=1e-3)
    with pytest.raises(UserError, match="is not the one that the student was trained with"):
        FewStepPipeline.from_pretrained(tmp_path / "model", prompt_encoder=str(moved))


def test_half_precision_walks_a_float32_state(tmp_path):
    save_bare(tmp_path, timestep_spacing="trailing")
    save_walk(tmp_path, NATIVE)
    pipeline = FewStepPipeline.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert next(pipeline.network.parameters()).dtype == torch.bfloat16
    assert pipeline(output="pt").dtype == torch.float32


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def unconditional(tmp_path) -> FewStepPipeline:
    save_bare(tmp_path / "unconditional", timestep_spacing="trailing")
    save_walk(tmp_path / "unconditional", NATIVE)
    return FewStepPipeline.from_pretrained(tmp_path / "unconditional")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompt": "a cat"}, "takes no prompts"),
        ({"labels": 1}, "knows no classes"),
        ({"num_inference_steps": 2}, "not trained for 2 evaluations: .* is one of 1, 3"),
        ({"output": "np"}, "output is pil or pt"),
        ({"count": 0}, "count and batch are 1 or more"),
        ({"batch": 0}, "count and batch are 1 or more"),
    ],
)
def test_what_a_student_cannot_do_is_refused(unconditional, asked, said):
    with pytest.raises(UserError, match=said):
        unconditional(**asked)


@pytest.mark.parametrize(("labels", "said"), [([1, 9], "label 9 is none"), ([], "no label")])
def test_classes_that_are_not_there_are_refused(tmp_path, labels, said):
    small_unet(num_class_embeds=6).save_pretrained(tmp_path)
    save_scheduler(tmp_path, ALONE)
    save_walk(tmp_path, NATIVE)
    with pytest.raises(UserError, match=rf"knows 6 classes, from 0 on: .*{said}"):
        FewStepPipeline.from_pretrained(tmp_path)(labels=labels)


def test_a_student_of_text_wants_a_prompt(tmp_path):
    save_whole(tmp_path, "sd15")
    save_walk(tmp_path, NATIVE)
    pipeline = FewStepPipeline.from_pretrained(tmp_path)
    for prompt in (None, []):
        with pytest.raises(UserError, match="give a prompt"):
            pipeline(prompt)


def test_a_model_that_is_no_student_is_refused(tmp_path):
    save_bare(tmp_path)
    with pytest.raises(UnreadableCheckpoint, match=rf"has no {FILE}: it is no few-step student"):
        FewStepPipeline.from_pretrained(tmp_path)


def test_runs_and_adapters_are_told_how_they_open(tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    with pytest.raises(UnreadableCheckpoint, match=f"The model of that run is {run / 'model'}"):
        FewStepPipeline.from_pretrained(run)
    save_walk(run / "model", FewSteps((2,)))
    for name in ("pytorch_lora_weights.safetensors", "adapter_config.json"):
        (run / "model" / name).touch()
        with pytest.raises(UnreadableCheckpoint, match=r"holds adapters.*`load_lora_weights`"):
            FewStepPipeline.from_pretrained(run / "model")
        (run / "model" / name).unlink()


def test_points_and_bare_latents_are_no_pictures(tmp_path):
    plane(tmp_path / "plane", FewSteps((2,)))
    with pytest.raises(UserError, match=r"tensors of shape \[2\], .* take output='pt'"):
        FewStepPipeline.from_pretrained(tmp_path / "plane")()


def test_a_student_that_needs_what_nobody_tells_is_refused(tmp_path):
    plane(tmp_path / "untold", FewSteps((2,)), steps=True)  # its walk says that it is not told
    with pytest.raises(UserError, match="is conditioned on steps, which cannot be made here"):
        FewStepPipeline.from_pretrained(tmp_path / "untold")
    save_whole(tmp_path / "mute", "sd15")
    for part in ("text_encoder", "tokenizer"):
        (tmp_path / "mute" / part).rename(tmp_path / part)
    save_walk(tmp_path / "mute", NATIVE)
    with pytest.raises(UserError, match="is conditioned on text"):
        FewStepPipeline.from_pretrained(tmp_path / "mute")


def test_a_student_without_a_size_is_refused(tmp_path):
    save_bare(tmp_path)
    save_walk(tmp_path, NATIVE)
    rewrite(tmp_path / "config.json", sample_size=None)
    with pytest.raises(UserError, match="does not say its image size"):
        FewStepPipeline.from_pretrained(tmp_path)
