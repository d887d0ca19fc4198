"""`stillhouse distill --method emd`: one-step generators and their family, as runs."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import loaded
import pytest
import torch
import warm
import yaml
from PIL import Image
from recipes.students import CLASSES, EDM, FLOW, VP, WEIGHTS, bare, distilling, log_of
from safetensors.torch import load_file, save_file
from small_models import relative_error, small_unet

from stillhouse.cli import main
from stillhouse.cli.distill import method_of
from stillhouse.cli.parse import parse
from stillhouse.distill.langevin import ChainNoise, Langevin, corrected
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.optimisers import AdamW, AdamW8bit, Cosine
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.pipelines import load_denoiser
from stillhouse.pipelines.few_steps import FewStepPipeline, read_walk
from stillhouse.process import Condition, keyed_normal, starting_noise
from stillhouse.recipes.distill import correcting
from stillhouse.recipes.distill.cards import spell_card
from stillhouse.recipes.distill.comparing import energy
from stillhouse.recipes.distill.correcting import run as correct
from stillhouse.recipes.distill.distilling import lesson, networks, run, stages_of
from stillhouse.recipes.distill.generators import GENERATORS, Emd, FDistill, ReverseKL, SidConfig
from stillhouse.recipes.distill.lessons import Wanted
from stillhouse.recipes.distill.methods import ProgressiveConfig, Sfd
from stillhouse.recipes.distill.settings import Comparison, DistillRun, StudentPreview, usual
from stillhouse.recipes.distill.students import load_source, load_student
from stillhouse.recipes.parts import ClassifierFree, Heun
from stillhouse.recipes.sampling import Correction, SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.solvers import classifier_free

FAMILY = [
    Emd(langevin=2),
    Emd(langevin=2, bookkeeping="full", latent_step=0),
    ReverseKL(kind="diff-instruct"),
    ReverseKL(kind="dmd"),
    SidConfig(),
    FDistill(power=0.01),
]


def started_at(model: Path) -> float:
    walk = read_walk(model)
    assert walk is not None
    return walk.sigma_max


def test_every_method_of_the_family_has_a_config():
    assert {method.kind for method in FAMILY} == {*GENERATORS}


@pytest.mark.parametrize("method", FAMILY, ids=lambda m: m.kind)
def test_a_generator_is_sampled_from_the_level_it_was_trained_at(method, teacher, tmp_path):
    before = load_file(teacher / WEIGHTS)
    method = method.model_copy(update={"start": 7.0})
    run(distilling(teacher, tmp_path / "run", method=method, evaluations="1"))
    model = tmp_path / "run/model"
    assert any(not torch.equal(before[k], v) for k, v in load_file(model / WEIGHTS).items())
    assert started_at(model) == 7
    sample(SampleRun(model=str(model), count=3, out=tmp_path / "drawn", tensors=True))
    drawn = load_file(tmp_path / "drawn/tensors/000000.safetensors")["samples"]
    first = 7 * starting_noise((3, 8, 8), range(3), seed=0).float()
    with torch.no_grad():
        wanted = load_denoiser(model)(first, torch.tensor(7.0))
    torch.testing.assert_close(drawn, wanted)
    assert json.loads((tmp_path / "drawn/record.json").read_text())["evaluations_per_sample"] == 1
    again = FewStepPipeline.from_pretrained(model)(count=3, seed=0, output="pt")
    torch.testing.assert_close(again, wanted)


@pytest.mark.parametrize("scheduler", [EDM, VP, FLOW], ids=["edm", "vp", "flow"])
def test_any_process_and_classes_can_be_distilled(scheduler, tmp_path):
    teacher = bare(tmp_path / "teacher", scheduler, **CLASSES)
    run(distilling(teacher, tmp_path / "run", method=Emd(langevin=2), evaluations="1"))
    level = started_at(tmp_path / "run/model")
    assert level == (pytest.approx(20, rel=0.005) if scheduler is VP else 20)
    if scheduler is VP:  # which knows whole timesteps
        time = load_denoiser(teacher).scaling.time_at(torch.tensor(level, dtype=torch.float64))
        assert float(time) == pytest.approx(round(float(time)), abs=1e-6)
    line = next(line for line in log_of(tmp_path / "run") if "watch/spread" in line)
    assert line["watch/gap"] > 0
    assert line["watch/drift"] > 0
    assert line["score/lr"] == pytest.approx(5 * line["student/lr"])


def test_a_run_that_stops_goes_on_as_if_it_had_not(teacher, tmp_path):
    """Both optimisers, the average, and the noise of the chain."""
    settings = {
        "method": Emd(langevin=2, score_steps=2),
        "evaluations": "1",
        "averages": (HalfLife(images=4),),
    }
    run(distilling(teacher, tmp_path / "whole", images=16, **settings))
    # The schedule does not know how long a run is: its rate is constant.
    run(distilling(teacher, tmp_path / "parts", images=8, **settings))
    run(distilling(teacher, tmp_path / "parts", images=16, **settings))
    whole, parts = (load_file(tmp_path / f"{name}/model" / WEIGHTS) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    gaps = [
        [line["watch/gap"] for line in log_of(tmp_path / name) if "watch/gap" in line]
        for name in ("whole", "parts")
    ]
    assert gaps[0] == gaps[1]


def test_the_card_tells_spread_and_cost(teacher, tmp_path):
    wanted = Comparison(count=6, steps=6, solvers=())
    method = Emd(langevin=3)
    run(distilling(teacher, tmp_path / "run", method=method, evaluations="1", comparison=wanted))
    found = json.loads((tmp_path / "run/comparison.json").read_text())
    # 3 steps of teacher, score and generator with half a backward; the generator's own update, and
    # the score's after a sample.
    assert found["evaluations_per_image"] == 3 * (1 + 1 + 1 + 2 * 0.5) + (1 + 2) + 1 + (1 + 2)
    assert found["spread"].keys() == {"teacher", "student"}
    # Not the distance between samples of the same noise, which a generator's need not have.
    assert "distance" not in found
    assert not (tmp_path / "run/comparison.png").exists()
    card = (tmp_path / "run/model/README.md").read_text()
    assert f"{found['spread']['student']['1']:.3f}" in card
    value = found["energy"]["student"]["1"]
    assert f"nothing in common): {value:.4f}" in card
    assert "noise level 20" in card
    assert f"Its teacher is `{teacher.name}`." in card
    assert "base_model" not in card
    drawn = []
    for model, steps in ((tmp_path / "run/model", 1), (teacher, 6)):
        out = tmp_path / f"drawn{steps}"
        sample(SampleRun(model=str(model), steps=steps, count=6, seed=1, out=out, tensors=True))
        drawn.append(load_file(out / "tensors/000000.safetensors")["samples"])
    assert value == pytest.approx(energy(*drawn), rel=1e-3)


def test_the_card_names_a_teacher_of_the_hub_and_the_guidance_that_was_learnt(tmp_path):
    folder = bare(tmp_path / "teacher", EDM, **CLASSES)
    guided = {"guidance": ClassifierFree(weight=2.5), "null_label": 7, "evaluations": "1"}
    config = distilling(folder, tmp_path / "run", method=Emd(langevin=1), **guided)
    run(config)
    spread = {"student": {1: 0.5}, "teacher": 0.6}
    counts = {"images": 8, "evaluations": 88.0, "evaluations_per_image": 11.0, "count": 4}
    record = counts | {"spread": spread, "energy": {"student": {1: 0.1}}, "start": 20.0}
    record |= {"preview_steps": 3, "teacher_steps": 50}
    card = spell_card(config.model_copy(update={"model": "someone/clothes"}), record)
    assert card.startswith("---\n")
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "someone/clothes"
    assert "`someone/clothes`, guided (classifier-free, weight 2.5)" in card
    exportable = config.model_copy(update={"exportable": True})
    assert "`num_inference_steps=1`" in spell_card(exportable, record)


def test_energy_tells_distributions_apart_and_not_samples():
    """Of unit normals m apart, |x - y| is a folded normal; 1 apart for points; without bias."""
    draws, m = torch.Generator().manual_seed(0), 1.5
    x, y = torch.randn(2, 2000, 1, 1, 1, generator=draws)
    own, root = 2 / math.pi**0.5, 2**0.5
    across = 2 * math.exp(-(m**2) / 4) / math.pi**0.5 + m * math.erf(m / 2)
    assert energy(x + m, y) == pytest.approx((across - own) / across, abs=0.02)
    assert energy(x, y) == pytest.approx(0, abs=0.002)
    assert energy(x, x) == pytest.approx(0, abs=1e-12)
    assert energy(torch.full((3, 1, 2, 2), root), torch.zeros(3, 1, 2, 2)) == pytest.approx(1)
    few = [energy(*torch.randn(2, 4, 2, generator=draws)) for _ in range(2000)]
    assert sum(few) / len(few) == pytest.approx(0, abs=0.015)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evaluations": "2"}, "--evaluations 1"),
        ({"method": Emd(start=500.0)}, "no level of this model"),
        ({"method": Emd(low=90.0)}, "--method.low 90 is no level of this model"),
        ({"method": Emd(low=1e-4)}, "--method.low 0.0001 is no level of this model"),
        ({"method": Emd(high=500.0)}, "--method.high 500 is no level of this model"),
        ({"method": Emd(low=9.0, high=8.0)}, "no levels from --method.low 9 to 8"),
        ({"method": Emd(start=2.5), "exportable": True}, "5 or more"),
        ({"method": Emd(score_rank=4)}, "add --method.score lora"),
    ],
)
def test_what_a_generator_cannot_be_is_refused(changes, sentence, teacher, tmp_path):
    settings = {"method": Emd(), "evaluations": "1"} | changes
    with pytest.raises(UserError, match=sentence):
        run(distilling(teacher, tmp_path / "run", **settings))


def test_the_command_begins_with_the_settings_of_the_method(teacher, tmp_path, capsys):
    assert method_of(["m", "--method", "emd"]) == method_of(["--method.kind=emd"]) == "emd"
    assert method_of(["m", "--method.start", "3"]) == ""
    assert usual("emd").optim.betas == (0.0, 0.99)
    assert usual("sfd-v").evaluations == "2..5"
    assert usual("no such") == DistillRun()
    words = f"distill {teacher} --method emd --langevin 2 --images 8 --batch 4 --device cpu"
    main([*words.split(), "--comparison.count", "0", "--out", str(tmp_path / "run")])
    kept = json.loads((tmp_path / "run/run.json").read_text())["config"]
    assert (kept["method"]["kind"], kept["method"]["langevin"]) == ("emd", 2)
    assert (kept["evaluations"], kept["optim"]["lr"]) == ("1", 2e-6)


def test_a_variation_of_the_optimiser_keeps_the_rate_of_the_method():
    words = ["--optim", "adamw-8bit", "--optim.eps", "1e-6"]
    found = parse(usual("emd"), words, prog="distill").optim
    assert found == AdamW8bit(lr=2e-6, betas=(0.0, 0.99), eps=1e-6)
    # The schedule is another's, of which it is no variation: nothing of that stays.
    changed = parse(usual("sfd"), ["--optim.schedule", "cosine"], prog="distill").optim
    assert changed == AdamW(lr=5e-5, schedule=Cosine())


def test_the_dry_run_tells_the_cost_and_writes_nothing(teacher, tmp_path, capsys):
    words = ["distill", str(teacher), "--out", str(tmp_path / "run"), "--dry-run"]
    main([*words, "--method", "emd", "--langevin", "4", "--images", "256000"])
    told = capsys.readouterr().out
    assert "method.langevin                    4\n" in told
    assert "256000 images in 2000 steps of 128\n" in told
    assert "23 network evaluations per image, 5.9 million in all" in told  # 4K + 7
    assert "checkpoint_every                   12800\n" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ("--method.start 1000", "--method.start 1000"),
        ("--drop 0.1", "give --null-label, or leave --drop out"),
        ("--images 4", "beyond --images 4: nothing to do"),
        ("--method.latent-step 0 --method.stretch 2", "leave --method.stretch out"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry", "run"])
def test_the_dry_run_refuses_what_the_run_refuses(wish, why, dry, teacher, tmp_path, capsys):
    small = "--method emd --langevin 1 --images 8 --batch 4 --device cpu --comparison.count 0"
    words = ["distill", str(teacher), *small.split(), "--out", str(tmp_path / "run")]
    if "--images" in wish:
        main(words)
    with pytest.raises(SystemExit):
        main([*words, *wish.split(), *dry])
    assert why in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_dry_run_refuses_a_batch_that_processes_cannot_share(teacher, tmp_path):
    words = f"distill {teacher} --method emd --batch 5 --images 10 --dry-run".split()
    done = loaded.run("-m", "stillhouse", *words, "--out", str(tmp_path / "run"), processes=2)
    assert done.returncode != 0
    assert "a batch of 5 cannot be shared by 2 processes" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_dry_run_of_several_processes_is_told_once(teacher, tmp_path):
    for words in (["distill", str(teacher), "--method", "emd"], ["train", "toy-moons"]):
        own = ["--dry-run", "--out", str(tmp_path / "run")]
        done = loaded.run("-m", "stillhouse", *words, *own, processes=2)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("M parameters") == 1


def test_the_dry_run_into_the_folder_of_another_run_is_refused(teacher, tmp_path, capsys):
    words = f"distill {teacher} --method sfd --images 8 --batch 4 --out {tmp_path}/run".split()
    small = [
        "--comparison.count",
        "0",
        "--preview.count",
        "2",
        "--preview.steps",
        "2",
        "--device",
        "cpu",
    ]
    main([*words, *small, "--evaluations", "2"])
    main([*words, *small, "--evaluations", "2", "--dry-run"])
    with pytest.raises(SystemExit):
        main([*words, *small, "--evaluations", "3", "--dry-run"])
    assert "holds a run with other settings (evaluations: 2 -> 3)" in capsys.readouterr().err
    network = load_file(teacher / WEIGHTS)
    save_file({name: 2 * weight for name, weight in network.items()}, teacher / WEIGHTS)
    with pytest.raises(SystemExit):
        main([*words, *small, "--evaluations", "2", "--dry-run"])
    assert "from another teacher of the same name" in capsys.readouterr().err


def test_a_short_run_is_kept_on_its_way():
    """The guide's first try has 4,096 images, and may be broken off."""
    (short,) = stages_of(DistillRun(method=Emd(), images=4096))
    assert (short.checkpoint_every, short.preview.every, short.log_every) == (512, 512, 82)
    (long,) = stages_of(DistillRun(method=Emd()))
    assert (long.checkpoint_every, long.preview.every, long.log_every) == (12_800, 12_800, 1_280)
    wish = {"checkpoint_every": 7, "log_every": 9, "preview": StudentPreview(every=11)}
    (asked,) = stages_of(DistillRun(images=4096, **wish))
    assert (asked.checkpoint_every, asked.preview.every, asked.log_every) == (7, 11, 9)
    halves = stages_of(DistillRun(method=ProgressiveConfig(first=4), evaluations="1", images=512))
    assert [stage.checkpoint_every for stage in halves] == [32, 32]


