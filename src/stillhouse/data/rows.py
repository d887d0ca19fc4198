"""One row of a data set: which columns hold the image, the label, the text and its styles."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, BinaryIO, NamedTuple

from pydantic import Field

from stillhouse.config import Config
from stillhouse.data.faults import Corrupt
from stillhouse.errors import UserError

_SHOWN = 12  # values of a column that an error lists
WHOLE_ROW = "*"  # in place of a column's name


class Style(Config):
    """A column of few values, told to the network by number: a categorical control.

    The values stand here and not in the data, so that a number means the same in every run.
    """

    column: Annotated[str, Field(min_length=1)]
    values: tuple[str, ...] = ()
    """Value i is number i."""

    def number(self, value: Any, where: str) -> float:
        """Not a number where the row says nothing."""
        if value is None:
            return float("nan")
        text = text_of(value)
        if text not in self.values:
            raise UserError(
                f"the style column {self.column!r} holds {text!r} in {where}, which is not among "
                f"its values ({_listed(self.values)}). Name it in --data.columns.styles"
            )
        return float(self.values.index(text))


class Columns(Config):
    """Names of the columns; an empty name means there is none.

    `json.caption` reads the field `caption` of the column `json` (WebDataset metadata).
    """

    image: str = "image"
    """Of the image."""
    label: str = ""
    """Of the class, a number."""
    text: str = ""
    """Of the caption."""
    styles: tuple[Style, ...] = ()
    """Categorical controls, as JSON: [{"column": "style", "values": ["flat", "3d"]}]."""

    @property
    def roles(self) -> list[tuple[str, str]]:
        """Every column that is read, with what it is for."""
        named = [("image", self.image), ("label", self.label), ("text", self.text)]
        return [*named, *(("styles", style.column) for style in self.styles)]


class Row(NamedTuple):
    """What a source gives for one image, still undecoded."""

    image: Any  # bytes, {"bytes", "path"}, a path, an array of pixels, or all columns
    label: Any
    text: Any
    id: int
    where: str  # how a report names it
    styles: tuple[Any, ...] = ()


def check_columns(
    features: Any, columns: Columns, where: str, flag: str = "--data.columns"
) -> None:
    """One sentence for a column that is not there, or that cannot be what it should be.

    `flag` is what a command calls the columns.
    """
    for role, name in columns.roles:
        known = name in ("", WHOLE_ROW) or name in features
        if not known and name.split(".")[0] not in features:
            there = ", ".join(features)
            beside = " or put a .txt beside each image of a folder" if role == "text" else ""
            raise UserError(
                f"there is no column {name!r} for the {role} in {where}; the columns are: {there}. "
                f"Name it as {flag}.{role}{beside}"
            )
    label = features.get(columns.label)
    dtype = str(getattr(label, "dtype", "int64"))
    if label is not None and not dtype.startswith(("int", "uint", "bool")):
        raise UserError(
            f"the label column {columns.label!r} in {where} holds {dtype}; labels are whole "
            "numbers. Use the column as text, or number its classes"
        )


def check_style(style: Style, found: Iterable[Any] = ()) -> None:
    """Refuses values that are not named; `found` are those of the data, where they are known."""
    there = {text_of(value) for value in found if value is not None}
    strange = sorted(there - {*style.values})
    if style.values and not strange:
        return
    wrong = f"also holds {_listed(strange)}" if style.values else "is named without its values"
    known = [*style.values, *strange]
    values = known if len(known) <= _SHOWN else [*known[:_SHOWN], "..."]
    raise UserError(
        f"the style column {style.column!r} {wrong}. Give all its values: --data.columns.styles "
        f"'{json.dumps([{'column': style.column, 'values': values}])}'"
    )


def _listed(values: Sequence[str]) -> str:
    more = len(values) - _SHOWN
    return ", ".join(values[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def raw_images(features: Any) -> Any:
    """The same columns with images left encoded, so that a damaged one harms only itself."""
    import datasets

    raw = features.copy()
    for name, feature in features.items():
        if isinstance(feature, datasets.Image):
            raw[name] = datasets.Image(mode=feature.mode, decode=False)
    return raw


Codes = Mapping[str, Sequence[str]]  # columns that hold numbers of names, with the names


def style_codes(features: Any, columns: Columns) -> Codes:
    """The styles whose column is one of class labels."""
    found = {style.column: features.get(style.column) for style in columns.styles}
    return {name: f.names for name, f in found.items() if getattr(f, "names", None)}


def read_row(values: dict[str, Any], columns: Columns, codes: Codes, id: int, where: str) -> Row:
    image = value_of(values, columns.image)
    path = image.get("path") if isinstance(image, dict) else None
    where = f"{where} ({path})" if path else where
    label, text = value_of(values, columns.label), value_of(values, columns.text)
    names = [style.column for style in columns.styles]
    styles = tuple(decoded(value_of(values, name), codes.get(name)) for name in names)
    return Row(image, label, text, id, where, styles)


def decoded(value: Any, names: Sequence[str] | None) -> Any:
    """The name behind a class label, of which -1 is none; other values as they are."""
    if names is None or value is None:
        return value
    return names[value] if value >= 0 else None


def value_of(values: dict[str, Any], name: str) -> Any:
    if name == WHOLE_ROW:
        return values
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


def image_file(image: Any) -> BinaryIO | None:
    """The encoded image, of which only the beginning may be read; None for pixels."""
    path = image.get("path") if isinstance(image, dict) and not image.get("bytes") else image
    if not isinstance(path, str):
        raw = image_bytes(image)
        return None if raw is None else io.BytesIO(raw)
    try:
        return open(path, "rb")
    except OSError as error:
        raise Corrupt(str(error)) from error


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
