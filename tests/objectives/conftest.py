"""Shared by the tests of objectives: keyed batches of Gaussian data."""

from collections.abc import Callable

import pytest
import torch

from stillhouse.process import Batch, Condition, keyed_normal

MakeBatch = Callable[..., Batch]


@pytest.fixture
def make_batch() -> MakeBatch:
    """Data N(mean, std^2) of any shape, keyed from `first` on, with a label per row."""

    def make(
        count: int,
        shape: tuple[int, ...] = (8,),
        *,
        mean: float = 0.0,
        std: float = 0.7,
        first: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> Batch:
        key = torch.arange(first, first + count)
        data = mean + std * keyed_normal(shape, key, seed=99, purpose="data").to(dtype)
        return Batch(data, Condition(label=key % 5), ids=key + 1000, key=key)

    return make
