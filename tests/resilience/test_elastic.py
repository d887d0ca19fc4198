"""Under torchrun: a worker that dies is replaced, and any number of processes goes on."""

import os
import signal
import subprocess
from collections import Counter

import pytest
from resilience.runs import (
    BATCH,
    EPOCH,
    Run,
    State,
    assert_same_end,
    ids,
    losses,
    network,
    small,
    write_data,
)

pytestmark = pytest.mark.slow

LONG = [12, 25, 17, 9, 23, 15] * 4  # rows of the shards of a long epoch
# Dropout is keyed by (seed, step, rank), so it is the one thing that the spread changes.
CALM = {"network": network(dropout=0.0)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Run:
    """An indexed run of one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("indexed")
    run = Run(small(folder / "alone", write_data(folder, "indexed"), **CALM), folder / "cache")
    run.end()
    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Run:
    """A streamed run of two processes that nothing happened to, shorter than an epoch."""
    folder = tmp_path_factory.mktemp("streamed")
    data = write_data(folder, "streamed", shards=LONG)
    run = Run(small(folder / "pair", data, images=24 * BATCH), folder / "cache")
    run.end(processes=2)
    return run


def workers(run: Run) -> dict[int, int]:
    """The process of each rank."""
    started = run.processes.items()
    return {int(given["RANK"]): pid for pid, given in started if "RANK" in given}


def kill_worker(run: Run, launcher: subprocess.Popen, rank: int) -> list[dict]:
    """Kills it past the first checkpoint; returns the log as it was before the run recovered."""
    run.wait_until(lambda: any(run.checkpoints.values()) and run.reached >= 7 * BATCH, launcher)
    before = sessions(run)
    os.kill(workers(run)[rank], signal.SIGKILL)
    computed = run.log

    def recovered() -> bool:
        nonlocal computed
        log = run.log
        computed = max(computed, log, key=len)  # its end goes when the run recovers
        return len(sessions(run)) > len(before)

    run.wait_until(recovered, launcher)
    return computed


def sessions(run: Run) -> list[int]:
    """The images at which each session began."""
    return [line["images"] for line in run.log if "session" in line]


def bereave(run: Run, rank: int) -> None:
    """Two processes, of which one is lost on the way; accounts for what is done again."""
    with run.started(processes=2, restarts=3) as launcher:
        computed = kill_worker(run, launcher, rank)
        assert launcher.wait(300) == 0, run.stderr.read_text()[-4000:]
    begun, resumed = sessions(run)
    assert begun == 0 < resumed
    assert State.of(run).images == len(ids(run.log)) == run.config.images
    again = [line for line in computed if line["images"] > resumed and "ids" in line]
    # A checkpoint may have been under way: then it is the one before that counts.
    assert 0 < len(again) <= 2 * run.config.checkpoint_every // BATCH
    final = {line["images"]: line["ids"] for line in run.log if "ids" in line}
    assert [line["ids"] for line in again] == [final[line["images"]] for line in again]


def test_a_lost_worker_is_replaced_and_every_epoch_is_whole(alone):
    run = alone.twin("killed")
    bereave(run, rank=1)
    seen = ids(run.log)
    assert seen == ids(alone.log)
    for start in range(0, len(seen) - EPOCH + 1, EPOCH):
        assert sorted(seen[start : start + EPOCH]) == list(range(EPOCH))
    assert losses(run.log) == pytest.approx(losses(alone.log), abs=1e-4)


def test_a_stream_recovers_bit_for_bit_and_another_number_goes_on_by_shards(pair):
    run = pair.twin("killed")
    bereave(run, rank=0)
    assert_same_end(run, pair)
    first = ids(run.log)
    assert len(set(first)) == len(first)  # within its epoch nothing comes twice
    epoch = sum(LONG)
    run.end("--images", str(2 * epoch // BATCH * BATCH))
    [note] = [line["message"] for line in run.log if "granularity" in line.get("message", "")]
    assert "continues at the granularity of shards (world 2 -> 1)" in note
    repeats = int(note.split("at most ")[1].split()[0])
    assert 0 < repeats < len(first)
    rest = ids(run.log)[len(first) :]
    rest_of_epoch = rest[: epoch - len(first) + repeats]
    assert set(first) | set(rest_of_epoch) == set(ids(run.log))
    assert len(set(ids(run.log))) == epoch
    again = sum((Counter(first) & Counter(rest_of_epoch)).values())
    assert again <= repeats


def test_two_processes_that_are_told_to_stop_go_on_as_one_and_three_and_two(alone):
    """A scheduler tells torchrun, torchrun its workers, and these agree on the step."""
    run = alone.twin("reshaped")
    with run.started(processes=2) as launcher:
        run.wait_until(lambda: run.reached >= 6 * BATCH, launcher)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(300)
    assert 6 * BATCH <= State.of(run).images == run.reached < 24 * BATCH
    for processes, steps in ((1, 24), (3, 32), (2, 40)):
        run.end("--images", str(steps * BATCH), processes=processes)
        assert State.of(run).world == processes
    assert losses(run.log) == pytest.approx(losses(alone.log), abs=1e-4)
    assert ids(run.log) == ids(alone.log)
    assert State.of(run).images == alone.config.images
