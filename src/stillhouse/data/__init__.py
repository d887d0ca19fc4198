"""Data: sources, transforms with their metadata, exact positions, and the prefetch."""

from stillhouse.data.faults import Fault, FaultConfig, FaultLog
from stillhouse.data.indexed import IndexedLoader, KeySampler, rows_at
from stillhouse.data.loaded import Loaded, Loader, Maker, State
from stillhouse.data.loaders import DataConfig
from stillhouse.data.permutation import permute
from stillhouse.data.points import PointsConfig
from stillhouse.data.prefetch import Prefetch
from stillhouse.data.rows import Columns
from stillhouse.data.sources import Folder, Parquet, Source, Tars, sample_id
from stillhouse.data.streamed import StreamedLoader
from stillhouse.data.transforms import (
    CentreCrop,
    Frame,
    ImageConfig,
    RandomCrop,
    Squash,
    source_points,
    to_float,
)

__all__ = [
    "CentreCrop",
    "Columns",
    "DataConfig",
    "Fault",
    "FaultConfig",
    "FaultLog",
    "Folder",
    "Frame",
    "ImageConfig",
    "IndexedLoader",
    "KeySampler",
    "Loaded",
    "Loader",
    "Maker",
    "Parquet",
    "PointsConfig",
    "Prefetch",
    "RandomCrop",
    "Source",
    "Squash",
    "State",
    "StreamedLoader",
    "Tars",
    "permute",
    "rows_at",
    "sample_id",
    "source_points",
    "to_float",
]
