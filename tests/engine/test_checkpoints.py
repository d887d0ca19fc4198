"""Checkpoints survive kills, damage, full disks and malice; any number of processes reads them.

Run as a script, this file is one of the processes of its distributed tests.
"""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from stillhouse.engine import storage
from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.contents import (
    MANIFEST,
    CheckpointError,
    FileRecord,
    folder_name,
    outdated,
    read_manifest,
    spell_manifest,
)

VALUES = {"config": {"lr": 2e-4}, "rng": "00ff", "history": [1, 2.5, None, True]}


def state(seed: int, size: int = 8) -> dict[str, Any]:
    """A state with every kind of tensor that training keeps."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "network": {
            "weight": torch.randn(size, 4, generator=draw),
            "half": torch.randn(size, generator=draw).bfloat16(),
            "count": torch.tensor(seed),
            "none": torch.zeros(0, 3),
        },
        "groups": [{"lr": 0.1 * seed, "betas": (0.9, 0.99), "names": ["a", "b"], "fused": None}],
    }


def tensors_of(tree: dict[str, Any]) -> list[Tensor]:
    return list(tree["network"].values())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return one["groups"] == other["groups"] and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )


def saved(root: Path | str, *images: int, **options: Any) -> CheckpointStore:
    """A store with a complete checkpoint at each of these, of `state(images)`."""
    store = CheckpointStore(root, **options)
    for count in images:
        store.save(count, state(count), {**VALUES, "images": count})
    store.wait()
    return store


def loaded(store: CheckpointStore) -> tuple[dict[str, Any], dict[str, Any]]:
    found, target = store.find(), state(0)
    assert found is not None
    return target, store.load(found, target)


def folders(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("images-")) for path in root.iterdir())


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_state_and_values_come_back_as_they_were(kind, tmp_path):
    root = {"path": tmp_path, "file": f"file://{tmp_path}/x", "memory": "memory://round/trip"}[kind]
    store = saved(root, 1000, 2000)
    target = state(0)
    places = [tensor.data_ptr() for tensor in tensors_of(target)]
    found = store.find()
    assert found is not None
    assert (found.images, found.world_size, found.skipped) == (2000, 1, ())
    assert store.load(found, target) == {**VALUES, "images": 2000}
    assert same(target, state(2000))
    assert [tensor.data_ptr() for tensor in tensors_of(target)] == places
    assert target["groups"][0]["betas"] == (0.9, 0.99)


def test_values_of_a_rank_are_kept_apart(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(5, state(5), {}, {"generator": "ab"})
    found = store.find()
    assert found is not None
    assert store.rank_values(found) == [{"generator": "ab"}]


def test_a_new_folder_has_none(tmp_path):
    assert CheckpointStore(tmp_path / "not" / "there").find() is None
    assert not (tmp_path / "not").exists()


def test_training_may_change_the_state_as_soon_as_save_returns(tmp_path, monkeypatch):
    def late(self, folder):
        time.sleep(0.3)
        original(self, folder)

    original = storage.Writer.__init__
    monkeypatch.setattr(storage.Writer, "__init__", late)
    store, live = CheckpointStore(tmp_path), state(7)
    store.save(7, live, VALUES)
    assert store.busy
    for tensor in tensors_of(live):
        tensor.zero_()
    live["groups"][0]["lr"] = 5.0
    store.wait()
    assert not store.busy
    assert same(loaded(store)[0], state(7))


def test_the_kept_copy_is_of_this_save_and_not_of_the_last(tmp_path):
    """Host memory is kept from save to save: same storages, new numbers, then new shapes."""
    store, live = CheckpointStore(tmp_path), state(1)
    for images in (1, 2):
        for tensor, new in zip(tensors_of(live), tensors_of(state(images)), strict=True):
            tensor.copy_(new)
        store.save(images, live, VALUES)
    found, target = store.find(), state(0)
    assert found is not None
    store.load(found, target)
    assert torch.equal(target["network"]["weight"], state(2)["network"]["weight"])
    store.save(3, state(3, size=20), VALUES)
    found, target = store.find(), state(0, size=20)
    assert found is not None
    store.load(found, target)
    assert same(target, state(3, size=20))


def test_torch_reads_the_tensors_too(tmp_path):
    saved(tmp_path, 3)
    flat = {"network.weight": torch.zeros(8, 4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(flat, storage_reader=dcp.FileSystemReader(tmp_path / folder_name(3)))
    assert torch.equal(flat["network.weight"], state(3)["network"]["weight"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def network(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def restore(store: CheckpointStore, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    found, target = store.find(), whole_state(model, optimizer)
    assert found is not None
    values = store.load(found, target)
    set_model_state_dict(model, target["model"])
    set_optimizer_state_dict(model, optimizer, target["optimizer"])
    return values


def test_training_continues_bit_for_bit(tmp_path):
    store = CheckpointStore(tmp_path)
    model, optimizer = network()
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 0.004
    store.save(3, whole_state(model, optimizer), {})
    train(model, optimizer, range(3, 8))
    again, its_optimizer = network(seed=1)
    restore(store, again, its_optimizer)
    assert its_optimizer.param_groups[0]["lr"] == 0.004
    train(again, its_optimizer, range(3, 8))
    assert all(map(torch.equal, model.parameters(), again.parameters()))


# ---------------------------------------------------------------- what does not fit is named


@pytest.mark.parametrize(
    ("tensors", "values", "named"),
    [
        ({"net": {"f": print}}, {}, "net.f is a builtin_function_or_method"),
        ({"net": [torch.ones(1), {1, 2}]}, {}, "net.1 is a set"),
        ({"net": (torch.ones(1),)}, {}, "net.0 is a Tensor"),
        ({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}}, {}, "two entries .* a.b.c"),
        ({}, {"rng": b"00"}, "values.rng is a bytes"),
        ({}, {"seen": {3: 1}}, "values.seen is a dict"),
    ],
)
def test_what_is_neither_tensor_nor_plain_is_refused_before_anything_is_written(
    tensors, values, named, tmp_path
):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=named):
        store.save(1, tensors, values)
    store.wait()
    assert not list(tmp_path.iterdir())


def test_other_names_and_shapes_are_named(tmp_path):
    store = saved(tmp_path, 1)
    found = store.find()
    assert found is not None
    more = state(0)
    more["ema"] = {"weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"cannot be loaded: it has no ema.weight\."):
        store.load(found, more)
    with pytest.raises(CheckpointError, match=r"weight has shape \(8, 4\) in it and \(9, 4\) here"):
        store.load(
            found,
            state(0, size=9) | {"network": state(0)["network"] | {"weight": torch.zeros(9, 4)}},
        )
    less = {"network": {"weight": torch.zeros(8, 4)}}
    with pytest.raises(
        CheckpointError, match=r"nothing here takes its network\.count, network\.half"
    ):
        store.load(found, less)
    store.load(found, less, partial=True)
    assert torch.equal(less["network"]["weight"], state(1)["network"]["weight"])


# ---------------------------------------------------------------- damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path, bit: int = 77) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "harm", "reason"),
    [
        ("__0_0.distcp", truncate, r"__0_0.distcp has \d+ bytes instead of \d+"),
        ("__0_0.distcp", flip, "__0_0.distcp has changed since it was written"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        (".metadata", truncate, r".metadata has \d+ bytes"),
        (".metadata", flip, ".metadata has changed"),
        ("values.json", flip, "values.json has changed"),
        ("values-00000.json", Path.unlink, "values-00000.json is missing"),
        (MANIFEST, truncate, "its manifest.json is damaged"),
        (MANIFEST, flip, "its manifest.json is damaged"),
        (MANIFEST, Path.unlink, "it has no manifest.json, so the run ended before it was complete"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_the_one_before_is_used(
    name, harm, reason, tmp_path
):
    saved(tmp_path, 1000, 2000)
    harm(tmp_path / folder_name(2000) / name)
    store = CheckpointStore(tmp_path)
    with pytest.warns(UserWarning, match=f"2000 is passed over: {reason}.* 1000 images is used"):
        found = store.find()
    assert found is not None
    assert found.images == 1000
    assert len(found.skipped) == 1
    target = state(0)
    assert store.load(found, target)["images"] == 1000
    assert same(target, state(1000))


def test_any_flipped_bit_is_noticed(tmp_path):
    saved(tmp_path, 1000, 2000)
    dice = random.Random(0)
    for path in sorted((tmp_path / folder_name(2000)).iterdir()):
        for _ in range(12):
            bit = dice.randrange(8 * path.stat().st_size)
            flip(path, bit)
            with pytest.warns(UserWarning, match="passed over"):
                found = CheckpointStore(tmp_path).find()
            assert found is not None
            assert found.images == 1000
            flip(path, bit)
    found = CheckpointStore(tmp_path).find()
    assert found is not None
    assert found.images == 2000


def test_a_run_does_not_start_anew_because_all_is_damaged(tmp_path):
    saved(tmp_path, 1, 2)
    for images in (1, 2):
        flip(tmp_path / folder_name(images) / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is intact; move the folder"):
        CheckpointStore(tmp_path).find()


def test_a_first_checkpoint_that_was_not_finished_is_none(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / folder_name(1) / MANIFEST).unlink()
    with pytest.warns(UserWarning, match="there is no earlier one"):
        assert CheckpointStore(tmp_path).find() is None


def test_a_newer_format_is_named(tmp_path):
    body = json.loads(spell_manifest(5, 1, {}))
    with pytest.raises(CheckpointError, match="its format is 2, and this Stillhouse reads 1"):
        read_manifest(json.dumps({**body, "format": 2}).encode(), 5)
    assert read_manifest(spell_manifest(5, 3, {"a": FileRecord(1, "f")}), 5).world_size == 3
    with pytest.raises(CheckpointError, match="damaged"):
        read_manifest(spell_manifest(5, 1, {}), 6)
    with pytest.raises(CheckpointError, match="outside the folder"):
        read_manifest(spell_manifest(5, 1, {"../a": FileRecord(1, "f")}), 5)


# ---------------------------------------------------------------- malice


class Gadget:
    """Unpickled without restriction, it calls a function of its choice."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


