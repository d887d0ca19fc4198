"""What a loader hands over, and how rows become it."""

import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stillhouse.data.crops import ControlConfig, Frame, Layout, Size
from stillhouse.data.faults import Fault, FaultLog
from stillhouse.data.rows import Columns, Row, image_bytes, label_number, text_of
from stillhouse.data.transforms import ImageConfig, array_image, decode, to_float
from stillhouse.errors import UserError
from stillhouse.process import Batch, Condition

if TYPE_CHECKING:
    from PIL.Image import Image

State = dict[str, Any]  # JSON
WorkerStart = Literal["auto", "fork", "forkserver", "spawn"]
NO_CONTROL = ControlConfig()


@dataclass(frozen=True, eq=False)
class Loaded:
    """A batch of this process, with what the tensors cannot say."""

    batch: Batch
    frame: Frame | None = None
    text: tuple[str, ...] | None = None
    faults: tuple[Fault, ...] = ()
    state: State = field(default_factory=dict)
    """The position after this batch: store that of the last batch consumed."""


class Loader(Protocol):
    """Gives this process its rows of one global batch after another, without end."""

    log: FaultLog
    classes: tuple[str, ...]
    note: str  # how it resumed, for people

    def __iter__(self) -> Iterator[Loaded]: ...


class Words(NamedTuple):
    """An encoded caption."""

    tokens: NDArray[Any]  # [n, C], without padding
    pooled: NDArray[Any]  # [P]


class Picture(NamedTuple):
    """One image, ready to be stacked."""

    pixels: NDArray[Any]  # uint8, or latents
    layout: Layout
    label: int
    text: str
    id: int
    control: tuple[float, ...]
    words: Words | None = None


@dataclass(frozen=True, eq=False)
class Stack:
    """The pictures of a batch on their way from whoever reads.

    An array, not a tensor: tensors go from process to process through shared memory, of which
    containers have little, and a reader that is killed leaves its part of it behind.
    """

    pixels: NDArray[Any]
    keys: Sequence[int]
    layouts: list[Layout]
    labels: list[int]
    text: tuple[str, ...]
    ids: list[int]
    control: list[tuple[float, ...]]
    words: list[Words | None]
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Maker:
    """Turns rows into pictures, in whichever process reads, and their stacks into batches."""

    image: ImageConfig
    columns: Columns
    seed: int
    control: ControlConfig = NO_CONTROL

    def picture(self, row: Row, key: int, size: Size | None = None) -> Picture:
        """`size` if not the usual square. Raises `Corrupt` if the row cannot be used."""
        image = open_image(row, self.image.mode)
        label = label_number(row.label) if self.columns.label else 0
        pixels, layout = self.image.apply(image, key, self.seed, size)
        styles = zip(self.columns.styles, row.styles, strict=True)
        control = self.control.values(layout, [s.number(v, row.where) for s, v in styles])
        return Picture(pixels, layout, label, text_of(row.text), row.id, control)

    def stack(
        self, pictures: Sequence[Picture], keys: Sequence[int], faults: Iterable[Fault]
    ) -> Stack:
        pixels, layouts, labels, text, ids, control, words = map(list, zip(*pictures, strict=True))
        return Stack(
            np.stack(pixels), keys, layouts, labels, tuple(text), ids, control, words, tuple(faults)
        )

    def finish(self, item: Stack | UserError, log: FaultLog, state: State) -> Loaded:
        """In the training process: counts faults, makes tensors; `state` is that after the batch.

        Workers return a `UserError` as a value: raised, it would arrive wrapped in a stack trace.
        """
        if isinstance(item, UserError):
            raise item
        log.add(item.faults)
        batch = Batch(
            data=self.floats(item.pixels),
            condition=self._condition(item),
            ids=torch.tensor(item.ids),
            key=torch.tensor(item.keys),
        )
        text = item.text if self.columns.text else None
        return Loaded(batch, Frame.of(item.layouts), text, item.faults, state)

    def floats(self, pixels: NDArray[Any]) -> Tensor:
        return to_float(torch.from_numpy(pixels))

    def spoken(self, words: list[Words | None]) -> Condition:
        """What captions say that are encoded already: nothing, of images."""
        return Condition()

    def _condition(self, item: Stack) -> Condition | None:
        label = torch.tensor(item.labels) if self.columns.label else None
        control = torch.tensor(item.control) if item.control[0] else None
        cond = replace(self.spoken(item.words), label=label, control=control)
        return cond if len(cond) else None


def open_image(row: Row, mode: Literal["rgb", "grey"]) -> "Image":
    """The decoded image of a row. Raises `Corrupt` if there is none."""
    raw = image_bytes(row.image)
    return array_image(row.image, mode) if raw is None else decode(raw, mode)


def rows_of(batch: int, rank: int, world: int) -> tuple[int, int]:
    """The rows of a global batch that belong to a process: from, up to."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world}")
    if batch < world:
        raise UserError(f"a global batch of {batch} has no row for each of {world} processes")
    return batch * rank // world, batch * (rank + 1) // world


def _heed_no_signal(_: int) -> None:
    """Ctrl-C and torchrun's SIGTERM reach readers too; the run decides when they end."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.SIG_IGN)


def worker_options(workers: int, start: WorkerStart) -> dict[str, Any]:
    """Options of a torch data loader that starts `workers` processes."""
    context = None if start == "auto" or not workers else start
    return {
        "batch_size": None,
        "num_workers": workers,
        "multiprocessing_context": context,
        "generator": torch.Generator(),  # of their own: the global one is the network's
        "worker_init_fn": _heed_no_signal if workers else None,
    }
