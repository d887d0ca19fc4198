"""The command-line parser: every field of every member is reached, every mistake is a sentence."""

import functools
import io
import itertools
import json
import subprocess
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import redirect_stderr
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from stillhouse.cli import parse as module
from stillhouse.cli.parse import ConfigError, dotted, exits, load_yaml_or_json, parse


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Precision(Enum):
    HALF = "bf16"
    FULL = "fp32"


class NoTail(Config):
    kind: Literal["none"] = "none"


class ExpTail(Config):
    """An exponential tail."""

    kind: Literal["exp", "exponential"] = "exp"
    decay: float = Field(default=0.5, gt=0, lt=1, description="how fast the tail falls")
    bends: tuple[int, ...] = (1, 2)


Tail = Annotated[NoTail | ExpTail, Field(discriminator="kind")]


class Linear(Config):
    kind: Literal["linear"] = "linear"
    tail: Tail = NoTail()
    clip: bool = False


class Cosine(Config):
    kind: Literal["cosine"] = "cosine"
    tail: Tail = ExpTail()
    shift: float | None = None


Spacing = Annotated[Linear | Cosine, Field(discriminator="kind")]


class Native(Config):
    kind: Literal["native"] = "native"
    dtype: Precision = Precision.HALF


class Polynomial(Config):
    """Karras's grid."""

    kind: Literal["polynomial"] = "polynomial"
    rho: float = 7.0
    """how much denser near zero"""
    # Not help: a comment is for the reader of the source.
    ends: tuple[float, float] = (0.002, 80.0)
    order: Literal[1, 2, 3] = 1
    spacing: Spacing = Linear()


class Loader(Config):
    workers: int = 2
    tail: Tail = NoTail()


class Folder(Config):
    kind: Literal["folder"] = "folder"
    root: Path
    spacing: Spacing
    loader: Loader


class Made(Config):
    kind: Literal["made"] = "made"
    count: int = Field(default=8, ge=1)


class Knotted(Config):
    knots: list[int] = Field(default_factory=lambda: [1])


class Warped(Knotted):
    kind: Literal["warped"] = "warped"
    tail: Tail = ExpTail(decay=0.25)


Other = Annotated[Folder | Warped, Field(discriminator="kind")]  # a union within a union


class Part(Config):
    name: str = "x"


class Run(Config):
    """A run for the tests."""

    grid: Annotated[Polynomial | Native, Field(discriminator="kind")] = Polynomial()
    """where steps are"""
    loader: Loader = Loader()
    out_dir: Path = Path("runs")
    note: str = ""
    seed: int | None = 3
    compile: bool = True
    size: int | Literal["auto"] = "auto"
    names: list[str] = []
    pair: tuple[int, int] | None = None
    weights: dict[str, float] = {}
    parts: tuple[Part, ...] = ()


class Data(Config):
    """Kept apart from `Run`: a folder has fields without defaults."""

    data: Annotated[Made | Other, Field(discriminator="kind")] = Made()
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def _in_order(self) -> "Data":
        if self.low > self.high:
            raise ValueError("low should not be above high")
        return self


Kinds = dict[str, str]  # the kind of each tagged node, by its dotted name
Leaves = dict[str, Any]  # the type of each leaf

# For every type of leaf, the words that set it and the value they set; never a default above.
CHANGES: dict[Any, tuple[list[str], Any]] = {
    float: (["0.125"], 0.125),
    int: (["5"], 5),
    str: (["two words"], "two words"),
    Path: (["a/b"], Path("a/b")),
    Precision: (["fp32"], Precision.FULL),
    Literal[1, 2, 3]: (["3"], 3),
    int | Literal["auto"]: (["64"], 64),
    int | None: (["None"], None),
    float | None: (["-1e-3"], -1e-3),
    list[str]: (["a", "b c", "-1"], ["a", "b c", "-1"]),
    tuple[int, ...]: (["4", "5", "6"], (4, 5, 6)),
    tuple[float, float]: (["-1", "2e3"], (-1.0, 2000.0)),
    tuple[int, int] | None: (["3", "4"], (3, 4)),
    dict[str, float]: (["a", "1", "b", "2"], {"a": 1.0, "b": 2.0}),
    tuple[Part, ...]: (['[{"name": "y"}]'], (Part(name="y"),)),
}


