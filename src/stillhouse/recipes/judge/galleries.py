"""Images to be measured, from a model, a folder or a data set: uint8 batches, nothing written.

Image i of a gallery is the same at any batch size and number of processes. A process is given its
part of each round of batches, so that rounds, joined in the order of processes, give all in order.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from stillhouse.data import Columns, DataConfig, Folder, ImageConfig, KeySampler, Parquet, Tars
from stillhouse.data.faults import Corrupt
from stillhouse.data.loaded import Loaded, open_image
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.pipelines import is_hub_id
from stillhouse.recipes import known_data
from stillhouse.recipes.pictures import to_bytes
from stillhouse.recipes.sampling import (
    SampleRun,
    build_grid,
    check_finite,
    count_evaluations,
    draw_batch,
    walked,
)
from stillhouse.recipes.subjects import Subject, run_model


class Shown(NamedTuple):
    """Some images, [B, 3, H, W] in uint8, with what they should show."""

    images: Tensor
    labels: tuple[int, ...] = ()
    text: tuple[str, ...] = ()


class Pixels(NamedTuple):
    """What images look like."""

    size: int = 0  # side of the square; 0: as they are, which must be one square size
    mode: Literal["rgb", "grey"] = "rgb"


class Gallery(Protocol):
    """Images, without saying where they come from."""

    name: str
    count: int
    reading: str
    """How they were made or read, in a line."""
    size: int
    mode: str
    whole: bool
    """All there is, not a part of it."""

    def shares(self, here: World) -> list[range]:
        """The numbers of the images in each of this process's batches."""
        ...

    def batches(self, here: World, skip: int, step: Callable[[float], None]) -> Iterator[Shown]:
        """This process's batches after the first `skip`; `step` is told of parts of images."""
        ...

    def fingerprint(self) -> str:
        """Changes when the images do."""
        ...


def colour(images: Tensor) -> Tensor:
    """uint8, three channels: grey is repeated."""
    pixels = to_bytes(images)
    return pixels if pixels.shape[1] == 3 else pixels.expand(-1, 3, -1, -1)


# ---------------------------------------------------------------- a model


def settings(config: SampleRun) -> dict[str, Any]:
    """Those that the images depend on beside solver, steps and seed."""
    own = {"grid", "guidance", "labels", "null_label", "dtype"}
    final = {"lower_order_final": config.solver.lower_order_final}
    return config.model_dump(mode="json", include=own) | final


USUAL = settings(SampleRun())


class Drawn:
    """What a model draws with a solver and a number of steps."""

    whole = False

    def __init__(
        self, config: SampleRun, subject: Subject, pixels: Pixels, device: torch.device
    ) -> None:
        self.config, self.subject = config, subject = walked(config, subject), subject
        self.size, self.mode = pixels
        self.name, self.count = config.model, config.count
        self.grid = build_grid(config, subject, device)
        self.evaluations = count_evaluations(config, self.grid.tolist())
        self.reading = f"{config.solver.kind}, {config.step_count} steps, seed {config.seed}"
        wanted = settings(config)
        if chosen := {name: wanted[name] for name in wanted if wanted[name] != USUAL[name]}:
            self.reading += ", " + re.sub(r'[{}"]', "", json.dumps(chosen))

    def shares(self, here: World) -> list[range]:
        """Whole batches are dealt in turn."""
        size, step = self.config.batch, self.config.batch * here.size
        starts = range(here.rank * size, self.count, step)
        return [range(start, min(start + size, self.count)) for start in starts]

    def batches(self, here: World, skip: int, step: Callable[[float], None]) -> Iterator[Shown]:
        for numbers in map(list, self.shares(here)[skip:]):
            share = len(numbers) / (len(self.grid) - 1)
            states = draw_batch(
                self.config,
                self.subject,
                self.grid,
                numbers,
                here.device,
                lambda _, share=share: step(share),
            )
            check_finite(states, numbers, self.reading)
            labels = tuple(self.subject.labels_of(numbers))
            text = tuple(self.subject.prompts_of(numbers))
            yield Shown(colour(self.subject.decode(states)), labels, text)

    def fingerprint(self) -> str:
        return ", ".join(self.subject.fingerprints().values())


# ---------------------------------------------------------------- a folder or data set


