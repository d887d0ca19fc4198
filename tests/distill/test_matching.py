"""Distribution matching in the engine: who learns from whom, resumed, in pieces, on processes."""

import copy
import json
import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import loaded
import pytest
import torch
from distill.matching_run import (
    BATCH,
    LEVELS,
    STEPS,
    Blocks,
    adapted,
    engine_of,
    networks_of,
    peak_bytes,
    starts,
    task_of,
    train,
)
from engine.toy_run import Lines
from torch import nn

from stillhouse.distill.emd import METHODS, Still, emd
from stillhouse.distill.langevin import ChainNoise, Langevin, corrected
from stillhouse.distill.lora_score import LoraScore
from stillhouse.distill.matching import Matching, generated, method_evaluations
from stillhouse.distill.trajectories import Evaluations, Start, frozen
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.process import Condition, keyed_normal, keyed_uniform
from stillhouse.solvers import classifier_free

HERE = World(0, 1, torch.device("cpu"))
SCRIPT = Path(__file__).with_name("matching_run.py")
WITHOUT = ("images_per_second", "data_wait", "checkpoint")


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was learnt, without how fast."""
    kept = [{k: v for k, v in line.items() if k not in WITHOUT} for line in lines]
    return [line for line in kept if len(line) > 1]


@cache
def alone(method: str = "emd", lora: bool = False, analytic: bool = True) -> list[dict[str, Any]]:
    return numbers(train(HERE, method=method, lora=lora, analytic=analytic))


def assert_close(lines: list[dict[str, Any]], others: list[dict[str, Any]], rel: float) -> None:
    for line, other in zip(lines, others, strict=True):
        assert line == pytest.approx(other, rel=rel, abs=1e-12)


def state(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def same(network: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(before[name], t) for name, t in network.state_dict().items())


def batch_of(count: int = BATCH, **options: Any) -> Start:
    return starts(**options).rows(torch.arange(count))


# ---------------------------------------------------------------- who learns from whom


class Gradients:
    """Which networks had a gradient, update by update, as the optimisers step."""

    def __init__(self, engine) -> None:
        self.seen: list[tuple[str, list[str]]] = []
        for name, trained in engine.networks.items():
            trained.optimiser.register_step_pre_hook(partial(self._note, engine, name))

    def _note(self, engine, name, *_) -> None:
        modules = {n: t.inner for n, t in engine.networks.items()}
        with_gradient = [
            n for n, m in modules.items() if any(p.grad is not None for p in m.parameters())
        ]
        self.seen.append((name, with_gradient))


@pytest.mark.parametrize("method", METHODS)
def test_each_update_has_a_gradient_in_its_own_network_alone(method):
    task = task_of(HERE, method=method, analytic=False)
    teacher: Any = task.teacher
    engine, before = engine_of(task, HERE), state(teacher)
    found = Gradients(engine)
    task.step(batch_of(), engine)
    assert found.seen == [("score", ["score"])] * 2 + [("student", ["student"])]
    engine.run(starts().feed(0, BATCH, HERE))
    assert same(teacher, before)
    assert all(p.grad is None for p in teacher.parameters())
    assert not teacher.training
    assert task.student.training
    assert task.score.training


@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_answers_as_it_is_kept_where_updates_are_mixed(method):
    """With what it is compared by afterwards: bfloat16 is of the two networks that learn."""
    options = {"method": method, "analytic": False, "single": True, "precision": "bf16"}
    task = task_of(HERE, **options)
    teacher: Any = task.teacher
    seen: dict[str, set[torch.dtype]] = {"teacher": set(), "score": set(), "student": set()}
    for name, network in (("teacher", teacher), *task.modules().items()):
        network.outward.register_forward_hook(lambda m, i, y, name=name: seen[name].add(y.dtype))
    engine = engine_of(task, HERE, **options)
    task.step(batch_of(**options), engine)
    half = {torch.bfloat16}
    assert seen == {"teacher": {torch.float32}, "score": half, "student": half}


def test_the_fake_score_learns_fresh_samples_that_no_chain_has_corrected():
    """Its first losses, by hand: latents, noise and levels of its own, and the student as it is,
    which after an update its average is not.
    """
    task = task_of(HERE, dropout=0.3, score_steps=1)
    engine = engine_of(task, HERE)
    for block in task.score.blocks:
        block[1].p = 0.0
    student, score = Blocks(0.3).double().eval(), Blocks(0.0).double()
    for i, keys in enumerate((range(BATCH), range(BATCH, 2 * BATCH))):
        start = starts().rows(torch.tensor(keys))
        student.load_state_dict(task.student.state_dict())
        score.load_state_dict(task.score.state_dict())
        z = keyed_normal((2,), keys, seed=0, purpose="distill/score0/latent").double()
        x = student(2.5 * z, torch.tensor(2.5), start.condition).detach()
        noise = keyed_normal((2,), keys, seed=0, purpose="distill/score0/noise")
        sigma = LEVELS.quantile(keyed_uniform(keys, seed=0, purpose="distill/score0/sigma"))
        x_t = x + sigma[:, None] * noise
        weight = sigma**-2 + 0.5**-2
        error = (score(x_t, sigma, start.condition) - x).detach().square().mean(1)
        task.step(start, engine)
        assert engine.updates["score"][i].loss == pytest.approx(float((weight * error).mean()))
        assert not torch.equal(z, start.noise)


def test_every_update_of_the_fake_score_has_samples_of_its_own():
    task, seen = task_of(HERE, score_steps=3), []
    engine = engine_of(task, HERE)

    def note(module, given):
        if module.training:  # the chain evaluates it too
            seen.append(given[0])

    task.score.register_forward_pre_hook(note)
    task.step(batch_of(), engine)
    assert len(seen) == len(engine.updates["score"]) == 3
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert len(engine.updates["student"]) == 1


def test_the_generator_follows_the_chain_that_its_keys_give():
    """One batch by hand, dropout off within the chain, and where the update begins."""
    task = task_of(HERE, dropout=0.3, K=3, latent_step=0.05)
    how = Langevin(3, latent_step=0.05)
    engine, start = engine_of(task, HERE), batch_of()
    given, learnt = task.rows(start), list[tuple[torch.Tensor, ...]]()

    def note(module, given):
        if module.training:  # the chain evaluates it
            learnt.append(given)

    task.student.register_forward_pre_hook(note)
    task.step(start, engine)
    student, score = (Blocks(0.3).double().eval() for _ in range(2))
    score.load_state_dict(task.score.state_dict())  # as its own updates have left it
    cond = start.condition

    def gap(x, sigma):
        with torch.no_grad():
            return task.teacher(x, sigma, cond) - score(x, sigma, cond)

    def generator(z):
        return student(2.5 * z, torch.tensor(2.5), cond)

    noise = ChainNoise(list(range(BATCH)), 0)
    walk = corrected(generator, gap, given.z, given.eps, given.sigma, how, noise)
    expected = float(0.5 * walk.shift.square().sum(1).mean())
    assert engine.updates["student"][0].loss == pytest.approx(expected, rel=1e-6)
    ((x, level, *_),) = learnt  # of the latents where the chain has ended, at the level of samples
    assert float(level) == 2.5
    assert torch.allclose(x, 2.5 * walk.z, atol=1e-12)
    assert (walk.z - given.z).abs().max() > 0.1
    report = task.report()
    assert report["watch/gap"] == pytest.approx(float(walk.gaps.mean()))
    assert report["watch/drift"] == pytest.approx(float(walk.drift.mean()))
    assert report["watch/stiffness"] == pytest.approx(float(walk.stiffness.max()))


def test_all_that_is_drawn_follows_the_seed():
    """Or the spread over seeds would be that of their weights alone."""
    task, seen = task_of(HERE, seed=3, score_steps=1), []
    engine, start, keys = engine_of(task, HERE), batch_of(), range(BATCH)

    def method(networks, given, noise):
        seen.append((given, noise(given.z, 4)))
        return METHODS["dmd"](networks, given, noise)

    task.method = method
    fresh = list[torch.Tensor]()
    task.student.register_forward_pre_hook(lambda module, given: fresh.append(given[0]))
    task.step(start, engine)
    ((given, unit),) = seen
    of = partial(keyed_normal, (2,), keys, seed=3)
    assert torch.equal(fresh[0], 2.5 * of(purpose="distill/score0/latent").double())
    assert torch.equal(given.eps, of(purpose="distill/noise").double())
    uniform = keyed_uniform(keys, seed=3, purpose="distill/level")
    assert torch.equal(given.sigma, LEVELS.quantile(uniform))
    assert torch.equal(unit, ChainNoise(list(keys), 3)(given.z, 4))


def test_exact_em_weights_a_level_by_its_signal_to_noise_ratio():
    task = task_of(HERE)
    task.weighting = "eps"
    given = task.rows(batch_of())
    assert torch.allclose(given.weight, given.sigma**-2)
    assert torch.equal(given.z, batch_of().noise)
    assert given.condition is not None
    assert given.sigma.dtype == torch.float64


def test_a_sample_is_the_denoiser_at_the_start_level():
    network, start = Blocks().double(), batch_of()
    found = generated(network, start.noise, 2.5, start.condition)
    assert torch.equal(found, network(2.5 * start.noise, torch.tensor(2.5), start.condition))


# ---------------------------------------------------------------- what is reported


def test_the_spread_is_the_deviation_of_samples_over_all_batches():
    task, g = task_of(HERE), torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 3, 2, generator=g) * 2 + 5 for n in (10, 6)]
    for part in parts:
        task.watched.add(part, {"gap": torch.full((len(part),), float(len(part)))})
    expected = torch.cat(parts).double().var(0, unbiased=False).mean().sqrt()
    assert task.report() == pytest.approx({"watch/gap": 8.5, "watch/spread": float(expected)})
    assert task.report() == {}


def test_of_stiffness_the_worst_sample_is_told():
    """One level at which a chain is about to diverge is no news in a mean over all levels."""
    task = task_of(HERE)
    for values in ([0.1, 1.9, 0.1], [0.2, 0.3, 0.1]):
        task.watched.add(torch.zeros(3, 2), {"stiffness": torch.tensor(values)})
    assert task.report()["watch/stiffness"] == pytest.approx(1.9)
    task.watched.add(torch.zeros(1, 2), {"stiffness": torch.tensor([0.4])})
    assert task.report()["watch/stiffness"] == pytest.approx(0.4)


@pytest.mark.parametrize("diverged", [0, 1, 2])
def test_a_process_that_diverged_is_told_whatever_the_others_say(diverged, monkeypatch):
    task, stiffness = task_of(HERE), [2.0, 0.5, 1.5]
    stiffness[diverged] = float("nan")
    task.watched.add(torch.zeros(1, 2), {"stiffness": torch.tensor([1.0])})
    every = [{"stiffness": value} for value in stiffness]
    monkeypatch.setattr(World, "gather", lambda self, value: every)
    assert math.isnan(task.report()["watch/stiffness"])


def test_of_a_skipped_update_each_process_tells_what_the_chain_of_one_shows(monkeypatch):
    """A skip is of all processes, its reason may be of one."""
    task = task_of(HERE)
    task.watched.add(torch.zeros(1, 2), {"stiffness": torch.tensor([0.5])}, skipped=True)
    monkeypatch.setattr(World, "gather", lambda self, value: [value, {"stiffness": 3.0}])
    assert task.report() == {"watch/stiffness": 3.0}


def test_a_run_whose_chain_runs_away_says_so():
    """Every update is skipped, and the chain alone knows why."""
    task = task_of(HERE, single=True)
    task.method = partial(emd, chain=Langevin(64, 0.16, 0.9, stretch=1e-3))
    engine = engine_of(task, HERE, lines := Lines())
    with pytest.raises(UserError, match=r"or raise --method\.stretch"):
        engine.run(starts(single=True).feed(0, BATCH, HERE))
    told = [line["watch/stiffness"] for line in lines.lines if "watch/stiffness" in line]
    assert told
    assert all(value > 2 for value in told)


@pytest.mark.parametrize(
    ("method", "teacher", "student", "backward"),
    [
        # own: a forward and a backward; K times a forward, a product, and both denoisers
        (partial(emd, chain=Langevin(4)), 4, 1 + 4 * 2, 1 + 4 * 0.5),
        (partial(emd, chain=Langevin(4, latent_step=0)), 4, 1 + 1 + 4, 1),
        (partial(emd, chain=Langevin(4, bookkeeping="stein")), 5, 1 + 5 * 2, 1 + 4 * 0.5),
        (METHODS["diff-instruct"], 1, 2, 1),
        (METHODS["dmd"], 1, 2, 1),
        (METHODS["sid"], 2, 2, 1.5),
        (METHODS["f-distill"], 9, 10, 1),
    ],
)
def test_evaluations_of_an_update_are_counted(method, teacher, student, backward):
    assert method_evaluations(method) == Evaluations(teacher, student, backward)
    task = task_of(HERE)
    task.method, task.score_steps = method, 3
    assert task.evaluations_per_image == Evaluations(teacher, student + 6, backward + 3)


def test_evaluations_are_those_that_happen():
    task = task_of(HERE, K=5)
    engine, calls = engine_of(task, HERE), {"student": 0, "score": 0}

    def count(name, *_):
        calls[name] += 1

    for name, module in task.modules().items():
        module.register_forward_hook(partial(count, name))
    task.step(batch_of(), engine)
    assert sum(calls.values()) == task.evaluations_per_image.student


# ---------------------------------------------------------------- trouble


def test_a_bad_batch_is_one_skipped_update_and_reports_nothing():
    task = task_of(HERE)
    engine, before = engine_of(task, HERE), state(task.student)
    bad = batch_of()
    bad.noise[3] = torch.nan
    task.step(bad, engine)
    assert engine.skips_in_a_row == 1
    assert len(engine.updates["score"]) == 2
    assert same(task.student, before)
    assert task.watched.suspicion() == ""
    assert task.report() == {}
    task.step(batch_of(), engine)
    assert engine.skips_in_a_row == 0


def test_after_a_skipped_update_of_the_fake_score_nothing_follows():
    task = task_of(HERE)
    engine = engine_of(task, HERE)
    bad = task.score.register_forward_hook(lambda module, given, answer: answer * torch.nan)
    task.step(batch_of(), engine)
    assert engine.skips_in_a_row == 1
    assert not engine.updates
    bad.remove()
    task.step(batch_of(), engine)
    assert engine.skips_in_a_row == 0


def test_what_cannot_be_matched_is_refused():
    student, score, _ = networks_of(HERE)
    with pytest.raises(ValueError, match="frozen"):
        Matching(student, score, Blocks().train(), 2.5, HERE)
    for wrong in ({"score_steps": 0}, {"sigma_star": 0.0}):
        options: dict[str, Any] = {"sigma_star": 2.5, **wrong}
        with pytest.raises(UserError):
            Matching(student, score, frozen(Blocks()), world=HERE, **options)


# ---------------------------------------------------------------- a fake score of adapters


def test_without_its_adapters_a_score_is_the_teacher_bit_for_bit():
    plain, start = Blocks().eval(), batch_of()
    score = LoraScore(adapted(Blocks(dropout=0.5)))
    x, sigma = start.noise.float(), torch.full((BATCH,), 0.7)
    score.train()
    assert torch.equal(score.teacher(x, sigma, start.condition), plain(x, sigma, start.condition))
    assert score.training
    score.eval()
    assert not torch.allclose(score(x, sigma), plain(x, sigma), atol=1e-3)
    guided = classifier_free(score.teacher, Condition(label=torch.tensor([0])), 1.0)
    assert torch.equal(guided(x, sigma, start.condition), plain(x, sigma, start.condition))


def test_training_the_adapters_leaves_the_teacher_as_it_was():
    task = task_of(HERE, lora=True)
    teacher, start = task.teacher, batch_of()
    sigma = torch.full((BATCH,), 0.7, dtype=torch.float64)
    before = teacher(start.noise, sigma, start.condition)
    faked = task.score(start.noise, sigma, start.condition)
    engine_of(task, HERE).run(starts().feed(0, BATCH, HERE))
    assert torch.equal(teacher(start.noise, sigma, start.condition), before)
    assert not torch.allclose(task.score(start.noise, sigma, start.condition), faked)


@dataclass
class Apart:
    """A family's networks outside of the engine."""

    student: nn.Module
    teacher: Any
    score: nn.Module

    def generate(self, z, cond):
        return generated(self.student, z, 2.5, cond)

    @contextmanager
    def still(self):
        networks = (self.student.eval(), self.teacher, self.score.eval())
        yield Still(lambda z, cond: generated(networks[0], z, 2.5, cond), *networks[1:])


