"""Features as files: the same bytes by any number of processes, after a kill, and read back."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import warm
from features.store_process import IDS, facts, names, reader
from safetensors import safe_open
from safetensors.torch import load_file

from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.features.store import StoredFeatures, extract_all, shard_name

TESTS = Path(__file__).parents[1]
ALONE = World(0, 1, torch.device("cpu"))
COUNT = 300  # 15 shards of 20


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def extract(out, count=50, here=ALONE, make=reader, **changes):
    extract_all(out, facts(count, **changes), names(count), make, here)
    return out


def test_what_was_written_is_what_the_extractor_gives(tmp_path):
    stored = StoredFeatures(extract(tmp_path / "out"))
    assert (len(stored), stored.ids[7]) == (50, "image 7")
    assert stored.shapes == {IDS[0]: (16, 4, 4), IDS[1]: (8, 8, 8)}
    assert stored.facts == facts(50)
    expected = reader()(range(40, 48))  # the first batch of the third shard
    for name, value in stored[43].items():
        assert value.dtype == torch.float16
        torch.testing.assert_close(value, expected[name][3].half(), atol=0, rtol=0)
        assert torch.equal(stored.of("image 43")[name], value)
    assert len(list(stored)) == 50
    assert [len(load_file(tmp_path / "out" / shard_name(n))[IDS[0]]) for n in range(3)] == [
        20,
        20,
        10,
    ]
    with pytest.raises(IndexError):
        stored[50]
    with pytest.raises(UserError, match="no features of 'image 50'"):
        stored.of("image 50")


def test_any_number_of_workers_takes_shards_in_turn(tmp_path):
    """Ranks of three, one after the other: each makes its own, together they make all."""
    whole = contents(extract(tmp_path / "whole", 110))

    class Alone(World):  # no process group: nothing is exchanged
        def barrier(self):
            pass

        def first(self, work):
            with suppress(FileNotFoundError, UserError):  # the index of shards still to come
                work()

    made = []
    for rank in (2, 0, 1):
        here = Alone(rank, 3, torch.device("cpu"))
        extract(tmp_path / "parts", 110, here)
        made.append({int(f.stem[6:]) for f in (tmp_path / "parts").glob("shard-*")})
    assert made == [{2, 5}, {0, 2, 3, 5}, {0, 1, 2, 3, 4, 5}]
    assert contents(tmp_path / "parts") == whole


def test_a_finished_extraction_loads_no_model_and_changes_nothing(tmp_path):
    before = contents(extract(tmp_path))

    def fail():
        raise AssertionError("the model was loaded")

    extract(tmp_path, make=fail)
    assert contents(tmp_path) == before
    (tmp_path / shard_name(1)).unlink()
    with pytest.raises(AssertionError, match="was loaded"):
        extract(tmp_path, make=fail)
    with pytest.raises(UserError, match=r"no index\.json: its extraction is not finished"):
        StoredFeatures(tmp_path)
    extract(tmp_path)
    assert contents(tmp_path) == before


def test_features_that_lie_otherwise_in_memory(tmp_path):
    """Maps of tokens, and what channels-last networks give."""
    x = torch.arange(50 * 24.0).view(50, 2, 3, 4)

    def make():
        kinds = {
            "tokens": lambda part: part.flatten(2).mT.contiguous().mT.unflatten(2, (3, 4)),
            "last": lambda part: part.to(memory_format=torch.channels_last),
        }
        return lambda n: {name: kind(x[n.start : n.stop]) for name, kind in kinds.items()}

    stored = StoredFeatures(extract(tmp_path, make=make))
    assert all(torch.equal(value, x[33].half()) for value in stored[33].values())


@pytest.mark.parametrize("change", [{"seed": 1}, {"dtype": "float32"}, {"batch": 5}, {"shard": 9}])
def test_a_folder_of_other_features_is_refused(tmp_path, change):
    before = contents(extract(tmp_path))
    with pytest.raises(UserError, match="holds other features"):
        extract(tmp_path, **change)
    assert contents(tmp_path) == before


def test_other_images_in_the_same_number_are_other_features(tmp_path):
    extract(tmp_path)
    with pytest.raises(UserError, match="holds other features"):
        extract_all(tmp_path, facts(50), names(50)[::-1], reader, ALONE)


def test_what_cannot_be_stored_or_read_is_told(tmp_path):
    def large():
        return lambda numbers: {"a": torch.full((len(numbers), 1, 2, 2), 1e5)}

    with pytest.raises(UserError, match="a has values that float16 cannot hold"):
        extract(tmp_path / "a", make=large)
    stored = StoredFeatures(extract(tmp_path / "b", make=large, dtype="bfloat16"))
    assert float(stored[0]["a"][0, 0, 0]) == pytest.approx(1e5, rel=1e-2)
    (tmp_path / "b" / shard_name(2)).write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"shard-00002.* cannot be read .*remove it"):
        extract(tmp_path / "b", make=large, dtype="bfloat16")
    with pytest.raises(UserError, match="is not finished"):
        StoredFeatures(tmp_path / "nowhere")
    (tmp_path / "b" / "index.json").write_text(json.dumps({"facts": {}}))
    with pytest.raises(UserError, match="cannot be read"):
        StoredFeatures(tmp_path / "b")


# ---------------------------------------------------------------- real processes


def start(out, slow=0.0, workers=2):
    script = [str(TESTS / "features/store_process.py"), str(out), str(COUNT), str(slow)]
    return subprocess.Popen(
        warm.command(*script, processes=workers),
        env=warm.environment(PYTHONPATH=os.pathsep.join([str(TESTS), *sys.path])),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for(true, seconds=120):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_worker_is_killed_and_the_job_restarted(tmp_path):
    """300 images on 2 workers, one of them killed in the middle: the shards of one that was not."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    extract(whole, COUNT)
    process = start(killed, slow=0.3)
    # The second worker makes every other shard, from the second on.
    wait_for((killed / shard_name(3)).exists)
    os.kill(int(Path(f"{killed}.pids/1").read_text()), signal.SIGKILL)
    assert process.wait(timeout=120) != 0
    left = contents(killed)
    shards = [name for name in left if name.endswith(".safetensors")]
    assert 2 <= len(shards) < 15
    assert "index.json" not in left
    for name in shards:  # those that were written are whole
        with safe_open(killed / name, "pt") as file:
            assert set(file.keys()) == set(IDS)
    written = {name: (killed / name).stat().st_mtime_ns for name in shards}
    assert start(killed).wait(timeout=240) == 0
    assert contents(killed) == contents(whole)
    assert {name: (killed / name).stat().st_mtime_ns for name in shards} == written
