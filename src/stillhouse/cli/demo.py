"""`stillhouse demo MODEL [STUDENT]`: see `recipes/demo/serving.py`."""

from collections.abc import Sequence


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.demo.serving import DemoRun, run

    config = parse(
        DemoRun(),
        words,
        prog="stillhouse demo",
        description="Try a model in the browser, beside its few-step student, and look inside it.",
        positional=("model", "student"),
        examples=("stillhouse demo reference/emoji reference/emoji-student",),
    )
    run(config)
