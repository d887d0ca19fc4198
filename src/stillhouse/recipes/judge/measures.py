"""What can be measured of samples, by name: each a function of the evidence, one row of a table.

| name | what | lower is better |
|---|---|---|
| `fid` | Fréchet distance of Gaussians fitted to features | yes |
| `fid-infinity` | the same, extrapolated to infinitely many samples | yes |
| `kid` | kernel distance: unbiased, so fair to small samples | yes |
| `cmmd` | maximum mean discrepancy with a Gaussian kernel | yes |
| `is` | how sure, and how varied, a classifier is | no |
| `prdc` | precision, recall, density, coverage by nearest neighbours | no |
| `lpips` | perceptual distance between samples of one class: diversity | no |
| `clip-score` | agreement of image and prompt | no |
| `retrieval` | how often an image finds its own caption | no |

A distance carries the name of its detector: FID and KID are Inception's, all others are FD-... and
KD-....
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.metrics.bank import Rows, blocks
from stillhouse.metrics.detectors import Detector
from stillhouse.metrics.frechet import frechet_distance, frechet_infinity
from stillhouse.metrics.kernels import all_pairs_distance, maximum_mean_discrepancy, mean_within
from stillhouse.metrics.moments import Moments
from stillhouse.metrics.neighbours import K, prdc, radii
from stillhouse.metrics.perceptual import Lpips, diversity
from stillhouse.metrics.scores import ClassScore, Pairs, caption_retrieval, clip_score

MetricName = Literal[
    "fid", "fid-infinity", "kid", "cmmd", "is", "prdc", "lpips", "clip-score", "retrieval"
]
Values = dict[str, float]
Encode = Callable[[Sequence[str]], Tensor]
STAND_INS = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))  # for features


@dataclass(frozen=True, eq=False)
class Known:
    """What samples are compared with; what it takes of this alone is computed once."""

    rows: Rows
    moments: Moments
    texts: Sequence[str] = ()

    @cached_property
    def radii(self) -> Tensor:
        return radii(self.rows, K)

    @cached_property
    def within(self) -> float:
        return mean_within(self.rows)


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a metric may look at."""

    detector: str
    samples: Rows
    moments: Moments
    known: Known
    seed: int = 0
    logits: Rows | None = None
    texts: Sequence[str] = ()
    encode_text: Encode | None = None
    joint_text: Encode | None = None
    """The detector's own, into the space of the images; any other is no CLIP score."""
    images: tuple[Tensor, Sequence[int]] | None = None
    """Some of the samples themselves, uint8, with their labels."""


def named(metric: str, detector: str) -> str:
    """FID and KID belong to Inception with its standard weights."""
    short = {"fid": "FID", "fid-infinity": "FID-infinity", "kid": "KID", "is": "IS"}
    long = {"fid": "FD", "fid-infinity": "FD-infinity", "kid": "KD", "is": "class score"}
    if detector == "Inception":
        return short[metric]
    return f"{long[metric]} {detector}" if metric == "is" else f"{long[metric]}-{detector}"


# ---------------------------------------------------------------- one function each


def _fid(seen: Evidence) -> Values:
    distance = frechet_distance(seen.moments, seen.known.moments)
    return {named("fid", seen.detector): distance}


def _fid_infinity(seen: Evidence) -> Values:
    found = frechet_infinity(seen.samples, seen.known.moments, seed=seen.seed)
    return {named("fid-infinity", seen.detector): found.value}


def _kid(seen: Evidence) -> Values:
    distance = all_pairs_distance(seen.samples, seen.known.rows, within_y=seen.known.within)
    return {named("kid", seen.detector): distance}


def _cmmd(seen: Evidence) -> Values:
    name = "CMMD" if seen.detector == "CLIP" else f"MMD-{seen.detector}"
    return {name: maximum_mean_discrepancy(seen.samples, seen.known.rows)}


def _is(seen: Evidence) -> Values:
    if seen.logits is None:
        raise UserError(f"{seen.detector} is no classifier: `is` needs Inception or ResNet56")
    total, start = ClassScore.none(seen.logits[:1].shape[1]), 0
    for block in blocks(seen.logits):
        at = torch.arange(start, start + len(block))
        total, start = total + ClassScore.of(block, at, len(seen.logits)), start + len(block)
    return {named("is", seen.detector): total.value().mean}


def _prdc(seen: Evidence) -> Values:
    found = prdc(seen.known.rows, seen.samples, real_radii=seen.known.radii)
    return {name: float(value) for name, value in found._asdict().items()}


def _lpips(seen: Evidence) -> Values:
    if seen.images is None:
        raise UserError("lpips looks at images, and there are none")
    images, labels = seen.images
    found = diversity(Lpips.load(), images, labels or [0] * len(images), seed=seen.seed)
    return {"LPIPS diversity": found.mean}


def _clip_score(seen: Evidence) -> Values:
    if seen.joint_text is None or not seen.texts:
        raise UserError("clip-score needs --detector clip and captions: see --columns.text")
    scores = clip_score(seen.samples[:], seen.joint_text(seen.texts))
    name = "CLIP score" if seen.detector == "CLIP" else f"CLIP score, {seen.detector}"
    return {name: float(scores.mean())}


def _retrieval(seen: Evidence) -> Values:
    if seen.encode_text is None or not (seen.texts and seen.known.texts):
        raise UserError(
            "retrieval needs captions of samples and reference (--columns.text) and --text-encoder"
        )
    known, shown = seen.known.texts, seen.texts
    found = caption_retrieval(
        Pairs(seen.known.rows, seen.encode_text(known), known),
        Pairs(seen.samples, seen.encode_text(shown), shown),
    )
    values = {f"recall@{k}": value for k, value in found.recall.items()}
    chance = {f"chance@{k}": value for k, value in found.chance.items()}
    return values | chance | {"median rank": found.median_rank}


METRICS: dict[str, Callable[[Evidence], Values]] = {
    "fid": _fid,
    "fid-infinity": _fid_infinity,
    "kid": _kid,
    "cmmd": _cmmd,
    "is": _is,
    "prdc": _prdc,
    "lpips": _lpips,
    "clip-score": _clip_score,
    "retrieval": _retrieval,
}
assert set(METRICS) == set(get_args(MetricName))

DISTANCES = {"fid", "fid-infinity", "kid", "cmmd"}  # lower is better
OF_FEATURES = DISTANCES | {"prdc"}  # and so have a floor: real against real


def measure(metrics: Sequence[str], seen: Evidence) -> Values:
    """All values of all metrics that were asked for."""
    values: Values = {}
    for name in metrics:
        values |= METRICS[name](seen)
    return values


def rehearse(
    metrics: Sequence[str],
    detector: Detector,
    known: Known,
    count: int,
    *,
    captioned: bool = False,
    encode_text: Encode | None = None,
) -> None:
    """What a metric refuses of `count` samples, it refuses here: before anything is drawn."""
    rows, moments = STAND_INS[:count], Moments.of(STAND_INS)
    joint = getattr(detector, "encode_text", None)

    def encode(texts: Sequence[str]) -> Tensor:
        return STAND_INS[: len(texts)]

    stand_ins = Evidence(
        detector=detector.name,
        samples=rows,
        moments=moments,
        known=Known(STAND_INS[: len(known.rows)], moments, known.texts[: len(STAND_INS)]),
        logits=rows if detector.classes else None,
        texts=["a"] * len(rows) if captioned else (),
        encode_text=encode if encode_text else None,
        joint_text=encode if joint else None,
        images=(torch.zeros(2, 3, 64, 64, dtype=torch.uint8), [0, 0]),
    )
    measure(metrics, stand_ins)
