"""The view of a run in a terminal; plain lines where there is none, as in a cluster's logs."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich import get_console
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stillhouse.engine.loop import Tracker

POINTS = 60  # of the numbers that are drawn
REFRESHES = 4  # per second, by a thread of rich's


class Terminal(Tracker):
    """A tracker that shows how far, how fast, how long still, and the last of each number."""

    def __init__(
        self,
        label: str,
        total: int,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or stdout()
        self.pace, self.numbers = Pace(label, total, clock), Numbers()
        self._body: RenderableType = Group()
        self._live: Live | None = None
        self._open = False

    def start(self, images: int) -> None:
        self.pace.start(images)
        self._say(self.pace.beginning())
        self._open = True
        if self.console.is_interactive:
            live = self._live = Live(self, console=self.console, refresh_per_second=REFRESHES)
            with self._lenient():
                live.start(refresh=True)

    def step(self, images: int) -> None:
        """Moves the bar; cheap enough for every step."""
        self.pace.step(images)

    def log(self, images: int, values: Mapping[str, Any]) -> None:
        self.pace.step(images)
        self.pace.speed = values.get("images_per_second", self.pace.speed)
        self.numbers.take(images, values)
        self._body = self.numbers.view()
        if "message" in values:
            self._say(values["message"])
        if self._live is None:
            self._say_plainly(values)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with self._lenient():
                live.stop()
        if self._open:
            self._open = False
            self._say(self.pace.ending())

    def __rich__(self) -> RenderableType:
        """What rich's thread draws; `log` replaces the body as a whole, so none of it changes."""
        return Group(self.pace.view(), self._body)

    @contextmanager
    def _lenient(self) -> Iterator[None]:
        """A terminal may go with its connection, a pipe with its reader; the run goes on."""
        try:
            yield
        except OSError:
            pass
        except SystemExit:  # so rich answers a broken pipe, once it has silenced the console
            if not self.console.quiet:
                raise

    def _say(self, line: str) -> None:
        with self._lenient():
            if self.console.is_interactive:
                self.console.print(line, markup=False, highlight=False)
            else:
                print(line, file=self.console.file, flush=True)

    def _say_plainly(self, values: Mapping[str, Any]) -> None:
        losses = [skip(values)] if "skipped" in values else list(plain_losses(values))
        if losses:
            self._say("  ".join([self.pace.plain(), *losses, *plain_costs(values)]))


def stdout() -> Console:
    """rich's own console, on which other bars find their place below; or one without colours."""
    # Asked here, since rich would take FORCE_COLOR for a terminal.
    return get_console() if sys.stdout.isatty() else Console(force_terminal=False)


# ---------------------------------------------------------------- how far


class Pace:
    """Where the run is, and when it will be over."""

    def __init__(self, label: str, total: int, clock: Callable[[], float]) -> None:
        self.label, self.total, self.clock = label, total, clock
        self.images, self.begun = 0, clock()
        self.speed: float | None = None
        self._first: tuple[float, int] | None = None

    def start(self, images: int) -> None:
        self.images, self.begun, self._first = images, self.clock(), None

    def step(self, images: int) -> None:
        self.images = images
        if self._first is None:  # counted from the end of the first step, which may compile
            self._first = self.clock(), images

    @property
    def elapsed(self) -> str:
        return duration(self.clock() - self.begun)

    @property
    def left(self) -> str:
        """At the mean speed so far: the pauses for samples and the like will recur."""
        since, before = self._first or (0.0, self.images)
        if self.images <= before:
            return "-:--:--"
        seconds = (self.clock() - since) / (self.images - before)
        return duration(seconds * max(self.total - self.images, 0))

    @property
    def seen(self) -> str:
        return f"{self.images:,}/{self.total:,} images"

    @property
    def share(self) -> str:
        return f"{min(self.images / self.total, 1):.1%}"

    def beginning(self) -> str:
        return f"{self.label}: {'goes on' if self.images else 'begins'} at {self.seen}"

    def ending(self) -> str:
        return f"{self.label}: {self.seen} after {self.elapsed}"

    def plain(self) -> str:
        return f"{self.elapsed}  {self.seen} ({self.share}, {self.left} left)"

    def view(self) -> RenderableType:
        speed = "" if self.speed is None else f"{self.speed:,.4g} images/s"
        top = Table.grid(padding=(0, 2, 0, 0), expand=True)
        top.add_column(no_wrap=True, style="bold")
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(self.total, self.images, complete_style="cyan", finished_style="green")
        top.add_row(Text(self.label), bar, self.share)
        parts = (self.seen, speed, f"{self.left} left", f"{self.elapsed} elapsed")
        return Group(top, Text("   ".join(filter(None, parts))))


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


# ---------------------------------------------------------------- the numbers


