"""Small pipelines and captioned images for fine-tuning, and a teacher to distil."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """A whole pipeline of each class that can be fine-tuned."""
    from tunable import FAMILIES, save_whole

    root = tmp_path_factory.mktemp("models")
    return {family: save_whole(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    from tunable import write_images

    return write_images(tmp_path_factory.mktemp("captioned") / "images")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Where latents and captions are kept: empty for every test."""
    monkeypatch.setenv("STILLHOUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "encoded"


@pytest.fixture
def teacher(tmp_path) -> Path:
    from recipes.students import EDM, bare

    return bare(tmp_path / "teacher", EDM)
