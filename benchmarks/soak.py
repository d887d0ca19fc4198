"""Training that is killed every few minutes: nothing lost, nothing left behind, flat memory.

    python benchmarks/soak.py [--minutes 20] [--kills 2 4] [--checkpoint-seconds 60]

Two processes under torchrun stream WebDataset tars. Now and then one worker is killed, and torchrun
restarts it, or everything is, and the same command is run again. At the end a SIGTERM stops the run
and the same command finishes it. Then it is looked at: images and sample ids in the log, files,
shared memory, processes, and the slope of the memory of every process. Last line: JSON, which also
goes to results/soak.json with a picture beside it, unless --minutes is less than 20. Linux only.
"""

import argparse
import io
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soak_report as report
from soak_report import Process, Reading, Seen

from stillhouse.data import Columns, DataConfig, ImageConfig, Tars
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.trackers import read_log
from stillhouse.recipes.train.networks import UNet
from stillhouse.recipes.train.training import TrainRun
from stillhouse.recipes.train.watching import Preview

RESULTS = Path(__file__).parent / "results"
WORLD, SHARDS, ROWS, SIDE, BATCH = 2, 16, 256, 16, 32
EPOCH = SHARDS * ROWS
LOG_EVERY = 256  # divides an epoch, so that epochs end with a line of the log
ENDLESS = 10**9
WHOLE = 20  # minutes; shorter soaks leave the results alone
MARK = "STILLHOUSE_SOAK"  # in the environment of all that is started here


