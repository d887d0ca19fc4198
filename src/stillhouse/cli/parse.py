"""Command lines and run files over kind-tagged configs, in two passes.

Pass 1 reads the kinds (`--grid.kind native`, or `--grid native`) outermost first and resets each
switched node to its member's defaults. Pass 2 hands tyro a struct with exactly the fields of the
chosen members, and pydantic validates the result. A `ConfigError` is one sentence per mistake.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo

from stillhouse.errors import UserError

if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec

M = TypeVar("M", bound=BaseModel)
Tree = dict[str, Any]  # a config's dump: a dict per node, a value per leaf
_ABSENT: Any = object()  # the value of a leaf that has no default
_UNDECIDED = create_model("_Undecided", kind=str)  # a node whose kind has no default
_CONSTANTS = {"true": "True", "false": "False", "none": "None", "null": "None"}
_FLAG = re.compile(r"--$|(?!-(inf|infinity|nan)$)-+[^\W\d_]", re.IGNORECASE)


class ConfigError(UserError):
    """A command line or run file that the config rejects."""


def parse(
    config: M,
    args: Sequence[str],
    *,
    prog: str,
    description: str = "",
    positional: tuple[str, ...] = (),
    examples: Sequence[str] = (),
) -> M:
    """Return `config` with the overrides in `args`; a rejected one prints a sentence and exits 2.

    Bare words before the first flag go to the fields named by `positional`, in order, the last of
    which takes whatever is left.
    """
    import tyro

    with exits(prog):
        root, given = _Node(type(config), config.model_dump()), _group(args, positional)
        _switch_kinds(root, given)
        words = ["--help"] if {"--help", "-h"} & {*args} else _tyro_words(root, given)
        usage = " ".join([prog, *(f"[{name.upper()}]" for name in positional)])
        shown = "\n  ".join(["Examples:", *examples]) if examples else ""
        about = "\n\n".join(filter(None, [description, shown]))
        result = tyro.cli(_struct(root), args=words, prog=usage, description=about or None)
        return _validate(type(config), dataclasses.asdict(result))


def load_yaml_or_json(path: str | Path, base: M) -> M:
    """Return `base` with the nested keys of a run file put over it, or raise `ConfigError`."""
    root = _Node(type(base), base.model_dump())
    _merge(root, _read_file(Path(path)))
    return _validate(type(base), root.tree)


def dotted(config: BaseModel) -> dict[str, Any]:
    """Every resolved value by the name of its flag; paths and enums as text, tuples as lists."""
    root = _Node(type(config), config.model_dump(mode="json"))
    return {leaf.path: leaf.value for leaf in root.leaves()}


@contextmanager
def exits(prog: str) -> Iterator[None]:
    """Turn a `ConfigError` into its sentence on stderr and exit code 2."""
    try:
        yield
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@dataclasses.dataclass(frozen=True)
class _Leaf:
    path: str
    annotation: Any
    value: Any
    help: str | None


@dataclasses.dataclass(frozen=True)
class _Node:
    """A part of the config as it stands: the live dict, the member it selects, its other kinds."""

    cls: type[BaseModel]
    tree: Tree
    path: str = ""
    kinds: Mapping[str, type[BaseModel]] = dataclasses.field(default_factory=dict)
    help: str | None = None

    @property
    def children(self) -> dict[str, _Node | _Leaf]:
        fields = sorted(self.cls.model_fields.items(), key=lambda item: item[0] != "kind")
        return {name: self._child(name, field) for name, field in fields}

    def _child(self, name: str, field: FieldInfo) -> _Node | _Leaf:
        path, models = f"{self.path}.{name}".removeprefix("."), _models(field.annotation)
        kinds = {kind: model for model in models for kind in _kinds(model)}
        if kinds or len(models) == 1:
            tree = self.tree.setdefault(name, {})
            cls = kinds.get(tree.get("kind"), _UNDECIDED) if len(models) > 1 else models[0]
            return _Node(cls, tree, path, kinds, field.description)
        is_tag = name == "kind" and self.kinds
        annotation = Literal[tuple(self.kinds)] if is_tag else field.annotation
        text = f"{_flag(path)} X --help lists the fields of X" if is_tag else None
        return _Leaf(path, annotation, self.tree.get(name, _ABSENT), field.description or text)

    def leaves(self) -> Iterator[_Leaf]:
        for child in self.children.values():
            yield from child.leaves() if isinstance(child, _Node) else [child]

    def find(self, path: str) -> _Node | None:
        head, _, rest = path.partition(".")
        child = self.children.get(head)
        node = child if isinstance(child, _Node) else None
        return node.find(rest) if node and rest else node

    def switch(self, kind: str) -> _Node:
        """The node with another kind, at that kind's defaults; the same kind keeps its values.

        A variation of the present member (its subclass, or what it is one of) keeps what differs
        from that member's defaults: AdamW of 8 bits learns at the rate that the recipe had chosen.
        """
        if kind not in self.kinds:
            raise ConfigError(f"{self.path}.kind got {kind!r}, {_not_among(kind, self.kinds)}.")
        new = self.kinds[kind]
        if self.tree.get("kind") != kind:
            varied = new is not self.cls and (
                issubclass(new, self.cls) or issubclass(self.cls, new)
            )
            chosen = self._chosen() if varied else {}
            shared = {name: chosen[name] for name in chosen if name in new.model_fields}
            self.tree.clear()
            self.tree.update(_defaults(new) | shared | {"kind": kind})
        return dataclasses.replace(self, cls=new)

    def _chosen(self) -> Tree:
        """What differs from the member's defaults."""
        usual = _defaults(self.cls)
        return {name: value for name, value in self.tree.items() if usual.get(name) != value}


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models an annotation is a union of; empty if anything else is among them."""
    if get_origin(annotation) is Annotated:
        return _models(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        parts = [_models(arg) for arg in get_args(annotation)]
        return [model for part in parts for model in part] if all(parts) else []
    return [annotation] if inspect.isclass(annotation) and issubclass(annotation, BaseModel) else []


def _kinds(model: type[BaseModel]) -> tuple[str, ...]:
    tag = model.model_fields.get("kind")
    return get_args(tag.annotation) if tag and get_origin(tag.annotation) is Literal else ()


def _defaults(cls: type[BaseModel]) -> Tree:
    """A member's defaults; a field that has none stays out, to be given in pass 2."""
    tree: Tree = {}
    for name, field in cls.model_fields.items():
        if not field.is_required():
            value = field.get_default(call_default_factory=True, validated_data=tree)
            tree[name] = value.model_dump() if isinstance(value, BaseModel) else value
        elif len(models := _models(field.annotation)) == 1:
            tree[name] = _defaults(models[0])
    return tree


