"""What the shards hold, all together: the content of `index.json`, and `failures.jsonl`."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from stillhouse.data.faults import Fault
from stillhouse.data.prepare.files import partial_file, publish, read_many, sizes
from stillhouse.data.prepare.moments import ChannelMoments
from stillhouse.data.prepare.samples import Failed
from stillhouse.data.prepare.units import Unit
from stillhouse.data.prepare.worker import SUMMARIES
from stillhouse.engine.storage import Folder
from stillhouse.errors import UserError

FAILURES = "failures.jsonl"
SCHEMA = 1


@dataclass(eq=False)
class Totals:
    """Over all units, in their order."""

    counts: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    rows: list[int] = field(default_factory=list)
    shape: list[int] | None = None
    moments: ChannelMoments | None = None
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def take(self, summary: Mapping[str, Any]) -> None:
        self.rows.append(summary["kept"])
        self.counts.update({name: summary[name] for name in ("rows", "kept", "tokens", "bytes")})
        self.counts["enlarged"] += summary.get("enlarged", 0)  # older ones don't say
        self.filtered.update(summary["filtered"])
        self.digest.update(bytes.fromhex(summary["digest"]))
        if summary["moments"]:
            found = ChannelMoments.from_json(summary["moments"])
            self.moments = found if self.moments is None else self.moments + found
            self.shape = summary["shape"]

    def fail(self, failure: Failed, stream: IO[str]) -> None:
        self.counts["failed"] += 1
        self.reasons[_kind(failure.reason)] += 1
        stream.write(json.dumps(failure._asdict()) + "\n")


def _kind(reason: str) -> str:
    """Without the numbers that each file has of its own."""
    return re.split(r"[\d(]", reason)[0].strip() or reason


def make_index(
    folder: Folder, units: Sequence[Unit], faults: Sequence[Fault], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads every summary, and writes the failures; `faults` are files that could not be cut into
    units."""
    totals = Totals()
    with partial_file(folder, FAILURES) as path:
        with path.open("w", encoding="utf-8") as stream:
            for fault in faults:
                totals.fail(Failed("", *fault), stream)
            for summary in summaries(folder, units):
                totals.take(summary)
                for failure in summary["failures"]:
                    totals.fail(Failed(**failure), stream)
        publish(folder, FAILURES, path)
    return _index(totals, facts)


def nothing_kept(folder: Folder, index: Mapping[str, Any]) -> str:
    """Why, and what to do."""
    counts, reasons = index["counts"], index["failures"]["reasons"]
    left_out = [f"{number} {reason}" for reason, number in counts["filtered"].items()]
    if counts["failed"]:
        left_out.append(f"{counts['failed']} failed ({', '.join(reasons)})")
    return (
        f"none of {counts['rows']} images was kept: {', '.join(left_out)}. Look at --min-size, "
        f"--max-aspect and {folder}/{FAILURES}, and run it again"
    )


def _index(totals: Totals, facts: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: totals.counts[name] for name in ("rows", "kept", "failed")}
    latent = {"shape": totals.shape}
    if totals.moments is not None:
        latent |= {"mean": totals.moments.mean.tolist(), "std": totals.moments.std.tolist()}
    return {
        "schema": SCHEMA,
        "shards": "shard-*.parquet",
        "counts": counts | {"filtered": dict(sorted(totals.filtered.items()))},
        "failures": {"file": FAILURES, "reasons": dict(totals.reasons.most_common())},
        "latent": latent,
        "tokens": totals.counts["tokens"],
        "enlarged": totals.counts["enlarged"],
        "bytes": totals.counts["bytes"],
        "digest": totals.digest.hexdigest(),
        **facts,
        "rows": totals.rows,
    }


def summaries(folder: Folder, units: Sequence[Unit]) -> Iterator[dict[str, Any]]:
    """In order, and each with its shard as large as it should be."""
    there, inner = sizes(folder), folder / SUMMARIES
    found = read_many(inner, [f"{unit.name}.json" for unit in units])
    for unit, data in zip(units, found, strict=True):
        summary, shard = json.loads(data), f"{unit.name}.parquet"
        if there.get(shard, 0) != summary["bytes"]:
            raise UserError(
                f"{shard} in {folder} has {there.get(shard, 0)} bytes instead of "
                f"{summary['bytes']}: remove it, and run the same command again"
            )
        yield summary
