"""A thread that keeps batches ready: data, and whatever the run prepares in advance.

The state of a batch travels with it: `state` is that of the last batch the consumer took, however
many more are ready.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from stillhouse.data.loaded import Loaded, State
from stillhouse.process import Batch

Prepare = Callable[[Batch], Batch]


class Prefetch:
    """Iterate over it; close it (or use `with`) when done.

    `prepare` sees each batch in the thread: it draws noise and noise levels, drops conditions,
    solves the coupling.
    """

    def __init__(
        self,
        loader: Iterable[Loaded],
        prepare: Prepare | None = None,
        *,
        depth: int = 2,
        state: State | None = None,
    ) -> None:
        self.state = state or {}
        """The position after the last batch taken."""
        self.waited = 0.0
        """Seconds that the consumer has waited for data."""
        self._prepare = prepare
        self._ready: queue.Queue[Loaded | BaseException | None] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(
            target=self._fill, args=(loader,), name="stillhouse-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        if self._ended:
            raise StopIteration
        began = time.perf_counter()
        item = self._ready.get()
        self.waited += time.perf_counter() - began
        if isinstance(item, Loaded):
            self.state = item.state
            return item
        self.close()
        raise StopIteration if item is None else item  # an error keeps its own traceback

    @property
    def full(self) -> bool:
        """Whether as many batches are ready as are kept ready."""
        return self._ready.full()

    def close(self, patience: float | None = None) -> None:
        """Ends the thread and the loader's workers. May be called twice.

        `patience`: seconds to wait for it, where it may itself wait for a process that is gone.
        """
        self._ended = True
        self._stop.set()
        self._thread.join(patience)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(None if error is None else 5.0)

    # -------- in the thread

    def _fill(self, loader: Iterable[Loaded]) -> None:
        try:
            items = iter(loader)
            try:
                for item in items:
                    if not self._put(self._prepared(item)):
                        return
            finally:
                if hasattr(items, "close"):
                    items.close()  # type: ignore[attr-defined]  # a generator: ends its workers
        except BaseException as error:
            self._put(error)
        else:
            self._put(None)

    def _prepared(self, item: Loaded) -> Loaded:
        return item if self._prepare is None else replace(item, batch=self._prepare(item.batch))

    def _put(self, item: Loaded | BaseException | None) -> bool:
        """False once the consumer has closed."""
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False
