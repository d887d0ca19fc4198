"""The order of the tests: files that start many processes first, so that no core idles at the end.

`pytest -n 2 --dist loadfile --no-loadscope-reorder` hands out whole files in this order.
"""

import os
from pathlib import Path

import pytest

# Ray's workers are nice by default: beside tests they would hardly be given the processor.
os.environ.setdefault("RAY_worker_niceness", "0")

LONG = ("resilience", "test_docs.py", "test_loop.py", "test_costs.py", "recipes", "benchmarks")


def place(path: Path) -> int:
    """The first name of LONG that the path holds; what holds none comes last."""
    return next((i for i, name in enumerate(LONG) if name in path.parts), len(LONG))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.path))
