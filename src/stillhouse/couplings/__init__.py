"""Couplings: which noise meets which datum. `coupling(x, noise, cond, generator) -> Pairing`.

| name | class | noise of a datum | paper |
|---|---|---|---|
| `independent` | `Independent` | its own | |
| `assignment` | `Assignment` | by the nearest permutation of the pool | Li et al. 2024 |
| `nearest` | `Nearest` | the nearest of k of its own | the follow-up of Li et al. |
| `conditional` | `Conditional` | likewise, within its condition | Cheng & Schwing 2025 |

`Pooled` takes the pool over all processes. `assign` and `pick` are for a loop of one's own.
"""

from stillhouse.couplings.assignment import Assignment
from stillhouse.couplings.conditional import Conditional
from stillhouse.couplings.leak import Leak, LeakProbe
from stillhouse.couplings.nearest import Nearest, pick
from stillhouse.couplings.own_loop import assign
from stillhouse.couplings.pairing import Coupling, Independent, KeyedDraws, Pairing
from stillhouse.couplings.pooled import Exchange, GroupExchange, Pooled

COUPLINGS: dict[str, type[Coupling]] = {
    "independent": Independent,
    "assignment": Assignment,
    "nearest": Nearest,
    "conditional": Conditional,
}

__all__ = [
    "COUPLINGS",
    "Assignment",
    "Conditional",
    "Coupling",
    "Exchange",
    "GroupExchange",
    "Independent",
    "KeyedDraws",
    "Leak",
    "LeakProbe",
    "Nearest",
    "Pairing",
    "Pooled",
    "assign",
    "pick",
]