class Numbers:
    """The last of each number, and how it went of late: losses, or what a task says to watch."""

    def __init__(self) -> None:
        self.networks: dict[str, dict[str, float]] = {}
        self.losses: dict[str, deque[float]] = {}
        self.watched: dict[str, deque[float]] = {}
        self.facts: dict[str, str] = {}
        self.skips = 0

    def take(self, images: int, values: Mapping[str, Any]) -> None:
        if "skipped" in values:
            self.skips += 1
            self.facts["skipped updates"] = f"{self.skips}, the last at {images:,} images"
        for name, numbers in by_network(values).items():
            self.networks.setdefault(name, {}).update(numbers)
            if "loss" in numbers:
                self.losses.setdefault(name, deque(maxlen=POINTS)).append(numbers["loss"])
        for name, value in measured(values, "watch").items():
            self.watched.setdefault(name, deque(maxlen=POINTS)).append(value)
        self.facts |= {
            label: spell(values[key], images)
            for key, (label, spell) in FACTS.items()
            if values.get(key) is not None
        }
        self.facts |= {
            name: f"{value:.4g} at {images:,} images"
            for name, value in measured(values, "evaluation").items()
        }

    def view(self) -> RenderableType:
        watched = [self._watched(), ""] if self.watched else []
        return Group("", self._networks(), "", *watched, self._facts())

    def _networks(self) -> RenderableType:
        keys = shown_cells(self.watched)
        table = wide_table("network", *(TITLES.get(key, key) for key in keys))
        if "loss" in keys:
            table.add_column("the loss of late", ratio=1, no_wrap=True)
        for name, numbers in self.networks.items():
            cells = (CELLS[key](numbers[key]) if key in numbers else "" for key in keys)
            late = [Sparkline(tuple(self.losses.get(name, ())))] if "loss" in keys else []
            table.add_row(Text(name), *cells, *late)
        return table if self.networks else Group()

    def _watched(self) -> RenderableType:
        table = wide_table("to watch", "now")
        table.add_column("of late", ratio=1, no_wrap=True)
        for name, values in self.watched.items():
            table.add_row(Text(name), f"{values[-1]:.4g}", Sparkline(tuple(values)))
        return table

    def _facts(self) -> RenderableType:
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for label, fact in self.facts.items():
            style = "yellow" if label == "skipped updates" else ""
            grid.add_row(label, Text(fact, style=style))
        return grid


def wide_table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), expand=True, header_style="dim")
    for title in titles:
        table.add_column(title, no_wrap=True)
    return table


TITLES = {"gradient_norm": "gradient norm", "lr": "learning rate"}

# How each number of a network is written, in the order of the columns.
CELLS: dict[str, Callable[[float], str]] = {
    "loss": "{:.4g}".format,
    "gradient_norm": "{:.3g}".format,
    "lr": "{:.2e}".format,
}

# The label of each other number, and how it is written, given the images it was logged at.
FACTS: dict[str, tuple[str, Callable[[Any, int], str]]] = {
    "memory_gb": ("memory", lambda value, _: f"{value:.1f} GB"),
    "data_wait": ("waiting for data", lambda value, _: f"{value:.0%} of the time"),
    "validation/loss": ("validation loss", lambda value, at: f"{value:.4g} at {at:,} images"),
    "samples": ("samples", lambda value, _: str(value)),
    "checkpoint": ("checkpoint", lambda value, _: f"{value:,} images"),
}


def by_network(values: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The numbers of `<network>/loss` and the like, by network and key."""
    found: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        network, _, key = name.rpartition("/")
        if network and key in CELLS and network != "validation" and value is not None:
            found.setdefault(network, {})[key] = value
    return found


def shown_cells(watched: Mapping[str, Any]) -> list[str]:
    """The losses of a task that says what to watch say nothing."""
    return [key for key in CELLS if key != "loss" or not watched]


def measured(values: Mapping[str, Any], kind: str) -> dict[str, float]:
    """What an `evaluation` has found, without how it was done; what a task says to `watch`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        start, _, rest = name.partition("/")
        if start == kind and rest not in ("", "count", "about") and value is not None:
            found[rest] = value
    return found


def plain_losses(values: Mapping[str, Any]) -> Iterator[str]:
    """The losses of a line, each with its gradient norm and learning rate; what was measured."""
    names = {"loss": "loss", "gradient_norm": "gradient norm", "lr": "lr"}
    watched = measured(values, "watch")
    keys = shown_cells(watched)
    for network, numbers in by_network(values).items():
        said = (f"{names[key]} {CELLS[key](numbers[key])}" for key in keys if key in numbers)
        yield " ".join([network, *said])
    if values.get("validation/loss") is not None:
        yield f"validation loss {values['validation/loss']:.4g}"
    found = measured(values, "evaluation") | watched
    yield from (f"{name} {value:.4g}" for name, value in found.items())


def plain_costs(values: Mapping[str, Any]) -> Iterator[str]:
    """What the line says of time and memory."""
    costs = {
        "images_per_second": "{:,.4g} images/s",
        "data_wait": "{:.0%} waiting for data",
        "memory_gb": "{:.1f} GB",
    }
    return (text.format(values[key]) for key, text in costs.items() if key in values)


def skip(event: Mapping[str, Any]) -> str:
    loss, norm = event.get("loss"), event.get("gradient_norm")
    return f"an update of {event['skipped']} was skipped: loss {loss}, gradient norm {norm}"


class Sparkline:
    """Numbers as bars of one line, the newest at the right; a gap where one is not finite.

    Where there is no room for all of them, each bar is the mean of a few.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        ramp = "_.-=*#" if options.ascii_only else "▁▂▃▄▅▆▇█"
        yield Text(draw(squeeze(self.values, options.max_width), ramp), style="cyan", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, POINTS).clamp(max_width=options.max_width)


def squeeze(values: Sequence[float], width: int) -> Sequence[float]:
    """As many means of neighbours as there is room for."""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)] if count else []
    return [fmean(values[low:high]) for low, high in pairwise(edges)]


def draw(values: Sequence[float], ramp: str) -> str:
    """One sign of the ramp per number, from the least to the greatest."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(ramp) - 1) / (high - low) if high > low else 0.0
    return "".join(
        ramp[round((value - low) * scale)] if math.isfinite(value) else " " for value in values
    )
