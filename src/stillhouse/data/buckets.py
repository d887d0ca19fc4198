"""Aspect-ratio buckets: images of many shapes in batches of one shape each.

A table of shapes has about the same area everywhere; an image goes to the shape whose aspect ratio
is nearest in its logarithm. A bucket of n images is an endless stream, epoch after epoch, each
shuffled, cut into whole batches of B. Epoch e of the run consists of the batches

    floor(e n / B) ... floor((e + 1) n / B) - 1   of every bucket,

in an order of their own. So every batch is whole and of one shape, whatever the process: all make
as many steps. No image is left out or shown twice for an epoch; the last of a bucket that do not
fill a batch, fewer than B, come with the next epoch's first. All of this follows from the number of
images seen, which is the whole position.

A shape with fewer than B images gives them to the nearest one with more: they would wait for
epochs.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from stillhouse.config import Config
from stillhouse.data.crops import Size
from stillhouse.data.indexed import rows_at
from stillhouse.data.permutation import permute
from stillhouse.data.sources import IndexedImages
from stillhouse.errors import UserError

# ---------------------------------------------------------------- shapes


def bucket_shapes(side: int, step: int, widest: float) -> tuple[Size, ...]:
    """Shapes (height, width) of at most side^2 pixels, from the tallest to the widest.

    Sides are multiples of `step`; the long one is the largest that the area allows, and at most
    `widest` times the short one.
    """
    if side % step:
        raise UserError(
            f"--data.image.size {side} is not a multiple of --data.buckets.step {step}: the square "
            "is one of the shapes"
        )
    tall = []
    for short in range(step, side + 1, step):
        long = side * side // (short * step) * step
        if long <= widest * short:
            tall.append((long, short))
    wide = [(short, long) for long, short in reversed(tall) if short != long]
    return (*tall, *wide)


def nearest_shape(aspects: NDArray[np.float64], shapes: Sequence[Size]) -> NDArray[np.int64]:
    """The place of the shape whose log(width / height) is nearest; shapes as in the table."""
    logs = np.log([width / height for height, width in shapes])
    return np.searchsorted((logs[1:] + logs[:-1]) / 2, np.log(aspects))


def well_filled(
    aspects: NDArray[np.float64], shapes: Sequence[Size], least: int
) -> tuple[list[Size], NDArray[np.int64]]:
    """The shapes that at least so many images are nearest to, and which each image goes to.

    The scarcest shape is taken away until all that are left have enough, or one is left.
    """
    kept = list(shapes)
    values, inverse, counts = np.unique(aspects, return_inverse=True, return_counts=True)
    while True:
        where = nearest_shape(values, kept)
        filled = np.bincount(where, weights=counts, minlength=len(kept))
        if len(kept) == 1 or filled.min() >= least:
            return kept, where[inverse]
        del kept[int(filled.argmin())]


# ---------------------------------------------------------------- order


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """Which images meet in which batch."""

    shapes: Sequence[Size]
    members: Sequence[NDArray[np.int64]]  # the rows in each bucket
    batch: int  # over all processes
    seed: int

    def __call__(self, keys: range) -> tuple[Sequence[int], Size | None]:
        """The rows of images `keys`, all of one batch, and their shape."""
        step, first = divmod(keys.start, self.batch)
        if first + len(keys) > self.batch:
            raise ValueError(f"images {keys.start} to {keys.stop - 1} are not of one batch")
        bucket, number = self.batch_at(step)
        begin = number * self.batch + first
        rows = self.members[bucket]
        places = rows_at(range(begin, begin + len(keys)), len(rows), self.seed)
        return rows[places].tolist(), self.shapes[bucket]

    def batch_at(self, step: int) -> tuple[int, int]:
        """The bucket of a step, and which of the bucket's batches it is."""
        # The batches that buckets have not filled yet are fewer than there are buckets.
        beyond = (step + len(self.members)) * self.batch // int(self._counts.sum()) + 1
        epoch = bisect_right(range(beyond), step, key=self.first_step) - 1
        before = self._whole(epoch)
        ends = (self._whole(epoch + 1) - before).cumsum()
        place = step - int(before.sum())
        place = int(permute([place], int(ends[-1]), self.seed, epoch, "buckets")[0])
        bucket = int(np.searchsorted(ends, place, side="right"))
        begin = int(ends[bucket - 1]) if bucket else 0
        return bucket, int(before[bucket]) + place - begin

    def first_step(self, epoch: int) -> int:
        """Steps before an epoch."""
        return int(self._whole(epoch).sum())

    def _whole(self, epochs: int) -> NDArray[np.int64]:
        """Whole batches that so many epochs of each bucket make."""
        return epochs * self._counts // self.batch

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return np.array([len(rows) for rows in self.members], np.int64)


# ---------------------------------------------------------------- config


class NoBuckets(Config):
    """Every image becomes a square."""

    kind: Literal["none"] = "none"

    def build(self, images: IndexedImages, side: int, batch: int, seed: int) -> None:
        """No plan: images come in the usual order."""


class AspectBuckets(Config):
    """Images keep their aspect ratio as nearly as the table of shapes allows."""

    kind: Literal["aspect"] = "aspect"
    step: PositiveInt = 8
    """Sides are multiples of this; the network's patch or downscaling must divide it."""
    widest: Annotated[float, Field(ge=1)] = 2.0
    """Largest ratio of the long side to the short one."""
    height: str = ""
    """Column of the images' heights; without it every image's header is read at the start."""
    width: str = ""
    """Column of their widths."""

    @model_validator(mode="after")
    def _both(self) -> "AspectBuckets":
        if bool(self.height) != bool(self.width):
            raise ValueError("give the columns of both the height and the width, or of neither")
        return self

    def build(self, images: IndexedImages, side: int, batch: int, seed: int) -> BucketPlan:
        """The plan for global batches of `batch` images of side^2 pixels."""
        sizes = self._sizes(images)
        # What cannot be read goes with the squares, and is told of when its turn comes.
        sizes[sizes.min(1) < 1] = 1
        aspects = sizes[:, 1] / sizes[:, 0]
        shapes, where = well_filled(aspects, bucket_shapes(side, self.step, self.widest), batch)
        members = [np.flatnonzero(where == place) for place in range(len(shapes))]
        return BucketPlan(tuple(shapes), tuple(members), batch, seed)

    def _sizes(self, images: IndexedImages) -> NDArray[np.int64]:
        if not self.height:
            return images.sizes()
        columns = (images.column(name) for name in (self.height, self.width))
        return np.array([(h or 0, w or 0) for h, w in zip(*columns, strict=True)], np.int64)


Buckets = Annotated[NoBuckets | AspectBuckets, Field(discriminator="kind")]
