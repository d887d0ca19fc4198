"""A newcomer's first hour: every command of the README and the first tutorials, timed.

    STILLHOUSE_DATA=../shared/data python benchmarks/first_hour.py

In a fresh clone and a fresh virtual environment: the README from `pip install` to a student of
one's own images (here 500 photographs of pets), then the tutorials, in order and as they are
written, with what they run of Python. pip's cache is as it is. Last line, JSON, also in
results/first_hour.json: seconds of each.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TUTORIALS = ("first-model", "few-steps", "features")
PHOTOS = 500


class Step(NamedTuple):
    """A line for the shell, or a piece of Python."""

    page: str
    words: list[str]
    name: str


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        done = list(walk(Path(folder)))
    result: dict[str, Any] = {"steps": done, "photos": PHOTOS, "cores": os.cpu_count()}
    result["minutes"] = round(sum(step["seconds"] for step in done) / 60, 1)
    result["load"] = round(os.getloadavg()[0], 1)
    (RESULTS / "first_hour.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def walk(folder: Path) -> Any:
    clone, lessons = folder / "clone", folder / "lessons"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    write_photos(clone / "photos")
    lessons.mkdir()
    venv = folder / "venv"
    yield timed(Step("README", [sys.executable, "-m", "venv", str(venv)], "python -m venv"), clone)
    path = {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for step in steps(ROOT / "README.md", python=False):
        yield timed(step, clone, path)
    for name in TUTORIALS:
        for step in steps(ROOT / f"docs/tutorials/{name}.md", python=True):
            yield timed(step, lessons, path)


def steps(page: Path, *, python: bool) -> list[Step]:
    """What a reader runs, in order; pieces of Python between two commands together."""
    found, code = [], ""
    pattern = r"^    ((?:pip|stillhouse) [^\n]*)$|```python\n(.*?)```"
    for line, piece in re.findall(pattern, page.read_text(), flags=re.MULTILINE | re.DOTALL):
        code += piece if python else ""
        if line and code:
            found.append(Step(page.stem, ["python", "-c", code], "its Python"))
            code = ""
        if line:
            found.append(Step(page.stem, shlex.split(line, comments=True), line.split("  ")[0]))
    return found


def write_photos(folder: Path) -> None:
    import pyarrow.parquet as pq

    folder.mkdir()
    file = Path(os.environ["STILLHOUSE_DATA"]) / "pets" / "train.parquet"
    rows = pq.read_table(file, columns=["image"])["image"][:PHOTOS].to_pylist()
    for number, row in enumerate(rows):
        (folder / f"{number}.jpg").write_bytes(row["bytes"])


def timed(step: Step, folder: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    began = time.perf_counter()
    variables = os.environ | (environment or {})
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        variables.pop(name, None)
    subprocess.run(step.words, cwd=folder, env=variables, check=True, stdout=subprocess.DEVNULL)
    seconds = round(time.perf_counter() - began, 1)
    print(f"{seconds:8} s  {step.page}: {step.name}", flush=True)
    return {"page": step.page, "step": step.name, "seconds": seconds}


if __name__ == "__main__":
    main()
