"""The progress bar of long jobs: how far, how fast, how long still."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    label: str, total: float, unit: str, *, shown: bool = True
) -> Iterator[Callable[[float], None]]:
    """Yields a function that advances the bar; fractions of a unit are welcome."""
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:.2f} {unit}/s", style="cyan")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not shown) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount: bar.advance(task, amount)
