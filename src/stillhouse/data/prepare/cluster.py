"""Ray: a cluster that is there, or one of this machine alone; and units streamed through workers.

A unit whose worker is lost goes to another one: Ray Data restarts workers and repeats their tasks.
Only the fate of each unit comes back, so the driver's memory does not grow with the data.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from stillhouse.data.prepare.units import Unit
from stillhouse.data.prepare.worker import Job
from stillhouse.errors import UserError, missing_extra, one_line

_STORE = 128 << 20  # bytes for what workers and driver send each other
_TASKS = 10_000  # Ray keeps an account of each
_IN_FLIGHT = 2  # tasks of a worker: the next is there when one is done
# Of a cluster of our own: nobody else is told, nothing is heard outside this machine, and its
# processes say nothing (what happens to a unit is reported by its worker).
_PRIVATE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the switch for the loopback address
}
_QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}


class Fate(NamedTuple):
    """What became of a unit in this run."""

    unit: int
    rows: int
    error: str


class Pool(NamedTuple):
    """Workers, and what each is given."""

    workers: int
    cpus: int = 1
    gpus: int = 0


class Doer(Protocol):
    """What a process of the cluster holds; made there from the job."""

    lasting: ClassVar[bool]
    """Whether it is kept from unit to unit."""

    def __init__(self, job: Job) -> None: ...
    def do(self, unit: Unit, drop: frozenset[int]) -> dict[str, Any]: ...


# ---------------------------------------------------------------- the cluster


@contextmanager
def cluster(address: str = "", workers: int = 0) -> Iterator[dict[str, float]]:
    """Yields its resources. One that the caller is in already is used, and left as it is."""
    address = address or os.environ.get("RAY_ADDRESS", "")
    os.environ.update(_QUIET if address else _QUIET | _PRIVATE)
    ray = _import()
    if ray.is_initialized():
        yield ray.cluster_resources()
        return
    try:
        with _silence():
            _init(ray, address, workers)
    except Exception as error:  # what Ray raises has no common class
        raise UserError(_refusal(address, one_line(error))) from error
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()


def _refusal(address: str, why: str) -> str:
    if not address:
        return f"Ray cannot be started ({why}). If this machine is busy, try again later"
    return (
        f"the Ray cluster at {address} cannot be reached ({why}). Check --ray and RAY_ADDRESS; "
        "without them it runs on this machine alone"
    )


def _import() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra("ray", "scale") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


def _init(ray: Any, address: str, workers: int) -> None:
    common = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address:
        ray.init(address=address, **common)
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ray.init(
        address="local",
        num_cpus=max(workers, cores or 1),
        include_dashboard=False,
        object_store_memory=_STORE,
        **common,
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Ray's C++ tells the terminal which log level it was told to have."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


# ---------------------------------------------------------------- the stream


def stream(
    kind: type[Doer],
    job: Job,
    units: Sequence[Unit],
    pool: Pool,
    drop: Mapping[int, frozenset[int]] | None = None,
) -> Iterator[Fate]:
    """Every unit through some worker, in whatever order they finish."""
    import ray.data

    if not units:
        return
    ray.data.DataContext.get_current().enable_progress_bars = False
    items = [_item(unit, (drop or {}).get(unit.number, frozenset())) for unit in units]
    found = ray.data.from_items(items, override_num_blocks=min(len(items), _TASKS)).map_batches(
        batch_size=None,
        batch_format="numpy",
        num_cpus=pool.cpus,
        num_gpus=pool.gpus if kind.lasting else 0,
        **_compute(kind, job, min(pool.workers, len(items))),
    )
    for row in found.iter_rows():
        yield Fate(int(row["unit"]), int(row["rows"]), str(row["error"]))


def _compute(kind: type[Doer], job: Job, workers: int) -> dict[str, Any]:
    """What takes long to make lives as long as the job; other things are made for each task."""
    from ray.data import ActorPoolStrategy, TaskPoolStrategy

    if not kind.lasting:
        return {"fn": partial(_once, kind, job), "compute": TaskPoolStrategy(workers)}
    pool = ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=_IN_FLIGHT)
    return {"fn": _Process, "fn_constructor_args": (kind, job), "compute": pool}


def _once(kind: type[Doer], job: Job, batch: dict[str, Any]) -> dict[str, Any]:
    return _Process(kind, job)(batch)


_COLUMNS = ("unit", "file", "start", "stop", "drop")


def _item(unit: Unit, drop: frozenset[int]) -> dict[str, Any]:
    places = np.array(sorted(drop), np.int64).tobytes()
    return {**dict(zip(_COLUMNS, unit, strict=False)), "drop": places}


class _Process:
    """A worker process. What it cannot do is returned: raised, Ray would end the whole stream."""

    def __init__(self, kind: type[Doer], job: Job) -> None:
        self.doer, self.error = None, ""
        try:
            self.doer = kind(job)
        except Exception as error:
            self.error = _said(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        values = zip(*(batch[name] for name in _COLUMNS), strict=True)
        fates = [self._do(*row) for row in values]
        unit, rows, error = map(list, zip(*fates, strict=True))
        return {"unit": unit, "rows": rows, "error": error}

    def _do(self, number: int, file: int, start: int, stop: int, drop: bytes) -> Fate:
        if self.doer is None:
            return Fate(int(number), 0, self.error)
        unit = Unit(int(number), int(file), int(start), int(stop))
        try:
            places = np.frombuffer(drop, np.int64).tolist()
            return Fate(unit.number, self.doer.do(unit, frozenset(places))["rows"], "")
        except Exception as error:
            return Fate(unit.number, 0, _said(error))


def _said(error: Exception) -> str:
    if isinstance(error, UserError):
        return str(error)
    logging.getLogger(__name__).exception("a unit failed")  # in Ray's log of the worker
    return one_line(error)