def test_a_generator_teaches_no_student_of_walks(teacher, tmp_path):
    run(distilling(teacher, tmp_path / "one", method=Emd(langevin=1), evaluations="1"))
    for method in (Sfd(refinement=1), ProgressiveConfig(first=2)):
        with pytest.raises(UserError, match="a one-step generator, which walks nowhere"):
            run(distilling(tmp_path / "one", tmp_path / "two", method=method, evaluations="1"))


@pytest.mark.parametrize("method", [Emd(langevin=1), Sfd(refinement=1)], ids=lambda m: m.kind)
def test_a_model_that_was_compared_with_nothing_has_a_card(method, teacher, tmp_path):
    run(distilling(teacher, tmp_path / "run", method=method, evaluations="1"))
    found = json.loads((tmp_path / "run/comparison.json").read_text())
    assert not found.keys() & {"distance", "energy", "spread"}
    card = (tmp_path / "run/model/README.md").read_text()
    assert f"Distilled by `{method.kind}`" in card
    assert f"Cost: {found['evaluations_per_image']:g} network evaluations per image" in card
    assert ("--steps 1 --metrics fid,prdc" in card) is (method.kind == "emd")


def test_the_dry_run_of_stages_tells_each(teacher, tmp_path, capsys):
    words = "--dry-run --method progressive --method.first 8 --evaluations 2 --images 256"
    main(["distill", str(teacher), "--out", str(tmp_path / "run"), *words.split()])
    told = capsys.readouterr().out
    seven = "7 network evaluations per image, 896 in all"  # two steps of four, and one learnt
    assert f"then 128 images in {tmp_path}/run/2-steps: {seven}" in told
    assert "128 images in 1 steps of 128\n11 network evaluations per image, 1,408 in all" in told


