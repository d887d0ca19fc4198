"""Pictures of samples: images as PNG files and grids, 2-D walks as trajectories."""

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillhouse.errors import missing_extra
from stillhouse.files import write_whole


def to_bytes(images: Tensor) -> Tensor:
    """Images in [-1, 1] as uint8, rounded to the nearest level."""
    return ((images.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def to_pil(image: Tensor) -> Any:
    """One image [C, H, W] in [-1, 1], grey or RGB, as a PIL image."""
    from PIL import Image

    pixels = to_bytes(image).movedim(0, -1).cpu().numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def save_png(image: Tensor, path: Path) -> None:
    """One image as a file."""
    _save(to_pil(image), path)


def image_grid(files: Sequence[Path], target: Path) -> None:
    """Tiles PNG files of one size into one picture."""
    from PIL import Image

    save_tiles([Image.open(file) for file in files], target)


def save_tiles(
    images: Sequence[Any], target: Path, *, columns: int | None = None, gap: int = 2
) -> None:
    """PIL images of one size side by side, nearly square, small ones enlarged to be seen."""
    from PIL import Image

    width, height = images[0].size
    zoom = max(1, 64 // max(width, height))
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    step_x, step_y = width * zoom + gap, height * zoom + gap
    sheet = Image.new("RGB", (columns * step_x + gap, rows * step_y + gap), "white")
    for i, image in enumerate(images):
        place = (gap + i % columns * step_x, gap + i // columns * step_y)
        enlarged = image.convert("RGB").resize(
            (width * zoom, height * zoom), Image.Resampling.NEAREST
        )
        sheet.paste(enlarged, place)
    _save(sheet, target)


def save_points(points: Tensor, backdrop: Tensor, target: Path, *, size: int = 384) -> None:
    """Points of the plane over those of the target, without matplotlib: runs draw many of these."""
    from PIL import Image, ImageDraw

    reach = 1.3 * float(backdrop.abs().max())
    sheet = Image.new("RGB", (size, size), "white")
    pen = ImageDraw.Draw(sheet)
    for places, radius, colour in ((backdrop, 0.8, "#c9ced6"), (points, 1.8, "#1d5b8f")):
        # y upwards
        for x, y in ((places * torch.tensor([1, -1]) / reach + 1) * size / 2).tolist():
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    _save(sheet, target)


def _save(picture: Any, target: Path) -> None:
    write_whole(target, png_of(picture))


def png_of(image: Any) -> bytes:
    """An image of PIL as a file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_uri(png: bytes) -> str:
    """A picture as a part of a page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def can_plot() -> bool:
    """Whether matplotlib is there, for plots that a run can end without."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def pyplot() -> Any:
    """matplotlib's pyplot without a display, or the line that installs it."""
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "plots") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def trajectories(states: Tensor, sigmas: Tensor, data: Tensor, title: str, target: Path) -> None:
    """Walks of 2-D samples [steps + 1, B, 2] beside their ends on top of the true data.

    Drawn in x / sqrt(1 + sigma^2), which is a unit Gaussian at the start and the data at the end.
    """
    plt = pyplot()
    scaled = (states / (1 + sigmas.view(-1, 1, 1) ** 2).sqrt()).cpu()
    figure, (walks, ends) = plt.subplots(1, 2, figsize=(9, 4.6), layout="constrained")
    for i in range(min(states.shape[1], 64)):
        walks.plot(*scaled[:, i].T, color="#7f8c9b", lw=0.7, alpha=0.7, zorder=1)
    walks.scatter(*scaled[0, :64].T, s=9, color="#d1862f", zorder=2, label="noise")
    walks.scatter(*scaled[-1, :64].T, s=9, color="#1d5b8f", zorder=3, label="samples")
    walks.set_title(title)
    ends.scatter(*data.T, s=2, color="#c9ced6", label="data")
    ends.scatter(*states[-1].T, s=6, color="#1d5b8f", label="samples")
    ends.set_title(f"{states.shape[1]} samples on the data")
    for axis, reach in ((walks, 2.8), (ends, 1.3 * float(data.abs().max()))):
        axis.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        axis.legend(loc="lower right", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.savefig(target, dpi=130)
    plt.close(figure)
