"""What a model sees in a visitor's picture: an upload, bounded before it is decoded, as colours."""

import io
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from stillhouse.data.faults import Corrupt
from stillhouse.data.transforms import decode
from stillhouse.errors import UserError
from stillhouse.features.selection import candidates, keep_by_rule
from stillhouse.recipes.demo.drawing import LETTERS, Model
from stillhouse.recipes.features.atlas import component_pictures

MEGABYTES, MEGAPIXELS = 8, 16  # of an upload
FORMATS = ("PNG", "JPEG", "WEBP")
SIGMA = 5.0  # the most noise that the page offers


class Seen(NamedTuple):
    """A picture as the network took it, and its features' first three components as colours."""

    picture: Any  # PIL
    components: Any  # PIL
    sigma: float


def open_upload(file: str | Path) -> Any:
    """A picture that a visitor gave, upright, in RGB; anything else is refused in a sentence."""
    content = _bounded(Path(file))
    width, height = _size(content)
    if width * height > MEGAPIXELS * 1e6:
        raise UserError(
            f"the picture has {width} x {height} pixels: make it smaller than {MEGAPIXELS} million"
        )
    try:
        return decode(content, "rgb")
    except Corrupt as error:
        raise UserError(f"the picture cannot be read ({error}): is the file whole?") from error


def _bounded(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(MEGABYTES * 2**20 + 1)
    except FileNotFoundError:
        raise UserError("the picture was forgotten after an hour: give it again") from None
    if len(content) > MEGABYTES * 2**20:
        raise UserError(f"the file is larger than {MEGABYTES} MB: give a smaller picture")
    return content


def _size(content: bytes) -> tuple[int, int]:
    """Read from the header alone: a small file may claim any number of pixels."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
                return picture.size
    except Image.DecompressionBombError:
        raise UserError(
            f"the picture claims far more than {MEGAPIXELS} million pixels: give a smaller one"
        ) from None
    except Exception:  # decoders raise whatever damaged bytes lead them to
        raise UserError("the file is no PNG, JPEG or WebP picture: give one of these") from None


def usual_activation(model: Model) -> str:
    """The last one that the paper's rules keep."""
    known = model.reader.known
    return ([*keep_by_rule(known, candidates(known))] or [*known])[-1]


def look(
    model: Model,
    picture: Any,
    activation: str,
    sigma: float,
    prompt: str = "",
    label: int | None = None,
) -> Seen:
    """The colours are those of `stillhouse features atlas` for this picture alone."""
    from PIL import Image

    from stillhouse.recipes.pictures import to_pil

    if not 0 <= sigma <= SIGMA:
        raise UserError(f"the noise level is from 0 to {SIGMA:g}, not {sigma:g}")
    if len(prompt) > LETTERS:
        raise UserError(f"the prompt has {len(prompt)} letters: write at most {LETTERS}")
    reader = model.seeing(prompt, label)
    (png,) = component_pictures(reader, [activation], sigma, [picture], seed=0)[activation]
    return Seen(to_pil(reader.pixels(picture)), Image.open(io.BytesIO(png)), sigma)
