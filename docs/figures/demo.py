"""Pictures of the demo's page for docs/demo.md: the reference models, in a real browser.

    python docs/figures/demo.py

Needs chromium, and gradio: pip install -e '.[demo]'. Browser and server are those of the
tests.
"""

import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EMOJI = ROOT / "reference" / "emoji"
SETTLED = "document.fonts.status === 'loaded' && !document.querySelector('.generating')"


def tile(column: int, row: int) -> Image.Image:
    """One of the samples on the model's card."""
    grid, step = Image.open(EMOJI / "grid.png"), 66
    left, top = 2 + column * step, 2 + row * step
    return grid.crop((left, top, left + 64, top + 64))


def drawn(guest: Any) -> None:
    """Both models at work; twice, as the first time is not yet that of a warm machine."""
    for seed in ("1", "0"):
        guest.write("#prompt :is(input, textarea)", "red apple")
        guest.write("#seed input", seed)
        guest.click("#draw-button")
        for panel in ("teacher-panel", "student-panel"):
            said = f"document.querySelector('#{panel} img:last-child')?.alt ?? ''"
            guest.wait(f"({said}).includes('seed {seed}, number 3')", 300)


def looked_at(guest: Any, file: Path) -> None:
    guest.open_tab("Features")
    guest.wait("document.querySelector('#upload input[type=file]')")
    guest.upload("#upload input[type=file]", file)
    guest.wait("document.querySelectorAll('#features-panel img').length === 2", 300)


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    visits: Any = import_module("cli.visitor")
    names = [str(EMOJI), str(ROOT / "reference" / "emoji-student")]
    with TemporaryDirectory() as place:
        folder = Path(place)
        served = visits.Served(folder, *names, "--size", "256")
        with visits.visitor(folder / "browser") as guest:
            guest.visit(served.url, height=760)
            guest.wait("document.querySelector('#draw-button')", 300)
            drawn(guest)
            guest.wait(SETTLED)
            guest.screenshot(HERE / "demo.png")
            tile(4, 0).save(folder / "orange-cat.png")
            looked_at(guest, folder / "orange-cat.png")
            guest.resize(1280, 640)
            guest.wait(SETTLED)
            guest.screenshot(HERE / "demo-features.png")
        served.end()


if __name__ == "__main__":
    main()
