"""The data of a run, as one config that builds its loader."""

from collections.abc import Sequence
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from stillhouse.config import Config
from stillhouse.data.faults import FaultConfig
from stillhouse.data.indexed import IndexedLoader
from stillhouse.data.loaded import Loader, Maker, State, WorkerStart
from stillhouse.data.rows import Columns
from stillhouse.data.sources import Folder, Parquet, Source
from stillhouse.data.streamed import StreamedLoader
from stillhouse.data.transforms import ImageConfig
from stillhouse.errors import UserError


class DataConfig(Config):
    """Source, columns, pixels, and how they are read."""

    kind: Literal["images"] = "images"
    source: Source = Parquet()
    columns: Columns = Columns()
    image: ImageConfig = ImageConfig()
    workers: NonNegativeInt = 0
    """Processes that read, per training process; 0 reads in the prefetch thread."""
    worker_start: WorkerStart = "auto"
    """How they are started; auto is PyTorch's own choice."""
    buffer: PositiveInt = 1024
    """Rows that a reader of a streamed source shuffles together."""
    faults: FaultConfig = FaultConfig()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return self.image.shape

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
        maker = Maker(self.image, self.columns, seed)
        common = {
            "batch": batch,
            "rank": rank,
            "world": world,
            "workers": self.workers,
            "worker_start": self.worker_start,
            "faults": self.faults,
        }
        if not isinstance(self.source, Folder) and self.source.streaming:
            if stop is not None:
                raise UserError("a streamed source has no end to stop at: use an indexed one")
            shards = self.source.open_shards(self.columns)
            return StreamedLoader(
                shards, maker, start=start, resume=resume, buffer=self.buffer, **common
            )
        if resume and resume[0].get("kind") != "indexed":
            raise UserError("the checkpoint comes from a streamed source, this one is indexed")
        images = self.source.open_indexed(self.columns)
        if resume and resume[0].get("rows", len(images)) != len(images):
            raise UserError(
                f"the data had {resume[0]['rows']} images when the run was stopped and has "
                f"{len(images)} now: the place in it is lost. Restore it, or start anew with "
                "another --out"
            )
        start = resume[0]["images"] if resume else start
        return IndexedLoader(images, maker, start=start, stop=stop, **common)
