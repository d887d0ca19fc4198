"""Scores of activations without a task, from one pass over a few dozen images.

| score | asks | see |
|---|---|---|
| `eta`, `eta_lo`, `eta_hi` | what share of it is the noise's, in all and by frequency | `spectra` |
| `kappa` | how fine its detail is | `spectra` |
| `locality` | does it follow the place rather than the label, if labels are given | `locality` |
| `position` | can the place be told from it | `locality` |

They compare activations of one resolution: across resolutions they mean nothing, and within one
they say which are not worth a closer look, not which is best.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean

import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.features.activation import Activation
from stillhouse.features.extractor import Extractor
from stillhouse.features.locality import Neighbourhoods, Placing
from stillhouse.features.spectra import Spectra
from stillhouse.process import Condition


@dataclass(frozen=True)
class Scores:
    eta: float
    eta_lo: float
    eta_hi: float
    kappa: float
    position: float
    locality: float | None = None  # None without labels


@dataclass(frozen=True, eq=False)
class Images:
    """A batch to score by."""

    x: Tensor  # [B, C, H, W] clean images or latents
    key: Tensor | Sequence[int]
    cond: Condition | None = None
    labels: Tensor | None = None  # [B, h, w] of any size; below 0 where not known


class Scoring:
    """Sums of all scores of one activation."""

    def __init__(self) -> None:
        self.spectra, self.placing, self.neighbours = Spectra(), Placing(), Neighbourhoods()

    def update(self, features: Tensor, labels: Tensor | None = None) -> None:
        """[seeds, B, C, H, W]: the same images with other noise."""
        self.spectra.update(features)
        mean = features.float().mean(0)
        self.placing.update(mean)
        if labels is not None:
            self.neighbours.update(mean, labels)

    def result(self) -> Scores:
        detail = self.spectra.result()
        return Scores(*detail, position=self.placing.result(), locality=self.neighbours.result())


def score(
    extractor: Extractor, batches: Iterable[Images], *, seeds: Sequence[int] = (0, 1)
) -> dict[str, Scores]:
    """Of every activation of the extractor, at its one noise level."""
    if extractor.several or len(set(seeds)) < 2:
        raise UserError("activations are scored at one noise level, with two seeds or more")
    sums: dict[str, Scoring] = defaultdict(Scoring)
    for batch in batches:
        runs = [extractor.extract(batch.x, batch.cond, key=batch.key, seed=seed) for seed in seeds]
        for name in list(runs[0]):
            features = torch.stack([run.pop(name) for run in runs])
            sums[name].update(features, batch.labels)
    if not sums:
        raise UserError("there are no images to score activations by")
    return {name: scoring.result() for name, scoring in sums.items()}


def asymmetry(scores: Mapping[str, Scores], known: Mapping[str, Activation]) -> float:
    """Mean noise fraction on the way down / that of the first half of the way up."""
    down = [s.eta for name, s in scores.items() if known[name].stage == "down"]
    up = [s.eta for name, s in scores.items() if _in_first_half_of_up(known[name], known)]
    if not down or not up:
        raise UserError("scores of both ways of a U-Net are needed: score its whole catalogue")
    return fmean(down) / fmean(up)


def _in_first_half_of_up(activation: Activation, known: Mapping[str, Activation]) -> bool:
    if activation.stage != "up":
        return False
    up = [a for a in known.values() if a.stage == "up"]
    levels, repeats = max(a.level for a in up) + 1, max(a.repeat for a in up) + 1
    within = repeats if activation.kind == "upsampler-out" else activation.repeat
    return (activation.level + within / repeats) / levels < 0.5


def granularity_change(
    scores: Mapping[str, Scores], known: Mapping[str, Activation]
) -> dict[Fraction, float]:
    """Within each resolution, how far apart the finest and the coarsest activations are."""
    kappas: dict[Fraction, list[float]] = defaultdict(list)
    for name, found in scores.items():
        if found.kappa == found.kappa:  # nan has none
            kappas[known[name].scale].append(found.kappa)
    return {scale: max(values) - min(values) for scale, values in kappas.items()}
