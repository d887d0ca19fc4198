"""Files that the metadata of a folder names: all of them are there."""

import os
from collections.abc import Iterable
from pathlib import Path

from stillhouse.errors import UserError

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # that datasets reads


def check_named(paths: Iterable[str | None], folder: str) -> None:
    """`paths` as datasets has read them; what is behind a URL is not looked for.

    A folder without metadata lists its files itself: none of them is looked for again. datasets
    refuses names that lead out of the folder.
    """
    if "://" in folder:
        return
    named = [path for path in paths if path]
    if not has_metadata(named):
        return
    missing = [path for path in named if not os.path.exists(path)]
    if missing:
        raise UserError(
            f"the metadata in {folder} names {os.path.relpath(missing[0], folder)}, which is not "
            f"there ({len(missing)} of {len(named)} images): add what is missing, or take its "
            "lines away"
        )


def has_metadata(paths: Iterable[str]) -> bool:
    """Whether there is any that could name these files: in their folders, or in one further up."""
    places = {os.path.dirname(path) for path in paths}
    folders = {folder for place in places for folder in (Path(place), *Path(place).parents)}
    return any((folder / name).is_file() for folder in folders for name in METADATA)
