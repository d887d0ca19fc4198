"""The cache of latents and captions where runs meet, processes share work, or a disk is full."""

import os
import resource
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tunable import HERE, prepared, tuning

from stillhouse.data import cached
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models import Codec
from stillhouse.pipelines.prompts import PromptEncoder, prompt_digest
from stillhouse.recipes import encoded
from stillhouse.recipes.latents import build_codec
from stillhouse.recipes.train.training import TrainRun, build_loader
from stillhouse.recipes.train.tuning import fitted

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("encoder", [Codec, PromptEncoder])
def test_runs_that_start_together_do_not_harm_each_other(
    models, images, tmp_path, cache, monkeypatch, encoder
):
    """The second starts, and is ready, while the first encodes."""
    config = tuning(models["sd15"], images, tmp_path / "run", batch=12)
    encode, second = encoder.encode, []

    def meanwhile(self, given):
        if not second:
            second.append(None)
            second.append(prepared(config)[2])
            second.append(_files(cache))
        return encode(self, given)

    monkeypatch.setattr(encoder, "encode", meanwhile)
    first = prepared(config)[2]
    assert torch.equal(first.data, second[1].data)
    assert torch.equal(first.condition.text, second[1].condition.text)
    kept = {path: age for path, age in second[2].items() if ".partial" not in str(path)}
    assert kept.items() <= _files(cache).items()
    assert not list(cache.glob("*.partial"))


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("harm", ["no manifest", "lost", "cut"])
def test_what_is_not_whole_is_made_anew(models, images, tmp_path, cache, harm):
    config = tuning(models["sd15"], images, tmp_path / "run", batch=12)
    _, _, before = prepared(config)
    names = _files(cache).keys()
    for file in [f for f in names if (f.name == "manifest.json") == (harm == "no manifest")]:
        os.truncate(file, file.stat().st_size // 2) if harm == "cut" else file.unlink()
    _, _, after = prepared(config)
    assert torch.equal(before.data, after.data)
    assert torch.equal(before.condition.text, after.condition.text)
    assert _files(cache).keys() == names


def test_what_a_killed_run_leaves_is_cleared_away_after_a_day(models, images, tmp_path, cache):
    config = tuning(models["sd15"], images, tmp_path / "run")
    prepared(config)
    folder = next(cache.glob("latents-*"))
    shutil.rmtree(folder)
    for name, age in (("old", encoded.ABANDONED + 60), ("new", 60)):
        left = folder.with_name(f"{folder.name}.{name}.partial")
        left.mkdir()
        when = left.stat().st_mtime - age
        os.utime(left, (when, when))
    prepared(config)
    assert [path.name.split(".")[1] for path in cache.glob("*.partial")] == ["new"]


def test_a_disk_without_room_is_told_of_before_anything_is_encoded(
    models, images, tmp_path, cache, monkeypatch
):
    config, loader, codec = _parts_of(models["sd15"], images, tmp_path)

    def fail(*args, **kwargs):
        raise AssertionError("something was encoded")

    monkeypatch.setattr("stillhouse.models.codecs.Codec.encode", fail)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # latents take 49,152
    try:
        with pytest.raises(UserError, match=r"File too large\): make room .*STILLHOUSE_CACHE"):
            encoded.encoded_once(loader, config.data, codec, HERE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(cache.glob("latents*"))


# ---------------------------------------------------------------- several processes


@dataclass(frozen=True)
class Threads(World):
    """Processes that are threads, which meet in a table."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    table: dict[int, Any] = field(default_factory=dict)

    def gather(self, value):
        self.table[self.rank] = value
        self.meeting.wait(60)
        found = [self.table[rank] for rank in range(self.size)]
        self.meeting.wait(60)
        return found

    def first(self, work):
        sentence = None
        try:
            work() if self.rank == 0 else None
        except UserError as error:
            sentence = str(error)
        sentence = self.gather(sentence)[0]
        if sentence is not None:
            raise UserError(sentence) if self.rank == 0 else SystemExit(1)


def on_all(size: int, work: Callable[[World], Any]) -> list[Any]:
    """What each process gives, or how it ends."""
    meeting, table, found = threading.Barrier(size), {}, [None] * size

    def process(rank: int) -> None:
        try:
            found[rank] = work(Threads(rank, size, torch.device("cpu"), meeting, table))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=process, args=(r,), name=str(r)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _parts_of(model: Path, images: Path, folder: Path) -> tuple[TrainRun, Any, Any]:
    config = fitted(tuning(model, images, folder / "run", batch=12))
    return config, build_loader(config, HERE, ()), build_codec(config, HERE.device)


@pytest.mark.parametrize("size", [2, 14])  # more than there are images and captions
def test_every_process_writes_a_part_of_its_own(models, images, tmp_path, cache, monkeypatch, size):
    config, loader, codec = _parts_of(models["sd15"], images, tmp_path)
    encode = codec.encode  # one at a time, as convolutions of several differ in the last digits
    monkeypatch.setattr(codec, "encode", lambda x: torch.cat([encode(one) for one in x.split(1)]))
    alone = next(iter(encoded.encoded_once(loader, config.data, codec, HERE))).batch
    shutil.rmtree(cache)
    look, looked, opened = cached.is_whole, set(), []
    make = cached.row_file

    def is_whole(*args):
        looked.add(threading.current_thread().name)
        return look(*args)

    def row_file(path, *args):
        opened.append(path.name)
        return make(path, *args)

    monkeypatch.setattr(cached, "is_whole", is_whole)
    monkeypatch.setattr(cached, "row_file", row_file)
    loaders = on_all(size, lambda here: encoded.encoded_once(loader, config.data, codec, here))
    assert looked == {"0"}
    assert len(opened) == len({*opened}) == 2 * min(size, 12)
    for mine in loaders:
        batch = next(iter(mine)).batch
        assert torch.equal(batch.data, alone.data)
        assert torch.equal(batch.ids, alone.ids)


@pytest.mark.parametrize("size", [2, 14])
def test_captions_are_shared_among_processes(models, cache, monkeypatch, size):
    model, captions = models["sd3"], ["", *(f"a red {letter}" for letter in "abcdefghijkl")]
    digest, encode, shares = prompt_digest(model), encoded.encoded, []
    alone_in_it = threading.Lock()  # threads cannot load models at once, as processes can

    def share(source, length, some, device):
        shares.append(some)
        with alone_in_it:
            return encode(source, length, some, device)

    monkeypatch.setattr(encoded, "encoded", share)
    alone = encoded.encoded_captions(model, digest, 0, captions, HERE)
    shutil.rmtree(cache)
    assert shares.pop() == tuple(captions)
    tables = on_all(size, lambda here: encoded.encoded_captions(model, digest, 0, captions, here))
    assert sorted(caption for some in shares for caption in some) == sorted(captions)
    assert max(map(len, shares)) == (7 if size == 2 else 1)
    every = torch.arange(len(captions))
    for table in tables:
        torch.testing.assert_close(table[every].text, alone[every].text, rtol=0, atol=1e-6)
        torch.testing.assert_close(table[every].pooled, alone[every].pooled, rtol=0, atol=1e-6)
        assert (table.captions, table.length) == (alone.captions, alone.length)
        assert table.longest == alone.longest


def test_what_one_process_refuses_ends_them_all(models, images, tmp_path, cache, monkeypatch):
    config, loader, codec = _parts_of(models["sd15"], images, tmp_path)
    encode = codec.encode

    def refuse(pixels):
        if threading.current_thread().name == "1":
            raise UserError("no")
        return encode(pixels)

    monkeypatch.setattr(codec, "encode", refuse)
    ends = on_all(2, lambda here: encoded.encoded_once(loader, config.data, codec, here))
    assert list(map(type, ends)) == [UserError, SystemExit]
    assert not list(cache.glob("latents*"))
