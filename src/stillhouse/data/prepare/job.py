"""The whole job: cut, find duplicates, encode what is missing, write the index.

    OUT/shard-000000.parquet, ...   latents        OUT/units/           what became of each unit
    OUT/failures.jsonl              with reasons   OUT/index.json       all together, written last

The same job in the same folder goes on where it was stopped.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from stillhouse.data.faults import Fault
from stillhouse.data.prepare.cluster import Fate, Pool, stream
from stillhouse.data.prepare.duplicates import HASHES, Hasher, find_duplicates
from stillhouse.data.prepare.files import read_many, remove_partial, sizes, write
from stillhouse.data.prepare.index import make_index, nothing_kept
from stillhouse.data.prepare.units import Unit
from stillhouse.data.prepare.worker import SUMMARIES, TRIES, Job, Worker
from stillhouse.data.prepared import INDEX
from stillhouse.engine.storage import Folder
from stillhouse.errors import UserError

Tell = Callable[[Fate], None]


class Plan(NamedTuple):
    """All units of a job, and which of them are still to be made."""

    units: list[Unit]
    missing: list[Unit]
    faults: list[Fault]  # files of which there are no units


def make_plan(job: Job, size: int = 0) -> Plan:
    """Looks at the source and at the folder. `size`: rows of a shard, 0 for the usual."""
    units, faults = job.rows.cut(size)
    if not units:
        why = f": {faults[0]}" if faults else ""
        raise UserError(f"the source has no images that could be prepared{why}")
    folder = job.folder()
    for inner in (folder, folder / SUMMARIES, folder / HASHES):
        remove_partial(inner)
    done = finished(folder)
    return Plan(units, [unit for unit in units if unit.name not in done], faults)


def finished(folder: Folder) -> set[str]:
    """Names of units. The summary of a shard that is gone, or of another size, is removed."""
    summaries, there = folder / SUMMARIES, sizes(folder)
    names = [name for name in summaries.names() if name.endswith(".json")]
    done: set[str] = set()
    for name, data in zip(names, read_many(summaries, names), strict=True):
        unit = name.removesuffix(".json")
        if there.get(f"{unit}.parquet", 0) == json.loads(data)["bytes"]:
            done.add(unit)
        else:
            summaries.remove(name)
    return done


def find_index(folder: Folder) -> dict[str, Any] | None:
    """What an earlier run has left when it was finished."""
    return json.loads(folder.read(INDEX)) if INDEX in folder.names() else None


def forget(folder: Folder) -> None:
    """What a try with other settings has left, and would be taken for this one's."""
    (folder / HASHES).clear()
    for name in folder.names():
        if name.startswith("shard-") and name.endswith(".parquet"):
            folder.remove(name)


def hash_all(job: Job, plan: Plan, pool: Pool, tell: Tell) -> dict[int, frozenset[int]]:
    """The places of duplicates, by unit: a pass over the whole source."""
    _follow(stream(Hasher, job, plan.units, pool), plan.units, job, tell)
    return find_duplicates(job.folder() / HASHES, plan.units)


def encode_all(
    job: Job, plan: Plan, pool: Pool, drop: Mapping[int, frozenset[int]], tell: Tell
) -> None:
    """Makes the shards that are missing. Until all are there, there is no index."""
    folder = job.folder()
    folder.remove(INDEX)
    (folder / TRIES).clear()
    _follow(stream(Worker, job, plan.missing, pool, drop), plan.units, job, tell)


def conclude(job: Job, plan: Plan, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The index, and nothing left that only the work has needed.

    Where no image was kept there is no index, and the folder is free for other settings.
    """
    folder = job.folder()
    index = make_index(folder, plan.units, plan.faults, facts)
    if not index["counts"]["kept"]:
        _clear(folder, TRIES, HASHES, SUMMARIES)
        raise UserError(nothing_kept(folder, index))
    write(folder, INDEX, json.dumps(index, indent=2).encode())
    _clear(folder, TRIES, HASHES)
    return index


def _clear(folder: Folder, *names: str) -> None:
    for name in names:
        (folder / name).clear()


def _follow(fates: Any, units: Sequence[Unit], job: Job, tell: Tell) -> None:
    for fate in fates:
        if fate.error:
            where = job.rows.where(units[fate.unit])
            raise UserError(
                f"{fate.error} (at {where}). What is finished is kept: mend it, and run the same "
                "command again"
            )
        tell(fate)
