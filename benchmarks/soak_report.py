"""What a soak concludes from what it has seen: samples, files, memory, and a picture of it all."""

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LIMIT = 1.0  # MB per minute
SETTLING = 5.0  # seconds after a process's first checkpoint until it counts as warm
WINDOW = 10.0  # seconds


class Process(NamedTuple):
    """A process that was started here, directly or not."""

    pid: int
    parent: int
    born: int  # in clock ticks: with the pid it names a process for good
    rank: str
    kind: str = "other"  # a worker trains, a reader reads for it; torchrun and orphans


class Reading(NamedTuple):
    """The memory of a process at a moment."""

    seconds: float
    process: Process
    mb: float


@dataclass
class Seen:
    """What was seen of a run, in seconds since it began."""

    readings: list[Reading] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)  # images in the log
    kills: list[tuple[float, str]] = field(default_factory=list)
    saved: dict[str, float] = field(default_factory=dict)  # checkpoint -> when it was complete

    def lives(self, kind: str) -> list[list[Reading]]:
        """The readings of each process of a kind, in order."""
        found: dict[Process, list[Reading]] = {}
        for reading in self.readings:
            if reading.process.kind == kind:
                found.setdefault(reading.process, []).append(reading)
        return list(found.values())

    def warm(self, life: Sequence[Reading]) -> list[Reading]:
        """What comes after its first checkpoint: every kind of work has been done once by then."""
        born = life[0].seconds
        first = min((at for at in self.saved.values() if at > born + 2), default=float("inf"))
        return [reading for reading in life if reading.seconds >= first + SETTLING]


# ---------------------------------------------------------------- memory


class Slope(NamedTuple):
    """MB per minute, with its standard error."""

    value: float
    error: float


class Window(NamedTuple):
    """The least and the most of some seconds."""

    seconds: float
    least: float
    most: float


def windows(life: Sequence[Reading]) -> list[Window]:
    """What a process holds between steps, and at the most: a step takes and returns tens of MB.

    Single readings fall anywhere in a step, so their scatter would hide a slope of 1 MB per minute.
    The last window is left out: it may be too short to have seen the least.
    """
    parts: dict[int, list[float]] = {}
    for reading in life:
        parts.setdefault(int((reading.seconds - life[0].seconds) / WINDOW), []).append(reading.mb)
    start = life[0].seconds if life else 0.0
    found = [Window(start + WINDOW * (n + 0.5), min(mb), max(mb)) for n, mb in parts.items()]
    return found[:-1]


def slope(lives: Iterable[Sequence[tuple[float, float]]]) -> Slope:
    """Of (seconds, MB), pooled: every life has a level of its own, all have one slope.

    Readings of one life hang together, so the error is taken over lives (cluster-robust).
    """
    centred, spread = [], 0.0
    for life in lives:
        if len(life) < 3:
            continue
        t, mb = (np.array(column) for column in zip(*life, strict=True))
        t, mb = (t - t.mean()) / 60, mb - mb.mean()
        centred.append((t, mb))
        spread += float(t @ t)
    if not spread:
        return Slope(float("nan"), float("nan"))
    value = sum(float(t @ mb) for t, mb in centred) / spread
    scores = [float(t @ (mb - value * t)) for t, mb in centred]
    few = len(scores) / max(len(scores) - 1, 1)
    return Slope(value, (few * sum(score**2 for score in scores)) ** 0.5 / spread)


def memory(seen: Seen, kind: str) -> dict[str, Any]:
    """Slopes over all processes of a kind; None where none lived long enough."""
    lives = [windows(seen.warm(life)) for life in seen.lives(kind)]
    lives = [life for life in lives if len(life) >= 3]
    least = slope([[(w.seconds, w.least) for w in life] for life in lives])
    most = slope([[(w.seconds, w.most) for w in life] for life in lives])
    return {
        "slope_mb_per_minute": round(least.value, 3) if lives else None,
        "standard_error": round(least.error, 3) if lives else None,
        "slope_of_peaks": round(most.value, 3) if lives else None,
        "standard_error_of_peaks": round(most.error, 3) if lives else None,
        "lives": len(lives),
        "warm_minutes": round(sum(len(life) for life in lives) * WINDOW / 60, 1),
        "held_mb": round(max((w.least for life in lives for w in life), default=0.0)),
        "peak_mb": round(max((w.most for life in lives for w in life), default=0.0)),
    }


def growth(kind: str, found: Mapping[str, Any]) -> list[str]:
    """What is wrong with the memory of a kind of process."""
    if found["slope_mb_per_minute"] is None:
        return [f"no {kind} lived long enough to measure its memory"]
    if found["slope_mb_per_minute"] > LIMIT:
        return [f"the memory of a {kind} grows by {found['slope_mb_per_minute']} MB per minute"]
    return []


# ---------------------------------------------------------------- samples


