"""Damaged checkpoints, full disks and losses that are no numbers: said in a sentence, mended."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from resilience.runs import (
    BATCH,
    Run,
    State,
    assert_same_end,
    assert_same_state,
    ids,
    numbers,
    small,
    write_data,
)

from stillhouse.engine.optimisers import AdamW

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("damage")
    run = Run(small(folder / "whole", write_data(folder, "indexed")), folder / "cache")
    run.end()
    return run


def sentence(stderr: str) -> str:
    """The one that a run ends with: no stack trace, no second line."""
    [line] = stderr.strip().splitlines()
    assert line.startswith("stillhouse train: ")
    assert line.endswith(".")
    return line


# ---------------------------------------------------------------- checkpoints


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_damaged_checkpoints_are_passed_over_and_the_run_ends_the_same(whole, tmp_path):
    run = whole.twin(tmp_path / "damaged")
    shutil.copytree(whole.out, run.out)
    newest, middle, good = sorted(run.checkpoints)[:-4:-1]
    truncate(run.checkpoint(newest) / "__0_0.distcp")
    flip_a_bit(run.checkpoint(middle) / "__0_0.distcp")
    said = run.end()
    [session] = [line for line in run.log if line["images"] == good and "session" in line]
    for where in (said, session["message"]):
        assert re.search(
            rf"{newest:012d} is passed over: __0_0.distcp has \d+ bytes instead", where
        )
        assert re.search(rf"{middle:012d} is passed over: __0_0.distcp has changed since", where)
    assert f"the one at {good} images is used" in said
    assert_same_end(run, whole)


# ---------------------------------------------------------------- disks


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A real file system of its own, whose size the test sets."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def resize(disk: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


def test_a_disk_that_is_full_of_checkpoints_ends_the_run_cleanly(whole, disk):
    """There is room for two of 1 MB; the third is begun and given up."""
    run, good = whole.twin(disk / "full"), 2 * whole.config.checkpoint_every
    resize(disk, 2600)
    said = sentence(run.end(code=1))
    assert f"checkpoint at {good + whole.config.checkpoint_every} images could not be wri" in said
    assert "No space left on device" in said
    assert f"the one at {good} images is intact" in said
    assert State.of(run).images == good  # it loads
    resize(disk, 16_000)
    run.end()
    assert_same_end(run, whole)


def test_a_disk_that_is_full_of_other_things_ends_the_run_at_a_line_of_the_log(
    whole, disk, tmp_path
):
    every = 20 * BATCH
    places = {"checkpoints": str(tmp_path / "kept"), "checkpoint_every": every}
    run = whole.twin(disk / "filled", **places)
    resize(disk, 16_000)  # which is soon full
    with run.started() as process:
        run.wait_until(lambda: run.reached > every, process)
        os.kill(run.holder, signal.SIGSTOP)  # or it might be at the next checkpoint by now
        fill(disk)
        os.kill(run.holder, signal.SIGCONT)
        assert process.wait(60) == 1
    said = sentence(run.stderr.read_text())
    assert "log.jsonl cannot be written (No space left on device)" in said
    assert State.of(run).images == every
    (disk / "ballast").unlink()
    run.end()
    assert_same_state(State.of(run), State.of(whole))
    assert numbers(run.log) == numbers(whole.log)


def test_a_disk_without_room_for_the_model_ends_the_run_cleanly(whole, disk, tmp_path):
    """One model of 53 kB fits, and its successor has to stand beside it for a moment."""
    run = whole.twin(disk / "tight", checkpoints=str(tmp_path / "kept"))
    resize(disk, 108)
    said = sentence(run.end(code=1))
    assert "model/diffusion_pytorch_model.safetensors: No space left on device" in said
    assert State.of(run).images == whole.config.checkpoint_every
    assert not list(disk.rglob("*.partial"))
    resize(disk, 16_000)
    run.end()
    assert_same_end(run, whole)


# ---------------------------------------------------------------- not a number


def test_a_loss_that_is_no_number_skips_names_its_samples_and_stops_with_advice(whole, tmp_path):
    """The first update makes weights of 1e30; no later one has a finite loss."""
    optim = AdamW(lr=1e30)
    run = whole.twin(tmp_path / "poisoned", optim=optim, max_skips=3)
    said = sentence(run.end(code=1))
    assert "4 updates of denoiser in a row had a loss or gradient that is not finite" in said
    assert "Lower the learning rate" in said
    skipped = [line for line in run.log if "skipped" in line]
    assert [line["images"] for line in skipped] == [n * BATCH for n in (2, 3, 4, 5)]
    assert [i for line in skipped for i in line["ids"]] == ids(whole.log)[BATCH : 5 * BATCH]
