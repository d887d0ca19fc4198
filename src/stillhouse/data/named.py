"""Files that the metadata of a folder names: all of them are there."""

import os
from collections.abc import Iterable

from stillhouse.errors import UserError


def check_named(paths: Iterable[str | None], folder: str) -> None:
    """`paths` as read from metadata.csv or .jsonl; what is behind a URL is not looked for.

    datasets itself refuses names that lead out of the folder.
    """
    if "://" in folder:
        return
    named = [path for path in paths if path]
    missing = [path for path in named if not os.path.exists(path)]
    if missing:
        raise UserError(
            f"the metadata in {folder} names {os.path.relpath(missing[0], folder)}, which is not "
            f"there ({len(missing)} of {len(named)} images): add what is missing, or take its "
            "lines away"
        )