def main() -> None:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="stillhouse-soak-", dir=options.folder))
    result, seen = soak(options, folder)
    whole = options.minutes >= WHOLE
    if whole:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "soak.json").write_text(json.dumps(result, indent=2) + "\n")
    report.draw(seen, (RESULTS if whole else folder) / "soak.png")
    if whole and result["passed"]:
        shutil.rmtree(folder)
    else:
        print(f"everything is in {folder}")
    print("\n".join(f"problem: {problem}" for problem in result["problems"]))
    print(json.dumps(result))
    sys.exit(not result["passed"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=WHOLE)
    parser.add_argument("--kills", type=float, nargs=2, default=(2, 4), help="minutes between")
    parser.add_argument("--checkpoint-seconds", type=float, default=60)
    parser.add_argument("--readers", type=int, default=1, help="reading processes per worker")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--folder", help="where to work; the system's temporary folder by default")
    return parser.parse_args()


def soak(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Seen]:
    """The whole of it: what is concluded, and what it is concluded from."""
    write_shards(folder / "data")
    shared = set(os.listdir("/dev/shm"))
    speed = calibrate(options, folder)
    every = max(1, round(speed * options.checkpoint_seconds / LOG_EVERY)) * LOG_EVERY
    print(f"{speed:.0f} images/s: a checkpoint every {every} images", flush=True)
    run = Soak(Launcher(configure(folder, "run", every, options.readers), folder), options)
    try:
        run.kill_now_and_then()
        target = (run.stop() // every + 2) * every
        run.finish(target)
    finally:
        run.launcher.end()
    kinds = ("worker", "reader") if options.readers else ("worker",)
    memory = {kind: report.memory(run.seen, kind) for kind in kinds}
    problems = [
        *run.problems,
        *report.account(read_log(run.out / "log.jsonl"), target, EPOCH),
        *report.strange_files(run.out, every, target, TrainRun().keep_last),
        *report.strange_leftovers(run.launcher.temporary, shared),
        *(problem for kind in kinds for problem in report.growth(kind, memory[kind])),
    ]
    return {
        "passed": not problems,
        "minutes": options.minutes,
        "images": target,
        "epochs": round(target / EPOCH, 2),
        "checkpoint_every": every,
        **report.progress(run.seen),
        "memory": memory,
        "problems": problems,
    }, run.seen


# ---------------------------------------------------------------- the run


def write_shards(folder: Path) -> None:
    """Tars of small pictures with a label, the same ones every time."""
    from PIL import Image

    folder.mkdir()
    noise = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"shard-{shard:03d}.tar", "w") as tar:
            for row in range(ROWS):
                pixels = noise.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
                encoded = io.BytesIO()
                Image.fromarray(pixels).save(encoded, "png")
                name = f"{shard * ROWS + row:06d}"
                _add(tar, f"{name}.png", encoded.getvalue())
                _add(tar, f"{name}.cls", str(row % 10).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def configure(folder: Path, name: str, every: int, readers: int) -> Path:
    """Writes the run's config; returns its path."""
    config = TrainRun(
        data=DataConfig(
            source=Tars(files=(str(folder / "data"),)),
            columns=Columns(image="png", label="cls"),
            image=ImageConfig(size=SIDE, flip=True),
            workers=readers,
            buffer=128,
        ),
        classes=10,
        network=UNet(channels=(32, 64, 64), layers=1, head_width=16),
        images=ENDLESS,
        batch=BATCH,
        optim=AdamW(lr=1e-4),
        averages=(HalfLife(images=10_000),),
        log_every=LOG_EVERY,
        checkpoint_every=every,
        preview=Preview(every=every, count=8, steps=4),
        log_ids=True,
        out=folder / name,
    )
    file = folder / f"{name}.json"
    file.write_text(config.model_dump_json())
    return file


def calibrate(options: argparse.Namespace, folder: Path) -> float:
    """Images per second of a short run of its own."""
    launcher = Launcher(configure(folder, "trial", LOG_EVERY, options.readers), folder)
    try:
        launcher.start(images=6 * LOG_EVERY)
        if launcher.wait(600):
            raise SystemExit(f"the trial run failed: see {launcher.output}")
    finally:
        launcher.end()
    lines = read_log(folder / "trial" / "log.jsonl")
    return statistics.median(line["images_per_second"] for line in lines if "data_wait" in line)


# ---------------------------------------------------------------- processes


class Launcher:
    """torchrun, started as a user would, and all processes that come of it."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.config, self.folder, self.mark = config, folder, uuid.uuid4().hex
        self.output = folder / "output.txt"
        self.temporary = folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, images: int = ENDLESS) -> None:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        words += ["--max-restarts=1000", "--monitor-interval=1"]
        words += [f"--log-dir={self.folder / 'torchrun'}"]  # else it leaves a temporary folder
        words += ["-m", "stillhouse", "train", str(self.config), "--images", str(images)]
        own = {MARK: self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")  # torch's own, kept for good
        with self.output.open("ab") as output:
            self.child = subprocess.Popen(
                [sys.executable, *words],
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return None if self.child is None else self.child.poll()

    def wait(self, seconds: float) -> int | None:
        """How it ended; None if it has not after so many seconds."""
        try:
            return self.child.wait(seconds) if self.child else None
        except subprocess.TimeoutExpired:
            return None

    def processes(self) -> list[Process]:
        """All that carry the mark: orphans too, and nobody else's."""
        found = [p for entry in os.listdir("/proc") if entry.isdigit() and (p := self._look(entry))]
        top = self.child.pid if self.child else 0
        workers = {p.pid for p in found if p.parent == top}
        kinds = {top: "worker", **dict.fromkeys(workers, "reader")}
        return [p._replace(kind=kinds.get(p.parent, "other")) for p in found]

    def _look(self, pid: str) -> Process | None:
        try:
            words = Path("/proc", pid, "environ").read_bytes().split(b"\0")
            # Fields 3, 4 and 22 of proc(5), counted from behind the name, which may hold spaces.
            fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        if f"{MARK}={self.mark}".encode() not in words or fields[0] == "Z":
            return None
        rank = next((w[5:].decode() for w in words if w.startswith(b"RANK=")), "")
        return Process(int(pid), int(fields[1]), int(fields[19]), rank)

    def kill_worker(self, chance: random.Random) -> bool:
        """One of the two; False while there are not two."""
        workers = [p for p in self.processes() if p.kind == "worker"]
        if len(workers) < WORLD:
            return False
        os.kill(chance.choice(workers).pid, signal.SIGKILL)
        return True

    def end(self) -> None:
        """Kills everything, as when the machine goes down: workers have sessions of their own."""
        while left := self.processes():
            for process in left:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        if self.child is not None:
            self.child.wait()


# ---------------------------------------------------------------- the soak


@dataclass
class Soak:
    """The run with its kills, and what was seen meanwhile."""

    launcher: Launcher
    options: argparse.Namespace
    seen: Seen = field(default_factory=Seen)
    problems: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.time)

    @property
    def now(self) -> float:
        return time.time() - self.began

    @property
    def out(self) -> Path:
        return self.launcher.folder / "run"

    def kill_now_and_then(self) -> None:
        """Until the minutes are over. The last life is at least as long as the shortest."""
        chance = random.Random(self.options.seed)
        low, high = (60 * minutes for minutes in self.options.kills)
        end = 60 * self.options.minutes
        due, kind = chance.uniform(low, high), chance.choice(["worker", "all"])
        self.launcher.start()
        while self.now < end:
            self.look()
            self._restart_if_ended()
            if due <= self.now < end - low and self._kill(kind, chance):
                self.seen.kills.append((self.now, kind))
                print(f"{self.now:.0f} s: {kind} killed", flush=True)
                due = self.now + chance.uniform(low, high)
                kind = {"worker": "all", "all": "worker"}[kind]

    def _kill(self, kind: str, chance: random.Random) -> bool:
        if kind == "worker":
            return self.launcher.kill_worker(chance)
        self.launcher.end()
        self.launcher.start()
        return True

    def _restart_if_ended(self) -> None:
        if self.launcher.code is not None:
            self.problems.append(f"at {self.now:.0f} s torchrun ended with {self.launcher.code}")
            self.launcher.end()
            self.launcher.start()

    def stop(self) -> int:
        """A SIGTERM to torchrun, which tells the workers; returns the images of the checkpoint."""
        assert self.launcher.child is not None
        self.launcher.child.terminate()
        if self.launcher.wait(60) is None:
            self.problems.append("the run did not end within a minute of a SIGTERM")
        self._leave()
        lines = read_log(self.out / "log.jsonl")
        return max((line["checkpoint"] for line in lines if "checkpoint" in line), default=0)

    def finish(self, target: int) -> None:
        """The same command once more, up to a number of images."""
        self.launcher.start(target)
        deadline = self.now + 600
        while self.launcher.code is None and self.now < deadline:
            self.look()
        if self.launcher.code != 0:
            self.problems.append(f"the last run ended with {self.launcher.code}")
        self._leave()

    def _leave(self) -> None:
        """Who is still there some seconds after the end is leaked; then it is ended."""
        deadline = self.now + 15
        while self.launcher.processes() and self.now < deadline:
            time.sleep(0.5)
        self.problems += [f"still there: {process}" for process in self.launcher.processes()]
        self.launcher.end()

    # -------- looking

    def look(self) -> None:
        """Two seconds of it: memory ten times a second, all else once."""
        processes = [p for p in self.launcher.processes() if p.kind != "other"]
        for _ in range(20):
            time.sleep(0.1)
            readings = [Reading(self.now, p, mb) for p in processes if (mb := resident_mb(p.pid))]
            self.seen.readings += readings
        if (images := last_images(self.out / "log.jsonl")) is not None:
            self.seen.progress.append((self.now, images))
        for manifest in self.out.glob("checkpoints/*/manifest.json"):
            self.seen.saved.setdefault(manifest.parent.name, self.now)


def resident_mb(pid: int) -> float:
    """0 for a process that has ended."""
    try:
        pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def last_images(log: Path) -> int | None:
    """Of the last whole line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1])["images"]
    except (OSError, IndexError, ValueError):
        return None


if __name__ == "__main__":
    main()