@pytest.mark.parametrize("method", METHODS)
def test_one_network_for_both_teaches_as_two_networks_do(method):
    """Also where the gradient goes through teacher and score (sid)."""
    given, noise = task_of(HERE).rows(batch_of()), ChainNoise(list(range(BATCH)), 0)
    score = LoraScore(adapted(Blocks())).double()
    plain = frozen(Blocks().double())
    found = []
    for teacher, fake in ((score.teacher, score), (plain, copy.deepcopy(score))):
        student = Blocks().double()
        outcome = METHODS[method](Apart(student, teacher, fake), given, noise)
        outcome.per_sample.sum().backward()
        found.append([outcome.per_sample, *(p.grad for p in student.parameters())])
        assert all(p.grad is None for p in fake.parameters())
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    assert any(g.abs().max() > 1e-3 for g in found[0][1:])


def test_adapters_take_their_share_of_memory_and_checkpoints():
    """Of rank 2 in layers of width 256: about 1/64 of a second network and its moments."""
    sizes = {"sizes": {"width": 256, "depth": 4}}

    def sizes_of(**options):
        task = task_of(HERE, **sizes, **options)
        engine = engine_of(task, HERE)
        task.step(batch_of(), engine)
        networks = [task.student, task.score]
        held = [t for n in networks for t in n.parameters()]
        if isinstance(task.teacher, nn.Module):
            held += task.teacher.parameters()
        held += [t for n in engine.networks.values() for s in n.optimiser.state.values()
                 for t in s.values()]  # fmt: skip
        saved = [*engine.tensors()["score"]["network"].values()]
        return [sum(t.numel() * t.element_size() for t in ts) for ts in (held, saved)]

    whole, lora = sizes_of(analytic=False), sizes_of(lora=True)
    network = sum(p.numel() * 8 for p in Blocks(**sizes["sizes"]).parameters())
    rank = 2 * 2 * 256 * 4 * 8  # two factors of rank 2, of four layers
    assert whole[1] == network
    assert lora[1] == rank
    # Without: student and moments (3), score and moments (3), teacher (1). With: 3 + 1, adapters.
    assert whole[0] == pytest.approx(7 * network, rel=1e-3)
    assert lora[0] == pytest.approx(4 * network + 3 * rank, rel=1e-3)