def test_settings_follow_the_method_also_in_python():
    plain, given = DistillRun(method=Emd(langevin=3)), DistillRun(method=SidConfig(), batch=8)
    for config in (plain, given, DistillRun.model_validate({"method": {"kind": "dmd"}})):
        assert (config.evaluations, config.optim.betas) == ("1", (0.0, 0.99))
        assert (config.optim.lr, config.images) == (2e-6, 12_800_000)
        assert config.averages == (HalfLife(images=20_000),)
        assert config.comparison.solvers == ()
    assert given.batch == 8
    own = {"evaluations": "2", "optim": AdamW(lr=1.0), "averages": ()}
    asked = DistillRun(method=Emd(), **own)
    assert all(getattr(asked, name) == value for name, value in own.items())
    assert DistillRun(method=Sfd()) == DistillRun(method=Sfd(), evaluations="2..5", averages=())
    again = plain.model_dump(mode="json")
    assert DistillRun.model_validate(again) == plain


# ---------------------------------------------------------------- correction


def test_samples_are_drawn_before_and_after_a_correction(teacher, tmp_path, capsys):
    method = Emd(langevin=1, start=7.0)
    run(distilling(teacher, tmp_path / "run", method=method, evaluations="1", images=4))
    model, out = tmp_path / "run/model", tmp_path / "out"
    words = f"sample {model} --correct 3 --correct.latent-step 0.01 --count 4 --device cpu"
    main([*words.split(), "--out", str(out)])
    assert str(out / "correction.png") in capsys.readouterr().out
    found = json.loads((out / "correction.json").read_text())
    assert (found["steps"], found["level"]) == (3, 1.0)
    assert found["moved"] > 0
    with Image.open(out / "correction.png") as picture:
        assert picture.size == (4 * 66 + 2, 2 * 66 + 2)  # a row before, and one after