class Stored:
    """Images that exist: `count` of them, chosen by the seed; 0 is all."""

    def __init__(
        self,
        name: str,
        data: DataConfig,
        pixels: Pixels,
        *,
        count: int,
        batch: int,
        seed: int,
        texts: Sequence[str] = (),
    ) -> None:
        self.name, self.batch, self.seed, self.texts = name, batch, seed, texts
        self.images = data.source.open_indexed(data.columns)
        if self.images.faults:
            raise UserError(f"{name}: {self.images.faults[0]}. Repair or remove it")
        there = len(self.images)
        if min(there, count or there) < 2:
            raise UserError(
                f"one image of {name} has no spread to compare: two are the least, thousands usual"
            )
        if count > there:
            raise UserError(
                f"{name} holds {there} images, not {count}: give --count {there} or fewer "
                "(--reference-count for a reference)"
            )
        if texts and len(texts) != there:
            raise UserError(
                f"{name} holds {there} images, but there are {len(texts)} prompts: give a line for "
                "each image, in the order of their names"
            )
        self.count, self.whole = count or there, count in (0, there)
        self.native = not pixels.size
        self.size, self.mode = pixels.size or self._native_size(), pixels.mode
        image = ImageConfig(size=self.size, mode=pixels.mode)
        self.data = data.model_copy(update={"image": image})
        how = "as they are" if self.native else f"centre crop, {image.filter}"
        read = [f"{role} {name!r}" for role, name in _named(data.columns)]
        self.reading = ", ".join([f"{self.size} px, {self.mode}, {how}", *read])

    def _native_size(self) -> int:
        """Of the first image; whether all are of that size is seen on the way."""
        row = self.images.rows([0])[0]
        try:
            image = open_image(row, "rgb")
        except Corrupt as error:
            raise UserError(
                f"{self.name}: {row.where} cannot be used ({error}). Repair or remove it"
            ) from error
        if image.height != image.width:
            raise UserError(
                f"{self.name} holds images of {image.width} x {image.height}: give the side of the "
                "square that they are cropped and resized to as --size"
            )
        return image.height

    def _sampler(self, here: World) -> KeySampler:
        # At least a row for each process; the last batch may leave some without.
        batch = self.batch * here.size
        return KeySampler(batch, 0, self.count, here.rank, here.size)

    def shares(self, here: World) -> list[range]:
        return list(self._sampler(here))

    def batches(self, here: World, skip: int, step: Callable[[float], None]) -> Iterator[Shown]:
        batch = self.batch * here.size
        loader = self.data.build(
            batch=batch,
            seed=self.seed,
            rank=here.rank,
            world=here.size,
            start=skip * batch,
            stop=self.count,
        )
        for item in loader:
            self._check(item)
            step(len(item.batch))
            yield Shown(colour(item.batch.data), self._labels(item), self._text(item))

    def _labels(self, item: Loaded) -> tuple[int, ...]:
        labels = item.batch.condition.label if item.batch.condition else None
        return () if labels is None else tuple(labels.tolist())

    def _text(self, item: Loaded) -> tuple[str, ...]:
        if self.texts and item.batch.ids is not None:
            rows: list[int] = item.batch.ids.tolist()
            return tuple(self.texts[row] for row in rows)
        return item.text or ()

    def _check(self, item: Loaded) -> None:
        """No image is replaced or bent silently."""
        if item.faults:
            where, reason = item.faults[0]
            reason = re.sub(r"; image \d+ is shown instead$", "", reason)
            raise UserError(f"{self.name}: {where} cannot be used ({reason}). Repair or remove it")
        assert item.frame is not None
        sizes = item.frame.source
        if self.native and bool((sizes != self.size).any()):
            odd = next(s for s in sizes.tolist() if s != [self.size] * 2)
            raise UserError(
                f"{self.name} holds images of several sizes ({self.size} x "
                f"{self.size} and {odd[1]} x {odd[0]}): give the side of the square "
                "that all are cropped and resized to as --size"
            )

    def fingerprint(self) -> str:
        return self.data.source.fingerprint()


def _named(columns: Columns) -> Iterator[tuple[str, str]]:
    """Columns that are not the usual ones: other columns are other images, or other captions."""
    if columns.image != Columns().image:
        yield "images", columns.image
    if columns.text:
        yield "captions", columns.text


# ---------------------------------------------------------------- by name


def find_data(name: str, columns: Columns) -> DataConfig | None:
    """A known data set (cifar10, fashion:test), Parquet files, tars, or a folder of images.

    None for what looks like none of them: a model, perhaps.
    """
    known, _, split = name.partition(":")
    if known in known_data.HUB and split in ("", "train", "test"):
        source = known_data.parquet(known, "test" if split == "test" else "train")
        return DataConfig(source=source, columns=known_data.columns(known))
    if name.endswith(".parquet"):
        return DataConfig(source=Parquet(files=(name,)), columns=columns)
    if name.endswith(".tar"):
        return DataConfig(source=Tars(files=(name,), streaming=False), columns=columns)
    folder = Path(name).expanduser()
    if not folder.is_dir() or _is_model(folder):
        return None
    files = {file for _, _, names in os.walk(folder) for file in names}
    if any(file.endswith(".parquet") for file in files):
        return DataConfig(source=Parquet(files=(name,)), columns=columns)
    # A folder's images have no column of their own name, and captions only where a file says so.
    text = columns.text if any(file.startswith("metadata.") for file in files) else ""
    return DataConfig(source=Folder(path=name), columns=Columns(text=text))


def _is_model(folder: Path) -> bool:
    return any((folder / f).is_file() for f in ("config.json", "model_index.json", "run.json"))


def model_folder(name: str, images: bool = False) -> str:
    """Where a model is; what is none is refused, and told what else it may be: `images`."""
    name = run_model(name)
    folder = Path(name).expanduser()
    if folder.is_dir() or is_hub_id(name) or name.startswith("toy:"):
        return name
    if images:
        raise UserError(
            f"{name} is neither a folder nor a data set: name a folder of images, a data set "
            "(cifar10, fashion:test), Parquet files, tars, or a model (its directory, a run's "
            "folder, or a hub id)"
        )
    raise UserError(
        f"there is no model {name}: name its directory, a run's folder, or a hub id (owner/name)"
    )