def plant(folder: Path, name: str, data: bytes) -> None:
    """Replaces a file and makes the manifest agree: checksums do not protect from malice."""
    (folder / name).write_bytes(data)
    manifest = read_manifest((folder / MANIFEST).read_bytes(), 1)
    files = {n: storage.Folder.at(folder) for n in manifest.files}
    records = {n: FileRecord(f.size(n), f.sha256(n)) for n, f in files.items()}
    (folder / MANIFEST).write_bytes(spell_manifest(1, 1, records))


def pickled(thing: Any) -> bytes:
    return pickle.dumps(thing)


def rewriting_a_class() -> bytes:
    """`Metadata.planner_data = ()`, by the opcode that restores the attributes of an object."""
    metadata = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return metadata + b"(N}(Vplanner_data\n)utb."


def described(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"state_dict_metadata": {}, "storage_data": {}}
    return pickle.dumps(Metadata(**(fields | changes)))


MALICE = {
    "a system call": (lambda mark: pickled(Gadget(os.system, f"touch {mark}")), "posix.system"),
    "eval": (lambda mark: pickled(Gadget(eval, f"open({str(mark)!r}, 'w')")), "builtins.eval"),
    "open": (lambda mark: pickled(Gadget(open, str(mark), "w")), "open"),
    "a process": (
        lambda mark: pickled({"x": [Gadget(subprocess.call, ["touch", str(mark)])]}),
        "subprocess.call",
    ),
    "torch.load": (lambda mark: pickled(Gadget(torch.load, str(mark))), "torch.serialization.load"),
    "a dotted way out": (
        lambda mark: b"\x80\x04\x8c\x05torch\x8c\tos.system\x93\x8c\x04true\x85R.",
        "torch.os.system",
    ),
    "a rewritten class": (lambda mark: rewriting_a_class(), "rewrites Metadata.planner_data"),
    "something else": (lambda mark: pickled({"a": 1}), "holds a dict"),
    "no pickle": (lambda mark: b"nothing", "cannot be read"),
    "pickled objects": (
        lambda mark: described(state_dict_metadata={"network.weight": BytesStorageMetadata()}),
        "BytesStorageMetadata",
    ),
}


