"""`stillhouse distill`: from a checkpoint to a student that samples in few evaluations."""

import json
import re
import shutil
import sys

import pytest
import torch
from metrics.test_perceptual import with_package
from PIL import Image
from recipes.students import CLASSES, EDM, WEIGHTS, bare, column_of, distilling, log_of, losses
from recipes.together import distil_by_two
from safetensors.torch import load_file
from small_models import small_autoencoder, small_unet, unit_noise

from stillhouse.cli import main
from stillhouse.distill.grids import Polynomial
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.sharding import Spread
from stillhouse.errors import UserError
from stillhouse.pipelines import load_denoiser
from stillhouse.pipelines.few_steps import FewStepPipeline, read_walk
from stillhouse.process import Condition, starting_noise
from stillhouse.recipes.distill.distilling import run
from stillhouse.recipes.distill.methods import ConsistencyConfig, ProgressiveConfig, Sfd, SfdV
from stillhouse.recipes.distill.settings import Comparison, read_evaluations
from stillhouse.recipes.distill.students import hearing_steps
from stillhouse.recipes.parts import ClassifierFree, Dpmpp3M, Euler, Heun, PolynomialGrid, solver
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.solvers import STOCHASTIC, sample_euler

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


@pytest.mark.parametrize("words", ["", "0", "few", "5..2", "2-5", "1..", "0..2", "101", "2,5..3"])
def test_other_words_are_no_evaluations(words):
    with pytest.raises(UserError, match=r"write 3, 2..5 or 2,4"):
        read_evaluations(words)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": ""}, "name the model to distil"),
        ({"model": "toy:moons"}, "a toy is a formula"),
        ({"model": "nothere"}, "there is no model nothere: name its directory"),
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
        ({"prompt_column": "words"}, "--prompt-column is of a data set"),
        ({"prompts": "none.txt", "prompt_column": "words"}, "--prompt-column is of a data set"),
        ({"prompt_encoder": "somewhere"}, "takes no prompts: leave --prompt-encoder out"),
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


def test_walks_of_a_run_that_is_gone_are_not_taken_for_its_own(teacher, tmp_path):
    config = distilling(teacher, tmp_path / "run", method=Sfd(refinement=1, walks=4))
    run(config)
    for what in ("checkpoints", "model", "samples"):
        shutil.rmtree(config.out / what)
    (config.out / "run.json").unlink()
    with pytest.raises(UserError, match="walks holds walks of a run that is gone"):
        run(config)
    shutil.rmtree(config.out / "walks")
    run(config)


def test_a_run_that_ends_within_its_last_batch_is_told_of_when_it_is_run_again(teacher, tmp_path):
    """As one that was broken off while its student was compared."""
    config = distilling(teacher, tmp_path / "run", images=10, comparison=Comparison(count=2))
    run(config)
    told = (config.out / "comparison.json").read_text()
    assert json.loads(told)["images"] == 12  # whole batches of 4
    (config.out / "comparison.json").unlink()
    run(config)
    assert (config.out / "comparison.json").read_text() == told
    with pytest.raises(UserError, match="is at 12 images already, beyond --images 8"):
        run(config.model_copy(update={"images": 8}))


def test_more_evaluations_than_levels_are_searched_all_the_same(teacher, tmp_path):
    wanted = Comparison(count=2, steps=3, fine=3, searched=2, solvers=("gits",))
    settings = {"method": Sfd(refinement=1), "evaluations": "4", "comparison": wanted}
    run(distilling(teacher, tmp_path / "run", images=4, **settings))
    found = json.loads((tmp_path / "run/comparison.json").read_text())
    assert found["distance"]["gits"].keys() == {"4"}


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
