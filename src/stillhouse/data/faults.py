"""What is wrong with the data: counted, named and passed over up to a limit, then a stop."""

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from stillhouse.config import Config
from stillhouse.errors import UserError


class FaultConfig(Config):
    """How many faults a run bears."""

    limit: NonNegativeInt = 100
    """Distinct faults (images, shards) per process before the run stops."""
    named: PositiveInt = 5
    """Faults that the report names."""


class Fault(NamedTuple):
    """One image or shard that could not be used."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Corrupt(Exception):
    """This image cannot be used; the message is the reason."""


class FaultLog:
    """The distinct faults seen so far. A fault met again in the next epoch counts once."""

    def __init__(self, config: FaultConfig) -> None:
        self.config = config
        self.faults: dict[str, Fault] = {}
        self._told = 0

    def __len__(self) -> int:
        return len(self.faults)

    def add(self, faults: Iterable[Fault]) -> None:
        """Counts; past the limit it raises the error that stops the run."""
        for fault in faults:
            self.faults.setdefault(fault.where, fault)
        if len(self) > self.config.limit:
            raise UserError(
                f"{self.report()}; the limit is {self.config.limit}. Repair or remove them, or "
                "raise --data.faults.limit"
            )

    def new(self) -> list[Fault]:
        """Those that were added since the last call."""
        found = list(self.faults.values())[self._told :]
        self._told += len(found)
        return found

    def report(self) -> str:
        """One sentence: how many, and the first few by name."""
        if not self.faults:
            return "no faults in the data"
        first = list(self.faults.values())[: self.config.named]
        more = len(self) - len(first)
        names = "; ".join(map(str, first)) + (f"; and {more} more" if more else "")
        return f"{len(self)} faults in the data: {names}"
