"""Builds the docs site and keeps its home page as docs/figures/site.png; needs chromium.

python docs/figures/site_pictures.py [a built site]
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from style import HERE

SIZE = "1280,1340"


def main() -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if sys.argv[1:] else build(Path(scratch))
        with served(folder) as address:
            photograph(f"{address}/index.html", HERE / "site.png")


def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=HERE.parents[1], check=True)
    return folder


class Quiet(SimpleHTTPRequestHandler):
    """Says nothing of what it serves."""

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The search needs a server: pages that are opened from a file have none."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def photograph(address: str, picture: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--screenshot={picture}", f"--window-size={SIZE}", "--virtual-time-budget=5000"]
    subprocess.run([*command, address], check=True, stderr=subprocess.DEVNULL, timeout=180)


if __name__ == "__main__":
    main()