@pytest.mark.parametrize("kind", MALICE)
def test_a_malicious_description_is_refused_and_runs_nothing(kind, tmp_path):
    make, named = MALICE[kind]
    mark = tmp_path / "mark"
    store = saved(tmp_path / "run", 1)
    plant(tmp_path / "run" / folder_name(1), ".metadata", make(mark))
    found = store.find()
    assert found is not None, "the manifest is valid: only the unpickler stands in the way"
    with pytest.raises(CheckpointError, match=f"cannot be loaded: .*{named}"):
        store.load(found, state(0))
    assert not mark.exists()
    assert Metadata({}).planner_data is None


def test_the_malice_of_these_tests_is_real(tmp_path):
    for kind in ("a system call", "eval", "open", "a process"):
        mark = tmp_path / kind.replace(" ", "")
        pickle.loads(MALICE[kind][0](mark))
        assert mark.exists()
    pickle.loads(rewriting_a_class())
    assert Metadata.planner_data == ()
    Metadata.planner_data = None


def test_a_description_cannot_point_outside_its_folder(tmp_path):
    store = saved(tmp_path, 1)
    folder = tmp_path / folder_name(1)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../../secret"
    plant(folder, ".metadata", pickle.dumps(metadata))
    found = store.find()
    assert found is not None
    with pytest.raises(CheckpointError, match="points outside the files of its manifest"):
        store.load(found, state(0))


