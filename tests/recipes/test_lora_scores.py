"""`stillhouse distill --method.score lora`: teacher and fake score in one network."""

import json
import re
import sys
from typing import Any, NamedTuple

import pytest
import torch
from recipes.students import CLASSES, EDM, HERE, VP, WEIGHTS, bare, distilling, log_of
from recipes.test_generators import FAMILY
from recipes.together import distil_by_two
from safetensors.torch import load_file
from small_models import unit_noise
from torch import Tensor
from tunable import save_whole

from stillhouse.cli import main
from stillhouse.distill.langevin import ChainNoise, Langevin, corrected
from stillhouse.distill.trajectories import Starts
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.loop import Engine
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.sharding import Spread
from stillhouse.errors import UserError
from stillhouse.models.adapters import adapter_sizes, add_adapters, load_adapters
from stillhouse.pipelines import load_denoiser
from stillhouse.process import Condition, keyed_normal, starting_noise
from stillhouse.recipes.distill.correcting import run as correct
from stillhouse.recipes.distill.distilling import lesson, network_config, plan_walk, run
from stillhouse.recipes.distill.generators import Emd, SidConfig
from stillhouse.recipes.distill.scores import with_score
from stillhouse.recipes.distill.settings import Comparison, DistillRun
from stillhouse.recipes.distill.students import Source, load_source, load_student
from stillhouse.recipes.distill.told import Conditions
from stillhouse.recipes.parts import Autoguidance, ClassifierFree
from stillhouse.recipes.sampling import Correction, SampleRun

LORA = {"score": "lora", "score_rank": 2}


def adapting(model, out, **changes) -> DistillRun:
    settings = {"method": Emd(langevin=2, **LORA), "evaluations": "1"}
    return distilling(model, out, **{**settings, **changes})


class Begun(NamedTuple):
    """A run before its first batch."""

    plain: Tensor  # an answer of the guided teacher, while it was alone
    source: Source
    task: Any
    engine: Engine
    feed: Any

    def answer(self) -> Tensor:
        with torch.no_grad():
            return answer_of(self.source)


def answer_of(source: Source) -> Tensor:
    subject, x = source.subject, 3 * unit_noise((4, *source.subject.shape))
    sigma = torch.tensor([0.1, 0.5, 2.0, 20.0], dtype=torch.float64)
    return subject.denoiser(x, sigma, subject.condition(range(4), HERE.device))


def begin(config: DistillRun) -> Begun:
    """As `distil` does."""
    source = load_source(config, HERE)
    with torch.no_grad():
        plain = answer_of(source)
    walk = plan_walk(config, source, (1,))
    torch.manual_seed(config.seed)
    student = load_student(config, source, walk)
    source = with_score(config, source, HERE)
    task = config.method.task(lesson(config, source, student, walk, HERE))
    settings = {name: network_config(config, name, HERE) for name in task.modules()}
    starts = Starts(source.subject.shape, config.seed, Conditions(source.subject, config.seed))
    feed = starts.feed(0, config.batch, HERE)
    return Begun(plain, source, task, Engine(task, config, settings, HERE), feed)


def weights_of(network: torch.nn.Module, adapters: bool) -> dict[str, Tensor]:
    found = network.named_parameters()
    return {k: w.detach().clone() for k, w in found if (".lora_" in k) is adapters}


# ---------------------------------------------------------------- one network, two answers


@pytest.mark.parametrize(
    ("scheduler", "guidance"),
    [(EDM, {}), (VP, {}), (EDM, {"guidance": ClassifierFree(weight=3.0), "null_label": 7})],
    ids=["edm", "clipped", "guided"],
)
def test_a_fake_score_begins_as_its_teacher_which_stays_itself(scheduler, guidance, tmp_path):
    """To the last bit: before, with adapters that add nothing, and when they have learnt."""
    model = bare(tmp_path / "teacher", scheduler, **CLASSES)
    begun = begin(adapting(model, tmp_path / "run", **guidance))
    assert torch.equal(begun.answer(), begun.plain)
    x, sigma = 0.1 * unit_noise((2, 3, 8, 8)), torch.tensor([0.1, 0.5], dtype=torch.float64)
    cond = Condition(label=torch.tensor([1, 2]))
    score, teacher = begun.task.score, load_denoiser(model)
    teacher.network.for_inference()
    with torch.no_grad():
        wanted = teacher.requires_grad_(False)(x, sigma, cond)
        assert torch.equal(score(x, sigma, cond), wanted)
    for _ in range(2):
        begun.engine._step(next(begun.feed))
    assert torch.equal(begun.answer(), begun.plain)
    with torch.no_grad():
        assert not torch.equal(score(x, sigma, cond), wanted)