def change(annotation: Any, default: Any) -> tuple[list[str], Any]:
    if annotation is bool:
        return (["False"], False) if default else ([], True)
    return CHANGES[annotation]


def variants(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[Kinds, Leaves]]:
    """Every combination of kinds that a schema can have, with the leaves it then has."""
    fields = [_options(f.annotation, prefix + name) for name, f in cls.model_fields.items()]
    for picks in itertools.product(*fields):
        yield dict(ChainMap(*(p[0] for p in picks))), dict(ChainMap(*(p[1] for p in picks)))


def _options(annotation: Any, path: str) -> list[tuple[Kinds, Leaves]]:
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if not all(isinstance(member, type) and issubclass(member, BaseModel) for member in members):
        return [({}, {} if path.endswith(".kind") else {path: annotation})]
    return [
        (({path: kind} if kind else {}) | kinds, leaves)
        for member in members
        for kind in _names(member)
        for kinds, leaves in variants(member, path + ".")
    ]


def _names(member: type[BaseModel]) -> tuple[str, ...]:
    tag = member.model_fields.get("kind")
    return get_args(tag.annotation) if tag else ("",)


def expected(kinds: Kinds, values: dict[str, Any], cls: type[BaseModel] = Run) -> Any:
    """What pydantic makes of the same choices, written as a nested dict."""
    tree: dict[str, Any] = {}
    for path, value in ({f"{path}.kind": kind for path, kind in kinds.items()} | values).items():
        *heads, last = path.split(".")
        functools.reduce(lambda node, head: node.setdefault(head, {}), heads, tree)[last] = value
    return cls.model_validate(tree)


def at(config: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), config)


def run(*args: str) -> Run:
    return parse(Run(), args, prog="stillhouse")


def spell(path: str, words: list[str], equals: bool) -> list[str]:
    return [f"--{path}={words[0]}", *words[1:]] if equals and words else [f"--{path}", *words]


VARIANTS = list(variants(Run))


def test_the_walk_of_the_schema_is_complete():
    chosen = {tuple(sorted(kinds.items())) for kinds, _ in VARIANTS}
    # grid: polynomial with (linear, cosine) x (none, exp, exponential), or native; loader.tail: 3.
    assert len(chosen) == len(VARIANTS) == (2 * 3 + 1) * 3
    assert max(path.count(".") for kinds, _ in VARIANTS for path in kinds) == 2


@pytest.mark.parametrize(
    ("kinds", "leaves"), VARIANTS, ids=["-".join(v[0].values()) for v in VARIANTS]
)
def test_an_override_reaches_every_leaf_of_every_combination(kinds: Kinds, leaves: Leaves):
    switches = [word for path, kind in kinds.items() for word in (f"--{path}.kind", kind)]
    untouched = expected(kinds, {})
    for path, annotation in leaves.items():
        words, value = change(annotation, at(untouched, path))
        result = run(*switches, *spell(path, words, equals=False))
        assert at(result, path) == value != at(untouched, path), path
        assert result == expected(kinds, {path: value})


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_order_and_spelling_of_arguments_do_not_matter(data: st.DataObject):
    kinds, leaves = data.draw(st.sampled_from(VARIANTS))
    changed = data.draw(st.sets(st.sampled_from(sorted(leaves))))
    untouched = expected(kinds, {})
    values, groups = {}, []
    for path in sorted(changed):
        words, values[path] = change(leaves[path], at(untouched, path))
        hyphens = path.replace("_", data.draw(st.sampled_from("-_")))
        groups.append(spell(hyphens, words, data.draw(st.booleans())))
    for path, kind in kinds.items():
        suffix = data.draw(st.sampled_from(["", ".kind"]))
        groups.append(spell(path + suffix, [kind], data.draw(st.booleans())))
    shuffled = data.draw(st.permutations(groups))
    assert run(*itertools.chain(*shuffled)) == expected(kinds, values)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_dotted_values_given_back_as_flags_make_the_same_config(data: st.DataObject):
    kinds, leaves = data.draw(st.sampled_from(VARIANTS))
    scalars = sorted(path for path in leaves if not path.startswith(("parts", "weights")))
    values = {p: change(leaves[p], at(expected(kinds, {}), p))[1] for p in scalars}
    config = expected(kinds, {p: values[p] for p in data.draw(st.sets(st.sampled_from(scalars)))})
    args: list[str] = []
    for path, value in dotted(config).items():
        if path not in ("parts", "weights"):
            args += [f"--{path}", *map(str, value if isinstance(value, list) else [value])]
    assert run(*args) == config


