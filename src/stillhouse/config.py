"""The base of every config: frozen, unknown keys are errors, help text below each field."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A part of a run; a choice between parts is a union tagged by `kind`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def spell_settings(config: BaseModel) -> list[str]:
    """Every value by its dotted name, a line each."""
    return [f"{key:<34} {value}" for key, value in _flat(config.model_dump(mode="json"))]


def _flat(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