def _group(args: Sequence[str], positional: tuple[str, ...]) -> dict[str, list[str]]:
    """The words given to each field, by its dotted name; the last use of a flag counts."""
    flags: dict[str, list[str]] = {}
    words = bare = list[str]()
    for arg in args:
        if _FLAG.match(arg):
            name, equals, value = arg.lstrip("-").partition("=")
            words = flags[name.replace("-", "_")] = [value] if equals else []
        else:
            words.append(arg)
    if bare and not positional:
        raise ConfigError(f"{bare[0]!r} is out of place, as values follow a flag: --name value.")
    named = {name: [word] for name, word in zip(positional, bare, strict=False)}
    if len(bare) > len(positional):
        named[positional[-1]] += bare[len(positional) :]
    return named | flags


def _switch_kinds(root: _Node, given: dict[str, list[str]]) -> None:
    """Pass 1: take the kinds out of `given` and into the tree, outermost first."""
    nodes = {flag: flag.removesuffix(".kind") for flag in given}
    for flag, path in sorted(nodes.items(), key=lambda item: item[1].count(".")):
        node = root.find(path)
        if node is not None and node.kinds:
            node.switch(" ".join(given.pop(flag)))


def _tyro_words(root: _Node, given: dict[str, list[str]]) -> list[str]:
    """The words for tyro, once every flag is known to exist and no value is missing."""
    leaves = {leaf.path: leaf for leaf in root.leaves()}
    short = [name for name, child in root.children.items() if isinstance(child, _Node)]
    for path in given:
        if path not in leaves:
            known = [*leaves, *(name for name in short if f"{name}.kind" in leaves)]
            hint = _elsewhere(root, path) or f"; the closest is {_flag(_closest(path, known))}"
            raise ConfigError(f"{_flag(path)} is not a flag here{hint}.")
    for leaf in leaves.values():
        if leaf.value is _ABSENT and leaf.path not in given:
            raise ConfigError(f"{leaf.path} has no default, so {_flag(leaf.path)} must be given.")
    # `=` keeps a first word that starts with a dash a value.
    groups = [["=".join([_flag(path), *words[:1]]), *words[1:]] for path, words in given.items()]
    return [word for group in groups for word in group]


def _struct(node: _Node) -> Any:
    """A dataclass of the members in use: tyro sees no unions, so it makes no subcommands."""
    fields: list[Any] = []
    for name, child in node.children.items():
        fields.append((name, *([_struct(child)] if isinstance(child, _Node) else _field(child))))
    # A builtin has no source, so tyro does not spend 50 ms looking for comments in it.
    about = "\n\n".join(filter(None, [node.help, node.cls.__doc__]))
    names = {"__doc__": about or None, "__module__": "builtins"}
    return dataclasses.make_dataclass(node.cls.__name__, fields, namespace=names, kw_only=True)


def _field(leaf: _Leaf) -> tuple[Any, Any]:
    """tyro's reader for the leaf's type, its errors made sentences; JSON where tyro has none."""
    import tyro
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    info = PrimitiveTypeInfo.make(leaf.annotation, {tyro.conf.EnumChoicesFromValues})
    spec = ConstructorRegistry.get_primitive_spec(info)
    if not isinstance(spec, PrimitiveConstructorSpec):
        spec = PrimitiveConstructorSpec(
            1, "JSON", lambda w: json.loads(*w), bool, lambda v: [repr(v)]
        )
    read, show = functools.partial(_read, leaf, spec), functools.partial(_show, spec)
    # tyro is told that any words will do, because it would object in a box and not a sentence.
    spec = PrimitiveConstructorSpec("*", spec.metavar, read, lambda _: True, show)
    default = tyro.MISSING if leaf.value is _ABSENT else leaf.value
    annotation = Annotated[Any, spec, tyro.conf.arg(help=leaf.help)]
    return annotation, dataclasses.field(default_factory=lambda: default)