ODD = ["-", "--", "---x", "-x", "-1", "-inf", "--=x", "--seed=", "=", "None", "true", "["]
FLAGS = sorted({f"--{path}" for kinds, leaves in VARIANTS for path in (*kinds, *leaves)})
WORDS = st.text() | st.sampled_from(ODD) | st.sampled_from(FLAGS)


@settings(max_examples=100, deadline=None)
@given(args=st.lists(WORDS.filter(lambda word: word not in ("-h", "--help")), max_size=6))
def test_any_words_make_a_config_or_our_sentence(args: list[str]):
    code = None
    with io.StringIO() as text, redirect_stderr(text):
        try:
            assert isinstance(parse(Run(), args, prog="stillhouse", positional=("note",)), Run)
        except SystemExit as error:
            code = error.code
        printed = text.getvalue()
    assert code == (2 if printed else None)
    assert not printed or (printed.startswith("stillhouse: ") and printed.endswith(".\n"))


@settings(max_examples=40, deadline=None)
@given(first=st.text(), rest=st.lists(st.text().filter(lambda word: not word.startswith("-"))))
def test_text_arrives_as_it_was_given(first: str, rest: list[str]):
    assert run(f"--names={first}", *rest).names == [first, *rest]
    assert run("--names", *rest, f"--note={first}") == Run(names=rest, note=first)


def test_dotted_holds_every_value_as_it_would_be_printed():
    flat = dotted(Run(out_dir=Path("a/b"), weights={"a": 1.0}, grid=Native()))
    assert flat["grid.kind"] == "native"
    assert flat["grid.dtype"] == "bf16"
    assert flat["out_dir"] == "a/b"
    assert flat["weights"] == {"a": 1.0}
    assert flat["loader.tail.kind"] == "none"
    assert flat["seed"] == 3
    native = next(leaves for kinds, leaves in VARIANTS if kinds["grid"] == "native")
    assert set(flat) == {"grid.kind", "loader.tail.kind", *native}


def test_the_kind_comes_before_inherited_fields():
    assert [*Warped.model_fields] == ["knots", "kind", "tail"]
    assert [*dotted(Data(data=Warped()))][:2] == ["data.kind", "data.knots"]


KEPT = Run(grid=Polynomial(rho=5.0, spacing=Cosine(shift=0.1, tail=ExpTail(decay=0.9))))


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("--grid.kind polynomial", KEPT.grid),
        ("--grid polynomial --grid.spacing=cosine", KEPT.grid),
        ("--grid.spacing.tail exp", KEPT.grid),
        ("--grid.spacing.tail none", Polynomial(rho=5.0, spacing=Cosine(shift=0.1, tail=NoTail()))),
        ("--grid.spacing linear", Polynomial(rho=5.0)),
        ("--grid native", Native()),
    ],
)
def test_a_node_given_its_present_kind_keeps_its_values(line: str, kept: Config):
    assert parse(KEPT, line.split(), prog="stillhouse") == KEPT.model_copy(update={"grid": kept})


