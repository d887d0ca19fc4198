"""The command line as a person meets it: help, errors, speed."""

import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from pydantic import BaseModel
from understanding import understood

from stillhouse.cli import COMMANDS, main
from stillhouse.cli.features import SUBCOMMANDS
from stillhouse.cli.parse import _models

TORCH = ("-c", "import torch")
OURS = "import stillhouse as s; s.load_denoiser, s.solvers, s.process, s.NetworkDenoiser"
IMPORT = ("-c", OURS)  # the names that people use, not only the empty package
HELPS = [("-m", "stillhouse", "--help"), ("-m", "stillhouse", "sample", "--help")]


def seconds(words: tuple[str, ...]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - started


@pytest.fixture(scope="module")
def ratios() -> dict[tuple[str, ...], float]:
    """Median ratios of commands' times to that of importing torch, all measured in turn."""
    timed = [IMPORT, *HELPS]
    for words in (TORCH, *timed):
        seconds(words)  # fill the disk cache
    found: dict[tuple[str, ...], list[float]] = {words: [] for words in timed}
    for turn in range(7):
        torch = seconds(TORCH)
        for words in timed if turn < 5 else [IMPORT]:
            found[words].append(seconds(words) / torch)
    return {words: statistics.median(values) for words, values in found.items()}


@pytest.mark.slow
@pytest.mark.timing
def test_import_costs_at_most_a_fifth_over_torch(ratios):
    assert ratios[IMPORT] <= 1.20


def test_heavy_libraries_are_imported_only_when_used():
    code = (
        "import sys, stillhouse as s; s.load_denoiser, s.solvers, s.process;"
        "heavy = {'diffusers', 'transformers', 'datasets', 'scipy', 'matplotlib', 'tyro', 'rich'};"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("words", HELPS, ids=" ".join)
def test_help_answers_in_under_twice_the_import_of_torch(words, ratios):
    assert ratios[words] < 2


@pytest.mark.slow
def test_sampling_does_not_import_what_trains():
    """Half of the time that help takes, where a student's walk brings its distiller along."""
    code = (
        "import sys, stillhouse.recipes.sampling;"
        "heavy = {'torch.distributed.checkpoint', 'stillhouse.engine.loop', 'diffusers', 'sympy'};"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_lists_every_command(capsys):
    main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


SPOKEN = [[name] for name in COMMANDS if name != "features"] + [
    ["features", n] for n in SUBCOMMANDS
]


def configs_of_examples(command, monkeypatch, capsys) -> list[type[BaseModel]]:
    """Every example in a command's help is parsed; by which schema."""
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    shown = capsys.readouterr().out
    lines = re.findall(r"^ +(stillhouse .*)$", shown.partition("Examples:")[2], re.MULTILINE)
    assert lines, shown
    examples = [shlex.split(line)[1:] for line in lines]
    assert all(words[: len(command)] == command for words in examples)
    return [schema for words in examples for schema in understood(words, monkeypatch)]


def undescribed(schema: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[str]:
    """Flags, and kinds of a part, of which help would say nothing."""
    if schema in seen:
        return
    seen.add(schema)
    if not schema.__doc__:
        yield schema.__name__
    for name, field in schema.model_fields.items():
        parts = _models(field.annotation)
        for part in parts:
            yield from undescribed(part, seen)
        if not parts and name != "kind" and not field.description:
            yield f"{schema.__name__}.{name}"


@pytest.mark.parametrize("command", SPOKEN, ids=" ".join)
def test_help_has_examples_that_are_understood_and_says_what_every_flag_is(
    command, monkeypatch, capsys
):
    for schema in configs_of_examples(command, monkeypatch, capsys):
        assert not [*undescribed(schema, set())]


def test_a_plan_is_explained_by_either_word_for_help(capsys):
    shown = []
    for word in ("-h", "--help"):
        with pytest.raises(SystemExit, match="0"):
            main(["plan", "cifar10-dit", word])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "--gpus" in shown[0]


def test_an_unknown_command_is_answered_with_the_nearest():
    with pytest.raises(SystemExit, match="Did you mean sample"):
        main(["smple"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["toy:mons"], "there is no toy:mons"),
        (["./nowhere"], "neither a directory nor a hub id"),
        (["toy:moons", "--grid.kind", "none"], "grid.kind got 'none'"),
        (["toy:moons", "--steps", "0"], "steps is 0"),
        (["toy:moons", "--stpes", "3"], "--steps"),
        (["toy:moons", "--device", "cuda:7"], "device 'cuda:7' cannot be used"),
        (["toy:moons", "--device", "foo"], "device 'foo' cannot be used"),
        (["toy:ring", "--guidance", "classifier-free"], "--labels"),
        (["toy:moons", "--grid", "searched", "--steps", "70"], "--grid.fine 61"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(words, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["sample", *words, "--out", str(tmp_path)])
    assert stopped.value.code in (1, 2)
    shown = capsys.readouterr().err
    assert sentence in shown
    assert "Traceback" not in shown


def test_sample_on_the_command_line(tmp_path, capsys):
    words = "sample toy:ring --solver dpmpp-3m --solver.variant exact --steps 12 --count 30"
    main([*words.split(), "--seed", "3", "--out", str(tmp_path)])
    assert "30 samples" in capsys.readouterr().out
    assert (tmp_path / "trajectories.png").is_file()
