"""`stillhouse distill MODEL`: see `recipes/distill/distilling.py`."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stillhouse.recipes.distill.settings import DistillRun

FLAG = re.compile(r"--method(\.kind)?(=|$)")


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.engine.world import first_process
    from stillhouse.recipes.distill.distilling import describe, run
    from stillhouse.recipes.distill.settings import usual

    dry = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    words = [re.sub(r"^--langevin(?=$|=)", "--method.langevin", word) for word in words]
    config = parse(
        usual(method_of(words)),
        words,
        prog="stillhouse distill",
        description="Distil a checkpoint into a student of few evaluations, without images. The "
        "same command again resumes; --dry-run shows what would be done, and what it costs.",
        positional=("model",),
        examples=(
            "stillhouse distill MODEL --method sfd-v --evaluations 2..5 --out student",
            "stillhouse distill MODEL --method sfd --evaluations 4 --exportable",
            "stillhouse distill MODEL --method emd --langevin 8 --out generator",
        ),
    )
    if dry:
        told = describe(config)  # by every process: it refuses what the run would
        if first_process():
            print(told)
        return
    config = run(config)
    if first_process():
        student = config.out / "model"
        print(f"the student is in {student}; its pictures in {config.out / 'samples'}")
        for line in next_steps(config):
            print(f"  {line}")
        if (config.out / "comparison.png").is_file():
            print(f"how near it comes to its teacher: {config.out / 'comparison.png'}")


def next_steps(config: "DistillRun") -> list[str]:
    """What to do with the student that a run has left."""
    from stillhouse.recipes.distill.cards import opening_adapters
    from stillhouse.recipes.judge.galleries import model_folder

    student = str(config.out / "model")
    if config.adapters:  # which are no model by themselves
        return ["in Python:", *opening_adapters(config, model_folder(config.model), student)]
    told = " --prompt 'WHAT TO DRAW'" if config.prompts else ""
    if config.labels:
        told = f" --labels {' '.join(map(str, config.labels))}"
    return [f"stillhouse sample {student}{told} --out DIR"]


def method_of(words: Sequence[str]) -> str:
    """The last that is named, or none."""
    pairs = zip(words, [*words[1:], ""], strict=False)
    found = [word.partition("=")[2] or after for word, after in pairs if FLAG.match(word)]
    return found[-1] if found else ""
