"""`stillhouse features info | extract | select | evaluate | atlas`: see `recipes/features`."""

from collections.abc import Callable, Sequence

SUBCOMMANDS = {
    "info": "list a model's activations, or say what a folder of features holds",
    "extract": "features of many images as sharded files, resumable",
    "select": "choose activations by rules, scores and a probe",
    "evaluate": "correspondence and segmentation with features",
    "atlas": "draw a model's inside as one HTML page",
}


def main(words: Sequence[str]) -> None:
    from stillhouse.errors import UserError

    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        print(usage())
    elif name in WORK:
        WORK[name](list(words[1:]))
    else:
        from difflib import get_close_matches

        close = get_close_matches(name, SUBCOMMANDS, 1, cutoff=0.0)[0]
        raise UserError(
            f"there is no {name!r} among {', '.join(SUBCOMMANDS)}; the closest is {close!r}"
        )


def usage() -> str:
    rows = "\n".join(f"  {name:<9} {what}" for name, what in SUBCOMMANDS.items())
    return (
        "A diffusion model's activations as features of images.\n\n"
        f"usage: stillhouse features COMMAND MODEL ...\n\n{rows}\n\n"
        "stillhouse features COMMAND --help shows all of its options."
    )


def _info(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.features.info import InfoRun, run

    print(
        run(
            parse(
                InfoRun(),
                words,
                prog="stillhouse features info",
                description="List a model's activations, or what a folder of features holds.",
                positional=("model",),
                examples=("stillhouse features info MODEL --match 'up-level1-*'",),
            )
        )
    )


def _extract(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.features.extracting import ExtractRun, run

    config = parse(
        ExtractRun(),
        words,
        prog="stillhouse features extract",
        description="Store features of many images; the same command again goes on.",
        positional=("model",),
        examples=("stillhouse features extract MODEL --images photos --selection sd15",),
    )
    found = run(config)
    if found is not None:  # the first process
        shapes = ", ".join(f"{n} {' x '.join(map(str, s))}" for n, s in found.shapes.items())
        print(f"features of {len(found)} images in {config.out}: {shapes}")


def _select(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.features.selecting import SelectRun, listed, run

    config = parse(
        SelectRun(),
        words,
        prog="stillhouse features select",
        description="Choose activations: by the paper's rules, by scores, by a probe.",
        positional=("model",),
        examples=("stillhouse features select MODEL --out selection.json",),
    )
    print(listed(run(config)))
    print(f"use it as --selection {config.out}")


def _evaluate(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.features.tasks import TaskRun, run, summary

    config = parse(
        TaskRun(),
        words,
        prog="stillhouse features evaluate",
        description="Put features to a task: correspondence, segmentation, few labels.",
        positional=("model",),
        examples=(
            "stillhouse features evaluate MODEL --task correspondence "
            "--data birds --selection rules.json",
        ),
    )
    record = run(config)
    if record:  # the first process
        print(summary(record))
        left = ["pictures.png"] * bool(config.pictures) + ["record.json"]
        print(f"see {' and '.join(str(config.out / name) for name in left)}")


def _atlas(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.features.atlas import AtlasRun, run

    config = parse(
        AtlasRun(),
        words,
        prog="stillhouse features atlas",
        description="Draw a model's inside as one HTML page, which opens in any browser.",
        positional=("model",),
        examples=("stillhouse features atlas MODEL --images photos --out atlas.html",),
    )
    print(run(config))


WORK: dict[str, Callable[[Sequence[str]], None]] = {
    "info": _info,
    "extract": _extract,
    "select": _select,
    "evaluate": _evaluate,
    "atlas": _atlas,
}
