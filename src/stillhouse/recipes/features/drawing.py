"""Pictures of what features are good for: matches between two images, masks beside their truth."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stillhouse.files import write_whole

RIGHT, WRONG = "#1a9850", "#d73027"
HEIGHT, GAP = 220, 6  # pixels
# Colour-blind safe, for classes in turn; black is what is not judged.
COLOURS = ("#4b5563", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")


class Shown(NamedTuple):
    """A pair of PIL images with points (x, y) [P, 2] in their own pixels."""

    source: Any
    target: Any
    points: Tensor
    found: Tensor
    right: Tensor  # [P] within the threshold


def draw_matches(pairs: Sequence[Shown], target: Path) -> None:
    """Source and target side by side, a line for each point: green is right, red is not."""
    save_rows([_matched(pair) for pair in pairs], target)


def _matched(pair: Shown) -> Any:
    from PIL import Image, ImageDraw

    images = [_at_height(image) for image in (pair.source, pair.target)]
    sheet = Image.new("RGB", (sum(i.width for i in images) + GAP, HEIGHT), "white")
    sheet.paste(images[0], (0, 0))
    sheet.paste(images[1], (images[0].width + GAP, 0))
    pen = ImageDraw.Draw(sheet)
    shift = torch.tensor([images[0].width + GAP, 0])
    starts = (pair.points + 0.5) * HEIGHT / pair.source.height
    ends = (pair.found.cpu() + 0.5) * HEIGHT / pair.target.height + shift
    for start, end, right in zip(starts, ends, pair.right, strict=True):
        colour = RIGHT if right else WRONG
        pen.line([*start.tolist(), *end.tolist()], fill=colour, width=1)
        for x, y in (start.tolist(), end.tolist()):
            pen.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour, outline="white")
    return sheet


def draw_segments(rows: Sequence[tuple[Any, Tensor, Tensor]], target: Path) -> None:
    """Image, truth and guess, in a row for each image."""
    save_rows(
        [_beside([image, painted(true), painted(found)]) for image, true, found in rows], target
    )


def painted(mask: Tensor) -> Any:
    """A mask [H, W] in the colours of its classes."""
    from PIL import Image, ImageColor

    table = torch.zeros(256, 3, dtype=torch.uint8)
    for label in range(255):
        colour = ImageColor.getrgb(COLOURS[label % len(COLOURS)])
        table[label] = torch.tensor(colour, dtype=torch.uint8)
    return Image.fromarray(table[mask.long().cpu()].numpy())


def _at_height(image: Any) -> Any:
    from PIL.Image import Resampling

    width = max(1, round(image.width * HEIGHT / image.height))
    small = image.height < HEIGHT
    return image.convert("RGB").resize(
        (width, HEIGHT), Resampling.NEAREST if small else Resampling.LANCZOS
    )


def _beside(images: Sequence[Any]) -> Any:
    from PIL import Image

    scaled = [_at_height(image) for image in images]
    width = sum(image.width for image in scaled) + GAP * (len(scaled) - 1)
    sheet, left = Image.new("RGB", (width, HEIGHT), "white"), 0
    for image in scaled:
        sheet.paste(image, (left, 0))
        left += image.width + GAP
    return sheet


def save_rows(rows: Sequence[Any], target: Path) -> None:
    """PIL images below each other."""
    from PIL import Image

    width = max(row.width for row in rows)
    sheet = Image.new("RGB", (width, len(rows) * (HEIGHT + GAP) - GAP), "white")
    for number, row in enumerate(rows):
        sheet.paste(row, (0, number * (HEIGHT + GAP)))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    write_whole(target, file.getvalue())
