"""Shards of latents from a source of images, by a Ray Data job: see `job`.

Encoders come as factories, picklable callables that are called in the workers.
"""

from stillhouse.data.loaded import Words
from stillhouse.data.prepare.cluster import Fate, Pool, cluster
from stillhouse.data.prepare.holdings import source_in
from stillhouse.data.prepare.job import (
    Plan,
    conclude,
    encode_all,
    find_index,
    forget,
    hash_all,
    make_plan,
)
from stillhouse.data.prepare.samples import Rules
from stillhouse.data.prepare.shard import Form, Precision
from stillhouse.data.prepare.units import Rows, Unit, open_rows
from stillhouse.data.prepare.worker import Factory, Job

__all__ = [
    "Factory",
    "Fate",
    "Form",
    "Job",
    "Plan",
    "Pool",
    "Precision",
    "Rows",
    "Rules",
    "Unit",
    "Words",
    "cluster",
    "conclude",
    "encode_all",
    "find_index",
    "forget",
    "hash_all",
    "make_plan",
    "open_rows",
    "source_in",
]
