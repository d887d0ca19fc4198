"""The base of every config: frozen, unknown keys are errors, help text below each field."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A part of a run; a choice between parts is a union tagged by `kind`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