def test_a_fake_score_is_not_clipped_where_its_teacher_is(tmp_path):
    begun = begin(adapting(bare(tmp_path / "teacher", VP), tmp_path / "run"))
    assert float(begun.answer().abs().max()) == 1
    score, x = begun.task.score.eval(), 3 * unit_noise((2, 3, 8, 8))
    with torch.no_grad():
        assert score(x, torch.tensor(2.0, dtype=torch.float64)).abs().max() > 1


def test_another_guide_than_the_teacher_keeps_its_own_weights(teacher, tmp_path):
    worse = bare(tmp_path / "worse", EDM)
    begun = begin(adapting(teacher, tmp_path / "run", guidance=Autoguidance(model=str(worse))))
    begun.engine._step(next(begun.feed))
    assert torch.equal(begun.answer(), begun.plain)


@pytest.mark.parametrize("method", FAMILY, ids=lambda m: m.kind)
def test_every_method_trains_the_adapters_and_no_weight_of_the_teacher(method, teacher, tmp_path):
    method = method.model_copy(update=LORA)
    begun = begin(adapting(teacher, tmp_path / "run", method=method))
    score, student = begun.task.score, begun.task.student
    before = [weights_of(score, False), weights_of(score, True), weights_of(student, False)]
    begun.engine._step(next(begun.feed))
    begun.engine._step(next(begun.feed))
    base, adapters, generator = (
        [not torch.equal(old[k], new) for k, new in weights_of(network, some).items()]
        for old, network, some in zip(
            before, (score, score, student), (False, True, False), strict=True
        )
    )
    assert not any(base)
    assert all(adapters)
    assert all(generator)
    assert all(w.grad is None for k, w in score.named_parameters() if ".lora_" not in k)


def test_a_teacher_of_half_precision_has_adapters_of_single(teacher, tmp_path):
    begun = begin(adapting(teacher, tmp_path / "run", teacher="bfloat16"))
    assert torch.equal(begun.answer(), begun.plain)
    kinds = {
        some: {w.dtype for w in weights_of(begun.task.score, some).values()}
        for some in (False, True)
    }
    assert kinds == {False: {torch.bfloat16}, True: {torch.float32}}
    before = weights_of(begun.task.score, True)
    for _ in range(2):
        begun.engine._step(next(begun.feed))
    assert all(not torch.equal(before[k], w) for k, w in weights_of(begun.task.score, True).items())
    assert torch.equal(begun.answer(), begun.plain)


# ---------------------------------------------------------------- memory


def held(begun: Begun) -> dict[str, int]:
    """Bytes of distinct tensors after a step, and of gradients as each optimiser steps."""
    found: dict[str, int] = {}

    def note(name):
        networks = [n.inner for n in begun.engine.networks.values()]
        grads = [p.grad for n in networks for p in n.parameters() if p.grad is not None]
        found[f"{name} gradients"] = sum(g.nbytes for g in grads)

    for name, trained in begun.engine.networks.items():
        trained.optimiser.register_step_pre_hook(lambda *_, name=name: note(name))
    begun.engine._step(next(begun.feed))
    networks = [begun.task.student, begun.task.score, begun.source.subject.bare]
    weights = {id(w): w.nbytes for network in networks for w in network.parameters()}
    moments = [
        t.nbytes
        for n in begun.engine.networks.values()
        for state in n.optimiser.state.values()
        for key, t in state.items()
        if key != "step"
    ]
    return found | {"weights": sum(weights.values()), "moments": sum(moments)}


def test_adapters_save_what_a_second_network_would_take(teacher, tmp_path):
    """Weights, gradients and moments, to the byte: P of a network, A of its adapters."""
    full = held(begin(adapting(teacher, tmp_path / "full", method=Emd(langevin=1))))
    lora = held(begin(adapting(teacher, tmp_path / "lora", method=Emd(langevin=1, **LORA))))
    model = load_denoiser(teacher).network.model
    P = 4 * sum(w.numel() for w in model.parameters())
    A = 4 * sum(adapter_sizes(model, 2).values())
    assert full == {
        "weights": 3 * P,  # teacher, generator, score
        "moments": 4 * P,
        "score gradients": P,
        "student gradients": P,
    }
    assert lora == {
        "weights": 2 * P + A,
        "moments": 2 * P + 2 * A,
        "score gradients": A,
        "student gradients": P,
    }
    assert A < 0.4 * P


