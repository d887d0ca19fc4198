"""Which shard is read when, and by whom: the bookkeeping of streamed sources.

All epochs together are one endless sequence of visits: visit v is shard
permutation(seed, epoch)[v % n] of epoch v // n. With S readers (processes times workers), reader s
makes visits s, s + S, s + 2S, ... With another number of readers the visits that nobody finished
come first (`pending`), then the sequence goes on: no shard of an epoch is lost, and only what was
read of the unfinished ones repeats.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stillhouse.data.permutation import permute


@dataclass(frozen=True)
class ShardPlan:
    """The visits that a run has still to make."""

    shards: int
    seed: int
    pending: tuple[int, ...] = ()
    start: int = 0

    def visit(self, turn: int) -> int:
        """The visit of a turn; turns count the visits of this plan."""
        left = len(self.pending)
        return self.pending[turn] if turn < left else self.start + turn - left

    def shard(self, visit: int) -> int:
        epoch, place = divmod(visit, self.shards)
        return int(permute([place], self.shards, self.seed, epoch, "shards")[0])

    def rest(self, cursors: "Sequence[Cursor]") -> "ShardPlan":
        """The plan of what is left when each of the readers stands at its cursor."""
        readers = len(cursors)
        done = {cursor.reader: cursor.shards for cursor in cursors}
        low = min(done.values()) * readers
        high = max((max(done.values()) + 1) * readers, len(self.pending))
        left = [t for t in range(low, high) if t // readers >= done[t % readers]]
        return ShardPlan(
            self.shards, self.seed, tuple(self.visit(t) for t in left), self.visit(high)
        )


@dataclass(frozen=True)
class Cursor:
    """Where a reader stands: `offset` rows into the shuffled block that starts at `row`."""

    reader: int
    shards: int = 0  # finished before the block
    row: int = 0  # in the next one, where the block starts
    offset: int = 0  # rows of the block that were handed out or passed over
    batches: int = 0  # handed out since the plan began

    @property
    def unfinished(self) -> int:
        """Rows already seen of shards that are not finished."""
        return self.row + self.offset

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def find_cursors(state: Any) -> Iterator[Cursor]:
    """The cursors inside a data loader's state, however it nests them."""
    if isinstance(state, Mapping):
        if "reader" in state and "offset" in state:
            yield Cursor(**state)
        else:
            for value in state.values():
                yield from find_cursors(value)
