"""Data: sources, transforms with their metadata, exact positions, and the prefetch."""

from stillhouse.data.buckets import AspectBuckets, BucketPlan, NoBuckets
from stillhouse.data.crops import (
    CentreCrop,
    ControlConfig,
    Frame,
    GlobalCrop,
    Layout,
    LocalCrop,
    RandomCrop,
    Squash,
    source_points,
)
from stillhouse.data.faults import Fault, FaultConfig, FaultLog
from stillhouse.data.indexed import IndexedLoader, KeySampler, numbered_captions, rows_at
from stillhouse.data.loaded import Loaded, Loader, Maker, State
from stillhouse.data.loaders import DataConfig
from stillhouse.data.permutation import permute
from stillhouse.data.points import PointsConfig
from stillhouse.data.prefetch import Prefetch
from stillhouse.data.prepared import Prepared
from stillhouse.data.rows import Columns, Style
from stillhouse.data.sources import Captions, Folder, Parquet, Source, Tars, sample_id
from stillhouse.data.streamed import StreamedLoader
from stillhouse.data.transforms import ImageConfig, to_float

__all__ = [
    "AspectBuckets",
    "BucketPlan",
    "Captions",
    "CentreCrop",
    "Columns",
    "ControlConfig",
    "DataConfig",
    "Fault",
    "FaultConfig",
    "FaultLog",
    "Folder",
    "Frame",
    "GlobalCrop",
    "ImageConfig",
    "IndexedLoader",
    "KeySampler",
    "Layout",
    "Loaded",
    "Loader",
    "LocalCrop",
    "Maker",
    "NoBuckets",
    "Parquet",
    "PointsConfig",
    "Prefetch",
    "Prepared",
    "RandomCrop",
    "Source",
    "Squash",
    "State",
    "StreamedLoader",
    "Style",
    "Tars",
    "numbered_captions",
    "permute",
    "rows_at",
    "sample_id",
    "source_points",
    "to_float",
]
