"""Cost of preparing latents beside the bare codec, in time and memory; and what kills change.

    STILLHOUSE_WEIGHTS=../shared/weights python benchmarks/prepare.py [--quick]
    STILLHOUSE_WEIGHTS=../shared/weights python benchmarks/prepare.py --kills 100000

Last line, JSON, also in results/prepare.json (results/prepare-kills.json) unless --quick.
`throughput` = images/s of the job (read, decode, crop, encode, write) / images/s of as many
processes, of one thread each, that do nothing but encode tensors that are there already: TAESD3 at
256 px, both in one run, the bare loop before and after. The job's time begins when as many shards
are there as there are workers; `startup_seconds` is all before. `cpu` is the same ratio of
processor seconds per image, over the same span, which other work on the machine does not touch.
`memory_ratio` = peak of the memory of all processes together, with 4 times the images; `held_ratio`
is what it would be if the job kept all that it has decoded.
`identical`: one worker is killed in the middle of the run, then the driver, and the command given
again; every file of the output is compared with that of a run that nobody touched.
"""

import argparse
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from stillhouse.recipes import preparing
from stillhouse.recipes.preparing import PrepareRun

RESULTS = Path(__file__).parent / "results"
CORES = len(os.sched_getaffinity(0))
BATCH = 16
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    parser.add_argument("--kills", type=int, default=0, help="prepare so many, with kills")
    parser.add_argument("--peak", nargs=2, help="for ourselves: prepare a folder into another")
    options = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")  # as the bare loop has
    if options.peak:
        preparing.run(configure(*options.peak, resolution=64))
        return
    with tempfile.TemporaryDirectory(prefix="prep-", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder
        result = measure(Path(folder), options.quick, options.kills)
    result |= {"quick": options.quick, "cores": CORES, "load": round(os.getloadavg()[0], 1)}
    if not options.quick:
        RESULTS.mkdir(exist_ok=True)
        name = "prepare-kills.json" if options.kills else "prepare.json"
        (RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(folder: Path, quick: bool, kills: int) -> dict[str, Any]:
    if kills:
        return compare_kills(folder, kills)
    side, count = (32, 64) if quick else (256, 256 * CORES)
    result = throughput(folder, side, count, rounds=1 if quick else 3)
    return result | memory(folder, *((48, 96) if quick else (1000, 4000)))


def configure(source: str, out: str, resolution: int, rows: int = 32) -> PrepareRun:
    weights = Path(os.environ["STILLHOUSE_WEIGHTS"]) / "taesd3"
    return PrepareRun(
        source=source,
        out=out,
        codec=str(weights),
        resolution=resolution,
        rows_per_shard=rows,
        batch=BATCH,
        workers=CORES,
    )


# ---------------------------------------------------------------- data


def write_images(
    folder: Path, count: int, sides: tuple[int, int], corrupt: float = 0.0, rows: int = 2000
) -> set[str]:
    """Parquet files of JPEGs, all different, of mixed sizes; the names of the corrupt ones."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    broken = set()
    for file, first in enumerate(range(0, count, rows)):
        images = []
        for number in range(first, min(first + rows, count)):
            random = np.random.default_rng(number)
            data = jpeg(random, sides)
            if random.random() < corrupt:
                broken.add(f"part-{file:04d}.parquet/{number - first}")
                data = data[: len(data) // 2] if random.random() < 0.5 else b"<html>404</html>"
            images.append({"bytes": data, "path": None})
        path = folder / f"part-{file:04d}.parquet"
        pq.write_table(pa.table({"image": images}), path, row_group_size=100)
    return broken


def jpeg(random: np.random.Generator, sides: tuple[int, int]) -> bytes:
    from PIL import Image

    height, width = (int(side) for side in random.integers(*sides, 2))
    coarse = Image.fromarray(random.integers(0, 256, (9, 9, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    coarse.resize((width, height)).save(buffer, "jpeg", quality=90)
    return buffer.getvalue()


# ---------------------------------------------------------------- processes


@dataclass
class Seen:
    """All processes below one, looked at again and again."""

    peak: int = 0  # bytes of all together
    seconds: dict[int, float] = field(default_factory=dict)  # of the processor, by process
    history: list[tuple[float, float]] = field(default_factory=list)  # when, and all of them

    def look(self, root: int) -> None:
        total = 0
        for pid in family(root):
            try:
                text = Path(f"/proc/{pid}/stat").read_text()
            except OSError:
                continue
            facts = text.rsplit(")", 1)[1].split()
            total += int(facts[21]) * PAGE
            self.seconds[pid] = (int(facts[11]) + int(facts[12])) / TICKS
        self.peak = max(self.peak, total)
        self.history.append((time.time(), sum(self.seconds.values())))

    def used_until(self, moment: float) -> float:
        times, used = zip(*self.history, strict=True)
        return float(np.interp(moment, times, used))


def family(root: int) -> list[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


@contextmanager
def watched(root: int, every: float = 0.1) -> Iterator[Seen]:
    seen, stop = Seen(), threading.Event()

    def watch() -> None:
        while not stop.wait(every):
            seen.look(root)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


# ---------------------------------------------------------------- throughput


def throughput(folder: Path, side: int, count: int, rounds: int) -> dict[str, Any]:
    write_images(folder / "photos", count, (side, 3 * side))
    before = bare(side, count)
    turns: list[dict[str, float]] = []
    for turn in range(rounds):
        ours = job(folder / "photos", folder / f"shards-{turn}", side)
        after = bare(side, count)
        speed = statistics.mean([before["speed"], after["speed"]])
        cost = statistics.mean([before["cpu"], after["cpu"]])
        ours |= {"ratio": ours["speed"] / speed, "cpu_ratio": cost / ours["cpu"], "bare": speed}
        turns.append(ours)
        before = after
    middle = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    return {
        "throughput": round(middle["ratio"], 4),
        "throughput_rounds": [round(turn["ratio"], 4) for turn in turns],
        "cpu": round(middle["cpu_ratio"], 4),
        "images_per_second": round(middle["speed"], 3),
        "bare_images_per_second": round(middle["bare"], 3),
        "startup_seconds": round(middle["startup"], 1),
        "images": count,
        "resolution": side,
    }


def job(source: Path, out: Path, side: int) -> dict[str, float]:
    """From the first shards to the last, by the time of their files."""
    began = time.time()
    with watched(os.getpid()) as seen:
        preparing.run(configure(str(source), str(out), side, rows=16))
    files = sorted((out / "units").iterdir(), key=lambda file: file.stat().st_mtime)
    start, end = (files[place].stat().st_mtime for place in (CORES - 1, -1))
    images = sum(json.loads(file.read_text())["rows"] for file in files[CORES:])
    return {
        "speed": images / (end - start),
        "cpu": (seen.used_until(end) - seen.used_until(start)) / images,
        "startup": start - began,
    }


def bare(side: int, count: int) -> dict[str, float]:
    """As many processes as the job has workers, which encode what they hold."""
    context = get_context("spawn")
    ready = context.Barrier(CORES)
    results = context.Queue()
    arguments = (side, -(-count // CORES // BATCH), ready, results)
    processes = [context.Process(target=encode, args=arguments) for _ in range(CORES)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    images = sum(images for images, *_ in found)
    seconds = max(end for *_, end in found) - min(start for _, _, start, _ in found)
    return {"speed": images / seconds, "cpu": sum(cpu for _, cpu, *_ in found) / images}


def encode(side: int, batches: int, ready: Any, results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    codec = preparing.CodecFactory(configure("", "", side).codec, "float32", 0).load("cpu")
    images = torch.rand(BATCH, 3, side, side) * 2 - 1
    images = images.contiguous(memory_format=torch.channels_last)  # a third faster than without
    codec.encode(images)
    ready.wait()
    start, used = time.time(), time.process_time()
    for _ in range(batches):
        codec.encode(images)
    results.put((batches * BATCH, time.process_time() - used, start, time.time()))


# ---------------------------------------------------------------- memory


def memory(folder: Path, few: int, many: int) -> dict[str, Any]:
    """Each in a process of its own, and the processes that Ray starts for it."""
    peaks, sides = [], (256, 768)
    for count in (few, many):
        write_images(folder / f"{count}", count, sides, rows=500)
        words = [sys.executable, __file__, "--peak", f"{folder}/{count}", f"{folder}/{count}-out"]
        process = subprocess.Popen(words)
        with watched(process.pid) as seen:
            assert process.wait() == 0
        peaks.append(seen.peak / 2**20)
    more = 3 * statistics.mean(sides) ** 2 * (many - few) / 2**20
    return {
        "memory_ratio": round(peaks[1] / peaks[0], 4),
        "held_ratio": round((peaks[0] + more) / peaks[0], 4),
        "peak_mb": [round(peak) for peak in peaks],
        "counts": [few, many],
    }


# ---------------------------------------------------------------- kills


def compare_kills(folder: Path, count: int) -> dict[str, Any]:
    """A run left alone, and one that loses a worker and then its driver."""
    broken = write_images(folder / "photos", count, (24, 96), corrupt=0.01)
    seconds: dict[str, float] = {}
    calm, disturbed = folder / "calm", folder / "disturbed"
    with timed(seconds, "calm"):
        started(folder / "photos", calm).check()
    units = len(list((calm / "units").iterdir()))
    with timed(seconds, "disturbed"):
        first = started(folder / "photos", disturbed)
        worker = first.kill_worker(units // 3)
        first.kill_driver(2 * units // 3)
        left = first.summaries()
        started(folder / "photos", disturbed).check()
    index = json.loads((disturbed / "index.json").read_text())
    failed = [json.loads(line) for line in (disturbed / "failures.jsonl").open()]
    found = digests(disturbed)
    return {
        "identical": contents(calm) == contents(disturbed),
        "images": count,
        "kept": index["counts"]["kept"],
        "corrupt": len(broken),
        "every_corrupt_listed": {failure["name"] for failure in failed} == broken,
        "lost": count - len(broken) - len(found),
        "twice": len(found) - len({*found}),
        "killed": {"worker": worker, "driver_when_done": left, "units": units},
        "seconds": {name: round(value) for name, value in seconds.items()},
    }


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file that the job leaves, but the claim, which knows its own folder."""
    from hashlib import sha256

    files = [file for file in folder.rglob("*") if file.suffix in (".parquet", ".json", ".jsonl")]
    named = {str(file.relative_to(folder)): sha256(file.read_bytes()).digest() for file in files}
    named.pop("run.json")
    return named


def digests(folder: Path) -> list[str]:
    import pyarrow.parquet as pq

    files = folder.glob("*.parquet")
    tables = (pq.read_table(file, columns=["digest"]) for file in files)
    return [digest for table in tables for digest in table["digest"].to_pylist()]


@dataclass
class Started:
    """`stillhouse prepare` in a process of its own."""

    process: subprocess.Popen[bytes]
    out: Path

    def check(self) -> None:
        assert self.process.wait() == 0

    def summaries(self) -> int:
        return len(list((self.out / "units").glob("*.json")))

    def wait_for(self, units: int) -> None:
        while self.summaries() < units:
            assert self.process.poll() is None
            time.sleep(0.05)

    def kill_worker(self, units: int) -> int:
        self.wait_for(units)
        titles = {
            pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(self.process.pid)
        }
        worker = next(pid for pid, title in titles.items() if title.startswith(b"ray::MapWorker"))
        os.kill(worker, signal.SIGKILL)
        return self.summaries()

    def kill_driver(self, units: int) -> None:
        self.wait_for(units)
        below = family(self.process.pid)[1:]
        self.process.kill()
        self.process.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in below):
            time.sleep(0.1)


def started(source: Path, out: Path) -> Started:
    config = configure(str(source), str(out), 32, rows=500)
    names = ("out", "codec", "resolution", "rows_per_shard", "batch", "workers")
    flags = [w for n in names for w in (f"--{n.replace('_', '-')}", str(getattr(config, n)))]
    words = [sys.executable, "-m", "stillhouse", "prepare", config.source, *flags]
    return Started(subprocess.Popen(words, stdout=subprocess.DEVNULL), out)


if __name__ == "__main__":
    main()
