"""`stillhouse plan RECIPE --gpus N --device D`: see `recipes/plan/costs.py`."""

from collections.abc import Collection, Sequence


def main(words: Sequence[str]) -> None:
    import json

    from stillhouse.cli.parse import parse
    from stillhouse.cli.train import recipe_or_file, take_own_flags
    from stillhouse.errors import UserError
    from stillhouse.recipes.plan.costs import PlanRun, as_json, plan, show
    from stillhouse.recipes.train.progressive import check_flags, legs

    words = ["--help" if word == "-h" else word for word in words]
    name, own, rest = _apart(words, {*PlanRun.model_fields, "json", "help"})
    machine = own.pop("--json", None) is not None
    place = parse(
        PlanRun(),
        [word for flag, values in own.items() for word in (flag, *values)],
        prog="stillhouse plan RECIPE",
        description="What a run will need: computing, memory, communication, time, storage. Every "
        "flag of stillhouse train may be given too, such as --images 400e6; --json for machines.",
        examples=("stillhouse plan cifar10-dit --gpus 64 --device h100 --images 400e6",),
    )
    if not name:
        raise UserError("name a recipe or a run file: stillhouse plan RECIPE --gpus 8")
    rest, beside = take_own_flags(rest)
    if others := beside.keys() - {"--scale"}:
        raise UserError(f"{min(others)} is a flag of stillhouse train: --gpus says how many here")
    start = recipe_or_file(name, beside.get("--scale", "full"))
    _check_own(rest, {*PlanRun.model_fields}, {*type(start).model_fields})
    config = parse(start, rest, prog=f"stillhouse plan {name}")
    check_flags(start, config)
    found = [(leg, plan(leg, place)) for leg in legs(config)]
    if machine:
        print(json.dumps([as_json(leg, place, lines) for leg, lines in found]))
    else:
        print("\n\n".join(show(leg, place, lines) for leg, lines in found))


def _check_own(words: Sequence[str], own: Collection[str], theirs: Collection[str]) -> None:
    """A flag like one of the plan's own is not looked for among the recipe's."""
    from difflib import get_close_matches

    from stillhouse.errors import UserError

    flags = [word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"]
    for flag in flags:
        close = get_close_matches(flag, own, 1, cutoff=0.8)
        if close and flag not in theirs:
            raise UserError(f"--{flag} is not a flag here; the closest is --{close[0]}")


def _apart(
    words: Sequence[str], names: Collection[str]
) -> tuple[str, dict[str, list[str]], list[str]]:
    """The recipe, the plan's own flags with their values, and the words that are the recipe's."""
    rest: list[str] = []
    own: dict[str, list[str]] = {}
    stream = iter(words)
    for word in stream:
        flag, equals, value = word.partition("=")
        if not word.startswith("--") or flag[2:].replace("-", "_") not in names:
            rest.append(word)
        elif flag in ("--json", "--help"):
            own[flag] = []
        else:
            own[flag] = [value] if equals else [word for word in [next(stream, None)] if word]
    name = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    return name, own, rest
