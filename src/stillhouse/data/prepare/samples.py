"""From a row to what is encoded: decoded, looked at, cropped; or why it is left out."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from stillhouse.data.crops import Layout
from stillhouse.data.faults import Corrupt, Fault
from stillhouse.data.loaded import open_image
from stillhouse.data.prepare.units import Entry
from stillhouse.data.rows import Row, label_number, text_of
from stillhouse.data.transforms import ImageConfig

if TYPE_CHECKING:
    from PIL.Image import Image

A = TypeVar("A")
B = TypeVar("B")
Filter = Literal["small", "aspect", "duplicate"]


class Sample(NamedTuple):
    """One image, ready to be encoded."""

    name: str
    where: str
    id: int
    pixels: NDArray[np.uint8]  # [3, H, W]
    layout: Layout
    label: int | None
    text: str
    styles: tuple[str | None, ...]


class Failed(NamedTuple):
    """One that cannot be used."""

    name: str
    where: str
    reason: str


Look = Sample | Failed | Filter


@dataclass(frozen=True)
class Rules:
    """Which images are kept, and which part of them."""

    image: ImageConfig
    min_size: int = 0
    """Pixels of the shorter side."""
    max_aspect: float = float("inf")
    """Longer side / shorter side."""
    seed: int = 0

    def look(self, entry: Entry, duplicate: bool = False) -> Look:
        """Corrupt images are told as such whatever else they are."""
        name, row = entry
        try:
            image, label = open_image(row, self.image.mode), label_of(row)
        except Corrupt as reason:
            return Failed(name, row.where, str(reason))
        wrong = "duplicate" if duplicate else self._refusal(image)
        if wrong:
            return wrong
        pixels, layout = self.image.apply(image, row.id, self.seed)
        styles = tuple(None if style is None else text_of(style) for style in row.styles)
        return Sample(name, row.where, row.id, pixels, layout, label, text_of(row.text), styles)

    def _refusal(self, image: "Image") -> Filter | None:
        short, long = sorted((image.height, image.width))
        if short < self.min_size:
            return "small"
        return "aspect" if long > self.max_aspect * short else None


def label_of(row: Row) -> int | None:
    """A row without a label is kept: whether it needs one is for the training to say."""
    return None if row.label is None else label_number(row.label)


# ---------------------------------------------------------------- reading ahead


def ahead(
    items: Iterator[A | Fault], work: Callable[[A, int], B], threads: int, depth: int
) -> Iterator[B | Fault]:
    """`work` on item and its number, in order, by threads that are at most `depth` items ahead.

    Faults are passed on, and not counted.
    """
    stop, ready = Event(), Queue[Any](maxsize=depth)

    def put(item: Any) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.05)
                return True
            except Full:
                continue
        return False

    def fill(pool: ThreadPoolExecutor) -> None:
        numbers = count()
        try:
            for item in items:
                fault = isinstance(item, Fault)
                if not put(item if fault else pool.submit(work, item, next(numbers))):
                    return
            put(None)
        except BaseException as error:
            put(error)

    with ThreadPoolExecutor(threads) as pool:
        reader = Thread(target=fill, args=(pool,), daemon=True)
        reader.start()
        try:
            yield from _results(ready)
        finally:
            stop.set()
            reader.join()


def _results(ready: "Queue[Any]") -> Iterator[Any]:
    while (item := ready.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item.result() if isinstance(item, Future) else item


def batches(items: Iterator[A], size: int) -> Iterator[list[A]]:
    """Lists of `size`; the last may be shorter."""
    found: list[A] = []
    for item in items:
        found.append(item)
        if len(found) == size:
            yield found
            found = []
    if found:
        yield found


__all__ = ["Failed", "Look", "Rules", "Sample", "ahead", "batches"]
