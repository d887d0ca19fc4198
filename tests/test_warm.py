"""A forked process is started, told, signalled and ended as a fresh one would be."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import loaded
import pytest
import warm

from stillhouse.data.prepare import cluster

ECHO = "import os, sys; print(sys.argv, os.getcwd(), os.environ['GIVEN'], sys.stdin.read())"

LATE = """
import atexit, threading
atexit.register(print, "end")
threading.Timer(0.1, print, ["late"]).start()
"""


def started(*words: str, **options) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, **pipes, **options)


def both(*words: str, given: str = "", **options) -> list[tuple[int, str, str]]:
    """What a fresh Python and a forked one have said in the end."""
    found = []
    for command in ([sys.executable, *words], warm.command(*words)):
        process = started(*command, env=warm.environment(GIVEN="this"), **options)
        said, complained = process.communicate(given, timeout=60)
        found.append((process.returncode, said, complained))
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("-c", ECHO, "a", "-b"),
        ("script.py", "a", "-b"),
        ("-m", "module.inner", "a"),
        ("-c", "import sys; sys.exit('so not')"),
        ("-c", "import sys; sys.exit(7)"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        ("-c", LATE),
    ],
)
def test_it_does_and_says_the_same(words, tmp_path):
    (tmp_path / "module").mkdir()
    for name in ("script.py", "module/inner.py"):
        (tmp_path / name).write_text(f"assert __name__ == '__main__'\n{ECHO}\n")
    fresh, forked = both(*words, given="hello", cwd=tmp_path)
    assert forked == fresh


def test_an_error_is_told_and_ends_it():
    fresh, forked = both("-c", "1 / 0")
    assert forked[0] == fresh[0] == 1
    last = {said.splitlines()[-1] for _, _, said in (fresh, forked)}
    assert last == {"ZeroDivisionError: division by zero"}


def test_nothing_of_ours_is_loaded_beforehand():
    code = "import sys; print(sorted(name for name in sys.modules if 'stillhouse' in name))"
    assert subprocess.check_output(warm.command("-c", code), text=True) == "[]\n"


@pytest.mark.parametrize("group", [None, 0])
def test_who_leads_a_group_of_processes_does_so_when_forked(group):
    """Ray ends the groups of its workers: of one that led none, it would be the tests' own."""
    fresh, forked = both("-c", "import os; print(os.getpgrp() == os.getpid())", process_group=group)
    assert forked == fresh == (0, f"{group == 0}\n", "")


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGKILL, -9)])
def test_a_signal_to_the_one_is_one_to_the_other(number, code):
    process = started(*warm.command("-c", WAITS))
    assert process.stdout is not None
    forked = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(60) == code
    assert_ends(forked)


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 30
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.01)
        pytest.fail("it lives on")


@pytest.mark.slow
def test_workers_of_ray_are_forked_and_another_takes_the_place_of_one_that_is_killed():
    ray = pytest.importorskip("ray", reason="pip install 'stillhouse[scale]' to test Ray")

    class Actor:
        def tell(self) -> tuple[int, bool, int]:
            return os.getpid(), "stillhouse.data" in sys.modules, os.nice(0)

    python = sys.executable
    with ExitStack() as stack:
        with loaded.ray_workers():
            stack.enter_context(cluster(workers=1))
        assert sys.executable == python
        actor = ray.remote(max_restarts=1, max_task_retries=-1)(Actor).remote()
        first, *found = ray.get(actor.tell.remote())
        assert found == [True, os.nice(0)]
        os.kill(first, signal.SIGKILL)
        second, *found = ray.get(actor.tell.remote())
        assert found == [True, os.nice(0)]
        assert first != second
    for pid in (first, second):
        assert_ends(pid)