def test_a_malicious_tensor_file_is_refused_and_runs_nothing(tmp_path):
    """The description is genuine; where it says that a tensor lies, there lies a gadget."""
    mark = tmp_path / "mark"
    store = saved(tmp_path / "run", 1)
    folder = tmp_path / "run" / folder_name(1)
    payload = folder.parent / "payload"
    torch.save(Gadget(os.system, f"touch {mark}"), payload)
    data = payload.read_bytes()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(data)
    plant(folder, ".metadata", pickle.dumps(metadata))
    plant(folder, "__0_0.distcp", data)
    found = store.find()
    assert found is not None
    with pytest.raises(
        CheckpointError, match=r"cannot be loaded: __0_0\.distcp holds .* nothing of it was run"
    ):
        store.load(found, state(0))
    assert not mark.exists()
    torch.load(payload, weights_only=False)
    assert mark.exists(), "the gadget works where nothing stops it"


# ---------------------------------------------------------------- what is kept


def test_the_newest_and_the_milestones_are_kept(tmp_path):
    saved(tmp_path, *range(300, 3001, 300), keep_last=2, keep_every=1000)
    assert folders(tmp_path) == [1200, 2100, 2700, 3000]


@given(
    st.sets(st.integers(0, 500), min_size=1),
    st.integers(1, 5),
    st.none() | st.integers(1, 100),
)
def test_pruning_step_by_step_keeps_what_pruning_at_once_would(times, last, every):
    """Milestones do not depend on when one looks; the newest always stay."""
    left: set[int] = set()
    for newest in sorted(times):
        left.add(newest)
        gone = outdated(left, newest, last, every)
        assert gone <= left - set(sorted(left)[-last:])
        left -= gone
    assert left == set(times) - outdated(times, max(times), last, every)
    if every:
        assert {t // every for t in times} - {0} == {t // every for t in left} - {0}


def test_leftovers_of_a_killed_run_go_when_a_newer_one_is_complete(tmp_path):
    saved(tmp_path, 1, 2, 9)
    for images in (2, 9):
        (tmp_path / folder_name(images) / MANIFEST).unlink()
    (tmp_path / "notes").mkdir()
    store = CheckpointStore(tmp_path, keep_last=5)
    assert store.root.names() == ["images-000000000001", *map(folder_name, (2, 9)), "notes"]
    store.save(3, state(3), VALUES)
    store.wait()
    shutil.rmtree(tmp_path / "notes")
    assert folders(tmp_path) == [1, 3]


def test_damaged_ones_do_not_take_the_place_of_good_ones(tmp_path):
    saved(tmp_path, 1, 2, 5)
    flip(tmp_path / folder_name(5) / "__0_0.distcp")
    store = CheckpointStore(tmp_path, keep_last=2)
    with pytest.warns(UserWarning, match="passed over"):
        loaded(store)
    store.save(3, state(3), VALUES)
    store.wait()
    assert folders(tmp_path) == [2, 3, 5]
    store.save(6, state(6), VALUES)
    store.wait()
    assert folders(tmp_path) == [3, 6]


def test_a_damaged_one_is_replaced_when_the_run_comes_by_again(tmp_path):
    saved(tmp_path, 1, 5)
    truncate(tmp_path / folder_name(5) / "__0_0.distcp")
    (tmp_path / folder_name(5) / "__1_0.distcp").write_text("of a second process")
    store = CheckpointStore(tmp_path)
    with pytest.warns(UserWarning, match="passed over"):
        loaded(store)
    store.save(5, state(5), VALUES)
    assert same(loaded(store)[0], state(5))
    assert not (tmp_path / folder_name(5) / "__1_0.distcp").exists()


def test_saving_again_at_the_same_place_does_nothing(tmp_path):
    store = saved(tmp_path, 5)
    written = (tmp_path / folder_name(5) / MANIFEST).stat().st_mtime_ns
    store.save(5, state(5), VALUES)
    store.close()
    assert (tmp_path / folder_name(5) / MANIFEST).stat().st_mtime_ns == written


# ---------------------------------------------------------------- disks and kills


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("rows", [4_000, 40_000])
def test_a_full_disk_is_said_and_the_last_good_state_stays(rows, small_disk):
    """0.6 MB fits once and not twice, in the buffer of the file or far beyond it."""
    store = CheckpointStore(small_disk)
    store.save(1000, state(1000, size=30_000), VALUES)
    store.wait()
    store.save(2000, state(2000, size=30_000 + rows), VALUES)
    with pytest.raises(
        CheckpointError,
        match="The checkpoint at 2000 images could not be written to .*images-000000002000: .*"
        r"No space left on device; the one at 1000 images is intact\.",
    ):
        store.wait()
    assert folders(small_disk) == [1000]
    target = state(0, size=30_000)
    fresh = CheckpointStore(small_disk)
    found = fresh.find()
    assert found is not None
    fresh.load(found, target)
    assert same(target, state(1000, size=30_000))
    (small_disk / folder_name(1000)).rename(small_disk / "elsewhere")
    shutil.rmtree(small_disk / "elsewhere")
    store.save(2000, state(2000, size=30_000), VALUES)
    store.wait()
    assert folders(small_disk) == [2000]


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


def test_a_disk_that_fills_up_at_the_manifest_leaves_none(small_disk):
    store = CheckpointStore(small_disk)
    store.save(1, state(1), VALUES)
    store.wait()
    original = storage.Folder.write

    def write(self, name, data):
        if name == MANIFEST:
            fill(small_disk / "ballast")
        return original(self, name, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.Folder, "write", write)
        store.save(2, state(2), VALUES)
        with pytest.raises(CheckpointError, match="No space left on device; the one at 1 images"):
            store.wait()
    (small_disk / "ballast").unlink()
    assert folders(small_disk) == [1]


def test_the_failure_of_a_save_is_known_before_the_next(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = CheckpointStore(tmp_path / "file")
    store.save(1, state(1), VALUES)
    deadline = time.monotonic() + 20
    while store.busy and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.failure is not None
    with pytest.raises(CheckpointError, match=r"could not be written to .*file"):
        store.save(2, state(2), VALUES)
    assert store.failure is None


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    with started("slow_save", tmp_path, 1) as [process]:
        half = tmp_path / "run" / folder_name(2000) / "__0_0.distcp"
        wait_until(lambda: half.exists() and half.stat().st_size > 0)
        process.send_signal(signal.SIGKILL)
    store = CheckpointStore(tmp_path / "run")
    with pytest.warns(UserWarning, match="2000 is passed over: it has no manifest.json"):
        target, values = loaded(store)
    assert values["images"] == 1000
    assert same(target, state(1000))
    store.save(2000, state(2000), VALUES)
    assert same(loaded(store)[0], state(2000))


# ---------------------------------------------------------------- several processes


def wait_until(done: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come to this in time"
        time.sleep(0.005)


@contextmanager
def started(role: str, folder: Path, size: int) -> Iterator[list[subprocess.Popen]]:
    """So many processes that run the function of this name below; none outlives the block."""
    command = [sys.executable, __file__, role, str(folder)]
    options: Any = {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen([*command, str(rank), str(size)], text=True, **options)
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        (folder / "meeting").unlink(missing_ok=True)


def together(role: str, folder: Path, size: int) -> None:
    with started(role, folder, size) as processes:
        errors = [process.communicate(timeout=120)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * size, "\n".join(errors)


def sharded_network(size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2 over all processes; rows of 16 and 3 divide unevenly by 3 and by 2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = network(seed)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def as_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the state in full, by name."""
    flat = dict(get_model_state_dict(model))
    for name, entry in get_optimizer_state_dict(model, optimizer)["state"].items():
        flat |= {f"{name}/{kind}": tensor for kind, tensor in entry.items()}
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in flat.items()
    }


def save_sharded(folder: Path, rank: int, size: int) -> None:
    """Trains and saves, while training's own collectives go on."""
    model, optimizer = sharded_network(size, seed=0)
    train(model, optimizer, range(3))
    store = CheckpointStore(folder / "run")
    before = {name: tensor.clone() for name, tensor in as_one(model, optimizer).items()}
    for images in (10, 20):
        store.save(images, whole_state(model, optimizer), {"n": images}, {"rank": rank})
        busy = torch.ones(())
        while busy:
            total = torch.ones(1000) * (rank + 1)
            dist.all_reduce(total)
            assert torch.all(total == size * (size + 1) / 2)
            train(model, optimizer, range(1)) if images == 20 else None
            busy = torch.tensor(float(store.busy))
            dist.all_reduce(busy)
    store.wait()
    if rank == 0:
        torch.save(before, folder / "expected.pt")


def load_sharded(folder: Path, rank: int, size: int) -> None:
    model, optimizer = sharded_network(size, seed=1)
    values = restore(store := CheckpointStore(folder / "run"), model, optimizer)
    expected, got = torch.load(folder / "expected.pt"), as_one(model, optimizer)
    assert values == {"n": 20}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    found = store.find()
    assert found is not None
    assert store.rank_values(found) == [{"rank": 0}, {"rank": 1}]
    assert found.world_size == 2
    if size == 3:
        store.save(30, whole_state(model, optimizer), {"n": 30})
        store.wait()


@pytest.mark.slow
def test_what_two_processes_saved_is_read_by_one_and_by_three_and_back(tmp_path):
    together("save_sharded", tmp_path, 2)
    manifest = json.loads((tmp_path / "run" / folder_name(20) / MANIFEST).read_text())
    assert manifest["world_size"] == 2
    assert {"__0_0.distcp", "__1_0.distcp", "values-00001.json"} <= manifest["files"].keys()
    model, optimizer = network(seed=1)
    assert restore(CheckpointStore(tmp_path / "run"), model, optimizer) == {"n": 20}
    expected, got = torch.load(tmp_path / "expected.pt"), as_one(model, optimizer)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    together("load_sharded", tmp_path, 3)
    again, its_optimizer = network(seed=2)
    assert restore(CheckpointStore(tmp_path / "run"), again, its_optimizer) == {"n": 30}
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def disagree(folder: Path, rank: int, size: int) -> None:
    """One of two cannot write; one of two finds the damage: both must come to the same end."""
    store = CheckpointStore(folder / "run")
    for images in (1, 2):
        store.save(images, state(images), {"n": images})
    store.wait()
    if rank == 1:
        storage.RecordedFiles.mkdir = failing  # type: ignore[method-assign]
    store.save(3, state(3), {})
    with pytest.raises(CheckpointError, match=r"at 3 images .* quota \(rank 1\); the one at 2"):
        store.wait()
    assert not (folder / "run" / folder_name(3)).exists()
    if rank == 0:
        flip(folder / "run" / folder_name(2) / "__1_0.distcp")
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = CheckpointStore(folder / "run").find()
    assert found is not None
    assert found.images == 1
    assert "__1_0.distcp has changed" in found.skipped[0]


def failing(self: Any, path: Any) -> None:
    raise OSError(122, "over quota")


@pytest.mark.slow
def test_what_fails_for_one_fails_for_all_with_the_same_sentence(tmp_path):
    together("disagree", tmp_path, 2)


def slow_save(folder: Path, rank: int, size: int) -> None:
    """A save that hangs after its first bytes are on the disk."""
    store = saved(folder / "run", 1000)
    storage._HashingStream.write = hanging  # type: ignore[method-assign]
    store.save(2000, state(2000), VALUES)
    store.wait()


def hanging(self: Any, data: Any) -> None:
    self.file.write(data)
    self.file.flush()
    time.sleep(600)


def bereaved(folder: Path, rank: int, size: int) -> None:
    """The other process is killed while both save."""
    store = saved(folder / "run", 1000)
    if rank == 1:
        storage._HashingStream.write = hanging  # type: ignore[method-assign]
    store.save(2000, state(2000), VALUES)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="writing a checkpoint failed"):
        store.wait()
    assert time.monotonic() - began < 60
    os._exit(0)  # the default group has lost a member too


@pytest.mark.slow
def test_a_process_that_dies_in_a_save_does_not_hang_the_others(tmp_path):
    with started("bereaved", tmp_path, 2) as (left, lost):
        half = tmp_path / "run" / folder_name(2000) / "__1_0.distcp"
        wait_until(lambda: half.exists() and half.stat().st_size > 0)
        lost.send_signal(signal.SIGKILL)
        errors = left.communicate(timeout=120)[1]
        assert left.returncode == 0, errors
    with pytest.warns(UserWarning, match="2000 is passed over: it has no manifest.json"):
        target, _ = loaded(CheckpointStore(tmp_path / "run"))
    assert same(target, state(1000))


if __name__ == "__main__":
    role, folder, rank, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if size > 1:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    {f.__name__: f for f in (save_sharded, load_sharded, disagree, slow_save, bereaved)}[role](
        folder, rank, size
    )
    if size > 1:
        dist.destroy_process_group()


def test_a_folder_that_is_not_shared_is_noticed_when_it_is_written(tmp_path):
    """Each machine would find its own files whole, and the first resume would find none."""
    from stillhouse.engine.checkpoints import _all_there
    from stillhouse.engine.storage import Folder

    folder = Folder.at(tmp_path / "images-000000000001")
    mine = {"values.json": folder.write("values.json", b"{}")}
    _all_there(folder, mine)
    with pytest.raises(CheckpointError, match=r"cannot see __1_0\.distcp.*one folder"):
        _all_there(folder, mine | {"__1_0.distcp": mine["values.json"]})
