"""`stillhouse report RUN`: see `recipes/report/report.py`."""

from collections.abc import Sequence
from pathlib import Path

from stillhouse.config import Config


class ReportRun(Config):
    """A page about a training run."""

    run: Path = Path()
    """The run's folder; the present one if not given."""
    out: Path | None = None
    """Where the page goes; report.html in the run's folder if not given."""


def main(words: Sequence[str]) -> None:
    from stillhouse.cli.parse import parse
    from stillhouse.recipes.report.report import report

    config = parse(
        ReportRun(),
        words,
        prog="stillhouse report",
        description="Draw a training run as one HTML page, which opens in any browser.",
        positional=("run",),
        examples=("stillhouse report runs/photos",),
    )
    print(report(config.run, config.out))
