"""Small training runs as real processes: written by the tests, started, killed and read.

A tiny U-Net with dropout on images of 8 pixels with flips, labels and two averages, in fp32: all
that is random or remembered in training is there.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import loaded
import torch
from data.pictures import write_shards
from torch import Tensor

from stillhouse.data import Columns, DataConfig, ImageConfig, Parquet, Tars
from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.contents import MANIFEST, VALUES, folder_name
from stillhouse.engine.ema import HalfLife, PowerFunction
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.storage import Reader
from stillhouse.engine.trackers import read_log
from stillhouse.recipes.train.networks import UNet
from stillhouse.recipes.train.training import TrainRun
from stillhouse.recipes.train.watching import Preview

BATCH = 12  # 1, 2 and 3 processes share it
SHARDS = [20, 17, 9, 23, 15, 22]  # rows; no epoch ends with a batch
EPOCH = sum(SHARDS)
MARK = "STILLHOUSE_RUN"  # in the environment of what is started for a run: its folder
SOURCES = {"indexed": "parquet", "streamed": "tars"}


def write_data(folder: Path, kind: str, shards: Sequence[int] = SHARDS) -> DataConfig:
    """The pictures of a run, as files."""
    files = (write_shards(folder / kind, SOURCES[kind], shards),)
    image = ImageConfig(size=8, flip=True)
    if kind == "indexed":
        return DataConfig(source=Parquet(files=files), columns=Columns(label="label"), image=image)
    columns = Columns(image="png", label="cls")
    # Blocks that are smaller and larger than what is left of a shard.
    return DataConfig(source=Tars(files=files), columns=columns, image=image, buffer=19)


def network(dropout: float = 0.1) -> UNet:
    return UNet(channels=(8,), layers=1, attention=(), head_width=8, dropout=dropout)


def small(out: Path, data: DataConfig, **changes: Any) -> TrainRun:
    """A run of forty steps, which logs each of them with its sample ids."""
    settings: dict[str, Any] = {
        "data": data,
        "classes": 5,
        "network": network(),
        "images": 40 * BATCH,
        "batch": BATCH,
        "optim": AdamW(lr=1e-3, warmup=5 * BATCH),
        "averages": (HalfLife(images=100), PowerFunction(sigma_rel=0.1)),
        "log_every": BATCH,
        "log_ids": True,
        "checkpoint_every": 4 * BATCH,
        "preview": Preview(every=20 * BATCH, count=4, steps=2),
        "out": out,
    }
    return TrainRun(**(settings | changes))


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class Run:
    """A run as files: what is started, and what it has left behind."""

    config: TrainRun
    cache: Path
    fresh: bool = False  # whether its processes load everything anew

    @property
    def out(self) -> Path:
        return self.config.out

    def twin(self, out: str | Path, **changes: Any) -> "Run":
        """The same run in another folder, beside this one if not said otherwise."""
        changes["out"] = self.out.parent / out
        return replace(self, config=self.config.model_copy(update=changes))

    def command(self, *flags: str, processes: int = 1, restarts: int = 0) -> list[str]:
        """What is called, under torchrun where there are several processes."""
        file = self.cache.with_name(f"{self.out.name}.json")  # the run's disk may be full
        file.write_text(self.config.model_dump_json())
        train = ["-m", "stillhouse", "train", str(file), *flags]
        python, *words = loaded.command(*train, processes=processes, restarts=restarts)
        return [sys.executable if self.fresh else python, *words]

    @property
    def stderr(self) -> Path:
        """What a run said that was started beside the test."""
        return self.cache.with_name(f"{self.out.name}.stderr")

    @property
    def environment(self) -> dict[str, str]:
        fixed = {"HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", MARK: str(self.out)}
        fixed |= {"PYTHON_EXEC": sys.executable} if self.fresh else {}
        return loaded.environment(HF_DATASETS_CACHE=str(self.cache), **fixed)

    def end(self, *flags: str, code: int = 0, **spread: int) -> str:
        """Runs it until it ends by itself; returns what it said to stderr."""
        done = subprocess.run(
            self.command(*flags, **spread),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == code, done.stdout[-1000:] + done.stderr[-4000:]
        return done.stderr

    @contextmanager
    def started(self, *flags: str, **spread: int) -> Iterator[subprocess.Popen]:
        """Runs it beside the test; with the block it is killed, all of it."""
        words = self.command(*flags, **spread)
        with self.stderr.open("w") as stderr:
            process = subprocess.Popen(
                words, env=self.environment, stdout=subprocess.DEVNULL, stderr=stderr
            )
        try:
            yield process
        finally:
            for pid in [*self.processes, process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def wait_until(
        self, happened: Callable[[], Any], process: subprocess.Popen, pause: float = 0.05
    ) -> None:
        """Looks again and again; a run that ends meanwhile has failed the test."""
        deadline = time.monotonic() + 300
        while not happened():
            assert process.poll() is None, "it ended before: " + self.stderr.read_text()[-4000:]
            assert time.monotonic() < deadline, "it did not come to this in time"
            time.sleep(pause)

    @property
    def processes(self) -> dict[int, dict[str, str]]:
        """Those that were started for it, with their environments.

        What is forked shows the environment of its server, so these are the programs that ask for
        it: who kills one of them kills what was forked for it.
        """
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (place / "environ").read_text(errors="replace").split("\0")
                given = {name: value for name, _, value in (w.partition("=") for w in words)}
                found |= {int(place.name): given} if given.get(MARK) == str(self.out) else {}
        return found

    @property
    def holder(self) -> int:
        """The process that holds the lock of its folder: the one that trains, if it is alone."""
        lock = (self.out / ".lock").stat()
        place = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
        lines = map(str.split, Path("/proc/locks").read_text().splitlines())
        return next(int(words[4]) for words in lines if words[5] == place)

    # ------------------------------------------------------------ what it leaves

    @property
    def root(self) -> str:
        """Where its checkpoints are."""
        return self.config.checkpoints or str(self.out / "checkpoints")

    @property
    def log(self) -> list[dict[str, Any]]:
        return read_log(self.out / "log.jsonl")

    @property
    def reached(self) -> int:
        """The images of the last step that was logged."""
        return max((line["images"] for line in self.log if "denoiser/loss" in line), default=0)

    @property
    def model(self) -> bytes:
        return (self.out / "model" / "diffusion_pytorch_model.safetensors").read_bytes()

    @property
    def checkpoints(self) -> dict[int, bool]:
        """Those that were begun, and whether each is complete."""
        folders = Path(self.root).glob("images-*")
        return {int(f.name[7:]): (f / MANIFEST).exists() for f in folders}

    def checkpoint(self, images: int) -> Path:
        return Path(self.root) / folder_name(images)


# ---------------------------------------------------------------- what is equal


@dataclass(frozen=True)
class State:
    """Everything in the newest checkpoint of a run."""

    images: int
    world: int
    tensors: dict[str, Tensor]
    leaves: dict[str, Any]  # the plain values among the tensors: an optimiser's groups
    positions: list[dict[str, Any]]  # in the data, of each process

    @classmethod
    def of(cls, run: Run) -> "State":
        store = CheckpointStore(run.root)
        found = store.find()
        assert found is not None
        folder = store.root / folder_name(found.images)
        described = Reader(folder, set(found.files)).read_metadata().state_dict_metadata
        empty = {name: _empty(entry) for name, entry in described.items()}
        store.load(found, empty)
        leaves = json.loads(folder.read(VALUES))["leaves"]
        return cls(found.images, found.world_size, empty, leaves, store.rank_values(found))

    @cached_property
    def kinds(self) -> set[str]:
        """network, optimiser, averages"""
        return {name.split(".")[1] for name in self.tensors}


def _empty(entry: Any) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def assert_same_state(one: State, other: State) -> None:
    """Bit for bit."""
    assert one.images == other.images
    assert one.kinds == other.kinds == {"network", "optimiser", "averages"}
    assert one.tensors.keys() == other.tensors.keys()
    changed = [n for n, t in one.tensors.items() if not torch.equal(t, other.tensors[n])]
    assert not changed
    assert one.leaves == other.leaves
    assert one.positions == other.positions


NUMBERS = (
    *("denoiser/loss", "denoiser/gradient_norm", "denoiser/lr", "levels"),
    *("ids", "samples", "skipped"),
)


def numbers(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a log says of the training itself, line by line: no times, no sessions."""
    kept = ({key: line[key] for key in ("images", *NUMBERS) if key in line} for line in log)
    return [line for line in kept if len(line) > 1]


def ids(log: Sequence[dict[str, Any]]) -> list[int]:
    """Every sample that was trained on, in order."""
    return [i for line in log if "denoiser/loss" in line for i in line["ids"]]


def losses(log: Sequence[dict[str, Any]]) -> dict[int, float]:
    return {line["images"]: line["denoiser/loss"] for line in log if "denoiser/loss" in line}


def assert_same_end(one: Run, other: Run) -> None:
    """Weights, optimiser, averages, positions, logged numbers, sample ids, the exported model."""
    assert_same_state(State.of(one), State.of(other))
    assert numbers(one.log) == numbers(other.log)
    assert ids(one.log) == ids(other.log)
    assert len(ids(one.log)) == State.of(one).images
    assert one.model == other.model
