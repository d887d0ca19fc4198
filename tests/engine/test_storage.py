"""Folders on disks and in object stores: whole files or none, patience, and true records."""

import hashlib
import pickle
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.contents import MANIFEST, FileRecord
from stillhouse.engine.storage import Folder, RecordedFiles, Writer
from stillhouse.errors import UserError


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    place = Folder.at(tmp_path / "a" if request.param == "disk" else "memory://storage/a")
    yield place
    place.clear()


def record_of(data: bytes) -> FileRecord:
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def test_files_go_in_and_come_out(folder):
    assert folder.names() == []
    record = folder.write("x.json", b"first")
    assert record == record_of(b"first")
    folder.write("x.json", b"second, longer")
    assert folder.read("x.json") == b"second, longer"
    assert (folder.size("x.json"), folder.sha256("x.json")) == (
        14,
        hashlib.sha256(b"second, longer").hexdigest(),
    )
    (folder / "inner").write("y", b"")
    assert folder.names() == ["inner", "x.json"]
    folder.remove("x.json")
    folder.remove("x.json")
    assert folder.names() == ["inner"]
    folder.clear()
    folder.clear()
    assert folder.names() == []


def test_damage_is_told_apart(folder):
    record = folder.write("x", b"abc")
    assert folder.damage("x", record) is None
    assert folder.damage("y", record) == "y is missing"
    folder.write("x", b"abd")
    assert folder.damage("x", record) == "x has changed since it was written (SHA-256)"
    folder.write("x", b"ab")
    assert folder.damage("x", record) == "x has 2 bytes instead of 3"


def test_a_local_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    folder = Folder.at(tmp_path)
    folder.write("x", b"old")

    def broken(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="No space"):
        folder.write("x", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_the_manifest_is_removed_first(tmp_path, monkeypatch):
    folder = Folder.at(tmp_path / "a")
    for name in (MANIFEST, "a", "z"):
        folder.write(name, b"1")

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder.fs, "rm", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.clear()
    monkeypatch.undo()
    assert folder.names() == ["a", "z"]


def test_an_unknown_protocol_is_a_sentence():
    with pytest.raises(UserError, match="nosuch://a/b cannot be opened: "):
        Folder.at("nosuch://a/b")


def test_home_and_relative_paths_are_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert str(Folder.at("~/runs")) == str(Folder.at("runs/")) == str(tmp_path / "runs")
    assert str(Folder.at("memory://runs/a")) == "memory:///runs/a"


# ---------------------------------------------------------------- what torch writes


def test_the_record_is_of_what_went_through(folder):
    files = RecordedFiles(folder)
    files.mkdir("")
    with files.create_stream("a.tmp", "wb") as stream:
        torch.save(torch.arange(1000), stream)
    files.rename("a.tmp", "a")
    assert files.written == {"a": record_of(folder.read("a"))}
    assert files.exists("a")
    assert not files.exists("a.tmp")
    with files.create_stream("a", "rb") as stream:
        assert torch.equal(torch.load(stream), torch.arange(1000))


def test_a_stream_that_fails_is_no_record(folder):
    files = RecordedFiles(folder)
    files.mkdir("")
    with pytest.raises(OSError, match=r"a: .*pickle"), files.create_stream("a", "wb") as stream:
        pickle.dump([bytes(9), lambda: 0], stream)
    assert files.written == {}


def test_a_full_disk_is_named_though_torch_reports_something_else(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    alone = pytest.warns(UserWarning, match="torch.distributed is disabled")
    with alone, pytest.raises(dcp.CheckpointException, match="No space left"):
        dcp.save({"a": torch.zeros(100_000)}, storage_writer=Writer(Folder.at(tmp_path)))


# ---------------------------------------------------------------- patience


class Flaky(MemoryFileSystem):
    """An object store of which every third request fails at first."""

    protocol = "flaky"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    asked: ClassVar[Counter[str]] = Counter()
    requests = 0

    def _maybe(self, what: str) -> None:
        Flaky.requests += 1
        Flaky.asked[what] += 1
        if Flaky.requests % 3 == 0:
            raise ConnectionResetError(f"{what}: connection reset by peer")

    def cat_file(self, *args, **kwargs):
        self._maybe("get")
        return super().cat_file(*args, **kwargs)

    def pipe_file(self, *args, **kwargs):
        self._maybe("put")
        return super().pipe_file(*args, **kwargs)

    def ls(self, *args, **kwargs):
        self._maybe("list")
        return super().ls(*args, **kwargs)

    def _open(self, *args, **kwargs):
        self._maybe("open")
        return super()._open(*args, **kwargs)


@pytest.fixture
def flaky(monkeypatch):
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    Flaky.store.clear()
    Flaky.asked.clear()


def test_an_object_store_that_stutters_loses_nothing(flaky):
    store = CheckpointStore("flaky://bucket/run", keep_last=2)
    for images in (1, 2, 3, 4):
        store.save(images, {"x": torch.full((50,), float(images))}, {"images": images})
    found, target = store.find(), {"x": torch.zeros(50)}
    assert found is not None
    assert found.skipped == ()
    assert store.load(found, target) == {"images": 4}
    assert torch.all(target["x"] == 4)
    assert store.root.names() == ["images-000000000003", "images-000000000004"]
    assert min(Flaky.asked[kind] for kind in ("get", "put", "list", "open")) > 2


def test_patience_ends(flaky):
    folder = Folder.at("flaky://bucket")
    calls: list[int] = []

    def down() -> None:
        calls.append(1)
        raise ConnectionResetError("down")

    with pytest.raises(ConnectionResetError):
        folder.patiently(down)
    assert len(calls) == 4
    with pytest.raises(FileNotFoundError):
        folder.patiently(Path("/no/such/file").read_bytes)


def test_a_disk_is_asked_once(tmp_path):
    calls: list[int] = []

    def broken() -> None:
        calls.append(1)
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        Folder.at(tmp_path).patiently(broken)
    assert len(calls) == 1