def test_only_layers_that_are_larger_than_their_adapters_get_some():
    """By hand: a convolution of 3x3, a linear layer, and one that rank 4 would not make smaller."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
    )
    assert adapter_sizes(network, 4) == {"0": 4 * (8 * 9 + 16), "1": 4 * (16 + 16)}
    add_adapters(network, 4)
    added = sum(w.numel() for k, w in network.named_parameters() if ".lora_" in k)
    assert added == 4 * (8 * 9 + 16) + 4 * (16 + 16)
    with pytest.raises(UserError, match="adapters of rank 64 are no smaller"):
        add_adapters(torch.nn.Linear(8, 8), 64)


# ---------------------------------------------------------------- runs


def test_a_run_that_stops_goes_on_as_if_it_had_not(teacher, tmp_path):
    settings = {
        "method": Emd(langevin=2, score_steps=2, **LORA),
        "averages": (HalfLife(images=4),),
    }
    run(adapting(teacher, tmp_path / "whole", images=16, **settings))
    run(adapting(teacher, tmp_path / "parts", images=8, **settings))
    run(adapting(teacher, tmp_path / "parts", images=16, **settings))
    for file in (f"model/{WEIGHTS}", "score/adapter_model.safetensors"):
        whole, parts = (load_file(tmp_path / name / file) for name in ("whole", "parts"))
        assert all(torch.equal(whole[name], parts[name]) for name in whole)
    gaps = [
        [line["watch/gap"] for line in log_of(tmp_path / name) if "watch/gap" in line]
        for name in ("whole", "parts")
    ]
    assert gaps[0] == gaps[1]
    # Of the score its adapters are kept, and nothing else.
    size = sum(adapter_sizes(load_denoiser(teacher).network.model, 2).values())
    stored = load_file(tmp_path / "whole/score/adapter_model.safetensors")
    assert sum(w.numel() for w in stored.values()) == size
    # As peft writes them: the name of an adapter is no part of those of its weights.
    assert all(re.fullmatch(r"base_model\.model\..+\.lora_[AB]\.weight", k) for k in stored)


def test_the_command_corrects_samples_with_the_adapters_that_it_kept(teacher, tmp_path):
    """By hand: the chain with teacher and fake score as peft opens them."""
    import peft

    words = f"distill {teacher} --method emd --langevin 1 --method.start 7 --method.score lora"
    few = "--method.score-rank 2 --images 8 --batch 4 --optim.lr 1e-3 --device cpu"
    plain = "--comparison.count 0 --preview.count 2 --preview.steps 2"
    out = tmp_path / "run"
    main([*words.split(), *few.split(), *plain.split(), "--out", str(out)])
    how = Correction(steps=2, level=0.5, latent_step=0.01)
    asked = SampleRun(model=str(out / "model"), correct=how, count=3, seed=3, device="cpu")
    correct(asked.model_copy(update={"out": tmp_path / "out"}))
    student, score, taught = (
        load_denoiser(folder).requires_grad_(False) for folder in (out / "model", teacher, teacher)
    )
    network: Any = score.network
    network.model = peft.PeftModel.from_pretrained(network.model, str(out / "score")).base_model
    network.model = network.model.merge_and_unload()
    z = starting_noise((3, 8, 8), range(3), seed=3).float()
    found = corrected(
        lambda z: student(7 * z, torch.tensor(7.0)),
        lambda x, sigma: taught(x, sigma) - score(x, sigma),
        z,
        keyed_normal((3, 8, 8), range(3), seed=3, purpose="correct").float(),
        torch.full((3,), 0.5),
        Langevin(2, 0.16, 0.01),
        ChainNoise([0, 1, 2], 3),
    )
    told = json.loads((tmp_path / "out/correction.json").read_text())
    assert told["gap"]["last"] == pytest.approx(float(found.gaps[:, -1].mean()), rel=1e-3)
    moved = student(7 * found.z, torch.tensor(7.0)) - student(7 * z, torch.tensor(7.0))
    rms = float(moved.square().mean((1, 2, 3)).sqrt().mean())
    assert told["moved"] == pytest.approx(rms, rel=1e-4)
    assert told["gap"]["last"] > 1e-4


def test_pictures_and_the_comparison_show_the_teacher_without_adapters(teacher, tmp_path):
    """The same as beside a full score, though adapters that learn fast are in its network."""
    settings = {"comparison": Comparison(count=4, steps=3, solvers=("euler",))}
    seen = {}
    for score, adapters in {"full": {}, "lora": LORA}.items():
        method = Emd(langevin=1, score_rate=50.0, **adapters)
        run(adapting(teacher, tmp_path / score, method=method, **settings))
        seen[score] = json.loads((tmp_path / score / "comparison.json").read_text())
    full, lora = (seen[score] for score in ("full", "lora"))
    assert lora["spread"]["teacher"] == full["spread"]["teacher"]
    assert lora["energy"]["euler"] == full["energy"]["euler"]


def test_a_pipeline_keeps_the_adapters_and_its_samples_are_corrected(tmp_path):
    """Of which a full score would not be kept."""
    model, prompts = save_whole(tmp_path / "sd15", "sd15"), tmp_path / "prompts.txt"
    prompts.write_text("a red a\na green b\n")
    guidance = ClassifierFree(weight=3.0)
    settings = {"prompts": str(prompts), "guidance": guidance, "method": Emd(langevin=1, **LORA)}
    run(adapting(model, tmp_path / "run", images=4, **settings))
    assert {file.name for file in (tmp_path / "run/score").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    how = {"correct": Correction(steps=2), "count": 2, "prompt": ("a red a", "a green b")}
    correct(SampleRun(model=str(tmp_path / "run/model"), out=tmp_path / "out", **how))
    assert json.loads((tmp_path / "out/correction.json").read_text())["moved"] > 0


def test_adapters_of_another_network_are_refused(teacher, tmp_path):
    run(adapting(teacher, tmp_path / "run", images=4))
    other = load_denoiser(bare(tmp_path / "other", EDM, block_out_channels=(8, 8)))
    network: Any = other.network
    with pytest.raises(UserError, match="do not fit this network"):
        load_adapters(network.model, tmp_path / "run/score")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"teacher": "float16"}, "give --teacher bfloat16"),
        (
            {"method": SidConfig(**LORA), "spread": Spread(checkpointing=True)},
            "leave --spread.checkpointing or",
        ),
        ({"method": Emd(score="lora", score_rank=900)}, "rank 900"),
    ],
)
def test_what_adapters_cannot_be_is_refused(changes, sentence, teacher, tmp_path):
    with pytest.raises(UserError, match=sentence):
        run(adapting(teacher, tmp_path / "run", **changes))


def test_sid_is_not_learnt_through_half_precision(teacher, tmp_path):
    """Also with a score of its own: the gradient passes the teacher."""
    config = distilling(teacher, tmp_path / "run", method=SidConfig(), evaluations="1")
    with pytest.raises(UserError, match="vanishes in float16: give --teacher bfloat16"):
        run(config.model_copy(update={"teacher": "float16"}))


def test_without_peft_the_line_to_run_is_told(teacher, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[finetune\]'"):
        run(adapting(teacher, tmp_path / "run"))


# ---------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_two_processes_equal_one(sharding, tmp_path):
    """Guided, so that the sharded network answers as teacher and as fake score in one step."""
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    alone = adapting(
        teacher,
        tmp_path / "one",
        optim=AdamW(lr=1e-3, eps=1.0),  # or it would enlarge the rounding of gradients near 0
        guidance=ClassifierFree(weight=3.0),
        null_label=7,
        images=16,
    )
    run(alone)
    both = alone.model_copy(update={"out": tmp_path / "two", "spread": Spread(sharding=sharding)})
    distil_by_two(both, tmp_path)
    for name in ("student/loss", "score/loss", "watch/gap", "watch/stiffness"):
        one, two = ([line[name] for line in log_of(c.out) if name in line] for c in (alone, both))
        assert two == pytest.approx(one, rel=1e-4), name
    for file in (f"model/{WEIGHTS}", "score/adapter_model.safetensors"):
        one, two = (load_file(c.out / file) for c in (alone, both))
        for name in one:
            torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5)
