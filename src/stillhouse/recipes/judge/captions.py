"""Captions of an evaluation: where they come from, and what encodes them."""

from functools import cache
from pathlib import Path

from stillhouse.errors import UserError
from stillhouse.metrics.detectors import Detector
from stillhouse.models.text import packaged
from stillhouse.recipes.judge.measures import Encode


def read_prompts(name: str) -> tuple[str, ...]:
    """The lines of a file."""
    if not name:
        return ()
    try:
        return tuple(Path(name).expanduser().read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{name} cannot be read as a list of prompts ({error}): give a text file with one in "
            "each line as --prompts"
        ) from error


def text_encoder(name: str, detector: Detector) -> Encode | None:
    """The one that is named; else the detector's own, if it reads text as CLIP does."""
    return _sentence_encoder(name) if name else getattr(detector, "encode_text", None)


@cache
def _sentence_encoder(name: str) -> Encode:
    from stillhouse.metrics.text import SentenceEncoder

    return SentenceEncoder(packaged(name))
