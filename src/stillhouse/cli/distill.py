"""`stillhouse distill MODEL`: see `recipes/distill/distilling.py`."""

import os
from collections.abc import Sequence


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.distill.distilling import DistillRun, run

    config = parse(
        DistillRun(),
        words,
        prog="stillhouse distill",
        description="Distil a checkpoint into a student of few evaluations, without data. The same "
        "command again resumes.",
        positional=("model",),
    )
    config = run(config)
    if os.environ.get("RANK", "0") == "0":
        print(f"the student is in {config.out / 'model'}; its pictures in {config.out / 'samples'}")
