"""Experiments of many runs over many sittings: what has a result is not run again."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# The commands of a run, each with the file that says it is done.
Commands = Callable[[str, Path], Iterator[tuple[Path, list[str]]]]


def work_through(
    about: str | None,
    names: Iterable[str],
    commands: Commands,
    summary: Callable[[str, Path], dict[str, Any]],
    results: Path,
    picture: Callable[[Path], Path],
    prepare: Callable[[str, Path], None] = lambda name, work: None,
) -> None:
    """The runs that the command line asks for; `--plan` prints their commands instead.

    A run is known by its name, and its folder below `--work` by the same. When it is done, what
    `summary` says of it is kept among the results, with its picture.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="beginnings of names of runs; all if none")
    parser.add_argument("--plan", action="store_true", help="print the commands and what is done")
    parser.add_argument("--work", type=Path, default=Path("runs") / results.name)
    options = parser.parse_args()
    for name in names:
        wanted = not options.names or any(name.startswith(begin) for begin in options.names)
        done = (results / f"{name}.json").exists()
        if options.plan and wanted:
            print(f"# {name}{' (done)' if done else ''}")
            for _, words in commands(name, options.work):
                print("stillhouse", shlex.join(words))
        elif wanted and not done:
            prepare(name, options.work)
            carry_out(commands(name, options.work))
            results.mkdir(parents=True, exist_ok=True)
            shutil.copy(picture(options.work / name), results / f"{name}.png")
            record = summary(name, options.work / name)
            (results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def carry_out(commands: Iterable[tuple[Path, list[str]]]) -> None:
    """What of it is left."""
    for result, words in commands:
        if not result.exists():
            print("$ stillhouse", shlex.join(words), flush=True)
            subprocess.run([sys.executable, "-m", "stillhouse", *words], check=True, env=quiet())


def quiet() -> dict[str, str]:
    return os.environ | {"TERM": "dumb", "HF_HUB_OFFLINE": "1"}


def read_lines(run: Path) -> list[dict[str, Any]]:
    """The log of a training run."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def last_values(lines: list[dict[str, Any]], key: str, count: int) -> list[list[float]]:
    """The last of what was logged under this name, with the images seen."""
    return [[line["images"], round(line[key], 5)] for line in lines if key in line][-count:]
