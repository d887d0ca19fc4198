"""`stillhouse export RUN`: see `recipes/report/cards.py`."""

from collections.abc import Sequence


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.report.cards import ExportRun, export

    config = parse(
        ExportRun(),
        words,
        prog="stillhouse export",
        description="Write a run's model as a diffusers folder with a card.",
        positional=("run",),
    )
    print(f"see {export(config)}")
