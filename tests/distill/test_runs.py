"""SFD-v in the engine: exact when resumed, equal in pieces and on several processes."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import loaded
import pytest
import torch
from distill.distil_run import BATCH, STEPS, train

from stillhouse.engine.world import World

HERE = World(0, 1, torch.device("cpu"))
SCRIPT = Path(__file__).with_name("distil_run.py")
WITHOUT = ("images_per_second", "data_wait", "checkpoint")


def numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was learnt, without how fast."""
    kept = [{k: v for k, v in line.items() if k not in WITHOUT} for line in lines]
    return [line for line in kept if len(line) > 1]


@cache
def alone(afs: bool = True) -> list[dict[str, Any]]:
    return numbers(train(HERE, afs=afs))


def assert_close(lines: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for line, other in zip(lines, others, strict=True):
        assert line == pytest.approx(other, rel=1e-6)


def test_a_log_line_has_the_loss_of_every_step():
    steps = {key.split("/")[0] for line in alone() for key in line if key.startswith("timestamps")}
    assert steps == {"timestamps4", "timestamps5", "timestamps6"}
    assert len(alone()) == STEPS


def test_a_resumed_run_has_bit_equal_losses(tmp_path):
    options = {"dropout": True, "save_every": 5}
    whole = numbers(train(HERE, **options))
    first = numbers(train(HERE, **options, store=str(tmp_path), stop_at=8))
    rest = numbers(train(HERE, **options, store=str(tmp_path)))
    assert len(first) < STEPS
    assert rest[0]["images"] == first[-1]["images"] + BATCH
    assert first + rest == whole


@pytest.mark.parametrize("afs", [True, False])
@pytest.mark.parametrize("micro", [3, 5])
def test_accumulation_equals_the_large_batch(micro, afs):
    """Also where the last piece is ragged, though each step begins where the last one ended."""
    assert_close(numbers(train(HERE, micro=micro, afs=afs)), alone(afs))


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "afs"), [("ddp", True), ("fsdp", False)])
def test_two_processes_equal_one(sharding, afs):
    options = json.dumps({"sharding": sharding, "afs": afs})
    done = loaded.run(str(SCRIPT), options, processes=2, PYTHONPATH=str(SCRIPT.parents[1]))
    assert done.returncode == 0, done.stderr[-3000:]
    assert_close(numbers(json.loads(done.stdout)), alone(afs))