def test_a_score_without_adapters_is_refused():
    with pytest.raises(ValueError, match="no adapters"):
        LoraScore(Blocks())


# ---------------------------------------------------------------- whole runs


def test_a_log_line_tells_what_to_watch():
    for line in alone()[:-1]:
        names = ("gap", "spread", "drift", "agreement", "stiffness")
        assert {f"watch/{name}" for name in names} <= line.keys()
    assert len(alone()) == STEPS + 1
    assert alone()[-2]["watch/gap"] < 0.7 * alone()[0]["watch/gap"]


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_is_bit_equal(tmp_path, lora):
    """Losses, and at the end weights, averages and so both optimisers."""
    options = {"dropout": 0.1, "save_every": 5, "lora": lora}
    whole = numbers(train(HERE, **options))
    first = numbers(train(HERE, **options, store=str(tmp_path), stop_at=8))[:-1]
    rest = numbers(train(HERE, **options, store=str(tmp_path)))
    assert len(first) < STEPS
    assert rest[0]["images"] == first[-1]["images"] + BATCH
    assert first + rest == whole


@pytest.mark.parametrize("method", METHODS)
def test_accumulation_equals_the_large_batch(method):
    """Also where the last piece is ragged."""
    assert_close(numbers(train(HERE, method=method, micro=5)), alone(method), 1e-5)


