"""A run that is killed again and again ends as one that never was, bit for bit."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resilience.runs import (
    BATCH,
    SOURCES,
    Run,
    State,
    assert_same_end,
    assert_same_state,
    ids,
    losses,
    numbers,
    small,
    write_data,
)

from stillhouse.recipes.claims import locked

pytestmark = pytest.mark.slow

# Log lines sum over several steps, and fall between checkpoints and on them.
LENGTH = {"images": 60 * BATCH, "log_every": 3 * BATCH, "checkpoint_every": 4 * BATCH}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory) -> dict[str, Run]:
    """Runs that nothing happened to."""
    runs = {}
    for kind in SOURCES:
        folder = tmp_path_factory.mktemp(kind)
        data = write_data(folder, kind)
        if kind == "streamed":  # its readers are processes too
            data = data.model_copy(update={"workers": 1})
        runs[kind] = Run(small(folder / "whole", data, **LENGTH), folder / "cache")
    at_once(Run.end, runs)
    return runs


@pytest.fixture(scope="module")
def killed(wholes) -> dict[str, Run]:
    """The same runs, killed five times each."""
    runs = {kind: whole.twin("killed") for kind, whole in wholes.items()}
    at_once(kill_five_times, runs)
    return runs


def at_once(work: Callable[[Run], Any], runs: dict[str, Run]) -> None:
    """To use two cores."""
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(work, runs.values()))


def parts_of_a_write(run: Run) -> dict[Path, int]:
    """The tensor files of checkpoints that are not complete, with the time of their last change."""
    found = {}
    for images, complete in run.checkpoints.items():
        for file in run.checkpoint(images).glob("*.distcp"):
            with suppress(FileNotFoundError):
                found |= {} if complete else {file: file.stat().st_mtime_ns}
    return found


def freeze_in_a_write(run: Run, trains: int, process: subprocess.Popen) -> None:
    """Stops it when a part of a checkpoint is there: frozen, it cannot complete it meanwhile."""
    before = parts_of_a_write(run)

    def writing() -> bool:
        if parts_of_a_write(run).items() <= before.items():
            return False
        os.kill(trains, signal.SIGSTOP)
        run.wait_until(lambda: threads(trains) == {"T"}, process, pause=0.001)
        if not parts_of_a_write(run).items() <= before.items():
            return True
        os.kill(trains, signal.SIGCONT)
        return False

    run.wait_until(writing, process, pause=0.01)


def threads(pid: int) -> set[str]:
    """The states that they are in; a T stands still."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def kill(run: Run, moments: random.Random, *, in_a_write: bool) -> None:
    """Starts it and kills it: in a write, or a few random steps after a new checkpoint."""
    sessions = len(run.log)
    with run.started() as process:
        run.wait_until(lambda: len(run.log) != sessions, process)
        trains = run.holder
        if in_a_write:
            freeze_in_a_write(run, trains, process)
        else:
            before, steps = saved(run), moments.randint(0, 4)
            run.wait_until(lambda: saved(run) > before, process)
            begun = run.reached
            run.wait_until(lambda: run.reached >= begun + steps * BATCH, process)
            time.sleep(moments.uniform(0, 0.1))
        os.kill(trains, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        with locked(run.out):  # its folder is free, though a reader of data may still live
            pass


def saved(run: Run) -> int:
    """The images of its last checkpoint that is complete."""
    return max((images for images, complete in run.checkpoints.items() if complete), default=0)


def kill_five_times(run: Run) -> None:
    """Twice certainly in the middle of a write; then it may end.

    What ends it has loaded everything anew: then also the order of sets is another.
    """
    moments = random.Random(3)
    for in_a_write in (False, True, False, True, False):
        kill(run, moments, in_a_write=in_a_write)
        assert parts_of_a_write(run) or not in_a_write
    said = replace(run, fresh=True).end().splitlines()
    assert all("is passed over" in line for line in said if line[0] != " "), said  # and its source


@pytest.mark.parametrize("kind", SOURCES)
def test_five_kills_change_nothing(kind, wholes, killed):
    run = killed[kind]
    assert_same_end(run, wholes[kind])
    first, *later = [line["images"] for line in run.log if "session" in line]
    assert first == 0
    assert len(later) == 5
    assert all(0 < images < run.config.images for images in later)  # each went on from a checkpoint
    assert all(run.checkpoints.values())
    assert not list(run.out.rglob("*.partial"))


def test_a_scheduler_that_asks_to_stop_gets_a_checkpoint_of_that_moment(wholes):
    whole = wholes["streamed"]
    run = whole.twin("stopped")
    with run.started() as process:
        run.wait_until(lambda: run.reached >= 9 * BATCH, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    stopped = run.reached
    assert stopped < run.config.images
    assert State.of(run).images == stopped
    assert len(ids(run.log)) == stopped
    run.end()
    assert_same_state(State.of(run), State.of(whole))
    assert run.model == whole.model
    assert ids(run.log) == ids(whole.log)
    # One line of the log is cut in two: no sum spans a resume.
    cut = {stopped, min(images for images in losses(whole.log) if images >= stopped)}
    one, other = (
        [line for line in numbers(log) if line["images"] not in cut] for log in (run.log, whole.log)
    )
    assert one == other