def _show(spec: PrimitiveConstructorSpec[Any], value: Any) -> list[str]:
    with suppress(AssertionError, AttributeError, TypeError):  # a default not of its type
        return spec.str_from_instance(value)
    return [str(value)]


def _read(leaf: _Leaf, spec: PrimitiveConstructorSpec[Any], words: list[str]) -> Any:
    if leaf.annotation is bool and not words:
        return True
    counts = spec.nargs if isinstance(spec.nargs, tuple) else (spec.nargs,)
    fits = len(words) in counts or "*" in counts
    constants = [_CONSTANTS.get(word.lower(), word) for word in words]
    parts = [part for word in words for part in word.split(",")] if "*" in counts else words
    for attempt in (words, constants, [_whole(word) for word in words], parts):
        with suppress(ValueError, TypeError):
            if fits and {*attempt} <= {*(spec.choices or attempt)}:
                return spec.instance_from_str(attempt)
    given, why = " ".join(words), f"which does not read as {spec.metavar}"
    if fits and spec.choices:
        why = _not_among(given, spec.choices)
    elif leaf.annotation is str and len(words) > 1:
        why = "of which it takes one: quote what belongs together, and put a flag before the rest"
    raise ConfigError(f"{leaf.path} got {given!r}, {why}.")


def _whole(word: str) -> str:
    """1e6 as 1000000, for fields that take whole numbers only."""
    with suppress(ValueError, OverflowError):
        if float(word).is_integer():
            return str(int(float(word)))
    return word


def _read_file(path: Path) -> Any:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        there = not isinstance(error, OSError)
        advice = "mend it, with names and plain values" if there else "check the path"
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{path} cannot be read: {reason}: {advice}.") from None


def _merge(node: _Node, data: Any) -> None:
    """Put a run file's keys over the tree; a new kind resets its node first."""
    if node.kinds and isinstance(data, str):
        data = {"kind": data}
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{node.path or 'a run file'} should map names to values, not be {data!r}."
        )
    if node.kinds and "kind" in data:
        node = node.switch(str(data["kind"]))
    for name, value in data.items():
        child = node.children.get(name)
        if child is None:
            where = f"{node.path}.{name}".removeprefix(".")
            among = _not_among(str(name), node.cls.model_fields)
            raise ConfigError(f"the key {where} is {among}.")
        if isinstance(child, _Node):
            _merge(child, value)
        else:
            node.tree[name] = value


def _flag(path: str) -> str:
    return "--" + path.replace("_", "-")


def _closest(path: str, options: Collection[str]) -> str:
    """By the last name first: --optim.lr is close to --lr."""
    same = [option for option in options if option.split(".")[-1] == path.split(".")[-1]]
    return next(iter(difflib.get_close_matches(path, same or options, 1, cutoff=0.0)), "")


def _not_among(given: str, options: Collection[str]) -> str:
    closest = _closest(given, options)
    return f"not one of {', '.join(options)}; the closest is {closest!r}"


def _elsewhere(root: _Node, path: str) -> str:
    """Which kinds have the flag, if it is only the present one that lacks it."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name, node = parts[end], root.find(".".join(parts[:end]))
        if node and name not in node.cls.model_fields:
            kind = node.tree.get("kind")
            owners = ", ".join(k for k, m in node.kinds.items() if name in m.model_fields)
            return (
                f", as {node.path}.kind is {kind!r} and {name!r} is of {owners}" if owners else ""
            )
    return ""


def _validate(cls: type[M], tree: Tree) -> M:
    try:
        return cls.model_validate(tree)
    except ValidationError as error:
        sentences: dict[str, str] = {}
        for item in error.errors():
            path, why = _path(_Node(cls, tree), item["loc"]), item["msg"].rstrip(".")
            why = why.removeprefix("Value error, ").replace("Input should", "it should")
            is_node = not path or isinstance(item["input"], dict)
            got = "is rejected:" if is_node else f"is {item['input']!r}, but"
            sentences.setdefault(path, f"{path or 'the config'} {got} {why}.")
        raise ConfigError("\n".join(sentences.values())) from None


def _path(node: _Node | None, loc: Iterable[int | str]) -> str:
    """pydantic's location without the tags of the unions on the way."""
    names, rest = [], iter(loc)
    for item in rest:
        if names and node is None and not isinstance(item, int):
            break  # below a leaf only positions are names
        names.append(str(item))
        child = node.children.get(str(item)) if node else None
        node = child if isinstance(child, _Node) else None
        if node and len({*node.kinds.values()}) > 1:
            next(rest, None)
    return ".".join(names)
