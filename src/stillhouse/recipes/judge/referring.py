"""The reference of an evaluation: read from a file, found in the cache, or computed and cached."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

from stillhouse import __version__
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.metrics.detectors import Detector
from stillhouse.metrics.frechet import expected_distance
from stillhouse.metrics.moments import Moments
from stillhouse.metrics.references import (
    DetectorFacts,
    Facts,
    Reference,
    load_reference,
    mismatches,
)
from stillhouse.recipes.claims import locked, make_folder
from stillhouse.recipes.judge.extraction import Collected, collect
from stillhouse.recipes.judge.galleries import Gallery, Pixels
from stillhouse.recipes.judge.measures import OF_FEATURES, Evidence, Known, Values, measure
from stillhouse.recipes.progress import progress_bar

CACHE = Path("~/.cache/stillhouse/references")
ELSEWHERE = "choose another --cache"
PATIENCE = 20 * 60.0  # seconds to wait for a run that makes the same; less than collectives do


@dataclass(frozen=True)
class Library:
    """Where statistics of references are kept, made by this detector."""

    folder: Path
    detector: Detector
    here: World
    kept: int = 10_000  # rows of features
    refresh: bool = False

    def open(self, name: str, pixels: Pixels, gallery: Callable[[], Gallery]) -> Reference:
        """The reference of this name; `gallery` makes its images where they are needed."""
        if name.endswith(".safetensors"):
            reference = load_reference(Path(name).expanduser())
            wanted: dict[str, Any] = {"detector": facts_of(self.detector)}
            if pixels.size:
                wanted |= pixels._asdict()
            _refuse(
                name, mismatches(reference.facts, **wanted), "Name the data itself as --reference"
            )
            return reference
        return self._cached(gallery())

    def _cached(self, gallery: Gallery) -> Reference:
        facts = Facts(
            name=gallery.name,
            count=gallery.count,
            fingerprint=gallery.fingerprint(),
            reading=gallery.reading,
            size=gallery.size,
            mode=gallery.mode,
            detector=facts_of(self.detector),
            version=__version__,
        )
        file = self._file(facts, 0 if gallery.whole else gallery.count)
        if not any(self.here.gather(file.exists())) or self.refresh:
            self._compute(gallery, facts, file)
        self.here.first(lambda: self._check(file, facts))
        return load_reference(file)

    def _check(self, file: Path, facts: Facts) -> None:
        found = load_reference(file).facts
        wanted = {name: getattr(facts, name) for name in ("detector", "fingerprint", "count")}
        reasons = mismatches(found, **wanted)
        _refuse(f"the cached reference {file}", reasons, "Compute it anew with --refresh")

    def _file(self, facts: Facts, part: int) -> Path:
        """Found by what it is called and how it is read; whether it still fits is seen inside."""
        local = Path(facts.name).expanduser()
        where = str(local.absolute()) if local.exists() else facts.name
        key = json.dumps((where, part, facts.reading, facts.detector.name, self.kept))
        short = hashlib.sha256(key.encode()).hexdigest()[:10]
        slug = re.sub(r"[^\w.-]+", "-", f"{local.name}-{facts.detector.name}").strip("-")
        return self.folder.expanduser() / f"{slug}-{short}.safetensors"

    def _compute(self, gallery: Gallery, facts: Facts, file: Path) -> None:
        """Goes on where the same was stopped: whatever differs has other parts.

        What another run is making now is waited for, so that many may begin at once.
        """
        here, label = self.here, f"reference {gallery.name} ({gallery.reading})"
        differing = hashlib.sha256(facts.model_dump_json(exclude={"version"}).encode()).hexdigest()
        parts = file.parent / "parts" / f"{file.stem}-{differing[:10]}"
        with ExitStack() as stack:
            here.first(lambda: make_folder(parts, ELSEWHERE))
            before = _made(file)
            here.first(lambda: stack.enter_context(locked(parts, ELSEWHERE, PATIENCE)))
            if any(here.gather(_made(file) != before)):
                return
            total = sum(map(len, gallery.shares(here)))
            with progress_bar(label, total, "images", shown=here.rank == 0) as advance:
                found = collect(gallery, self.detector, here, parts, "features", advance)
            self._store(found, facts, file)
            found.remove()
            here.barrier()
            here.first(lambda: rmtree(parts, ignore_errors=True))

    def _store(self, found: Collected, facts: Facts, file: Path) -> None:
        def store() -> None:
            texts = tuple(found.texts[: self.kept])
            complete = facts.model_copy(update={"content": found.content})
            rows = found.features[: self.kept].clone()
            Reference(complete, found.moments(), rows, texts).save(file)

        self.here.first(store)


def _made(file: Path) -> int | None:
    """When, in nanoseconds."""
    return file.stat().st_mtime_ns if file.exists() else None


def cache_folder(given: Path) -> Path:
    """Where references are kept: as asked for, else $STILLHOUSE_CACHE, else the usual place."""
    return given if given != CACHE else Path(os.environ.get("STILLHOUSE_CACHE") or CACHE)


def facts_of(detector: Detector) -> DetectorFacts:
    return DetectorFacts(
        name=detector.name, digest=detector.digest, preprocessing=detector.preprocessing
    )


def _refuse(name: str, reasons: list[str], advice: str) -> None:
    if reasons:
        raise UserError(f"{name} cannot be used: {'; '.join(reasons)}. {advice}")


# ---------------------------------------------------------------- what a perfect model gets


class Baseline(NamedTuple):
    """What to hold a distance against."""

    floor: Values
    """The metrics of real images against the other real ones; empty if there are too few."""
    images: int
    """How many of them against the others."""
    expected: float | None
    """Fréchet distance that Gaussian features of a perfect model would have: its bias."""


def baseline(
    reference: Reference, metrics: Sequence[str], count: int, folder: Path | None = None
) -> Baseline:
    """Computed once for a reference and a count where there is a folder to keep it."""
    facts = reference.facts.model_dump_json()
    kept = len(reference.features)
    key = hashlib.sha256(f"{facts} {kept} {sorted(metrics)} {count}".encode()).hexdigest()[:16]
    file = folder.expanduser() / f"baseline-{key}.json" if folder else None
    if file and file.is_file():
        return Baseline(**json.loads(file.read_text()))
    part = min(count, len(reference.features) // 2)
    bias = None
    if {"fid", "fid-infinity"} & {*metrics}:
        bias = expected_distance(reference.moments, count)
    found = Baseline(_floor(reference, metrics, part), part, bias)
    if file:
        make_folder(file.parent, ELSEWHERE)
        write_whole(file, json.dumps(found._asdict()).encode())
    return found


def _floor(reference: Reference, metrics: Sequence[str], count: int) -> Values:
    rows = reference.features
    try:
        part = Moments.of(rows[:count])
        rest = reference.moments - part
        name = reference.facts.detector.name
        seen = Evidence(name, rows[:count], part, Known(rows[count:], rest))
        return measure([m for m in metrics if m in OF_FEATURES], seen)
    except UserError:  # too few
        return {}
