"""A thread that keeps batches ready: data, noise, noise levels, and the coupling of the two.

Noise and noise level are keyed by (seed, image key), so what a row gets does not depend on where
or when it is drawn. The state of a batch travels with it: `state` is that of the last batch the
consumer took, however many more are ready.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from stillhouse.data.loaded import Loaded, State
from stillhouse.process import Batch, keyed_normal, keyed_uniform
from stillhouse.process.levels import Density

Couple = Callable[[Batch], Batch]


def draw(batch: Batch, *, seed: int, density: Density | None, noise: bool = True) -> Batch:
    """The batch with its noise and its noise levels, drawn by key."""
    key = batch.key
    if key is None:
        raise ValueError("a batch without keys: noise is drawn by key")
    if noise:
        drawn = keyed_normal(batch.data.shape[1:], key, seed=seed, purpose="noise")
        batch = replace(batch, noise=drawn)
    if density is not None:
        u = keyed_uniform(key, seed=seed, purpose="sigma")
        batch = replace(batch, sigma=density.quantile(u).to(batch.data.dtype))
    return batch


class Prefetch:
    """Iterate over it; close it (or use `with`) when done.

    `couple` sees each batch after its noise was drawn and returns it with the noise rearranged.
    """

    def __init__(
        self,
        loader: Iterable[Loaded],
        *,
        seed: int,
        density: Density | None = None,
        noise: bool = True,
        couple: Couple | None = None,
        depth: int = 2,
        state: State | None = None,
    ) -> None:
        self.state = state or {}
        """The position after the last batch taken."""
        self.waited = 0.0
        """Seconds that the consumer has waited for data."""
        self._draw = (seed, density, noise)
        self._couple = couple
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

    def close(self) -> None:
        """Ends the thread and the loader's workers. May be called twice."""
        self._ended = True
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -------- in the thread

    def _fill(self, loader: Iterable[Loaded]) -> None:
        try:
            items = iter(loader)
            try:
                for item in items:
                    if not self._put(self._prepare(item)):
                        return
            finally:
                if hasattr(items, "close"):
                    items.close()  # type: ignore[attr-defined]  # a generator: ends its workers
        except BaseException as error:
            self._put(error)
        else:
            self._put(None)

    def _prepare(self, item: Loaded) -> Loaded:
        seed, density, noise = self._draw
        batch = draw(item.batch, seed=seed, density=density, noise=noise)
        return replace(item, batch=self._couple(batch) if self._couple else batch)

    def _put(self, item: Loaded | BaseException | None) -> bool:
        """False once the consumer has closed."""
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False
