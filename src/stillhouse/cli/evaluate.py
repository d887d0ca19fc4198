"""`stillhouse evaluate MODEL --reference DATA`: see `recipes/judge/evaluating.py`."""

from collections.abc import Sequence


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.judge.evaluating import EvaluateRun, run
    from stillhouse.recipes.judge.verdicts import show

    config = parse(
        EvaluateRun(),
        words,
        prog="stillhouse evaluate",
        description="Compare samples of a model, or images, with a reference.",
        positional=("model",),
        examples=(
            "stillhouse evaluate MODEL --reference cifar10 --metrics fid,kid --seeds 3",
            "stillhouse evaluate photos --reference others --size 64 --metrics kid "
            "--count 500 --detector mobilenet-v2",
        ),
    )
    record = run(config)
    if record:  # the first process
        show(record)
        print(f"see {config.out / 'evaluation.png'} and {config.out / 'evaluation.json'}")