def test_a_switched_node_takes_the_defaults_of_its_member():
    warped = parse(Data(), ["--data", "warped", "--data.tail", "exp"], prog="x")
    assert warped.data == Warped(tail=ExpTail(decay=0.25)) != Warped(tail=ExpTail())
    back = parse(Data(data=Warped()), ["--data.tail", "exponential"], prog="x")
    assert back.data == Warped(tail=ExpTail(kind="exponential"))


def test_the_last_use_of_a_flag_counts():
    assert run("--note", "a", "--note=b").note == "b"
    assert run("--grid", "native", "--grid", "polynomial") == Run()


def test_the_default_config_is_left_alone():
    config = Run(weights={"a": 1.0}, names=["a"])
    before = config.model_dump()
    result = parse(config, ["--names", "b", "--weights", "c", "2"], prog="stillhouse")
    assert (result.names, result.weights) == (["b"], {"c": 2.0})
    assert config.model_dump() == before


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--compile", "compile", True),
        ("--compile true", "compile", True),
        ("--compile=True", "compile", True),
        ("--seed none", "seed", None),
        ("--seed=-4", "seed", -4),
        ("--seed 1e6", "seed", 1_000_000),
        ("--note 1e6", "note", "1e6"),
        ("--note=--seed", "note", "--seed"),
        ("--note=", "note", ""),
        ("--note none", "note", "none"),
        ("--names", "names", []),
        ("--names a=b --seed 1", "names", ["a=b"]),
        ("--size auto", "size", "auto"),
        ("--out-dir x", "out_dir", Path("x")),
        ("--out_dir=x", "out_dir", Path("x")),
        ("--grid.rho -inf", "grid", Polynomial(rho=float("-inf"))),
    ],
)
def test_words_on_the_command_line(line: str, field: str, value: Any):
    before = Run(compile=False, names=["z"], note="z", size=1)
    assert getattr(parse(before, line.split(), prog="stillhouse"), field) == value
    assert getattr(before, field) != value


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("a.png", {"note": "a.png"}),
        ("a.png b c", {"note": "a.png", "names": ["b", "c"]}),
        ("a.png b --seed 1", {"note": "a.png", "names": ["b"], "seed": 1}),
        ("a.png --note b", {"note": "b"}),
        ("", {}),
    ],
)
def test_bare_words_first_are_the_positional_fields(line: str, result: dict[str, Any]):
    parsed = parse(Run(), line.split(), prog="stillhouse", positional=("note", "names"))
    assert parsed == Run.model_validate(result)


def test_a_positional_field_may_be_a_kind():
    assert parse(Run(), ["native"], prog="x", positional=("grid",)) == Run(grid=Native())


def test_fields_without_defaults_can_be_given_with_the_kind():
    args = ["--data.spacing.shift", "2", "--data.root=d", "--data.spacing", "cosine"]
    folder = Folder(root=Path("d"), spacing=Cosine(shift=2.0), loader=Loader(workers=5))
    args += ["--data", "folder", "--data.loader.workers", "5"]
    assert parse(Data(), args, prog="x") == Data(data=folder)


