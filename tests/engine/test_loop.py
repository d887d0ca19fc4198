"""The one loop: equal on any spread over processes, exact when resumed, honest about NaN."""

import json
import random
import subprocess
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import loaded
import pytest
import torch
import warm
from torch import nn

from stillhouse.engine.loop import Engine, LoopConfig
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World
from stillhouse.errors import UserError

SCRIPT = Path(__file__).with_name("toy_run.py")


def run(processes: int = 1, **options) -> list[dict]:
    """The log lines of a whole run."""
    done = loaded.run(str(SCRIPT), json.dumps(options), processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def losses(lines: list[dict]) -> list[float]:
    return [value for line in lines for key, value in line.items() if key.endswith("/loss")]


@cache
def alone(task: str, steps: int = 50) -> list[float]:
    return losses(run(task=task, steps=steps))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, {"sharding": "ddp"}),
        (2, {"sharding": "fsdp"}),
        (4, {"sharding": "hsdp", "shard_size": 2}),
        (3, {"sharding": "fsdp", "micro": 2}),
        (2, {"sharding": "ddp", "micro": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("task", ["one", "three"])
def test_every_spread_gives_the_curve_of_one_process(task, processes, options):
    curve = losses(run(processes, task=task, steps=50, **options))
    assert curve == pytest.approx(alone(task), abs=1e-5)


@pytest.mark.parametrize("task", ["one", "three"])
@pytest.mark.parametrize("micro", [3, 5])
def test_accumulation_equals_the_large_batch(task, micro):
    """Also where update i + 1 needs the result of update i, and where the last piece is ragged."""
    assert losses(run(task=task, steps=50, micro=micro)) == pytest.approx(alone(task), abs=1e-5)


def test_activation_checkpointing_changes_nothing():
    curve = losses(run(task="three", steps=50, checkpointing=True))
    assert curve == pytest.approx(alone("three"), abs=1e-6)


def test_bf16_follows_fp32_loosely_and_is_not_it():
    curve = losses(run(task="one", steps=50, precision="bf16"))
    assert curve == pytest.approx(alone("one"), abs=0.05)
    assert curve != alone("one")


def without_speed(lines: list[dict]) -> list[dict]:
    return [
        {k: v for k, v in line.items() if k not in ("images_per_second", "data_wait")}
        for line in lines
    ]


def wait_for_change(folder: Path, process: subprocess.Popen) -> None:
    """Until a checkpoint is begun that was not there before."""
    before, deadline = set(folder.glob("*")), time.monotonic() + 60
    while set(folder.glob("*")) <= before and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_bit_identical(tmp_path):
    """SIGKILL at random moments; dropout shows that randomness is keyed, not consumed."""
    options = {"task": "three", "steps": 1000, "dropout": 0.1, "save_every": 20}
    whole = without_speed(run(**options, store=str(tmp_path / "whole")))
    moments, kills = random.Random(0), 0
    for _ in range(5):
        cut = json.dumps({**options, "store": str(tmp_path / "cut")})
        words = loaded.command(str(SCRIPT), cut)
        process = subprocess.Popen(words, env=loaded.environment(), stdout=subprocess.DEVNULL)
        # Somewhere within the writing of a checkpoint or the steps after it.
        wait_for_change(tmp_path / "cut", process)
        time.sleep(moments.uniform(0, 0.15))
        kills += process.poll() is None
        warm.kill(process)
    assert kills == 5
    last = without_speed(run(**options, store=str(tmp_path / "cut")))
    assert last == whole[len(whole) - len(last) :]
    finals = [
        folder / f"images-{12 * 1000:012d}" for folder in (tmp_path / "whole", tmp_path / "cut")
    ]
    states = [json.loads((f / "manifest.json").read_text())["files"] for f in finals]
    data = [{k: v for k, v in s.items() if k.endswith(".distcp")} for s in states]
    assert data[0] == data[1]  # SHA-256 of weights and optimiser states


def test_a_nan_batch_skips_the_update_and_names_its_samples():
    lines = run(steps=6, poison=[30])
    events = [line for line in lines if "skipped" in line]
    assert len(events) == 1
    assert events[0]["skipped"] == "net"
    assert 30 in events[0]["ids"]
    assert all(loss == loss for loss in losses(lines)[3:])  # it goes on


def test_a_run_of_nans_stops_with_advice():
    options = {"steps": 20, "poison": list(range(1000)), "max_skips": 3}
    done = loaded.run(str(SCRIPT), json.dumps(options))
    assert done.returncode != 0
    assert "4 updates of net in a row" in done.stderr
    assert "Lower the learning rate" in done.stderr


def test_good_updates_do_not_hide_that_another_network_never_learns():
    class Two:
        """Of two networks, one has no finite loss, ever."""

        def __init__(self):
            self.networks = {"good": nn.Linear(1, 1), "bad": nn.Linear(1, 1)}

        def modules(self):
            return self.networks

        def step(self, batch, engine):
            engine.update("good", lambda x: (engine["good"](x)[:, 0], None), batch)
            engine.update("bad", lambda x: (float("nan") * engine["bad"](x)[:, 0], None), batch)

        def report(self):
            return {}

    config = LoopConfig(images=100, batch=2, max_skips=3)
    networks = {name: NetworkConfig() for name in ("good", "bad")}
    engine = Engine(Two(), config, networks, World(0, 1, torch.device("cpu")))
    feed = (SimpleNamespace(batch=torch.ones(2, 1), state={}) for _ in range(50))
    with pytest.raises(UserError, match="4 updates of bad in a row"):
        engine.run(feed)
    assert engine.images == 6


@pytest.mark.slow
def test_skipping_is_a_collective_decision():
    """A NaN on one of two processes: both skip, and the curve is that of one process."""
    together = run(2, steps=10, poison=[30], sharding="ddp")
    single = run(1, steps=10, poison=[30])
    assert [line.get("skipped") for line in together] == [line.get("skipped") for line in single]
    after = losses(together)[4:], losses(single)[4:]
    assert after[0] == pytest.approx(after[1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (2, 3), (1, 2)])
def test_a_checkpoint_resumes_on_another_number_of_processes(tmp_path, first, then):
    def spread(processes):
        return {} if processes == 1 else {"sharding": "fsdp"}

    store = str(tmp_path)
    run(first, steps=20, task="three", store=store, **spread(first))
    rest = losses(run(then, steps=50, task="three", store=store, **spread(then)))
    assert rest == pytest.approx(alone("three")[-len(rest) :], abs=1e-4)
    assert len(rest) == 2 * 30
