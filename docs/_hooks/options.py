"""Every option of a config as tables: name, type, default, meaning; read from its models."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pages import heading, joined, table
from pydantic import BaseModel
from pydantic.fields import FieldInfo

HEAD = ("option", "type", "default", "meaning")
NAMES = {bool: "true or false", int: "int", float: "float", str: "text", Path: "path"}
BOUNDS = {
    annotated_types.Gt: ("gt", "> {}"),
    annotated_types.Ge: ("ge", "≥ {}"),
    annotated_types.Lt: ("lt", "< {}"),
    annotated_types.Le: ("le", "≤ {}"),
}
Model = type[BaseModel]
Seen = dict[frozenset[Model], "Place"]  # what has been shown, and where


def options_of(config: BaseModel) -> str:
    """The run's own options, then a section for each of its parts."""
    root = Place("", "")
    return joined(
        [own_table(type(config), config, root), *parts_of(type(config), config, root, {})]
    )


@dataclass(frozen=True)
class Place:
    """A part by its dotted name, and by its anchor, which also tells the kinds on the way."""

    path: str
    anchor: str

    def child(self, name: str) -> "Place":
        path, anchor = f"{self.path}.{name}", f"{self.anchor}-{name}".replace("_", "-")
        return Place(path.removeprefix("."), anchor.removeprefix("-"))

    def of_kind(self, kind: str) -> "Place":
        return replace(self, anchor=f"{self.anchor}-{kind}")

    @property
    def flag(self) -> str:
        return f"--{self.path.replace('_', '-')}"

    @property
    def depth(self) -> int:
        return self.path.count(".")


def own_table(model: Model, values: BaseModel | None, place: Place) -> str:
    """The options of a part; parts within it are named, with the kind that they are at first."""
    rows = []
    for name, field in shown_fields(model).items():
        here, default = place.child(name), default_of(field, values, name)
        kinds, meaning = kinds_of(field.annotation), field.description or ""
        if kinds:
            kind = getattr(default, "kind", "")
            alone = inspect.getdoc(kinds[""]) or "" if "" in kinds else ""
            first = f"`{kind}`" if kind else ""
            what = f"[{'kinds' if kind else 'options'} below](#{here.anchor})"
            rows.append((f"`{here.flag}`", what, first, meaning or alone.split("\n\n")[0]))
        else:
            what = type_name(field.annotation, field.metadata)
            rows.append((f"`{here.flag}`", what, shown_value(default), meaning))
    return table(HEAD, rows)


def parts_of(model: Model, values: BaseModel | None, place: Place, seen: Seen) -> Iterator[str]:
    for name, field in shown_fields(model).items():
        kinds = kinds_of(field.annotation)
        if kinds:
            yield from part(place.child(name), field, kinds, default_of(field, values, name), seen)


def part(
    place: Place, field: FieldInfo, kinds: Mapping[str, Model], default: Any, seen: Seen
) -> Iterator[str]:
    """A section: one part, or a choice of kinds; what has been shown before is not shown again."""
    yield heading(min(place.depth + 2, 4), f"`{place.flag}`", place.anchor)
    known = frozenset(kinds.values())
    if known in seen:
        yield f"As [`{seen[known].flag}`](#{seen[known].anchor})."
        return
    seen[known] = place
    several = get_origin(plain(field.annotation)) is tuple
    if several:
        yield "A list, in JSON, of such objects; the names of their keys are without the prefix."
    if "" in kinds:
        yield from kind_section(place, kinds[""], default, seen)
        return
    chosen = "" if several else getattr(default, "kind", "")
    yield (
        "One of " + ", ".join(f"`{kind}`" + " (default)" * (kind == chosen) for kind in kinds) + "."
    )
    for kind, model in kinds.items():
        here = place.of_kind(kind)
        yield heading(min(place.depth + 3, 5), f"`{place.flag} {kind}`", here.anchor)
        yield from kind_section(here, model, default if kind == chosen else None, seen)


def kind_section(place: Place, model: Model, values: Any, seen: Seen) -> Iterator[str]:
    yield inspect.cleandoc(model.__doc__ or "")
    if shown_fields(model):
        values = values if isinstance(values, model) else None
        yield own_table(model, values, place)
        yield from parts_of(model, values, place, seen)


# ---------------------------------------------------------------- what fields are


def shown_fields(model: Model) -> dict[str, FieldInfo]:
    return {name: field for name, field in model.model_fields.items() if name != "kind"}


def kinds_of(annotation: Any) -> dict[str, Model]:
    """The models that an annotation chooses among, by their kind; empty if it is no part."""
    annotation = plain(annotation)
    if get_origin(annotation) is tuple:
        inner = get_args(annotation)
        return kinds_of(inner[0]) if inner[1:] == (...,) else {}
    if get_origin(annotation) in (Union, UnionType):
        each = [kinds_of(one) for one in get_args(annotation)]
        return {kind: model for one in each for kind, model in one.items()} if all(each) else {}
    if not (inspect.isclass(annotation) and issubclass(annotation, BaseModel)):
        return {}
    tag = annotation.model_fields.get("kind")
    return dict.fromkeys(map(str, get_args(tag.annotation)) if tag else [""], annotation)


def plain(annotation: Any) -> Any:
    return plain(get_args(annotation)[0]) if get_origin(annotation) is Annotated else annotation


def default_of(field: FieldInfo, values: BaseModel | None, name: str) -> Any:
    if values is not None:
        return getattr(values, name)
    return ... if field.is_required() else field.get_default(call_default_factory=True)


# ---------------------------------------------------------------- words


def type_name(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """An annotation in words, with its bounds."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(inner[0], inner[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(type_name(one) for one in inner)
    if origin is tuple:
        return several_names(inner)
    if origin is dict:
        return "names and values"
    if annotation is NoneType:
        return "none"
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return ", ".join(f"`{one.value}`" for one in annotation)
    return " ".join(
        [NAMES.get(annotation, getattr(annotation, "__name__", "JSON")), *bounds(metadata)]
    )


def several_names(inner: tuple[Any, ...]) -> str:
    if inner[1:] == (...,):
        return f"any number of: {type_name(inner[0])}"
    return ", ".join(type_name(one) for one in inner)


def bounds(metadata: list[Any] | tuple[Any, ...]) -> list[str]:
    found = [(BOUNDS[type(one)], one) for one in flattened(metadata) if type(one) in BOUNDS]
    return [words.format(f"{getattr(one, name):g}") for (name, words), one in found]


def flattened(metadata: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    for one in metadata:
        yield from flattened(one.metadata) if isinstance(one, FieldInfo) else [one]


def shown_value(value: Any) -> str:
    if value is ...:
        return "*must be given*"
    if value in ("", (), {}):
        return ""
    if isinstance(value, tuple):
        return f"`{' '.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) or value is None else value}`"
