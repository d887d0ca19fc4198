"""One row of a data set: which columns hold the image, the label and the text."""

from typing import Any, NamedTuple

from stillhouse.config import Config
from stillhouse.data.faults import Corrupt
from stillhouse.errors import UserError


class Columns(Config):
    """Names of the columns; an empty name means there is none.

    `json.caption` reads the field `caption` of the column `json` (WebDataset metadata).
    """

    image: str = "image"
    label: str = ""
    text: str = ""


class Row(NamedTuple):
    """What a source gives for one image, still undecoded."""

    image: Any  # bytes, {"bytes", "path"}, a path, or an array of pixels
    label: Any
    text: Any
    id: int
    where: str  # how a report names it


def check_columns(features: Any, columns: Columns, where: str) -> None:
    """One sentence for a column that is not there, or that cannot be what it should be."""
    for role, name in columns:
        if name and name not in features and name.split(".")[0] not in features:
            there = ", ".join(features)
            raise UserError(
                f"there is no column {name!r} for the {role} in {where}; the columns are: {there}. "
                f"Name it as --data.columns.{role}"
            )
    label = features.get(columns.label)
    dtype = str(getattr(label, "dtype", "int64"))
    if label is not None and not dtype.startswith(("int", "uint", "bool")):
        raise UserError(
            f"the label column {columns.label!r} in {where} holds {dtype}; labels are whole "
            "numbers. Use the column as text, or number its classes"
        )


def raw_images(features: Any) -> Any:
    """The same columns with images left encoded, so that a damaged one harms only itself."""
    import datasets

    raw = features.copy()
    for name, feature in features.items():
        if isinstance(feature, datasets.Image):
            raw[name] = datasets.Image(mode=feature.mode, decode=False)
    return raw


def read_row(values: dict[str, Any], columns: Columns, id: int, where: str) -> Row:
    image = _value(values, columns.image)
    path = image.get("path") if isinstance(image, dict) else None
    where = f"{where} ({path})" if path else where
    label, text = _value(values, columns.label), _value(values, columns.text)
    return Row(image, label, text, id, where)


def _value(values: dict[str, Any], name: str) -> Any:
    if not name or name in values:
        return values.get(name)
    column, _, field = name.partition(".")
    inner = values.get(column)
    return inner.get(field) if isinstance(inner, dict) else None


def image_bytes(image: Any) -> bytes | None:
    """The encoded image; None for a column that holds pixels."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if image is None:
        raise Corrupt("no image")
    if isinstance(image, str):
        return _read(image)
    return bytes(image) if isinstance(image, bytes | bytearray) else None


def _read(path: str) -> bytes:
    """A local file: remote folders are prepared in datasets' cache, which is local."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Corrupt(str(error)) from error


def label_number(label: Any) -> int:
    try:
        return int(label)
    except (TypeError, ValueError) as error:
        raise Corrupt(f"the label is {label!r}, not a whole number") from error


def text_of(text: Any) -> str:
    """A caption; empty where there is none."""
    if isinstance(text, bytes):
        return text.decode(errors="replace")
    return "" if text is None else str(text)
