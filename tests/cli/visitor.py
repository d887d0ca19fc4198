"""A served demo and its visitor: the browser of the tests, which also writes and uploads.

`docs/figures/demo.py` takes its pictures with them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import warm
from browser import Browser

# Names that are looked up and places that are connected to, but for this machine's own.
WATCHED = """
import sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        place = arguments[0] if event == "socket.getaddrinfo" else arguments[1]
        host = place[0] if isinstance(place, tuple) else place
        if host not in ("127.0.0.1", "localhost", "::1"):
            print("foreign:", event, place, file=sys.stderr, flush=True)

sys.addaudithook(watch)
from stillhouse.cli import main

main(sys.argv[1:])
"""
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Visitor(Browser):
    """Elements are named by their CSS selectors."""

    def visit(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)
        self.events.clear()
        self("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height}
        self("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)

    def wait(self, code: str, seconds: float = 60) -> None:
        """Until the expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({code})"):
            assert time.monotonic() < end, f"{code} is not so after {seconds} s: {self.text()}"
            time.sleep(0.1)

    def text(self, selector: str = "body") -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def open_tab(self, name: str) -> None:
        tabs = "[...document.querySelectorAll('button[role=tab]')]"
        self.evaluate(f"{tabs}.find(tab => tab.innerText === {json.dumps(name)}).click()")

    def write(self, selector: str, words: str) -> None:
        """In place of what stands there."""
        self.evaluate(
            f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))"
        )
        self("Input.insertText", text=words)

    def upload(self, selector: str, file: Path) -> None:
        root = self("DOM.getDocument")["root"]["nodeId"]
        node = self("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self("DOM.setFileInputFiles", nodeId=node, files=[str(file)])


@contextmanager
def visitor(folder: Path) -> Iterator[Visitor]:
    """Chromium without a window, which keeps its files in this folder."""
    assert BROWSER is not None, "no chromium: apt-get install chromium"
    os.makedirs(folder, exist_ok=True)
    started = Visitor(BROWSER, folder)
    try:
        yield started
    finally:
        started.close()


class Served:
    """A demo in a process of its own, which keeps its files in this folder."""

    def __init__(self, folder: Path, *words: str, fresh: bool = True) -> None:
        """One that is not fresh has loaded torch and the like before it is watched."""
        self.log, self.temporary = folder / "stderr", folder / "temporary"
        self.temporary.mkdir()
        words = ("-c", WATCHED, "demo", *words, "--port", "0")
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *words] if fresh else warm.command(*words),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"TMPDIR": str(self.temporary), "HF_HUB_OFFLINE": "1"},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"open (http://127\.0\.0\.1:\d+) in a browser", line)
        assert found, line + self.log.read_text()
        self.url = found[1]

    def end(self, kind: signal.Signals = signal.SIGINT) -> int:
        """As Ctrl-C does, or by another signal."""
        if self.process.poll() is None:
            self.process.send_signal(kind)
        return self.process.wait(60)
