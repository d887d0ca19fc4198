"""The command line as it is: what `--help` prints, and the config that a command parses into."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel

import stillhouse.cli.parse
from stillhouse.cli import COMMANDS, main


def every_command() -> dict[str, str]:
    """Command, with its sub-command if it has some -> what it is for."""
    found = dict[str, str]()
    for name, purpose in COMMANDS.items():
        found[name] = purpose
        inner = getattr(import_module(f"stillhouse.cli.{name}"), "SUBCOMMANDS", {})
        found |= {f"{name} {sub}": what for sub, what in inner.items()}
    return found


def help_of(command: str) -> tuple[str, BaseModel | None]:
    """What `stillhouse COMMAND --help` prints, and the config of that command, if it has one."""
    parsed: list[BaseModel] = []
    real = stillhouse.cli.parse.parse

    def noted(config: BaseModel, *args: Any, **named: Any) -> BaseModel:
        parsed.append(config)
        return real(config, *args, **named)

    noting = patch.object(stillhouse.cli.parse, "parse", noted)
    with printed() as out, noting, suppress(SystemExit):
        main([*command.split(), "--help"])
    text = "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())
    return text, parsed[0] if parsed else None


@contextmanager
def printed() -> Iterator[io.StringIO]:
    """Standard output, as a terminal of 94 columns without colours would have it."""
    plain = {"COLUMNS": "94", "NO_COLOR": "1", "TERM": "dumb"}
    with patch.dict(os.environ, plain), redirect_stdout(io.StringIO()) as out:
        yield out
