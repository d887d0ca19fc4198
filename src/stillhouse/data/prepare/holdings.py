"""What a folder holds decides how it is read: tars, Parquet files with images, or image files."""

import posixpath
from typing import Any

from stillhouse.data.prepare.units import SUFFIXES, usual_columns
from stillhouse.data.rows import Columns
from stillhouse.data.shardfiles import filesystem
from stillhouse.data.sources import Folder, Parquet, Source, Tars
from stillhouse.errors import UserError

_PICTURES = {f".{suffix}" for suffix in (*SUFFIXES, "avif")}


def source_in(folder: str, columns: Columns) -> Source:
    """All files of the one kind that is there; where there are several, nobody can tell which."""
    fs, root = filesystem(folder, {})
    files = [file for file in fs.find(root) if _visible(file.removeprefix(root))]
    tars, tables = ([f for f in files if f.endswith(suffix)] for suffix in (".tar", ".parquet"))
    pictures = [f for f in files if posixpath.splitext(f)[1].lower() in _PICTURES]
    # img2dataset leaves Parquet files of metadata beside what it has downloaded.
    if tables and (tars or pictures) and not _holds_images(fs, tables[0], columns):
        tables = []
    _refuse_several(folder, {".tar": len(tars), ".parquet": len(tables), "image": len(pictures)})
    if tars:
        return Tars(files=(folder,))
    return Parquet(files=(folder,)) if tables else Folder(path=folder)


def _visible(path: str) -> bool:
    return not any(part.startswith(".") for part in path.split("/"))


def _holds_images(fs: Any, file: str, columns: Columns) -> bool:
    """Whether a Parquet file has the column of images; one that cannot be read has none."""
    from pyarrow.parquet import ParquetFile

    try:
        with fs.open(file, "rb") as stream:
            names = dict.fromkeys(ParquetFile(stream).schema_arrow.names)
    except ValueError:  # pyarrow's own
        return False
    image = usual_columns(columns, names).image
    return image in names or image.split(".")[0] in names


def _refuse_several(folder: str, counts: dict[str, int]) -> None:
    there = {kind: count for kind, count in counts.items() if count}
    if len(there) > 1:
        first = next(iter(there))
        raise UserError(
            f"{folder} holds {' and '.join(f'{kind} files ({n})' for kind, n in there.items())}, "
            f"of which only one kind is read: name the {first} files as "
            f"'{folder.rstrip('/')}/**/*{first}', or move them elsewhere to read the others"
        )
