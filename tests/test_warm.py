"""A forked process is started, told, signalled and ended as a fresh one would be."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import warm

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
    deadline = time.monotonic() + 30
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(forked, 0)
            time.sleep(0.01)
        pytest.fail("it lives on")
