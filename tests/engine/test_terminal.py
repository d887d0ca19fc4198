"""The view of a run: what a person sees in a terminal, and what a log file gets."""

import io
import math
import re
import time

import pytest
from rich.console import Console

from stillhouse.engine.terminal import Sparkline, Terminal, draw, squeeze, stdout

LINE = {
    "images_per_second": 1987.3,
    "data_wait": 0.031,
    "memory_gb": 12.34,
    "denoiser/loss": 0.123456,
    "denoiser/gradient_norm": 0.5321,
    "denoiser/lr": 1e-4,
}
SKIP = {"skipped": "denoiser", "loss": math.nan, "gradient_norm": math.inf, "ids": [1, 2]}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(*, tty: bool, width: int = 100, total: int = 10_000) -> tuple[Terminal, Clock]:
    console = Console(file=io.StringIO(), force_terminal=tty, width=width, height=40, _environ={})
    clock = Clock()
    return Terminal("toy", total, console=console, clock=clock), clock


def written(view: Terminal) -> str:
    assert isinstance(view.console.file, io.StringIO)
    return view.console.file.getvalue()


def seen(view: Terminal, width: int = 100) -> str:
    """The view as it is drawn now, without colours."""
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    console.print(view)
    return console.export_text()


# ---------------------------------------------------------------- in a terminal


def test_the_bar_says_how_far_and_how_long_still():
    view, clock = terminal(tty=True)
    view.pace.start(1000)
    clock.now += 30  # the first step compiles
    view.step(1100)
    clock.now += 10
    view.step(2100)
    view.log(2100, {"images_per_second": 123.4})
    top, below, *_ = seen(view).splitlines()
    assert re.fullmatch(r"toy +━+╸?╺?━+ +21\.0% *", top)
    # 1000 images in the 10 s since the first step: 79 s for the 7900 that are left.
    assert below.split("   ") == [
        "2,100/10,000 images",
        "123.4 images/s",
        "0:01:19 left",
        "0:00:40 elapsed",
    ]


