"""Command lines that are parsed as they are written, and not carried out."""

from collections.abc import Sequence

import pytest
from pydantic import BaseModel

from stillhouse.cli import main
from stillhouse.cli.parse import parse


class Understood(Exception):
    """A command line was, and nothing is done."""


def understood(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[type[BaseModel]]:
    """The schemas that these words were read by."""
    found: list[type[BaseModel]] = []

    def stop(config, *given, prog, **options):
        result = parse(config, *given, prog=prog, **options)
        found.append(type(config))
        if prog == "stillhouse plan RECIPE":  # which reads the flags of the recipe next
            return result
        raise Understood

    with monkeypatch.context() as patch:
        patch.setattr("stillhouse.cli.parse.parse", stop)
        with pytest.raises(Understood):
            main(words)
    return found
