"""`stillhouse distill`: from a checkpoint to a student that samples in few evaluations."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from datasets import Dataset
from metrics.test_perceptual import with_package
from PIL import Image
from pipelines.plain_diffusers import watch
from recipes.together import distil_by_two
from safetensors.torch import load_file
from small_models import (
    build_network,
    network_config,
    relative_error,
    save_scheduler,
    small_autoencoder,
    small_unet,
    unit_noise,
)

from stillhouse.cli import main
from stillhouse.distill.grids import Native, Polynomial
from stillhouse.distill.trajectories import Starts, with_steps
from stillhouse.distill.walks import FewSteps
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.sharding import Spread
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.pipelines import load_denoiser
from stillhouse.pipelines.few_steps import FewStepPipeline, read_walk
from stillhouse.process import EDM as EdmProcess
from stillhouse.process import VP as VpProcess
from stillhouse.process import (
    Condition,
    Flow,
    KeyedNoise,
    NetworkDenoiser,
    Scaling,
    alphas_cumprod,
    betas,
    starting_noise,
)
from stillhouse.recipes.distill.comparing import Comparison
from stillhouse.recipes.distill.distilling import (
    DistillRun,
    digest,
    read_evaluations,
    run,
)
from stillhouse.recipes.distill.lessons import Lesson
from stillhouse.recipes.distill.methods import (
    ConsistencyConfig,
    ProgressiveConfig,
    Sfd,
    SfdV,
    check_second_stage,
)
from stillhouse.recipes.distill.students import hearing_steps, load_source
from stillhouse.recipes.distill.told import find_labels, find_prompts
from stillhouse.recipes.distill.watching import StudentPreview
from stillhouse.recipes.parts import ClassifierFree, Dpmpp3M, Euler, Heun, PolynomialGrid, solver
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.recipes.train.folders import check_origins
from stillhouse.solvers import STOCHASTIC, sample_euler, sample_renoise

EDM = {"_class_name": "EDMEulerScheduler", "sigma_data": 0.5}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
VP = {"_class_name": "DDIMScheduler", "clip_sample": True}
CLASSES = {"num_class_embeds": 8}
HERE = World(0, 1, torch.device("cpu"))
WEIGHTS = "diffusion_pytorch_model.safetensors"


def distilling(model: Path, out: Path, **changes) -> DistillRun:
    """Two batches of a small student."""
    settings = {
        "method": Sfd(refinement=2),
        "evaluations": "2",
        "images": 8,
        "batch": 4,
        "optim": AdamW(lr=1e-3),
        "log_every": 4,
        "checkpoint_every": 4,
        "preview": StudentPreview(every=8, count=2, steps=3),
        "comparison": Comparison(count=0),
        "device": "cpu",
    }
    return DistillRun(model=str(model), out=out, **{**settings, **changes})


def bare(folder: Path, scheduler: dict, **network) -> Path:
    small_unet(**network).save_pretrained(folder)
    save_scheduler(folder, scheduler)
    return folder


@pytest.fixture
def teacher(tmp_path) -> Path:
    return bare(tmp_path / "teacher", EDM)


def log_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [line["student/loss"] for line in log_of(out) if "student/loss" in line]


# ---------------------------------------------------------------- what a run leaves


def test_the_long_walks_are_those_that_were_asked_for(teacher, tmp_path):
    """Not whatever sampling does by default: distances of two versions would not compare."""
    found = []
    for lowered in (True, False):
        walk = Dpmpp3M(lower_order_final=lowered)
        wanted = Comparison(count=3, steps=4, solvers=("dpmpp-3m",), walk=walk)
        out = tmp_path / str(lowered)
        run(distilling(teacher, out, evaluations="4", method=Sfd(refinement=1), comparison=wanted))
        record = json.loads((out / "comparison.json").read_text())
        assert record["teacher_solver"]["lower_order_final"] is lowered
        found.append(record["distance"]["dpmpp-3m"]["4"])
    assert found[0] == 0  # the same walk
    assert found[1] > 0


def test_a_student_is_sampled_as_it_was_trained_to_walk(teacher, tmp_path):
    run(distilling(teacher, tmp_path / "run", evaluations="2", method=Sfd(refinement=2)))
    model = tmp_path / "run/model"
    assert read_walk(model).evaluations == (2,)
    sample(SampleRun(model=str(model), count=3, out=tmp_path / "drawn", tensors=True))
    drawn = load_file(tmp_path / "drawn/tensors/000000.safetensors")["samples"]
    grid = Polynomial().student(4)  # an analytical step and two evaluations
    first = grid[0] * starting_noise((3, 8, 8), range(3), seed=0)
    wanted = sample_euler(load_denoiser(model), first.float(), grid, afs=True)
    torch.testing.assert_close(drawn, wanted)
    assert json.loads((tmp_path / "drawn/record.json").read_text())["evaluations_per_sample"] == 2
    again = FewStepPipeline.from_pretrained(model)(count=3, seed=0, output="pt")
    torch.testing.assert_close(again, wanted)


def test_pictures_show_the_teacher_above_every_walk_of_the_student(teacher, tmp_path):
    run(distilling(teacher, tmp_path / "run", method=SfdV(refinement=1), evaluations="1..3"))
    pictures = sorted((tmp_path / "run/samples").glob("*.png"))
    assert [p.name[7:19] for p in pictures] == ["000000000000", "000000000008"]
    with Image.open(pictures[0]) as first:
        width, height = first.size
    assert (width - 2) / 2 * 4 == height - 2  # 2 columns; the teacher and 3 walks


def test_a_comparison_tells_distances_and_cost(teacher, tmp_path):
    wanted = Comparison(count=6, steps=6, batch=4, searched=2)
    run(distilling(teacher, tmp_path / "run", comparison=wanted, evaluations="3"))
    found = json.loads((tmp_path / "run/comparison.json").read_text())
    assert found["distance"].keys() == {"student", "euler", "dpmpp-3m", "gits"}
    assert all(values["3"] > 0 for values in found["distance"].values())
    # 4 steps, the first analytical, of 2 steps of the teacher each; 3 updates, a backward is two.
    assert found["evaluations_per_image"] == 4 * 2 + 3 * (1 + 2)
    assert found["evaluations"] == 8 * found["evaluations_per_image"]
    card = (tmp_path / "run/model/README.md").read_text()
    assert f"| **student** | {found['distance']['student']['3']:.4f} |" in card
    assert f"| teacher, GITS | {found['distance']['gits']['3']:.4f} |" in card
    assert "17 network evaluations per image" in card
    assert "not how good its images are: `stillhouse evaluate THIS_FOLDER" in card
    assert "is guided" not in card
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", card):
        assert (tmp_path / "run/model" / picture).is_file()


def test_without_matplotlib_the_curves_alone_are_missing(teacher, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    wanted = Comparison(count=2, steps=2, solvers=())
    run(distilling(teacher, tmp_path / "run", comparison=wanted))
    card = (tmp_path / "run/model/README.md").read_text()
    assert re.findall(r"!\[.*?\]\((.*?)\)", card) == ["samples.png"]


@pytest.mark.parametrize("method", [Sfd(refinement=2), SfdV(refinement=2)], ids=["sfd", "sfd-v"])
def test_walks_that_come_again_are_kept_and_cost_nothing(method, teacher, tmp_path):
    """The first two batches are the same lesson with and without; then they come again."""
    settings = {"evaluations": "1..2" if method.told else "2", "images": 32}
    once = method.model_copy(update={"walks": 8})
    wanted = Comparison(count=2, steps=2, solvers=())
    run(distilling(teacher, tmp_path / "kept", method=once, comparison=wanted, **settings))
    run(distilling(teacher, tmp_path / "new", method=method, **settings))
    kept, new = losses(tmp_path / "kept"), losses(tmp_path / "new")
    if not method.told:  # whose numbers of steps are dealt in turn, where they are drawn otherwise
        assert kept[:2] == new[:2]
    assert kept[2:] != new[2:]
    assert len(list((tmp_path / "kept/walks").iterdir())) == 2
    found = json.loads((tmp_path / "kept/comparison.json").read_text())
    steps = 1.5 if method.told else 2
    assert found["evaluations_per_image"] == 2 * (steps + 1) * 8 / 32 + 3 * steps
    odd = method.model_copy(update={"walks": 7})
    with pytest.raises(UserError, match="no multiple of the batch"):
        run(distilling(teacher, tmp_path / "odd", method=odd, **settings))


@pytest.mark.parametrize(
    ("method", "folder", "walk", "lesson"),
    [
        (ConsistencyConfig(timestamps=4), "", 6, 4),
        (ProgressiveConfig(first=2), "1-steps", 2, 3),
    ],
    ids=["consistency", "progressive"],
)
def test_peers_keep_their_walks_too(method, folder, walk, lesson, teacher, tmp_path):
    """The first two batches are the same lesson with and without; then they come again."""
    once = method.model_copy(update={"walks": 8})
    settings = {"evaluations": "1", "images": 32}
    wanted = Comparison(count=2, steps=2, solvers=())
    run(distilling(teacher, tmp_path / "kept", method=once, comparison=wanted, **settings))
    run(distilling(teacher, tmp_path / "new", method=method, **settings))
    kept, new = (losses(tmp_path / name / folder) for name in ("kept", "new"))
    assert kept[:2] == new[:2]
    assert kept[2:] != new[2:]
    files = list((tmp_path / "kept" / folder / "walks").iterdir())
    assert len(files) == 2
    found = json.loads((tmp_path / "kept" / folder / "comparison.json").read_text())
    assert found["evaluations_per_image"] == walk * 8 / 32 + lesson


def test_kept_walks_deal_the_numbers_of_steps_in_turn(teacher, tmp_path):
    method = SfdV(refinement=1, walks=8)
    run(distilling(teacher, tmp_path / "run", method=method, evaluations="1..2", images=16))
    kept = sorted(file.stem.rsplit("-", 1) for file in (tmp_path / "run/walks").iterdir())
    assert [keys for keys, _ in kept] == ["000000000-000000003", "000000004-000000007"]
    assert {number for _, number in kept} == {"3", "4"}
    few = distilling(teacher, tmp_path / "few", method=method, evaluations="1..3")
    with pytest.raises(UserError, match="makes 12"):
        run(few)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"guidance": ClassifierFree(weight=2.0)}, "leave --guidance out"),
        ({"solver": Heun()}, "leave --solver out"),
        ({"grid": PolynomialGrid()}, "leave --grid out"),
    ],
)
def test_what_a_student_has_learnt_is_not_asked_for_again(asked, sentence, tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, num_class_embeds=9)
    guidance = ClassifierFree(weight=2.0)
    run(distilling(teacher, tmp_path / "run", guidance=guidance, null_label=8))
    student = SampleRun(model=str(tmp_path / "run/model"), null_label=8, count=2, **asked)
    with pytest.raises(UserError, match=sentence):
        sample(student.model_copy(update={"out": tmp_path / "drawn"}))


def test_a_share_that_hears_nothing_needs_a_nothing(tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    with pytest.raises(UserError, match="give --null-label, or leave --drop out"):
        run(distilling(teacher, tmp_path / "run", drop=0.5))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"drop": 0.5}, "leave --drop out"),
        ({"method": Sfd(refinement=2, walks=7)}, "no multiple of the batch"),
    ],
    ids=["drop", "walks"],
)
def test_a_refused_command_leaves_its_folder_to_the_right_one(changes, said, tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    right = distilling(teacher, tmp_path / "run", images=4)
    with pytest.raises(UserError, match=said):
        run(right.model_copy(update=changes))
    run(right)
    assert losses(right.out)


def test_other_prompts_of_the_same_name_are_another_run(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("red\nblue\n")
    before = digest(find_prompts(str(file), "text"))
    file.write_text("red\ngreen\n")
    after = digest(find_prompts(str(file), "text"))
    assert before != after
    check_origins(tmp_path, {"prompts": after})  # where nothing is known
    (tmp_path / "run.json").write_text(json.dumps({"config": {}, "prompts": before}))
    with pytest.raises(UserError, match="distilled on other prompts"):
        check_origins(tmp_path, {"prompts": after})


def test_a_comparison_of_the_teacher_with_itself_finds_no_distance(teacher, tmp_path):
    """Long walks are compared with the same long walk."""
    wanted = Comparison(count=3, steps=2, batch=2, solvers=("dpmpp-3m",))
    run(distilling(teacher, tmp_path / "run", comparison=wanted))
    found = json.loads((tmp_path / "run/comparison.json").read_text())
    assert found["distance"]["dpmpp-3m"]["2"] == 0


def test_a_student_is_its_teacher_until_it_has_learnt(teacher):
    """Whatever number of steps it is told."""
    network = hearing_steps(load_denoiser(teacher).network)
    x, time = unit_noise((2, 3, 8, 8)), torch.full((2,), 0.3)
    with torch.no_grad():
        plain = load_denoiser(teacher).network(x, time)
        for steps in (4, 5, 9):
            told = network(x, time, Condition(steps=torch.full((2,), steps)))
            assert torch.equal(told, plain)


# ---------------------------------------------------------------- every kind of teacher


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


def test_labels_are_those_that_were_asked_for(tmp_path):
    """A class that is not drawn is not learnt: its embedding keeps its bits."""
    teacher = bare(tmp_path / "teacher", EDM, num_class_embeds=8)
    run(distilling(teacher, tmp_path / "run", labels=(2, 3)))
    before, after = (load_file(f / WEIGHTS) for f in (teacher, tmp_path / "run/model"))
    moved = (before["class_embedding.weight"] != after["class_embedding.weight"]).any(1)
    assert moved.nonzero().flatten().tolist() == [2, 3]


def test_some_are_told_nothing_so_that_the_student_can_be_guided(tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, num_class_embeds=8)
    config = distilling(teacher, tmp_path / "run", labels=(2, 3), null_label=7, drop=0.5)
    run(config)
    before, after = (load_file(f / WEIGHTS) for f in (teacher, tmp_path / "run/model"))
    moved = (before["class_embedding.weight"] != after["class_embedding.weight"]).any(1)
    assert moved.nonzero().flatten().tolist() == [2, 3, 7]
    drawn = []
    for weight in (1.0, 4.0):
        how = {"guidance": ClassifierFree(weight=weight), "null_label": 7, "labels": (2, 3)}
        out = tmp_path / f"drawn{weight}"
        model = str(tmp_path / "run/model")
        sample(SampleRun(model=model, count=2, out=out, tensors=True, **how))
        drawn.append(load_file(out / "tensors/000000.safetensors")["samples"])
    assert not torch.allclose(*drawn)


def test_prompts_are_those_of_a_column_each_once(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    rows = [
        {"file_name": f"{i}.png", "words": f"a {'red' if i % 2 else 'blue'} one"} for i in range(4)
    ]
    (data / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for row in rows:
        Image.new("RGB", (8, 8)).save(data / row["file_name"])
    assert find_prompts(str(data), "words") == ("a blue one", "a red one")


def classes_in(folder, counts):
    """So many images of each class, which are sub-folders."""
    for label, count in enumerate(counts):
        (folder / f"class{label}").mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8)).save(folder / f"class{label}/{i}.png")
    return str(folder)


def column_of(file, **columns):
    Dataset.from_dict(columns).to_parquet(file)
    return str(file)


def test_classes_are_dealt_as_often_as_a_data_set_has_them(tmp_path):
    found = find_labels(classes_in(tmp_path / "data", [30, 10, 80]), "", (0, 1, 2))
    assert [found.count(label) for label in range(3)] == [30, 10, 80]
    for stretch in (found[:12], found[40:52], found[-24:]):  # few walks are of all kinds
        wanted = [len(stretch) * share for share in (3 / 12, 1 / 12, 8 / 12)]
        assert [stretch.count(label) for label in range(3)] == pytest.approx(wanted, abs=1)


def test_a_column_of_classes_needs_no_images(tmp_path):
    file = column_of(tmp_path / "objects.parquet", category=[4, 2, 4], rare=[True, False, False])
    assert sorted(find_labels(file, "category", tuple(range(8)))) == [2, 4, 4]
    found = find_labels(file, "rare", (0, 1))
    assert sorted(found) == [0, 0, 1]
    assert {type(label) for label in found} == {int}  # what is true or false is no label


def test_a_student_hears_the_classes_of_a_data_set_alone(tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    data = column_of(tmp_path / "objects.parquet", label=[2, 5])
    run(distilling(teacher, tmp_path / "run", labels_of=data))
    before, after = (load_file(f / WEIGHTS) for f in (teacher, tmp_path / "run/model"))
    moved = (before["class_embedding.weight"] != after["class_embedding.weight"]).any(1)
    assert moved.nonzero().flatten().tolist() == [2, 5]


def test_other_classes_of_the_same_name_are_another_run(tmp_path):
    teacher, data = bare(tmp_path / "teacher", EDM, **CLASSES), tmp_path / "data"
    config = distilling(teacher, tmp_path / "run", labels_of=classes_in(data, [1] * 8))
    run(config)
    Image.new("RGB", (8, 8)).save(data / "class1/more.png")
    with pytest.raises(UserError, match="distilled on other classes"):
        run(config)


def test_a_comparison_is_told_what_the_student_was_told(tmp_path):
    """Of a data set that has gone by then."""
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    file = column_of(tmp_path / "objects.parquet", label=[2, 5])
    config = distilling(teacher, tmp_path / "run", labels_of=file)
    source = load_source(config, HERE)
    Path(file).unlink()
    assert load_source(config, HERE, source).subject.labels == source.subject.labels == (2, 5)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"labels": (1,)}, "leave one of them out"),
        ({"label_column": "category"}, "no column 'category'"),
        ({"label_column": "image"}, "which is no class of the teacher"),
        ({"labels_of": "nowhere"}, "nowhere is no data set"),
        ({"labels_of": "", "label_column": "label"}, "name one"),
        ({}, "has 2 classes and the teacher 8"),
    ],
)
def test_classes_that_cannot_be_dealt_are_refused(how, said, tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    data = classes_in(tmp_path / "data", [1, 1])
    with pytest.raises(UserError, match=said):
        run(distilling(teacher, tmp_path / "run", **{"labels_of": data, **how}))


def test_the_label_of_no_class_is_none_to_deal(tmp_path):
    file = column_of(tmp_path / "objects.parquet", label=[0, 7])
    with pytest.raises(UserError, match="holds 7, which is no class"):
        find_labels(file, "", tuple(range(7)))


def test_files_of_classes_that_cannot_be_read_are_told(tmp_path):
    column_of(tmp_path / "data/0.parquet", label=[0, 1])
    (tmp_path / "data/1.parquet").write_bytes(b"half of it")
    with pytest.raises(UserError, match=r"1\.parquet.*Repair or remove it"):
        find_labels(str(tmp_path / "data"), "", (0, 1))


def test_a_model_without_classes_takes_none_of_a_data_set(tmp_path):
    data = column_of(tmp_path / "objects.parquet", label=[0])
    with pytest.raises(UserError, match="knows no classes: leave --labels-of out"):
        run(distilling(bare(tmp_path / "teacher", EDM), tmp_path / "run", labels_of=data))


# ---------------------------------------------------------------- a second stage


def test_a_student_teaches_one_evaluation(teacher, tmp_path):
    first = distilling(teacher, tmp_path / "first", method=SfdV(refinement=1), evaluations="4,5")
    run(first)
    wanted = {"evaluations": "1", "comparison": Comparison(count=2)}
    method = Sfd(refinement=3, walks=4)
    second = distilling(first.out, tmp_path / "second", method=method, **wanted)
    run(second)
    # Its goals are what the first student draws, as it draws: told, its own first step analytical.
    denoiser, earlier = load_denoiser(first.out / "model"), read_walk(first.out / "model")
    start = next(iter(Starts((3, 8, 8), second.seed).feed(0, 4, HERE))).batch
    grids = earlier.grids(denoiser.scaling)
    levels = grids.student(7)
    x = grids.start(start.noise, float(levels[0]))
    ends = sample_euler(denoiser, x, levels, with_steps(None, 7, x), afs=True)
    goals = load_file(second.out / "walks/000000000-000000003-3.safetensors")
    torch.testing.assert_close(goals["1"], ends)
    walk = read_walk(second.out / "model")
    assert walk.evaluations == (1,)
    found = json.loads((second.out / "comparison.json").read_text())
    assert found["distance"].keys() == {"student"}  # no other solver walks as its teacher does
    assert found["teacher_steps"] == 5
    # Nor the 3 steps of a preview: the first row, too, is drawn as its teacher walks.
    card = (second.out / "model/README.md").read_text()
    assert "the teacher, 5 evaluations" in card
    assert walk.told  # its network hears a number of steps, so it is given its own
    sample(SampleRun(model=str(second.out / "model"), count=2, out=tmp_path / "drawn"))


@pytest.mark.parametrize(
    ("method", "evaluations", "said"),
    [
        (Sfd(refinement=2), "1", "follows a teacher of 3, and this one knows 5"),
        (Sfd(refinement=3, sigma_min=0.1), "1", "walks from 80 to 0.006"),
        (Sfd(refinement=3, solver=Heun()), "1", "leave --method.solver out"),
    ],
)
def test_a_second_stage_that_does_not_fit_its_teacher_is_refused(
    teacher, tmp_path, method, evaluations, said
):
    first = distilling(teacher, tmp_path / "first", evaluations="5")
    run(first)
    again = distilling(first.out, tmp_path / "second", method=method, evaluations=evaluations)
    with pytest.raises(UserError, match=said):
        run(again)


def second_stage(process: Scaling, earlier: FewSteps, walk: FewSteps) -> Lesson:
    """What a check of the two walks looks at."""
    student: Any = SimpleNamespace(scaling=process)
    return Lesson(student, student, process, walk, earlier, HERE, 0, Path())


@pytest.mark.parametrize(
    "process",
    [VpProcess(alphas_cumprod(betas("scaled_linear"))), Flow(3.0), EdmProcess()],
    ids=["vp", "flow", "edm"],
)
def test_a_second_stage_walks_its_teacher_at_the_levels_that_it_learnt(process):
    """Polynomial grids contain each other, native ones do not."""
    ends = {"sigma_min": 0.03, "sigma_max": 14.0}
    five, one = (FewSteps((n,), **ends) for n in (5, 1))
    check_second_stage(second_stage(process, five, one), five, 3)
    native = {"grid": "native", "afs": False}
    four, two = (FewSteps((n,), **native) for n in (4, 2))
    check_second_stage(second_stage(process, four, four), four, 1)
    with pytest.raises(UserError, match="levels of 2: distil both stages without --exportable"):
        check_second_stage(second_stage(process, four, two), four, 2)


def test_an_exportable_second_stage_is_refused_before_it_begins(tmp_path):
    teacher = bare(tmp_path / "teacher", VP)
    first = distilling(teacher, tmp_path / "first", exportable=True, images=4)
    run(first)
    again = distilling(first.out, tmp_path / "second", exportable=True, evaluations="1")
    with pytest.raises(UserError, match="or this one from the model that taught its teacher"):
        run(again)
    assert not (again.out / "run.json").exists()


# ---------------------------------------------------------------- peers


def test_progressive_distillation_halves_the_steps_stage_by_stage(teacher, tmp_path):
    method = ProgressiveConfig(first=4)
    config = distilling(teacher, tmp_path / "run", method=method, evaluations="1", images=16)
    last = run(config)
    assert last.out == tmp_path / "run/1-steps"
    two, one = (tmp_path / f"run/{n}-steps/model" for n in (2, 1))
    assert [read_walk(m).evaluations for m in (two, one)] == [(2,), (1,)]
    assert json.loads((last.out / "run.json").read_text())["config"]["model"] == str(two.parent)
    assert [len(losses(two.parent)), len(losses(one.parent))] == [2, 2]  # half of the images each
    sample(SampleRun(model=str(one), count=2, out=tmp_path / "drawn"))


def test_later_stages_are_compared_with_the_first_teacher(tmp_path):
    """Guided as it was: with the student of the stage before, they would be compared with less."""
    teacher = bare(tmp_path / "teacher", EDM, num_class_embeds=8)
    wanted = Comparison(count=2, steps=4, solvers=("euler",))
    guided = {"guidance": ClassifierFree(weight=4.0), "null_label": 7, "comparison": wanted}
    method = ProgressiveConfig(first=4)
    config = distilling(teacher, tmp_path / "run", method=method, evaluations="1", **guided)
    run(config)
    second = distilling(
        tmp_path / "run/2-steps",
        tmp_path / "second",
        method=ProgressiveConfig(first=2),
        evaluations="1",
        null_label=7,
        comparison=wanted.model_copy(update={"against": str(teacher)}),
    )
    run(second)
    folders = ("run/2-steps", "run/1-steps", "second/1-steps")
    first, *later = (
        json.loads((tmp_path / folder / "comparison.json").read_text()) for folder in folders
    )
    assert [found["teacher_steps"] for found in (first, *later)] == [4, 4, 4]
    for found in later:  # the same walks: the same numbers
        assert found["spread"]["teacher"] == pytest.approx(first["spread"]["teacher"], rel=1e-6)
    cards = [(tmp_path / folder / "model/README.md").read_text() for folder in folders]
    assert ["the first teacher's 4 steps" in card for card in cards] == [False, True, True]
    # Of rows of the guided teacher, in later stages too.
    assert ["its network is called 2n times" in card for card in cards] == [True] * 3


def test_a_guided_student_is_not_guided_again_where_it_is_the_first_teacher(tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, num_class_embeds=8)
    guided = {"guidance": ClassifierFree(weight=4.0), "null_label": 7}
    five = distilling(teacher, tmp_path / "five", method=SfdV(refinement=1), **guided)
    run(five.model_copy(update={"evaluations": "5"}))
    spreads = []
    for against in ("", str(five.out)):
        wanted = Comparison(count=2, solvers=(), against=against)
        out, how = (
            tmp_path / f"one{len(spreads)}",
            {"method": Sfd(refinement=3), "evaluations": "1"},
        )
        run(distilling(five.out, out, null_label=7, comparison=wanted, **how))
        spreads.append(json.loads((out / "comparison.json").read_text())["spread"]["teacher"])
    assert spreads[0] == spreads[1]


def test_a_first_teacher_that_is_not_there_is_missed_before_the_lesson(teacher, tmp_path):
    wanted = Comparison(count=2, against=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere"):
        run(distilling(teacher, tmp_path / "run", comparison=wanted))
    assert not (tmp_path / "run/log.jsonl").exists()


def test_a_stage_follows_the_steps_of_the_student_before_it(teacher, tmp_path):
    """Which knows two: a student of one follows those, and no other."""
    method = ProgressiveConfig(first=4)
    run(distilling(teacher, tmp_path / "run", method=method, evaluations="2"))
    again = distilling(tmp_path / "run/2-steps", tmp_path / "more", method=method, evaluations="2")
    with pytest.raises(UserError, match="follows a teacher of 4, and this one knows 2"):
        run(again)


def test_a_consistency_student_is_sampled_with_noise_anew(teacher, tmp_path):
    method = ConsistencyConfig(timestamps=4)
    wanted = {"evaluations": "1..2", "comparison": Comparison(count=2, steps=2, solvers=())}
    run(distilling(teacher, tmp_path / "run", method=method, **wanted))
    model = tmp_path / "run/model"
    sample(SampleRun(model=str(model), count=2, steps=2, out=tmp_path / "drawn", tensors=True))
    drawn = load_file(tmp_path / "drawn/tensors/000000.safetensors")["samples"]
    grid = Polynomial().student(3)
    first = (grid[0] * starting_noise((3, 8, 8), range(2), seed=0)).float()
    noise = KeyedNoise(range(2), seed=0)
    wanted = sample_renoise(load_denoiser(model), first, grid, generator=noise)
    torch.testing.assert_close(drawn, wanted)
    # A walk of Heun's over 3 steps; the student twice, once with a backward, which is two.
    found = json.loads((tmp_path / "run/comparison.json").read_text())
    assert found["evaluations_per_image"] == 2 * 3 + 2 + 2


# ---------------------------------------------------------------- how images look


def test_lpips_counts_at_the_last_step_and_teaches(tmp_path, monkeypatch):
    """Its distance at 224 pixels, once per element, beside L1; grey images are made of three."""
    with_package(tmp_path / "site", monkeypatch)
    grey = {"in_channels": 1, "out_channels": 1}
    teacher = bare(tmp_path / "teacher", EDM, **grey)
    seen = {}
    for lpips in (False, True):
        method = Sfd(refinement=2, lpips=lpips)
        config = distilling(teacher, tmp_path / f"run{lpips}", method=method, images=4)
        run(config)
        seen[lpips] = [line for line in log_of(config.out) if "student/loss" in line]
    plain, both = seen[False][0], seen[True][0]
    assert both["timestamps4/step1"] == plain["timestamps4/step1"]
    assert both["timestamps4/step2"] > plain["timestamps4/step2"] + 64 * 1e-3
    weights = [load_file(tmp_path / f"run{x}/model" / WEIGHTS) for x in (False, True)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_latents_are_not_compared_by_their_looks(tmp_path):
    """Also where they have as many channels as images."""
    teacher = bare(tmp_path / "teacher", EDM)
    small_autoencoder(3).save_pretrained(teacher / "vae")
    with pytest.raises(UserError, match=r"this model draws latents: leave --method\.lpips out"):
        run(distilling(teacher, tmp_path / "run", method=Sfd(lpips=True)))


# ---------------------------------------------------------------- resume, processes


@pytest.mark.parametrize(
    ("method", "evaluations"),
    [
        (SfdV(refinement=2), "1..3"),
        (Sfd(refinement=2, walks=4), "2"),
        (ConsistencyConfig(timestamps=4, walks=4), "1"),
    ],
    ids=["sfd-v", "kept", "consistency-kept"],
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(method, evaluations, teacher, tmp_path):
    whole = distilling(teacher, tmp_path / "whole", method=method, evaluations=evaluations)
    run(whole)
    half = whole.model_copy(update={"out": tmp_path / "half", "images": 4})
    run(half)
    run(half.model_copy(update={"images": 8}))
    assert losses(whole.out) == losses(half.out)
    files = sorted(file.name for file in (whole.out / "model").glob("*.safetensors"))
    assert WEIGHTS in files
    for name in files:
        one, other = (load_file(c.out / "model" / name) for c in (whole, half))
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_another_teacher_of_the_same_name_is_refused(teacher, tmp_path):
    config = distilling(teacher, tmp_path / "run", images=4)
    run(config)
    small_unet(seed=5).save_pretrained(teacher)
    with pytest.raises(UserError, match="another teacher of the same name"):
        run(config.model_copy(update={"images": 8}))


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "walks"), [("ddp", 12), ("fsdp", 0)])
def test_two_processes_distil_as_one_does(tmp_path, sharding, walks):
    """With walks that come again, too."""
    alone = distilling(
        bare(tmp_path / "teacher", EDM, **CLASSES),
        tmp_path / "one",
        labels_of=column_of(tmp_path / "objects.parquet", label=[2, 5, 5]),
        images=max(8, 2 * walks),
        method=SfdV(refinement=2, walks=walks),
        evaluations="1..3",
        optim=AdamW(lr=1e-3, eps=1.0),  # or it would enlarge the rounding of gradients near 0
        comparison=Comparison(count=3, steps=3, batch=2, searched=2),
    )
    run(alone)
    spread = {"out": tmp_path / "two", "spread": Spread(sharding=sharding)}
    both = alone.model_copy(update=spread)
    distil_by_two(both, tmp_path)
    torch.testing.assert_close(losses(both.out), losses(alone.out), rtol=1e-4, atol=0)
    near = [json.loads((c.out / "comparison.json").read_text()) for c in (alone, both)]
    for name, values in near[0]["distance"].items():
        assert near[1]["distance"][name] == pytest.approx(values, rel=1e-3), name
    one, two = (load_file(c.out / "model" / WEIGHTS) for c in (alone, both))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=2e-4)


# ---------------------------------------------------------------- the command line, and mistakes


def test_the_command_of_the_guide(teacher, tmp_path, capsys):
    words = f"distill {teacher} --method sfd-v --evaluations 2..3 --out {tmp_path / 'student'}"
    few = "--images 4 --batch 4 --comparison.count 0 --preview.count 2 --method.refinement 1"
    main([*words.split(), *few.split()])
    assert f"the student is in {tmp_path / 'student/model'}" in capsys.readouterr().out
    assert read_walk(tmp_path / "student/model").told


@pytest.mark.parametrize(
    ("words", "numbers"),
    [("3", (3,)), ("2..5", (2, 3, 4, 5)), ("2, 4", (2, 4)), ("1,3..4", (1, 3, 4))],
)
def test_evaluations_are_numbers_or_spans(words, numbers):
    assert read_evaluations(words) == numbers


@pytest.mark.parametrize("words", ["", "0", "few", "5..2", "2-5", "1..", "0..2"])
def test_other_words_are_no_evaluations(words):
    with pytest.raises(UserError, match=r"write 3, 2..5 or 2,4"):
        read_evaluations(words)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": ""}, "name the model to distil"),
        ({"model": "toy:moons"}, "a toy is a formula"),
        ({"exportable": True, "method": SfdV()}, "cannot tell a student how many steps"),
        ({"exportable": True, "method": Sfd(sigma_max=40.0)}, "--method.sigma-max out"),
        ({"exportable": True, "method": Sfd(sigma_min=0.1)}, "leave --method.sigma-min and"),
        ({"method": Sfd(sigma_max=90.0)}, "sigma-max 90 is no level .* from 0.002 to 80"),
        ({"method": ConsistencyConfig(sigma_min=1e-3)}, "sigma-min 0.001 is no level"),
        ({"method": Sfd(sigma_min=20.0, sigma_max=9.0)}, "begin at 9 and end at 20"),
        ({"method": Sfd(solver=Heun(afs=True))}, "leave --method.solver.afs out"),
        *(
            ({"method": Sfd(solver=solver(name))}, f"{name} draws noise on its way")
            for name in sorted(STOCHASTIC)
        ),
        ({"adapters": 4}, "no pipeline that adapters could be loaded into"),
        ({"prompts": "none.txt"}, "none.txt cannot be read as a list of prompts"),
        ({"labels": (1,)}, "knows no classes"),
        ({"method": ProgressiveConfig(first=6), "evaluations": "2"}, "do not come down to 2"),
        ({"method": ProgressiveConfig(), "evaluations": "1..2"}, "ends with one number"),
        ({"method": ConsistencyConfig(), "exportable": True}, "is for --method sfd"),
    ],
)
def test_mistakes_are_told_in_a_sentence(teacher, tmp_path, changes, said):
    config = distilling(teacher, tmp_path / "run")
    with pytest.raises(UserError, match=said):
        run(config.model_copy(update=changes))


def test_a_student_refuses_walks_that_it_does_not_know(teacher, tmp_path):
    run(distilling(teacher, tmp_path / "run", evaluations="2,3"))
    with pytest.raises(UserError, match=r"not trained for 4 evaluations: give one of --steps 2, 3"):
        sample(SampleRun(model=str(tmp_path / "run/model"), steps=4, out=tmp_path / "drawn"))


def test_a_solver_that_is_named_for_a_student_does_not_count(teacher, tmp_path):
    """It has one way to walk, and the record says so."""
    run(distilling(teacher, tmp_path / "run"))
    config = SampleRun(model=str(tmp_path / "run/model"), count=1, out=tmp_path / "drawn")
    sample(config)
    record = json.loads((tmp_path / "drawn/record.json").read_text())
    assert record["run"]["solver"] == Euler(afs=True).model_dump()