def test_the_bar_is_as_long_as_the_share(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one rich draws no colours, by which it is seen
    view, _ = terminal(tty=True)
    for images in (2_500, 7_500):
        view.step(images)
        drawn = io.StringIO()
        Console(file=drawn, force_terminal=True, width=100, color_system="standard").print(view)
        done = re.search(r"\x1b\[36m(━+)", drawn.getvalue())
        whole = seen(view).splitlines()[0].count("━")
        assert done is not None
        assert len(done[1]) / whole == pytest.approx(images / 10_000, abs=0.03)


def test_nothing_is_promised_before_there_is_a_speed():
    view, clock = terminal(tty=True)
    view.pace.start(0)
    assert "-:--:-- left" in seen(view)
    clock.now += 5
    view.step(100)
    assert "-:--:-- left" in seen(view)
    view.step(20_000)
    assert "0:00:00 left" in seen(view)
    assert "100.0%" in seen(view)


def test_each_network_has_a_row_and_each_fact_a_line():
    view, _ = terminal(tty=True)
    view.log(1000, LINE)
    view.log(2000, {"denoiser/loss": 0.1, "critic/loss": 2.5, "critic/lr": 3e-5})
    view.log(2000, {"validation/loss": 0.2345678})
    view.log(2000, {"samples": "samples/images-000000002000.png", "checkpoint": 2000})
    view.log(2500, SKIP)
    view.log(3000, SKIP)
    lines = [re.split(r" {2,}", line.strip()) for line in seen(view).splitlines()]
    assert ["network", "loss", "gradient norm", "learning rate", "the loss of late"] in lines
    assert ["denoiser", "0.1", "0.532", "1.00e-04", "█▁"] in lines
    assert ["critic", "2.5", "3.00e-05", "▁"] in lines
    assert ["memory", "12.3 GB"] in lines
    assert ["waiting for data", "3% of the time"] in lines
    assert ["validation loss", "0.2346 at 2,000 images"] in lines
    assert ["samples", "samples/images-000000002000.png"] in lines
    assert ["checkpoint", "2,000 images"] in lines
    assert ["skipped updates", "2, the last at 3,000 images"] in lines
    assert sum("validation" in line[0] for line in lines) == 1


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    view, _ = terminal(tty=True)
    for images in range(100, 9_000, 100):
        view.log(images, {**LINE, "samples": "samples/images-000000002000.png"})
    lines = seen(view, width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 24 or width == 20


def test_a_live_run_moves_by_itself_and_leaves_its_last_state():
    view, clock = terminal(tty=True)
    view.start(0)
    view.step(4_000)
    deadline = time.monotonic() + 5
    while "40.0%" not in written(view) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "40.0%" in written(view)  # rich's thread drew it
    view.log(5_000, {"message": "resumed from [bold]images-5000[/bold]"})
    view.step(10_000)
    clock.now += 60
    view.close()
    text = written(view)
    assert "toy: begins at 0/10,000 images" in text
    assert "resumed from [bold]images-5000[/bold]" in text
    assert text.index("resumed from") < text.index("100.0%")
    assert text.endswith("toy: 10,000/10,000 images after 0:01:00\n")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back
    view.close()
    assert written(view) == text


def test_bars_of_others_find_their_place(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    from rich import get_console

    assert stdout() is get_console()


# ---------------------------------------------------------------- in a file


def test_a_log_file_gets_a_line_per_loss_and_no_escape_codes():
    view, clock = terminal(tty=False)
    view.start(2_000)
    clock.now += 5
    view.step(2_500)
    clock.now += 5
    view.log(3_000, LINE)
    view.log(3_000, {"validation/loss": 0.2345678})
    view.log(3_000, {"samples": "samples/images-000000003000.png"})
    view.log(3_000, {"checkpoint": 3_000})
    view.log(3_100, SKIP)
    view.log(3_100, {"message": "a [bold] word"})
    clock.now += 50
    view.close()
    assert written(view).splitlines() == [
        "toy: goes on at 2,000/10,000 images",
        "0:00:10  3,000/10,000 images (30.0%, 0:01:10 left)  "
        "denoiser loss 0.1235 gradient norm 0.532 lr 1.00e-04  "
        "1,987 images/s  3% waiting for data  12.3 GB",
        "0:00:10  3,000/10,000 images (30.0%, 0:01:10 left)  validation loss 0.2346",
        "0:00:10  3,100/10,000 images (31.0%, 0:00:58 left)  "
        "an update of denoiser was skipped: loss nan, gradient norm inf",
        "a [bold] word",
        "toy: 3,100/10,000 images after 0:01:00",
    ]


def test_what_was_measured_is_told_with_its_name():
    line = {"evaluation/FD-MobileNetV2": 41.234, "evaluation/KD-MobileNetV2": None}
    line |= {"evaluation/count": 1024, "evaluation/about": {"detector": "MobileNetV2"}}
    plain, _ = terminal(tty=False)
    plain.log(500, line)
    assert written(plain).split("  ")[-1] == "FD-MobileNetV2 41.23\n"
    live, _ = terminal(tty=True)
    live.log(500, line)
    assert re.search(r"FD-MobileNetV2 +41\.23 at 500 images", seen(live))
    assert "count" not in seen(live)


def test_what_a_task_says_to_watch_takes_the_place_of_losses():
    """Of generators, whose losses say nothing: the last of each number, and how it went."""
    line = {"student/loss": 2.0, "student/gradient_norm": 0.25, "timestamps4/step1": 3.0}
    live, _ = terminal(tty=True)
    for at, spread in ((400, 0.1), (500, 0.51234)):
        live.log(at, line | {"watch/spread": spread, "watch/gap": 0.75})
    shown = seen(live)
    assert re.search(r"spread +0\.5123 +▁█", shown)
    assert re.search(r"gap +0\.75 +▁▁", shown)
    assert re.search(r"student +0\.25", shown)
    assert "loss" not in shown
    assert "step1" not in shown
    plain, _ = terminal(tty=False)
    plain.log(500, line | {"watch/spread": 0.51234})
    assert written(plain).endswith("student gradient norm 0.25  spread 0.5123\n")


def test_forced_colours_do_not_make_a_file_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    view = Terminal("toy", 100)
    view.start(0)
    view.log(10, LINE)
    view.close()
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 3
    assert "\x1b" not in out


@pytest.mark.parametrize("tty", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError, OSError])
def test_a_terminal_that_is_gone_does_not_end_the_run(tty, error, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise error("gone")

    # What rich does on a broken pipe; not to the tests' own stdout.
    monkeypatch.setattr("os.dup2", lambda *_: None)
    view = Terminal("toy", 100, console=Console(file=Gone(), force_terminal=tty, _environ={}))
    view.start(0)
    view.log(10, {**LINE, "message": "nobody reads this"})
    view.log(20, SKIP)
    view.close()
    assert view.pace.images == 20


@pytest.mark.parametrize("tty", [True, False])
def test_an_exit_that_is_meant_is_not_swallowed(tty):
    class Ending(io.StringIO):
        def write(self, text):
            raise SystemExit(3)  # as a signal handler may, at any moment

    view = Terminal("toy", 100, console=Console(file=Ending(), force_terminal=tty, _environ={}))
    with pytest.raises(SystemExit):
        view.start(0)


# ---------------------------------------------------------------- parts


def test_a_sparkline_goes_from_the_least_to_the_greatest():
    assert draw([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█") == "▁▂▃▄▅▆▇█"
    assert draw([3.0, math.nan, -1.0, math.inf], "▁█") == "█ ▁ "
    assert draw([2.0, 2.0], "▁█") == "▁▁"
    assert draw([math.nan], "▁█") == " "
    assert draw([], "▁█") == ""


def test_neighbours_are_averaged_where_there_is_no_room():
    assert squeeze([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert squeeze([1.0, 2.0], 60) == [1.0, 2.0]
    assert squeeze([], 10) == []
    many = squeeze([float(i) for i in range(60)], 24)
    assert len(many) == 24
    assert list(many) == sorted(many)


def test_all_losses_are_drawn_however_narrow():
    drawn = io.StringIO()
    Console(file=drawn, width=4).print(Sparkline([0.0] * 30 + [1.0] * 30))
    assert drawn.getvalue() == "▁▁██\n"


def test_the_sparkline_keeps_the_last_losses_only():
    view, _ = terminal(tty=True)
    for images in range(200):
        view.log(images, {"net/loss": float(images < 100)})
    assert list(view.numbers.losses["net"]) == [0.0] * 60


def test_the_sparkline_does_without_blocks_where_there_are_none():
    class Ascii(io.StringIO):
        encoding = "ascii"

    drawn = Ascii()
    Console(file=drawn, width=20).print(Sparkline((0.0, 1.0)))
    assert drawn.getvalue() == "_#\n"


@pytest.mark.timing
def test_a_step_costs_less_than_twenty_microseconds():
    view, _ = terminal(tty=True)
    view.start(0)
    costs = []
    for _ in range(5):
        began = time.perf_counter()
        for images in range(10_000):
            view.step(images)
        costs.append((time.perf_counter() - began) / 10_000)
    view.close()
    assert min(costs) < 20e-6
