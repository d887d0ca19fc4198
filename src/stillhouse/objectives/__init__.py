"""Objectives: `objective(denoiser, batch, generator) -> Loss`. Noise is applied once, in `base`.

A coupling chooses it before, in `pair_noise`: every objective takes any coupling.

| name | class | paper |
|---|---|---|
| `denoising` | `Denoising` with a weighting of `WEIGHTINGS` | Ho et al. 2020; Karras et al. 2022 |
| `flow` | `FlowMatching` | Lipman et al. 2023; Esser et al. 2024 |
| `consistency` | `ImprovedConsistency` | Song & Dhariwal 2023 |
| `easy-consistency` | `EasyConsistency` | Geng et al. 2024 |
"""

from stillhouse.objectives.base import Draws, Loss, Noised, Objective, drop_apart, drop_condition
from stillhouse.objectives.consistency import Consistent, EasyConsistency, ImprovedConsistency
from stillhouse.objectives.curves import LevelCurve, log_edges, validate, validation_loss
from stillhouse.objectives.denoising import WEIGHTINGS, Constants, Denoising, Weighting
from stillhouse.objectives.flow import FlowMatching
from stillhouse.objectives.pairing import Paired, pair_noise

OBJECTIVES: dict[str, type[Objective]] = {
    "denoising": Denoising,
    "flow": FlowMatching,
    "consistency": ImprovedConsistency,
    "easy-consistency": EasyConsistency,
}

__all__ = [
    "OBJECTIVES",
    "WEIGHTINGS",
    "Consistent",
    "Constants",
    "Denoising",
    "Draws",
    "EasyConsistency",
    "FlowMatching",
    "ImprovedConsistency",
    "LevelCurve",
    "Loss",
    "Noised",
    "Objective",
    "Paired",
    "Weighting",
    "drop_apart",
    "drop_condition",
    "log_edges",
    "pair_noise",
    "validate",
    "validation_loss",
]
