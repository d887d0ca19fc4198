"""`stillhouse train RECIPE`: see `recipes/train/training.py`, and `catalogue.py` beside it."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stillhouse.recipes.train.training import TrainRun


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.engine.world import first_process
    from stillhouse.recipes.train.progressive import check_flags, legs, run_stages

    words, own = take_own_flags(list(words))
    scale = own.get("--scale", "full")
    name = words.pop(0) if words and not words[0].startswith("-") else ""
    recipe = recipe_or_file(name, scale)
    config = parse(
        recipe,
        words,
        prog=f"stillhouse train {name or 'RECIPE'}",
        description=_description(),
        examples=(
            "stillhouse train images --data.source.path photos --scale tiny",
            "stillhouse train images --data.source.path photos --dry-run",
            "stillhouse train cifar10-unet --coupling conditional --optim.lr 2e-4",
        ),
    )
    if not name:
        from stillhouse.errors import UserError

        raise UserError(_description())
    check_flags(recipe, config)
    if "--dry-run" in own:
        from stillhouse.recipes.plan.planning import describe

        processes = int(own.get("--processes", os.environ.get("WORLD_SIZE", "1")))
        told = "\n\n".join(describe(leg, processes) for leg in legs(config))
        if first_process():
            print(told)
        return
    config = run_stages(config)
    if first_process():
        print(f"{config.images} images; the model is in {config.out / 'model'}")
        print(f"  {_next_step(config)}")
        print(f"  stillhouse report {config.out}")


def _next_step(config: "TrainRun") -> str:
    """What to do with the model that a run has left."""
    model = config.out / "model"
    if config.network.kind == "tuned" and config.network.method == "lora":
        return f"its adapters, for {config.network.path or config.model}: {_opening(model)}"
    prompt = " --prompt 'WHAT TO DRAW'" if config.text.kind != "none" else ""
    return f"stillhouse sample {model}{prompt}"


def _opening(adapters: Path) -> str:
    """PixArt's pipelines have no loader of adapters: theirs are in peft's own layout."""
    if (adapters / "adapter_config.json").is_file():
        return f"peft.PeftModel.from_pretrained(pipeline.transformer, {str(adapters)!r})"
    return f"pipeline.load_lora_weights({str(adapters)!r})"


def take_own_flags(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """What is no part of the config: `--scale` picks the recipe's defaults, `--dry-run` ends early.

    Values by flag, and the other words.
    """
    from stillhouse.errors import UserError

    rest, own = [], {}
    stream = iter(words)
    for word in stream:
        flag, equals, value = word.partition("=")
        if flag == "--dry-run":
            own[flag] = ""
        elif flag in ("--scale", "--processes"):
            own[flag] = value if equals else next(stream, "")
        else:
            rest.append(_in_full(word))
    if own.get("--scale", "full") not in ("tiny", "full"):
        raise UserError(f"--scale is tiny or full, not {own['--scale']!r}")
    processes = own.get("--processes", "1")
    if not processes.isdigit() or not int(processes):
        raise UserError(f"--processes is a number from 1 on, not {processes!r}")
    return rest, own


def _in_full(word: str) -> str:
    """--crop is short for --data.image.crop, as stillhouse prepare calls it."""
    return re.sub(r"^--crop(?=[.=]|$)", "--data.image.crop", word)


def recipe_or_file(name: str, scale: str) -> "TrainRun":
    """The recipe, or the run file, that the flags change."""
    from difflib import get_close_matches

    from stillhouse.cli.parse import load_yaml_or_json
    from stillhouse.errors import UserError
    from stillhouse.recipes.train.catalogue import RECIPES
    from stillhouse.recipes.train.training import TrainRun

    if not name:
        return TrainRun()
    if name in RECIPES:
        return RECIPES[name](scale)  # type: ignore[arg-type]
    if Path(name).suffix in (".json", ".yaml", ".yml"):
        if scale != "full":
            raise UserError("--scale belongs to recipes: leave it out, a run file says what it is")
        return _recorded(Path(name)) or load_yaml_or_json(name, TrainRun())
    close = get_close_matches(name, RECIPES, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise UserError(f"there is no recipe {name!r}.{hint} {_description()}")


def _recorded(path: Path) -> "TrainRun | None":
    """The config in a run's own run.json, which has other facts beside it."""
    import json

    from stillhouse.recipes.train.folders import RECORD
    from stillhouse.recipes.train.training import TrainRun

    try:
        found = json.loads(path.read_text()) if path.name == RECORD else {}
    except (OSError, ValueError):
        return None  # the reader of run files says what is wrong with it
    return TrainRun.model_validate(found["config"]) if "versions" in found else None


def _description() -> str:
    from stillhouse.recipes.train.catalogue import RECIPES

    return (
        f"Train a recipe ({', '.join(RECIPES)}) or a run file (.yaml, .json). --scale tiny makes "
        "it a minute long; --dry-run shows what would be done, with --processes N on so many; "
        "--crop local or global, for pre-training at a low resolution, is short for "
        "--data.image.crop. The same command again resumes."
    )
