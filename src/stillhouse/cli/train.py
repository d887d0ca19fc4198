"""`stillhouse train RECIPE`: see `recipes/training.py` and the table in `recipes/catalogue.py`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stillhouse.recipes.training import TrainRun


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.training import run

    words, scale, dry = _take_own_flags(list(words))
    name = words.pop(0) if words and not words[0].startswith("-") else ""
    config = parse(
        _start(name, scale),
        words,
        prog=f"stillhouse train {name or 'RECIPE'}",
        description=_description(),
    )
    if not name:
        from stillhouse.errors import UserError

        raise UserError(_description())
    if dry:
        from stillhouse.recipes.planning import describe

        print(describe(config, int(os.environ.get("WORLD_SIZE", "1"))))
        return
    images = run(config)
    if _first_process():
        print(f"{images} images; the model is in {config.out / 'model'}")
        print(f"  stillhouse sample {config.out / 'model'}")
        print(f"  stillhouse report {config.out}")


def _take_own_flags(words: list[str]) -> tuple[list[str], str, bool]:
    """`--scale` picks the recipe's defaults and `--dry-run` ends early: no part of the config."""
    from stillhouse.errors import UserError

    dry = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    scale = "full"
    for i, word in enumerate(words):
        if word.partition("=")[0] == "--scale":
            taken = 1 if "=" in word else 2
            scale = (word.partition("=")[2] if "=" in word else "".join(words[i + 1 : i + 2])) or ""
            if scale not in ("tiny", "full"):
                raise UserError(f"--scale is tiny or full, not {scale!r}")
            return words[:i] + words[i + taken :], scale, dry
    return words, scale, dry


def _start(name: str, scale: str) -> "TrainRun":
    """The recipe, or the run file, that the flags change."""
    from difflib import get_close_matches

    from stillhouse.cli.parse import load_yaml_or_json
    from stillhouse.errors import UserError
    from stillhouse.recipes.catalogue import RECIPES
    from stillhouse.recipes.training import TrainRun

    if not name:
        return TrainRun()
    if name in RECIPES:
        return RECIPES[name](scale)  # type: ignore[arg-type]
    if Path(name).suffix in (".json", ".yaml", ".yml"):
        return load_yaml_or_json(name, TrainRun())
    close = get_close_matches(name, RECIPES, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UserError(f"there is no recipe {name!r}.{hint} {_description()}")


def _description() -> str:
    from stillhouse.recipes.catalogue import RECIPES

    return (
        f"Train a recipe ({', '.join(RECIPES)}) or a run file (.yaml, .json). --scale tiny makes "
        "it a minute long; --dry-run shows what would be done. The same command again resumes."
    )


def _first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"