def account(lines: Sequence[Mapping[str, Any]], target: int, epoch: int) -> list[str]:
    """Every image once per epoch, in a log without gaps that ends at `target` images."""
    problems, before, ids = [], 0, []
    for line in lines:
        if "ids" not in line:
            continue
        if len(line["ids"]) != line["images"] - before:
            step = f"{before} to {line['images']} images"
            problems.append(f"the log names {len(line['ids'])} samples from {step}")
        before = line["images"]
        ids += line["ids"]
    if before != target or lines[-1]["images"] != target:
        problems.append(f"the log ends at {before} images, not at {target}")
    everything = set(ids[:epoch])
    for number, start in enumerate(range(0, len(ids), epoch)):
        part = ids[start : start + epoch]
        if len(set(part)) != len(part) or not everything.issuperset(part):
            problems.append(f"epoch {number}: {len(part)} samples, {len(set(part))} different")
    return problems


def progress(seen: Seen) -> dict[str, Any]:
    """Kills, what they cost, and how often there was a checkpoint."""
    images = [count for _, count in seen.progress]
    gaps = [b - a for a, b in pairwise(seen.saved.values()) if not _killed(seen, a, b)]
    return {
        "kills": {k: sum(kind == k for _, kind in seen.kills) for k in ("worker", "all")},
        "images_trained_again": sum(max(a - b, 0) for a, b in pairwise(images)),
        "seconds_between_checkpoints": round(statistics.median(gaps), 1) if gaps else None,
    }


def _killed(seen: Seen, start: float, end: float) -> bool:
    return any(start < at <= end for at, _ in seen.kills)


# ---------------------------------------------------------------- files


def strange_files(run: Path, every: int, target: int, keep: int) -> list[str]:
    """Files of a run's folder that should not be there, or should and are not."""
    files = {str(f.relative_to(run)) for f in run.rglob("*") if not f.is_dir()}
    expected = set(_expected(run, every, target, keep))
    extra = [f"{name} is left over" for name in sorted(files - expected)]
    return extra + [f"{name} is missing" for name in sorted(expected - files)]


def _expected(run: Path, every: int, target: int, keep: int) -> Iterator[str]:
    yield from ("run.json", "log.jsonl", ".lock", "model/config.json")
    yield from ("model/scheduler_config.json", "model/diffusion_pytorch_model.safetensors")
    for images in range(every, target + 1, every):
        yield f"samples/images-{images:012d}.png"
    for checkpoint in sorted(run.glob("checkpoints/*"))[-keep:]:
        manifest = checkpoint / "manifest.json"
        names = json.loads(manifest.read_text())["files"] if manifest.exists() else {}
        yield from (f"checkpoints/{checkpoint.name}/{name}" for name in (manifest.name, *names))


def strange_leftovers(temporary: Path, shared_before: set[str]) -> list[str]:
    """What is in the folder for temporary files, and what is new in shared memory."""
    names = [str(f.relative_to(temporary.parent)) for f in temporary.rglob("*")]
    names += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared_before]
    return [f"{name} is left over" for name in sorted(names)]


# ---------------------------------------------------------------- the picture


def draw(seen: Seen, target: Path) -> None:
    """Memory and progress over time, kills marked; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (memory, images) = plt.subplots(
        2, 1, figsize=(9, 5.6), sharex=True, layout="constrained"
    )
    colours = {("worker", "0"): "#1d5b8f", ("worker", "1"): "#5a9bd0"}
    colours |= {("reader", "0"): "#b5651d", ("reader", "1"): "#dca56b"}
    named: set[tuple[str, str]] = set()
    for kind in ("worker", "reader"):
        for life in seen.lives(kind):
            key = kind, life[0].process.rank
            label = f"{kind} {key[1]}" if key not in named else None
            named.add(key)
            spans = windows(life)
            minutes, least = [w.seconds / 60 for w in spans], [w.least for w in spans]
            memory.plot(minutes, least, color=colours[key], lw=1.2, label=label)
            most = [w.most for w in spans]
            memory.fill_between(minutes, least, most, color=colours[key], alpha=0.2, lw=0)
    images.plot(*zip(*((s / 60, n / 1000) for s, n in seen.progress), strict=True), color="#333")
    for at, kind in seen.kills:
        for axis in (memory, images):
            axis.axvline(at / 60, color="#c0392b", lw=0.8, ls="-" if kind == "all" else ":")
    memory.set(ylabel="resident memory, MB", ylim=(0, None))
    memory.set_title(
        "held between steps, and peaks; kills: dotted, one worker; solid, everything",
        fontsize=9,
        loc="left",
    )
    memory.legend(fontsize=8, loc="lower right", ncols=2)
    images.set(ylabel="thousand images", xlabel="minutes", ylim=(0, None))
    figure.savefig(target, dpi=120)
    plt.close(figure)