def test_a_corrected_sample_is_the_chains(teacher, tmp_path):
    """By hand: the chain with the run's own teacher and fake score."""
    method = Emd(langevin=1, start=7.0)
    run(distilling(teacher, tmp_path / "run", method=method, evaluations="1", images=4))
    config = SampleRun(
        model=str(tmp_path / "run/model"),
        correct=Correction(steps=2, level=0.5, latent_step=0.01),
        count=2,
        seed=3,
        out=tmp_path / "out",
        device="cpu",
    )
    correct(config)
    student, score, taught = (
        load_denoiser(folder).requires_grad_(False)
        for folder in (tmp_path / "run/model", tmp_path / "run/score", teacher)
    )
    z = starting_noise((3, 8, 8), range(2), seed=3).float()
    found = corrected(
        lambda z: student(7 * z, torch.tensor(7.0)),
        lambda x, sigma: taught(x, sigma) - score(x, sigma),
        z,
        keyed_normal((3, 8, 8), [0, 1], seed=3, purpose="correct").float(),
        torch.full((2,), 0.5),
        Langevin(2, 0.16, 0.01),
        ChainNoise([0, 1], 3),
    )
    moved = student(7 * found.z, torch.tensor(7.0)) - student(7 * z, torch.tensor(7.0))
    told = json.loads((tmp_path / "out/correction.json").read_text())["moved"]
    assert told == pytest.approx(float(moved.square().mean((1, 2, 3)).sqrt().mean()), rel=1e-4)


