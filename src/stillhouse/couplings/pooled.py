"""One pool over all processes: gather, solve once, send back indices.

Each process sends what the coupling compares of its data (the vectors, or images averaged to few
pixels) and its keys, never noise: the first process draws the pool's noise by key, and every
process draws the noise that its rows met. The pool is ordered by key, so the answer is that of one
process with the whole batch, to the bit, however rows were dealt out.

It is meant for the prefetch thread, with a gloo group of its own, one exchange per step.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.couplings.assignment import Assignment, check_shapes
from stillhouse.couplings.pairing import Independent, KeyedDraws, Pairing, check_rows
from stillhouse.errors import UserError
from stillhouse.process import Condition


class Exchange(Protocol):
    """How processes talk: all make the same calls in the same order. Values get pickled."""

    def collect(self, value: Any) -> list[Any]:
        """Every process's value, by rank, at the first process; nothing at the others."""
        ...

    def share(self, value: Any) -> Any:
        """The first process's value, everywhere."""
        ...

    @property
    def rank(self) -> int: ...


class GroupExchange:
    """Over a gloo group that nobody else uses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def collect(self, value: Any) -> list[Any]:
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, group=self.group, group_dst=0)
        return found or []

    def share(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]


class Part(NamedTuple):
    """What a process tells of its rows."""

    view: Tensor  # [b, d] float32
    key: Tensor  # [b]
    shape: tuple[int, ...]  # of one datum
    condition: Tensor | None


class Pooled:
    """A coupling over the rows of all processes. Close it when the run ends."""

    def __init__(self, coupling: Assignment, exchange: Exchange) -> None:
        self.coupling, self.exchange = coupling, exchange
        self._gate, self._turn = threading.Lock(), threading.Lock()
        self._started, self._closed = 0, False

    def __call__(
        self,
        x: Tensor,
        noise: Tensor,
        cond: Condition | None = None,
        generator: KeyedDraws | None = None,
        *,
        mask: Tensor | None = None,
    ) -> Pairing:
        with self._gate:
            if self._closed:  # nobody waits for this batch any more
                return Independent()(x, noise)
            self._started += 1
        try:
            part = self._part(x, noise, cond, generator, mask)
        except Exception as error:  # the others must hear of it, or they wait for ever
            self._exchange(str(error), None)
            raise
        found = self._exchange(part, generator)
        if isinstance(found, str):
            raise UserError(found)
        return found or Independent()(x, noise)

    def close(self, highest: Callable[[int], int]) -> None:
        """Ends the exchanges on all processes; each calls it, outside the prefetch thread, first.

        Threads that read ahead stand at different steps, and one may wait for others that read no
        further. So processes agree on the last exchange that any has begun (`highest`: the
        greatest of their numbers) and take part, without rows, in those they had not reached.
        """
        with self._gate:
            self._closed, started = True, self._started
        for _ in range(highest(started) - started):
            self._exchange(None, None)

    def _part(
        self,
        x: Tensor,
        noise: Tensor,
        cond: Condition | None,
        generator: KeyedDraws | None,
        mask: Tensor | None,
    ) -> Part:
        check_shapes(x, noise)
        if generator is None or mask is not None:
            raise ValueError("a pool over processes needs keyed draws, and knows no padding masks")
        view = self.coupling.view(x).cpu()
        check_rows(view)
        condition = self.coupling.condition(cond)
        return Part(view, generator.key.cpu(), tuple(x.shape[1:]), condition)

    def _exchange(
        self, part: Part | str | None, generator: KeyedDraws | None
    ) -> Pairing | str | None:
        """What these rows met; a sentence where a process refused, None for a step of no use."""
        with self._turn:
            parts = self.exchange.collect(part)
            first = self.exchange.rank == 0
            answers = self.exchange.share(self._answers(parts, generator) if first else None)
        return answers if isinstance(answers, str) else answers[self.exchange.rank]

    def _answers(
        self, parts: Sequence[Part | str | None], generator: KeyedDraws | None
    ) -> Sequence[Pairing | None] | str:
        for rank, part in enumerate(parts):
            if isinstance(part, str):
                return f"process {rank}: {part}"
        if generator is None:  # the first process has closed
            return [None] * len(parts)
        try:
            return solve_parts(self.coupling, parts, generator)  # type: ignore[arg-type]
        except Exception as error:
            return f"the pool of {len(parts)} processes: {error}"


def solve_parts(
    coupling: Assignment, parts: Sequence[Part | None], generator: KeyedDraws
) -> list[Pairing | None]:
    """One pool per shape: what differs in shape is never swapped."""
    pools: dict[tuple[int, ...], dict[int, Part]] = defaultdict(dict)
    for rank, part in enumerate(parts):
        if part is not None:
            pools[part.shape][rank] = part
    answers: list[Pairing | None] = [None] * len(parts)
    for pool in pools.values():
        found = solve_pool(coupling, list(pool.values()), generator)
        for rank, pairing in zip(pool, found, strict=True):
            answers[rank] = pairing
    return answers


def solve_pool(coupling: Assignment, parts: Sequence[Part], generator: KeyedDraws) -> list[Pairing]:
    """As one process would solve it with all these rows, in the order of their keys."""
    keys = torch.cat([part.key for part in parts])
    order = keys.argsort()
    key = keys[order]
    conditions = [part.condition for part in parts if part.condition is not None]
    whole = coupling.pair(
        torch.cat([part.view for part in parts])[order],
        coupling.view(generator(parts[0].shape, key)),
        torch.cat(conditions)[order] if conditions else None,
    )
    own = whole.index[order.argsort()].split([len(part.key) for part in parts])
    return [replace(whole, index=index, key=key[index]) for index in own]
