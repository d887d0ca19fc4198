"""Processes that start quickly: forked from one that has loaded torch and diffusers.

To import those takes longer than most runs that the tests start. So a server imports them once and
forks for each. `command(...)` is what to start: a small program that takes words as Python does
(`-m`, `-c` or a script), hands them to the server with its environment and its streams, passes
signals on, and ends as the forked process ends; who kills the one kills the other. Nothing of this
package is loaded beforehand, and nothing but imports has run. What differs from a fresh Python: the
order of sets is the same in all processes, and what libraries read from the environment when they
are imported is what the server had. tests/resilience/test_kill.py ends runs afresh, and
tests/recipes/test_preparing.py starts the workers of Ray so.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

LOADED = (
    *("torch.distributed.launcher.api", "torch.distributed.elastic.multiprocessing.errors"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("diffusers.models.unets.unet_2d", "diffusers.schedulers", "peft", "scipy.optimize"),
    *("pydantic", "rich.progress", "PIL.Image", "safetensors.torch"),
    *("aiohttp", "dill", "multiprocess"),  # of datasets, which reads its environment when imported
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Forking:
    """Starts processes that a server forks: this file, or one that has more loaded."""

    def __init__(self, file: str, start: "Forking | None" = None, **kept: str) -> None:
        """The server is itself forked from that of `start`, or else begins afresh."""
        self.file, self.start, self.kept, self.lock = file, start, kept, threading.Lock()

    def command(self, *words: str, processes: int = 1, restarts: int = 0) -> list[str]:
        """To run these words of Python's command line; under torchrun if there are several."""
        launcher = [str(Path(__file__).with_name("launcher.py")), "--standalone"]
        launcher += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
        return [self.program, *(launcher if processes > 1 else []), *words]

    def run(
        self,
        *words: str,
        processes: int = 1,
        timeout: float | None = 300,
        cwd: Path | None = None,
        **changes: str,
    ) -> subprocess.CompletedProcess[str]:
        """Until it ends by itself, with all that it said; `changes` of its environment."""
        return subprocess.run(
            self.command(*words, processes=processes),
            env=self.environment(**changes),
            cwd=cwd,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )

    def environment(self, **changes: str) -> dict[str, str]:
        """One thread for each process, and the same program for the workers of torchrun."""
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": self.program, **changes}

    @property
    def program(self) -> str:
        """That asks the server: one, whichever threads ask for it."""
        with self.lock:
            return str(self._started / "python")

    @cached_property
    def _started(self) -> Path:
        """The folder of the server, which ends when our pipe to it does."""
        folder = Path(tempfile.mkdtemp(prefix="warm-"))
        program, place = folder / "python", str(folder / "socket")
        program.write_text(
            f"#!{sys.executable} -IS\n"
            f"import runpy\nrunpy.run_path({__file__!r})['ask']({place!r})\n"
        )
        program.chmod(0o755)
        own = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets"), **self.kept}
        python = self.start.program if self.start else sys.executable
        self.server = subprocess.Popen(
            [python, self.file, place],
            env={**os.environ, "OMP_NUM_THREADS": "1", **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == b"ready\n"
        return folder


HERE = Forking(__file__)
command, run, environment = HERE.command, HERE.run, HERE.environment


def kill(process: subprocess.Popen) -> int:
    """Kills what was forked for it, and returns how it ended when that is dead.

    A SIGKILL to the program itself reaches what was forked a moment later.
    """
    process.send_signal(signal.SIGQUIT)
    return process.wait()


# ---------------------------------------------------------------- the program


def ask(place: str) -> NoReturn:
    """Has the server run this command line; ends as it ends."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(place)
    wanted = {"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}
    wanted["leader"] = os.getpgrp() == os.getpid()
    message = json.dumps(wanted).encode()
    socket.send_fds(server, [len(message).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(message)
    pid = int.from_bytes(server.recv(4), "big")
    for number in SIGNALS:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(pid, signal.SIGKILL))
    status = int.from_bytes(server.recv(4), "big")
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL cannot be handled in the first place
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


# ---------------------------------------------------------------- the server


def serve(place: str) -> dict[str, Any]:
    """Forks for every request; returns in the forked process alone, with what it is to run."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who uses it
    print("ready", flush=True)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupt)
            listener.close()
            return watch(client)
        client.close()
    shutil.rmtree(Path(place).parent, ignore_errors=True)
    os._exit(0)


def watch(client: socket.socket) -> dict[str, Any]:
    """Forks what was asked for and tells how it ended; kills it if the program is killed."""
    size, streams, _, _ = socket.recv_fds(client, 4, 3)
    message = b""
    while len(message) < int.from_bytes(size, "big"):
        part = client.recv(1 << 16)
        if not part:
            os._exit(0)  # the program is dead already
        message += part
    pid = os.fork()
    if pid == 0:
        client.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return json.loads(message)
    for stream in (0, 1, 2, *streams):
        os.close(stream)  # or who reads them would wait for this process too
    with suppress(BrokenPipeError):
        client.sendall(pid.to_bytes(4, "big"))
    end = os.pidfd_open(pid)
    ready, _, _ = select.select([end, client], [], [])
    if end not in ready:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):
        client.sendall(status.to_bytes(4, "big"))
    os._exit(0)


def become(words: list[str], folder: str, environment: dict[str, str], leader: bool) -> None:
    """Does what the interpreter does with such a command line, but for loading what is there."""
    import numpy
    import torch

    if leader:
        os.setpgid(0, 0)  # who ends the group of either does not end ours
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # of the server; a fresh Python asks its environment
    random.seed()
    numpy.random.seed()  # noqa: NPY002
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)  # pyright: ignore[reportAttributeAccessIssue]
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if words[0] == "-m":
        sys.path[0] = folder
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path[0] = folder
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(words[0]).resolve().parent)
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def end(code: int) -> NoReturn:
    """As an interpreter ends, but for taking every module apart, whose memory is shared."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    for name in LOADED:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads, of which a fork would keep but one"
    gc.freeze()
    wanted = serve(sys.argv[1])
    try:
        become(**wanted)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            end(stop.code or 0)
        print(stop.code, file=sys.stderr)
        end(1)
    except BaseException:
        traceback.print_exc()
        end(1)
    end(0)


if __name__ == "__main__":
    main()