def test_samples_are_corrected_in_batches_each_by_itself(teacher, tmp_path, monkeypatch):
    run(distilling(teacher, tmp_path / "run", method=Emd(langevin=1), evaluations="1", images=4))
    how = Correction(steps=2, level=0.5, latent_step=0.01)
    asked = SampleRun(model=str(tmp_path / "run/model"), correct=how, count=5, device="cpu")
    sizes, seen, walk = list[int](), [], correcting.corrected

    def noted(generator, gap, z, *others):
        sizes.append(len(z))
        return walk(generator, gap, z, *others)

    monkeypatch.setattr(correcting, "corrected", noted)
    for batch in (5, 2):
        correct(asked.model_copy(update={"batch": batch, "out": tmp_path / f"out{batch}"}))
        seen.append(json.loads((tmp_path / f"out{batch}/correction.json").read_text()))
    assert sizes == [5, 2, 2, 1]
    assert seen[1]["gap"] == pytest.approx(seen[0]["gap"], rel=1e-4)
    for name in ("moved", "stiffness"):
        assert seen[1][name] == pytest.approx(seen[0][name], rel=1e-4)


def test_rows_before_and_after_stay_apart_where_the_last_is_short(teacher, tmp_path):
    run(distilling(teacher, tmp_path / "run", method=Emd(langevin=1), evaluations="1", images=4))
    how = Correction(steps=1, latent_step=0)
    out, model = tmp_path / "out", str(tmp_path / "run/model")
    correct(SampleRun(model=model, correct=how, count=10, batch=3, out=out, device="cpu"))
    with Image.open(out / "correction.png") as picture:
        found = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    assert picture.size == (8 * 66 + 2, 4 * 66 + 2)
    tiles = found.view(4 * 66 + 2, -1, 3)[2:, 2:].unfold(0, 64, 66).unfold(1, 64, 66)
    # The latent stayed, so that what is below each sample is the sample itself.
    assert torch.equal(tiles[0], tiles[1])
    assert torch.equal(tiles[2], tiles[3])
    assert (tiles[2, 2:] == 255).all()  # white where there is none
    assert not (tiles[2, :2] == 255).all()


