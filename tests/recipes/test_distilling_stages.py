"""Students that teach: the second stage; and the peers, which go by stages too."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recipes.students import EDM, HERE, VP, bare, distilling, losses
from safetensors.torch import load_file

from stillhouse.distill.grids import Polynomial
from stillhouse.distill.trajectories import Starts, with_steps
from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError
from stillhouse.pipelines import load_denoiser
from stillhouse.pipelines.few_steps import read_walk
from stillhouse.process import EDM as EdmProcess
from stillhouse.process import VP as VpProcess
from stillhouse.process import Flow, KeyedNoise, Scaling, alphas_cumprod, betas, starting_noise
from stillhouse.recipes.distill.distilling import run
from stillhouse.recipes.distill.lessons import Lesson
from stillhouse.recipes.distill.methods import (
    ConsistencyConfig,
    ProgressiveConfig,
    Sfd,
    SfdV,
    check_second_stage,
)
from stillhouse.recipes.distill.settings import Comparison
from stillhouse.recipes.parts import ClassifierFree, Heun
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.solvers import sample_euler, sample_renoise

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


def test_stages_keep_their_checkpoints_apart(teacher, tmp_path):
    method, where = ProgressiveConfig(first=4), tmp_path / "kept"
    settings = {"method": method, "evaluations": "1", "images": 16, "checkpoints": str(where)}
    run(distilling(teacher, tmp_path / "run", **settings))
    assert sorted(folder.name for folder in where.iterdir()) == ["1-steps", "2-steps"]
    run(distilling(teacher, tmp_path / "run", **settings))  # all is done


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
    assert [card.count("million in this stage") for card in cards] == [1, 1, 1]
    begun = "Its teacher is `2-steps`, which was made from `teacher`, guided"
    assert [begun in card for card in cards] == [False, True, True]
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