KINDS = "grid.kind got {}, not one of polynomial, native; the closest is {}"
TAILS = "grid.spacing.tail.kind got 'x', not one of none, exp, exponential; the closest is"
DTYPES = "grid.dtype got 'fp3', not one of bf16, fp32; the closest is 'fp32'"
MISTAKES = {
    "--grid.kind natve": KINDS.format("'natve'", "'native'"),
    "--grid=poly": KINDS.format("'poly'", "'polynomial'"),
    "--grid native x": KINDS.format("'native x'", "'native'"),
    "--grid": KINDS.format("''", "'polynomial'"),
    "--grid.spacing.tail x": f"{TAILS} 'exp'",
    "--out-dirr x": "--out-dirr is not a flag here; the closest is --out-dir",
    "--gird natve": "--gird is not a flag here; the closest is --grid",
    "--rho 3": "--rho is not a flag here; the closest is --grid.rho",
    "--loader.clip": "--loader.clip is not a flag here; the closest is --grid.spacing.clip",
    "--grid.rho.x 3": "--grid.rho.x is not a flag here; the closest is --grid.rho",
    "--grid.rhoo 3": "--grid.rhoo is not a flag here; the closest is --grid.rho",
    "--grid.spacing.tial.x 3": (
        "--grid.spacing.tial.x is not a flag here; the closest is --grid.spacing.tail.kind"
    ),
    "--loader 3": "--loader is not a flag here; the closest is --loader.workers",
    "-- 3": "-- is not a flag here; the closest is --weights",
    "--grid.dtype fp32": (
        "--grid.dtype is not a flag here, as grid.kind is 'polynomial' and 'dtype' is of native"
    ),
    "--grid native --grid.spacing linear": (
        "--grid.spacing is not a flag here, as grid.kind is 'native' and 'spacing' is of polynomial"
    ),
    "--grid native --grid.spacing.clip": (
        "--grid.spacing.clip is not a flag here,"
        " as grid.kind is 'native' and 'spacing' is of polynomial"
    ),
    "word --seed 1": "'word' is out of place, as values follow a flag: --name value",
    "--loader.workers many": "loader.workers got 'many', which does not read as INT",
    "--loader.workers=1.5": "loader.workers got '1.5', which does not read as INT",
    "--loader.workers": "loader.workers got '', which does not read as INT",
    "--loader.workers 1 2": "loader.workers got '1 2', which does not read as INT",
    "--grid.ends 1": "grid.ends got '1', which does not read as FLOAT FLOAT",
    "--grid.ends 1 x": "grid.ends got '1 x', which does not read as FLOAT FLOAT",
    "--parts [": "parts got '[', which does not read as JSON",
    "--compile maybe": "compile got 'maybe', not one of True, False; the closest is 'False'",
    "--grid.order 4": "grid.order got '4', not one of 1, 2, 3; the closest is '3'",
    "--grid native --grid.dtype fp3": DTYPES,
    "--loader.tail exp --loader.tail.decay=-2": (
        "loader.tail.decay is -2.0, but it should be greater than 0"
    ),
    '--parts [{"name":3}]': "parts.0 is 3, but it should be a valid string",
}
MISTAKES_IN_DATA = {
    "--data folder": "data.root has no default, so --data.root must be given",
    "--data folder --data.root d": (
        "data.spacing.kind has no default, so --data.spacing.kind must be given"
    ),
    "--data.count 0": "data.count is 0, but it should be greater than or equal to 1",
    "--low 2": "the config is rejected: low should not be above high",
}