def test_samples_are_corrected_by_the_teacher_as_it_was_guided(tmp_path):
    folder = bare(tmp_path / "teacher", EDM, **CLASSES)
    guided = {"guidance": ClassifierFree(weight=3.0), "null_label": 7, "evaluations": "1"}
    run(distilling(folder, tmp_path / "run", method=Emd(langevin=1), **guided))
    how, found = Correction(steps=2, latent_step=0.01), []
    model = tmp_path / "run/model"
    for null in (None, 5):  # nobody is asked which label stands for no class
        asked = {"model": str(model), "null_label": null, "labels": (2,), "count": 2}
        correct(SampleRun(**asked, correct=how, out=tmp_path / "out", device="cpu"))
        found.append(json.loads((tmp_path / "out/correction.json").read_text()))
    assert found[0] == found[1]
    # By hand: how far teacher and score are apart where the chain begins.
    student, score, plain = (
        load_denoiser(place).requires_grad_(False)
        for place in (model, tmp_path / "run/score", folder)
    )
    guide = classifier_free(plain, Condition(label=torch.tensor([7])), 3.0)
    cond, z = Condition(label=torch.tensor([2, 2])), starting_noise((3, 8, 8), range(2), seed=0)
    x = student(20 * z.float(), torch.tensor(20.0), cond)
    x = x + keyed_normal((3, 8, 8), [0, 1], seed=0, purpose="correct").float()  # at level 1
    sigma = torch.ones(2)

    def apart(teacher):
        gap = teacher(x, sigma, cond) - score(x, sigma, cond)
        return float(gap.square().mean((1, 2, 3)).sqrt().mean())

    assert found[0]["gap"]["first"] == pytest.approx(apart(guide), rel=1e-4)
    assert apart(plain) != pytest.approx(apart(guide), rel=0.05)


def test_samples_are_not_corrected_with_another_teacher(teacher, tmp_path):
    run(distilling(teacher, tmp_path / "run", method=Emd(langevin=1), evaluations="1", images=4))
    small_unet(seed=5).save_pretrained(teacher)
    model = str(tmp_path / "run/model")
    with pytest.raises(UserError, match="distilled from another teacher than is in"):
        correct(SampleRun(model=model, correct=Correction(steps=2), count=2, out=tmp_path / "out"))


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """Whose fake score knows levels from 0.5 to 10."""
    folder = tmp_path_factory.mktemp("generator")
    method = Emd(langevin=1, low=0.5, high=10.0)
    run(distilling(bare(folder / "teacher", EDM), folder / "run", method=method, evaluations="1"))
    return folder / "run/model"


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"steps": 4}, "leave --steps out"),
        ({"tensors": True}, "pictures alone"),
        ({"dtype": "bfloat16"}, "in float32"),
        ({"solver": Heun()}, "leave --solver out"),
        ({"correct": Correction(steps=2, level=500.0)}, "--correct.level 500 is no level at which"),
        ({"correct": Correction(steps=2, level=0.1)}, "learnt: give one from 0.5 to 10"),
    ],
)
def test_what_a_correction_would_ignore_is_refused(wish, why, generator, tmp_path):
    asked = {"model": str(generator), "correct": Correction(steps=2), "count": 2}
    with pytest.raises(UserError, match=why):
        correct(SampleRun(**asked | wish, out=tmp_path / "out"))


def test_a_correction_without_steps_is_refused(teacher, tmp_path):
    with pytest.raises(UserError, match="say how many"):
        sample(SampleRun(model=str(teacher), correct=Correction(level=2.0), out=tmp_path / "out"))


def test_only_generators_are_corrected(teacher, tmp_path):
    with pytest.raises(UserError, match="no one-step generator"):
        correct(SampleRun(model=str(teacher), correct=Correction(steps=2), out=tmp_path / "out"))


