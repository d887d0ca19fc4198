"""Keeps the page of a report and that of an atlas as docs/figures/report.png and atlas.png.

python docs/figures/pages.py

The run is a toy's, the atlas that of reference/fashion on its own samples; needs chromium.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from site_pictures import photograph
from style import HERE

from stillhouse.cli import main as stillhouse

MODEL = HERE.parents[1] / "reference" / "fashion"


def main() -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        stillhouse(["train", "toy-moons", "--scale", "tiny", "--out", str(folder / "moons")])
        stillhouse(["report", str(folder / "moons")])
        photograph(f"file://{folder}/moons/report.html", HERE / "report.png")
        drawn, atlas = str(folder / "drawn"), str(folder / "atlas.html")
        stillhouse(["sample", str(MODEL), "--count", "10", "--steps", "20", "--out", drawn])
        images = ["--images", f"{drawn}/images", "--count", "4"]
        stillhouse(["features", "atlas", str(MODEL), *images, "--out", atlas])
        photograph(f"file://{atlas}", HERE / "atlas.png")


if __name__ == "__main__":
    main()