def test_recomputed_activations_are_those_of_the_chain():
    """Dropout is off within it, also when its graph is computed a second time."""
    plain = numbers(train(HERE, dropout=0.3))
    assert_close(numbers(train(HERE, dropout=0.3, checkpointing=True)), plain, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "method", "lora", "analytic", "micro"),
    [
        ("fsdp", "emd", False, False, 0),  # of three sharded networks
        ("fsdp", "emd", False, False, 4),  # in ragged pieces of each process's six
        ("ddp", "emd", False, True, 4),
        ("fsdp", "emd", True, True, 0),
        ("fsdp", "sid", False, False, 0),  # through a teacher that is sharded, too
        ("fsdp", "sid", True, True, 0),  # through one sharded network, as both
    ],
)
def test_two_processes_equal_one(sharding, method, lora, analytic, micro):
    options = {"sharding": sharding, "method": method, "lora": lora, "analytic": analytic}
    words = json.dumps(options | {"micro": micro})
    done = loaded.run(str(SCRIPT), words, processes=2, PYTHONPATH=str(SCRIPT.parents[1]))
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close(numbers(json.loads(done.stdout)), alone(method, lora, analytic), 1e-5)


def test_memory_does_not_grow_with_the_chain():
    """Bytes of tensors, counted by torch's profiler."""
    assert peak_bytes(K=16) < 1.05 * peak_bytes(K=1)
