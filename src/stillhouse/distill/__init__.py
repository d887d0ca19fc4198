"""Distillers: turn one denoiser into a faster one. Tasks that the engine drives.

| task | its student | needs | paper |
|---|---|---|---|
| `SFD` | takes its teacher's walk in few Euler steps | no data | Zhou et al. 2024 |
| with several `timestamps`, `told` | SFD-v: in any of these numbers | | |
| of an `earlier_student` | the second stage: in one evaluation | | |
| `Progressive` | takes two of its teacher's Euler steps in one | no data | Salimans & Ho 2022 |
| `ConsistencyDistillation` | says where its teacher's walk ends | no data | Song et al. 2023 |
"""

from stillhouse.distill.consistency import ConsistencyDistillation
from stillhouse.distill.grids import Grids, Native, Polynomial, evaluations_of, timestamps_for
from stillhouse.distill.progressive import Nested, Progressive, halvings
from stillhouse.distill.sfd import DISTANCES, SFD
from stillhouse.distill.trajectories import (
    Evaluations,
    Labels,
    Start,
    Starts,
    Teacher,
    Trajectories,
    earlier_student,
    frozen,
)

__all__ = [
    "DISTANCES",
    "SFD",
    "ConsistencyDistillation",
    "Evaluations",
    "Grids",
    "Labels",
    "Native",
    "Nested",
    "Polynomial",
    "Progressive",
    "Start",
    "Starts",
    "Teacher",
    "Trajectories",
    "earlier_student",
    "evaluations_of",
    "frozen",
    "halvings",
    "timestamps_for",
]