# ---------------------------------------------------------------- plain diffusers


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [EDM, VP], ids=["edm", "vp"])
def test_an_exportable_generator_opens_in_plain_diffusers(scheduler, tmp_path):
    """In a process without Stillhouse: one step, from the level that the generator knows."""
    teacher = bare(tmp_path / "teacher", scheduler)
    method = Emd(langevin=1, start=7.0)
    run(
        distilling(
            teacher, tmp_path / "run", method=method, evaluations="1", exportable=True, images=4
        )
    )
    model = tmp_path / "run/model"
    denoiser, sigma = load_denoiser(model), started_at(model)
    assert sigma == pytest.approx(7, rel=0.01)
    assert denoiser.scaling.sigma_max == pytest.approx(sigma, rel=1e-6)
    noise = torch.randn((2, 3, 8, 8), generator=torch.Generator().manual_seed(5))
    # DDIM's pipeline draws its own noise, of unit variance in the process's coordinates.
    start = sigma * noise if scheduler is EDM else denoiser.scaling.start(noise, sigma)
    job = {
        "folder": str(model),
        "given": str(tmp_path / "given"),
        "found": str(tmp_path / "found"),
        "steps": [1],
        "call": {"batch_size": 2},
        "seed": None if scheduler is EDM else 5,
    }
    save_file({"state": start}, tmp_path / "given")
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    elsewhere = Path(__file__).parents[1] / "pipelines/plain_diffusers.py"
    command, environment = (
        warm.command(str(elsewhere), str(tmp_path / "jobs.json")),
        warm.environment(),
    )
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, env=environment)
    with torch.no_grad():
        wanted = denoiser(start, torch.tensor(sigma))
    assert relative_error(load_file(tmp_path / "found")["state1"], wanted) < 1e-4


def test_an_exportable_generator_is_compared_at_all_of_its_teachers_levels(teacher, tmp_path):
    """Its own process ends where it begins; the fake score's does not."""
    method = Emd(start=7.0)
    wanted = Wanted(load_denoiser(teacher).scaling, (1,), None, exportable=True, told=False)
    walk = method.walk(wanted)
    config = distilling(teacher, tmp_path, method=method, evaluations="1", exportable=True)
    here = World(0, 1, torch.device("cpu"))
    source = load_source(config, here)
    student = load_student(config, source, walk)
    task = method.task(lesson(config, source, student, walk, here))
    assert task.student.scaling.sigma_max == 7
    assert task.score.scaling.sigma_max == 80
    assert float(task.levels.quantile(torch.tensor(1.0))) == pytest.approx(80)


@pytest.mark.parametrize("scheduler", [EDM, VP, FLOW], ids=["edm", "vp", "flow"])
def test_a_fake_score_begins_as_its_teacher_and_learns_as_its_process_does(scheduler, tmp_path):
    teacher = bare(tmp_path / "teacher", scheduler | {"clip_sample": False})
    config = distilling(teacher, tmp_path, method=Emd(), evaluations="1")
    task: Any
    source, _, _, task = networks(config, (1,), World(0, 1, torch.device("cpu")))
    x, sigma = torch.randn(2, *source.subject.shape), torch.tensor([0.1, 6.0])
    cond = source.subject.condition([0, 1], torch.device("cpu"))
    with torch.no_grad():
        found, wanted = task.score.eval()(x, sigma, cond), task.teacher(x, sigma, cond)
    assert relative_error(found, wanted) < 1e-6
    # 1/sigma^2 + 1/sigma_data^2, which is no other process's.
    weight = task.objective.weight(torch.tensor([6.0]))
    assert float(weight) == pytest.approx(1 / 36 + source.subject.scaling.sigma_data**-2)


def test_adapters_are_refused_before_anything_is_loaded(tmp_path):
    method, model = Emd(), str(tmp_path / "teacher")
    bare(tmp_path / "teacher", EDM)
    config = DistillRun(model=model, method=method, adapters=4, out=tmp_path / "run")
    with pytest.raises(UserError, match=r"leave --adapters out; .*--method\.score lora"):
        run(config)


def test_a_flow_begins_at_pure_noise_in_diffusers(tmp_path):
    teacher = bare(tmp_path / "teacher", FLOW)
    settings = {"method": Emd(langevin=1), "evaluations": "1", "exportable": True}
    with pytest.raises(UserError, match="anywhere but pure noise"):
        run(distilling(teacher, tmp_path / "run", **settings))
