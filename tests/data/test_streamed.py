"""Streamed sources: exact at the same number of readers, shard-granular at another."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from data.pictures import numbers, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from stillhouse.data import Columns, DataConfig, FaultConfig, ImageConfig, Parquet, RandomCrop, Tars
from stillhouse.data.shards import Cursor, ShardPlan
from stillhouse.data.sources import ShardedImages
from stillhouse.data.streamed import Reader
from stillhouse.errors import UserError

SIZES = [7, 9, 0, 5, 8, 6, 7, 3, 9, 4]
COUNT = sum(SIZES)


def config_for(kind, folder, sizes=SIZES, broken=(), **options):
    files = (write_shards(folder, kind, sizes, broken),)
    if kind == "tars":
        source, columns = Tars(files=files), Columns(image="png", label="cls")
    else:
        source, columns = Parquet(files=files, streaming=True), Columns(label="label")
    options = {"buffer": 10, **options}
    image = ImageConfig(size=8, crop=RandomCrop(zoom=1.5), flip=True)
    return DataConfig(source=source, columns=columns, image=image, **options)


def take(loader, steps):
    """Numbers, keys, a sum of the pixels, and the state, through JSON, of each batch."""
    items = iter(loader)
    out = []
    for _ in range(steps):
        item = next(items)
        batch = item.batch
        seen = (batch.ids.tolist(), batch.key.tolist(), batch.data.sum((1, 2, 3)).tolist())
        out.append((seen, json.loads(json.dumps(item.state))))
    return out


@pytest.mark.parametrize("kind", ["tars", "parquet"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_is_exact(kind, workers, tmp_path):
    config = config_for(kind, tmp_path / "data", workers=workers)
    whole = take(config.build(batch=4, seed=1), 24)
    assert [key for seen, _ in whole for key in seen[1]] == list(range(96))
    for cut in (1, 6, 13):
        loader = config.build(batch=4, seed=1, resume=[whole[cut - 1][1]])
        assert loader.note == "continues at the very next sample"
        assert take(loader, 24 - cut) == whole[cut:]


def test_ranks_resume_exactly_and_never_share_a_row(tmp_path):
    config = config_for("tars", tmp_path / "data")
    runs = [take(config.build(batch=6, seed=2, rank=r, world=2), 8) for r in range(2)]
    keys = [[seen[1] for seen, _ in run] for run in runs]
    assert [a + b for a, b in zip(*keys, strict=True)] == [
        list(range(i, i + 6)) for i in range(0, 48, 6)
    ]
    ids = [i for run in runs for seen, _ in run for i in seen[0]]
    assert len(set(ids)) == len(ids)
    states = [run[3][1] for run in runs]
    for rank in range(2):
        loader = config.build(batch=6, seed=2, rank=rank, world=2, resume=states)
        assert take(loader, 4) == runs[rank][4:]


def shown_in(runs):
    """Counts of the ids of several runs together."""
    return Counter(i for run in runs for seen, _ in run for i in seen[0])


@pytest.mark.parametrize(
    ("before", "after"), [((2, 0), (1, 0)), ((2, 0), (3, 0)), ((1, 0), (1, 2))]
)
def test_another_number_of_readers_goes_on_by_shards(before, after, tmp_path):
    (world, workers), (world2, workers2) = before, after
    config = config_for("tars", tmp_path / "data", workers=workers)
    first = [take(config.build(batch=6, seed=0, rank=r, world=world), 4) for r in range(world)]
    states = [run[-1][1] for run in first]
    config = config.model_copy(update={"workers": workers2})
    loaders = [
        config.build(batch=6, seed=0, rank=r, world=world2, resume=states) for r in range(world2)
    ]
    assert "granularity of shards" in loaders[0].note
    at_most = int(loaders[0].note.split("at most ")[1].split()[0])
    assert 0 < at_most <= 24
    rest = [take(loader, 14) for loader in loaders]  # every reader ends the epoch
    shown = shown_in(first)
    late = Counter()
    for run in rest:
        late |= Counter({i: 1 for seen, _ in run for i in seen[0]})
    assert len(shown | late) == COUNT
    keys = sorted(k for run in rest for seen, _ in run for k in seen[1])
    assert keys == list(range(24, 24 + 6 * 14))
    if after == (1, 0):  # one reader shows the rest of the epoch before anything else
        epoch = [i for seen, _ in rest[0] for i in seen[0]][: COUNT - 24 + at_most]
        assert sum(i in shown for i in epoch) == at_most
        assert len(set(epoch)) == len(epoch)


@settings(deadline=None, max_examples=150)
@given(
    shards=st.integers(1, 12),
    phases=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_no_visit_is_lost_or_made_twice(shards, phases):
    """Each phase is a number of readers, each of which finishes some shards; then all changes."""
    plan = ShardPlan(shards, seed=3)
    made = []
    for finished in phases:
        readers = len(finished)
        for reader, count in enumerate(finished):
            made += [plan.visit(reader + i * readers) for i in range(count)]
        plan = plan.rest([Cursor(reader, count) for reader, count in enumerate(finished)])
    made += [plan.visit(turn) for turn in range(40)]
    assert len(set(made)) == len(made)
    assert set(range(40)) <= set(made)


@settings(deadline=None, max_examples=20)
@given(shards=st.integers(1, 30), epoch=st.integers(0, 9))
def test_an_epoch_visits_every_shard(shards, epoch):
    plan = ShardPlan(shards, seed=1)
    visits = range(epoch * shards, (epoch + 1) * shards)
    assert sorted(plan.shard(v) for v in visits) == list(range(shards))


def test_what_repeats_is_what_the_note_says(tmp_path):
    """One reader becomes one with another buffer: the same order of shards, so counts are exact."""
    config = config_for("tars", tmp_path / "data")
    first = take(config.build(batch=5, seed=4), 5)
    config = config.model_copy(update={"buffer": 11})
    loader = config.build(batch=5, seed=4, resume=[first[-1][1]])
    repeat = int(loader.note.split("at most ")[1].split()[0])
    left = COUNT - 25 + repeat  # rows to the end of the epoch
    rest = [i for seen, _ in take(loader, -(-left // 5)) for i in seen[0]][:left]
    shown = shown_in([first])
    assert sum(i in shown for i in rest) == repeat
    assert len(set(shown) | set(rest)) == COUNT


def test_workers_that_gave_nothing_yet_have_a_position(tmp_path):
    config = config_for("tars", tmp_path / "data", workers=2)
    state = take(config.build(batch=5, seed=4), 1)[0][1]
    loader = config.model_copy(update={"workers": 0}).build(batch=5, seed=4, resume=[state])
    assert "at most 5 samples" in loader.note
    rest = [i for seen, _ in take(loader, 12) for i in seen[0]][:COUNT]
    assert len(set(rest)) == COUNT


def test_a_foreign_checkpoint_is_refused(tmp_path):
    config = config_for("tars", tmp_path / "data")
    state = take(config.build(batch=4, seed=1), 1)[0][1]
    with pytest.raises(UserError, match="the seed is not the one"):
        config.build(batch=4, seed=2, resume=[state])
    with pytest.raises(UserError, match="of 1 processes, 2 data states"):
        config.build(batch=4, seed=1, resume=[state, state])
    with pytest.raises(UserError, match="comes from an indexed source"):
        config.build(batch=4, seed=1, resume=[{"kind": "indexed", "images": 4}])
    (tmp_path / "data" / "shard-001.tar").unlink()
    with pytest.raises(UserError, match="list of shards is not the one"):
        config.build(batch=4, seed=1, resume=[state])


# ---------------------------------------------------------------- faults


def one_epoch(config, rows):
    loader = config.build(batch=1, seed=0)
    items = iter(loader)
    return sorted(numbers(next(items).batch)[0] for _ in range(rows)), loader.log


@pytest.mark.parametrize("kind", ["tars", "parquet"])
def test_corrupt_images_and_empty_shards_are_named_and_passed_over(kind, tmp_path):
    config = config_for(kind, tmp_path / "data", broken=(3, 20))
    config = config.model_copy(update={"image": ImageConfig(size=8)})
    seen, log = one_epoch(config, COUNT - 2)
    assert seen == [n for n in range(COUNT) if n not in (3, 20)]
    assert len(log) == 3
    report = log.report()
    assert "row 3 of " in report
    assert "shard-002" in report
    assert "no rows" in report


@pytest.mark.parametrize("kind", ["tars", "parquet"])
def test_a_truncated_shard_gives_what_it_has(kind, tmp_path):
    config = config_for(kind, tmp_path / "data", sizes=[12, 12, 12])
    config = config.model_copy(update={"image": ImageConfig(size=8)})
    path = next((tmp_path / "data").glob("shard-001.*"))
    path.write_bytes(path.read_bytes()[:6000] if kind == "tars" else path.read_bytes()[:-60])
    loader = config.build(batch=1, seed=0)
    items = iter(loader)
    seen = {numbers(next(items).batch)[0] for _ in range(40)}
    assert set(range(12)) | set(range(24, 36)) <= seen
    assert 23 not in seen
    assert "shard-001" in loader.log.report()
    assert "read up to row" in loader.log.report()


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_faults_stop(workers, tmp_path):
    config = config_for(
        "tars",
        tmp_path / "data",
        broken=range(4, 40),
        workers=workers,
        faults=FaultConfig(limit=5),
    )
    with pytest.raises(UserError, match=r"^6 faults in the data: .*the limit is 5") as error:
        take(config.build(batch=4, seed=0), 20)
    assert "Traceback" not in str(error.value)


def test_only_empty_shards_stop(tmp_path):
    with pytest.raises(UserError, match="none of the 2 files can be read"):
        config_for("tars", tmp_path / "tars", sizes=[0, 0]).build(batch=1, seed=0)
    loader = config_for("parquet", tmp_path / "parquet", sizes=[0, 0]).build(batch=1, seed=0)
    with pytest.raises(UserError, match="no shard has any rows"):
        next(iter(loader))


def test_a_failing_network_is_tried_again_and_nothing_changes(tmp_path, monkeypatch):
    config = config_for("tars", tmp_path / "data")
    calm = take(config.build(batch=4, seed=1), 12)
    monkeypatch.setattr("stillhouse.data.streamed.time.sleep", lambda seconds: None)
    rows, calls = ShardedImages.rows, Counter()

    def failing(self, shard, start=0):
        for row in rows(self, shard, start):
            calls["rows"] += 1
            if calls["rows"] % 5 == 0:
                raise ConnectionResetError("the other end hung up")
            yield row

    monkeypatch.setattr(ShardedImages, "rows", failing)
    loader = config.build(batch=4, seed=1)
    assert take(loader, 12) == calm
    assert calls["rows"] > 50
    assert "hung up" not in loader.log.report()


def test_a_network_that_stays_away_stops_with_advice(tmp_path, monkeypatch):
    config = config_for("tars", tmp_path / "data")
    loader = config.build(batch=4, seed=1)
    monkeypatch.setattr("stillhouse.data.streamed.time.sleep", lambda seconds: None)

    def dead(self, shard, start=0):
        raise TimeoutError("no answer")

    monkeypatch.setattr(ShardedImages, "rows", dead)
    with pytest.raises(UserError, match=r"after 6 tries .*no answer.*Run the same command again"):
        next(iter(loader))


def test_reading_is_spread_over_the_block(tmp_path):
    """No batch but the first waits for a whole block."""
    config = config_for("tars", tmp_path / "data")
    reader = Reader(config.build(batch=1, seed=0).job, 0, 1)
    reads = []
    for _ in range(30):
        next(reader)
        reads.append(len(reader.coming))
    assert max(b - a for a, b in pairwise(reads)) <= 1


# ---------------------------------------------------------------- two processes, killed


def start(config, rank, out, resume):
    script = Path(__file__).parent / "stream_process.py"
    arguments = [sys.executable, str(script), config.model_dump_json(), str(rank), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*arguments, json.dumps(resume)], env=environment)


def lines(path):
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_for(count, outs, processes):
    while min(len(lines(out)) for out in outs) < count:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)


@pytest.mark.slow
def test_two_processes_killed_in_the_middle_resume_exactly(tmp_path):
    config = config_for("tars", tmp_path / "data", workers=1)
    whole = [take(config.build(batch=6, seed=5, rank=r, world=2), 12) for r in range(2)]
    outs = [tmp_path / f"first-{rank}" for rank in range(2)]
    processes = [start(config, rank, outs[rank], []) for rank in range(2)]
    wait_for(5, outs, processes)
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    states = [lines(out)[4]["state"] for out in outs]  # of the last batch both consumed
    outs = [tmp_path / f"second-{rank}" for rank in range(2)]
    processes = [start(config, rank, outs[rank], states) for rank in range(2)]
    wait_for(7, outs, processes)
    for process in processes:
        process.kill()
        process.wait()
    for rank in range(2):
        assert [line["ids"] for line in lines(outs[rank])[:7]] == [
            seen[0] for seen, _ in whole[rank][5:]
        ]


@pytest.mark.slow
def test_workers_may_be_spawned(tmp_path):
    config = config_for("tars", tmp_path / "data", workers=1)
    spawned = config.model_copy(update={"worker_start": "spawn"})
    ours = [seen for seen, _ in take(spawned.build(batch=4, seed=1), 5)]
    assert ours == [seen for seen, _ in take(config.build(batch=4, seed=1), 5)]
