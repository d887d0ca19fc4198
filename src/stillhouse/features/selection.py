"""Which activations to take: the published selections, the paper's rules, a gate by scores.

| rule (Meng et al. 2024, section 5.1) | because |
|---|---|
| nothing of the way down and the middle, nor late on the way up | diffusion noise |
| no queries and keys of self-attention ... | they follow the place |
| ... except keys late on the way up | there, that keeps noise out |
| no increments (`res-increment`, `ffn-inner`, `self-v`) | high-frequency noise |

Of the 279 candidates of SDXL, 63 are left.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from typing import Literal

import torch

from stillhouse.errors import UserError
from stillhouse.features.activation import Activation
from stillhouse.features.properties import Scores
from stillhouse.process import Scaling

# ---------------------------------------------------------------- published


@dataclass(frozen=True)
class Selection:
    """Activations that go together, at the timestep that they were chosen for."""

    ids: tuple[str, ...]
    time: float

    def sigma(self, scaling: Scaling) -> float:
        """The noise level of that timestep in a model's own process."""
        return float(scaling.sigma_at(torch.tensor(self.time, dtype=torch.float64)))


# For images of 512 and 1024 pixels, the models' own. Timestep 50 everywhere; the sampler of SD 1.5
# counts one step twice, which makes it 51.
SELECTIONS: dict[str, Selection] = {
    "sd15": Selection(
        (
            "up-level1-repeat1-vit-block0-cross-q",
            "up-level1-repeat2-res-out",
            "up-level2-repeat1-vit-block0-cross-q",
            "up-level3-repeat0-vit-block0-self-k",
        ),
        time=51,
    ),
    "sdxl": Selection(
        (
            "up-level0-repeat0-vit-block5-out",
            "up-level0-repeat0-vit-block7-out",
            "up-level1-repeat0-vit-block0-cross-q",
            "up-level1-repeat0-vit-block0-out",
        ),
        time=50,
    ),
    "legacy-sd15": Selection(
        (
            "up-level0-upsampler-out",
            "up-level1-upsampler-out",
            "up-level2-upsampler-out",
            "up-level3-repeat2-vit-out",
        ),
        time=51,
    ),
    "legacy-sdxl": Selection(
        ("up-level0-upsampler-out", "up-level1-upsampler-out", "up-level2-repeat2-res-out"),
        time=50,
    ),
}


def published(name: str) -> Selection:
    if name not in SELECTIONS:
        close = get_close_matches(name, SELECTIONS, n=1, cutoff=0.0)
        raise UserError(
            f"there is no selection {name!r}, the closest is {close[0]!r}; choose one of "
            f"{', '.join(SELECTIONS)}"
        )
    return SELECTIONS[name]


# ---------------------------------------------------------------- rules


def candidates(known: Mapping[str, Activation]) -> list[str]:
    """What the paper compares: no maps, no values, and of deep ViTs the first and odd blocks."""
    return [
        a.id
        for a in known.values()
        if a.stage not in ("in", "out")
        and not a.is_map
        and not a.kind.endswith("-v")
        and (a.block == 0 or a.block % 2)
    ]


def keep_by_rule(known: Mapping[str, Activation], ids: Sequence[str]) -> list[str]:
    """The ids that the rules leave. Of a transformer, which has no way up, they leave all that is
    neither of self-attention nor an increment."""
    up = [a for a in known.values() if a.stage == "up"]
    if not up:
        return [name for name in ids if known[name].stage == "block" and _is_plain(known[name])]
    # The level in the middle of the way up, where noise sets in: 1 of 3, 2 of 4.
    turn = (max(a.level for a in up) + 1) // 2
    last = max(a.repeat for a in up)
    return [name for name in ids if _is_kept(known[name], turn, last)]


def _is_plain(activation: Activation) -> bool:
    of_self = activation.kind.startswith(("self-", "dual-"))
    return not (of_self or activation.is_map or activation.is_increment)


def _is_kept(activation: Activation, turn: int, last: int) -> bool:
    level = activation.level
    if activation.stage != "up":
        return False
    if activation.kind == "self-k":
        return level > turn or (level == turn and activation.repeat == last)
    if activation.kind == "upsampler-out":
        return level < turn
    return level <= turn and _is_plain(activation)


# ---------------------------------------------------------------- gate


def gate(
    scores: Mapping[str, Scores],
    known: Mapping[str, Activation],
    *,
    by: Literal["eta", "eta_lo", "eta_hi", "position", "locality"] = "eta_hi",
    share: float = 0.5,
) -> list[str]:
    """The better share within each resolution, at least one of each; less is better.

    A filter before a probe: what it leaves is in the given order, not ranked.
    """
    if not 0 < share <= 1:
        raise UserError(f"the share that is kept lies between 0 and 1, not at {share}")
    values = {name: getattr(found, by) for name, found in scores.items()}
    if any(value is None for value in values.values()):
        raise UserError(f"{by} is not known: score the activations with labels, or gate by another")
    resolutions: dict[Fraction, list[str]] = defaultdict(list)
    for name in scores:
        resolutions[known[name].scale].append(name)
    kept: set[str] = set()
    for names in resolutions.values():
        # One that could not be measured comes last.
        order = sorted(names, key=lambda n: math.inf if math.isnan(values[n]) else values[n])
        kept.update(order[: math.ceil(share * len(names))])
    return [name for name in scores if name in kept]
