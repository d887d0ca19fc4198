"""The data of a run, as one config that builds its loader."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from stillhouse.config import Config
from stillhouse.data.buckets import Buckets, NoBuckets
from stillhouse.data.crops import ControlConfig, GlobalCrop, LocalCrop
from stillhouse.data.faults import FaultConfig
from stillhouse.data.indexed import IndexedLoader
from stillhouse.data.loaded import Loader, Maker, State, WorkerStart
from stillhouse.data.prepared import LatentMaker, Prepared
from stillhouse.data.rows import Columns
from stillhouse.data.sources import Folder, Parquet, Tars
from stillhouse.data.streamed import StreamedLoader
from stillhouse.data.transforms import ImageConfig
from stillhouse.errors import UserError

DataSource = Annotated[Parquet | Tars | Folder | Prepared, Field(discriminator="kind")]


class DataConfig(Config):
    """Source, columns, pixels, and how they are read."""

    kind: Literal["images"] = "images"
    source: DataSource = Parquet()
    columns: Columns = Columns()
    image: ImageConfig = ImageConfig()
    control: ControlConfig = ControlConfig()
    buckets: Buckets = NoBuckets()
    """Shapes of batches, for images that are not all square."""
    workers: NonNegativeInt = 0
    """Processes that read, per training process; 0 reads in the prefetch thread."""
    worker_start: WorkerStart = "auto"
    """How they are started; auto is PyTorch's own choice."""
    buffer: PositiveInt = 1024
    """Rows that a reader of a streamed source shuffles together."""
    faults: FaultConfig = FaultConfig()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image, or of its latents where they are stored."""
        return self.source.index.shape if isinstance(self.source, Prepared) else self.image.shape

    def build(
        self,
        *,
        batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
        stop: int | None = None,
        resume: Sequence[State] = (),
    ) -> Loader:
        """The loader of process `rank` of `world`, for global batches of `batch` images.

        `resume` holds the stored states of all processes by rank (of an indexed source, any one of
        them); without it the run begins at image `start`. `stop` ends an indexed source.
        """
        common = {
            "batch": batch,
            "rank": rank,
            "world": world,
            "workers": self.workers,
            "worker_start": self.worker_start,
            "faults": self.faults,
        }
        maker, bucketed = self._maker(seed), not isinstance(self.buckets, NoBuckets)
        if not isinstance(self.source, Folder) and self.source.streaming:
            if stop is not None:
                raise UserError("a streamed source has no end to stop at: use an indexed one")
            if bucketed:
                raise UserError(
                    "a streamed source cannot be sorted into buckets, as its images are not known "
                    "before they are read: give --data.source.streaming false, or leave "
                    "--data.buckets out"
                )
            shards = self.source.open_shards(self.columns)
            return StreamedLoader(
                shards, maker, start=start, resume=resume, buffer=self.buffer, **common
            )
        images = self.source.open_indexed(self.columns)
        if resume:
            _check_place(resume[0], len(images), batch if bucketed else None)
            start = resume[0]["images"]
        order = self.buckets.build(images, self.image.size, batch, seed)
        return IndexedLoader(images, maker, order, start=start, stop=stop, **common)

    def _maker(self, seed: int) -> Maker:
        if not isinstance(self.source, Prepared):
            return Maker(self.image, self.columns, seed, self.control)
        if self.image.flip or not isinstance(self.buckets, NoBuckets):
            raise UserError(
                "prepared latents are neither flipped nor sorted into shapes any more: give "
                "--data.image.flip false and no --data.buckets; `stillhouse prepare --flip` flips"
            )
        if isinstance(self.image.crop, GlobalCrop | LocalCrop):
            raise UserError(
                "prepared latents are not cropped any more: leave --crop out; "
                "`stillhouse prepare --crop` crops"
            )
        return LatentMaker(self.image, self.columns, seed, self.control, self.source.index)


def _check_place(state: State, rows: int, batch: int | None) -> None:
    """Whether a place in the data means here what it meant there. `batch` of bucketed data."""
    if state.get("kind") != "indexed":
        raise UserError("the checkpoint comes from a streamed source, this one is indexed")
    if state.get("rows", rows) != rows:
        raise UserError(
            f"the data had {state['rows']} images when the run was stopped and has {rows} now: the "
            "place in it is lost. Restore it, or start anew with another --out"
        )
    if state.get("batch") != batch:
        raise UserError(
            "the checkpoint counts its place in the data by other buckets or batches: use the same "
            "--data.buckets and --batch, or start anew with another --out"
        )