@pytest.mark.parametrize(
    ("config", "line", "sentence"),
    [
        *[(Run(), *item) for item in MISTAKES.items()],
        *[(Data(), *item) for item in MISTAKES_IN_DATA.items()],
    ],
    ids=[*MISTAKES, *MISTAKES_IN_DATA],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    config: Config, line: str, sentence: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as exit_info:
        parse(config, line.split(), prog="stillhouse train")
    assert exit_info.value.code == 2
    assert exit_info.value.__suppress_context__
    assert capsys.readouterr() == ("", f"stillhouse train: {sentence}.\n")


def help_text(capsys: pytest.CaptureFixture[str], *args: str, config: Config | None = None) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse(config or Run(), args, prog="stillhouse train")
    assert exit_info.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    return " ".join(out.replace("│", " ").split())


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_every_kind_and_the_present_one(flag: str, capsys: pytest.CaptureFixture[str]):
    text = help_text(capsys, flag)
    assert text.startswith("usage: stillhouse train [-h] [OPTIONS]")
    assert "A run for the tests." in text
    for node, kinds, present in [
        ("grid", "{polynomial,native}", "polynomial"),
        ("grid.spacing", "{linear,cosine}", "linear"),
        ("grid.spacing.tail", "{none,exp,exponential}", "none"),
        ("loader.tail", "{none,exp,exponential}", "none"),
    ]:
        line = f"--{node}.kind {kinds} --{node}.kind X --help lists the fields of X"
        assert f"{line} (default: {present})" in text


def test_help_shows_the_description_and_the_positional_fields(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(Run(), ["-h"], prog="x", description="Trains a model.", positional=("note",))
    text = capsys.readouterr().out
    assert text.startswith("usage: x [NOTE] ")
    assert "Trains a model." in text
    assert "A run for the tests." not in text


def test_help_lists_the_fields_of_the_kind_given_with_it(capsys: pytest.CaptureFixture[str]):
    plain, tail = help_text(capsys, "--help"), help_text(capsys, "--help", "--loader.tail=exp")
    assert "--loader.tail.decay" not in plain
    assert "--loader.tail.decay FLOAT how fast the tail falls (default: 0.5)" in tail
    assert "An exponential tail." in tail
    assert "(default: exp)" in tail


def test_help_takes_text_from_strings_below_fields_and_not_from_comments(
    capsys: pytest.CaptureFixture[str],
):
    text = help_text(capsys, "--help")
    assert "--grid.rho FLOAT how much denser near zero (default: 7.0)" in text
    assert "where steps are" in text
    assert "Karras's grid." in text
    assert "Not help" not in text


def test_help_shows_defaults_as_they_would_be_given(capsys: pytest.CaptureFixture[str]):
    config = Run(pair=(1, 2), weights={"a": 1.0}, grid=Native(), parts=(Part(),))
    text = help_text(capsys, "--help", config=config)
    for line in ["{bf16,fp32} (default: bf16)", "{True,False} (default: True)", "(default: 1 2)"]:
        assert line in text
    assert "--weights [STR FLOAT [STR FLOAT ...]] (default: a 1.0)" in text
    assert "--parts JSON" in text
    warped = help_text(capsys, "--help", "--data=warped", config=Data())
    assert "--data.knots [INT [INT ...]] (default: 1)" in warped


def test_help_shows_what_is_required(capsys: pytest.CaptureFixture[str]):
    text = help_text(capsys, "--data=folder", "--help", config=Data())
    assert "--data.root PATH (required)" in text
    assert "--data.spacing.kind {linear,cosine}" in text
    assert "--data.spacing.tail" not in text


def test_help_shows_a_default_that_is_not_of_its_type(capsys: pytest.CaptureFixture[str]):
    class Sloppy(Config):
        root: Path | None = "runs"  # type: ignore[assignment]

    text = help_text(capsys, "--help", config=Sloppy())
    assert "--root {None}|PATH (default: runs)" in text


BASE = Run(grid=Polynomial(rho=2.0), weights={"a": 1.0})
FILES = {
    "{}": {},
    "{seed: 4, out_dir: a}": {"seed": 4, "out_dir": Path("a")},
    "seed: null": {"seed": None},
    "weights: {b: 1}": {"weights": {"b": 1.0}},
    "parts: [{name: y}]": {"parts": (Part(name="y"),)},
    "grid: {ends: [1, 2]}": {"grid": Polynomial(rho=2.0, ends=(1.0, 2.0))},
    "grid: {kind: polynomial, order: 2}": {"grid": Polynomial(rho=2.0, order=2)},
    "grid: {kind: native}": {"grid": Native()},
    "grid: {dtype: fp32, kind: native}": {"grid": Native(dtype=Precision.FULL)},
    "{grid: native, loader: {tail: exp}}": {"grid": Native(), "loader": Loader(tail=ExpTail())},
    "grid: {spacing: {kind: cosine, tail: {kind: exponential, bends: [3]}}}": {
        "grid": Polynomial(rho=2.0, spacing=Cosine(tail=ExpTail(kind="exponential", bends=(3,))))
    },
    "grid:\n  rho: 2e-4  # text in YAML 1.1\n  spacing: cosine\n": {
        "grid": Polynomial(rho=2e-4, spacing=Cosine())
    },
}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
@pytest.mark.parametrize(("text", "changes"), FILES.items(), ids=FILES)
def test_a_run_file_goes_over_the_base(
    text: str, changes: dict[str, Any], suffix: str, tmp_path: Path
):
    as_json = json.dumps(yaml.safe_load(text))
    path = write(tmp_path / f"run.{suffix}", as_json if suffix == "json" else text)
    assert load_yaml_or_json(path, BASE) == BASE.model_copy(update=changes)
    assert load_yaml_or_json(str(path), BASE) == load_yaml_or_json(path, BASE)


def test_flags_go_over_a_run_file(tmp_path: Path):
    base = load_yaml_or_json(write(tmp_path / "run.yaml", "{grid: {rho: 2}, seed: 1}"), Run())
    assert parse(base, ["--seed", "2"], prog="x") == Run(seed=2, grid=Polynomial(rho=2.0))


TOP = ", ".join(Run.model_fields)
BAD_FILES = {
    "sede: 1": f"the key sede is not one of {TOP}; the closest is 'seed'",
    "3: 4": f"the key 3 is not one of {TOP}; the closest is 'weights'",
    "grid: {kind: native, rho: 1}": (
        "the key grid.rho is not one of kind, dtype; the closest is 'kind'"
    ),
    "grid: natve": KINDS.format("'natve'", "'native'"),
    "grid: {kind: [a]}": KINDS.format("\"['a']\"", "'native'"),
    "grid: 3": "grid should map names to values, not be 3",
    "loader:": "loader should map names to values, not be None",
    "loader: exp": "loader should map names to values, not be 'exp'",
    "[1]": "a run file should map names to values, not be [1]",
    "loader: {workers: many}": (
        "loader.workers is 'many', but it should be a valid integer,"
        " unable to parse string as an integer"
    ),
    "grid: {ends: [1, x]}": (
        "grid.ends.1 is 'x', but it should be a valid number, unable to parse string as a number"
    ),
    "loader: {tail: {kind: exp, decay: 3}}": (
        "loader.tail.decay is 3, but it should be less than 1"
    ),
}


@pytest.mark.parametrize(("text", "sentence"), BAD_FILES.items(), ids=BAD_FILES)
def test_a_bad_run_file_is_one_sentence(text: str, sentence: str, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        load_yaml_or_json(write(tmp_path / "run.yaml", text), Run())
    assert str(error.value) == f"{sentence}."


def test_two_bad_values_are_two_sentences(tmp_path: Path):
    path = write(tmp_path / "run.yaml", "{loader: {workers: x}, size: y}")
    with pytest.raises(ConfigError) as error:
        load_yaml_or_json(path, Run())
    assert [line.split()[0] for line in str(error.value).splitlines()] == ["loader.workers", "size"]


@pytest.mark.parametrize(("name", "text"), [("a.json", "{"), ("a.yaml", "a: ["), ("no.yaml", None)])
def test_a_file_that_cannot_be_read_exits_with_a_sentence(
    name: str, text: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    path = tmp_path / name if text is None else write(tmp_path / name, text)
    with pytest.raises(SystemExit) as exit_info, exits("stillhouse train"):
        load_yaml_or_json(path, Run())
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"stillhouse train: {path} cannot be read: ")
    assert err.count("\n") == 1


def test_importing_the_parser_imports_neither_tyro_nor_torch_nor_yaml():
    code = f"import runpy, sys; runpy.run_path({module.__file__!r}); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert {"pydantic", "tyro", "torch", "yaml"} & set(loaded.stdout.split()) == {"pydantic"}
