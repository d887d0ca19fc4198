"""Scores of images by themselves or with their captions: Inception score, CLIP score, retrieval."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from stillhouse.errors import UserError
from stillhouse.metrics.bank import BLOCK, Rows, blocks
from stillhouse.metrics.moments import Moments, Spread, checked


@dataclass(frozen=True, eq=False)
class ClassScore:
    """Statistics of an Inception score (Salimans et al. 2016), summable, a row per split."""

    counts: Tensor  # [splits]
    classes: Tensor  # [splits, C]  sum of p
    certainty: Tensor  # [splits]   sum of sum_c p_c log p_c

    @classmethod
    def none(cls, classes: int, splits: int = 10) -> "ClassScore":
        """Of no images at all: what sums start from."""
        zeros = torch.zeros(splits, classes + 1, dtype=torch.float64)
        return cls(torch.zeros(splits, dtype=torch.int64), zeros[:, 1:], zeros[:, 0])

    @classmethod
    def of(
        cls, logits: Tensor, positions: Tensor | Sequence[int], total: int, splits: int = 10
    ) -> "ClassScore":
        """Of images at these positions among `total`, whose splits are contiguous and even.

        Split s holds the positions from s total // splits to (s + 1) total // splits, whichever
        batch or process an image is in.
        """
        logits, places = checked(logits), torch.as_tensor(positions).cpu().contiguous()
        if len(places) != len(logits) or bool(((places < 0) | (places >= total)).any()):
            raise ValueError(f"every image has a position from 0 to {total - 1}")
        ends = torch.arange(1, splits + 1) * total // splits
        split = torch.searchsorted(ends, places, right=True)
        p, log_p = logits.softmax(dim=1), logits.log_softmax(dim=1)
        none = cls.none(logits.shape[1], splits)
        return cls(
            none.counts.index_add(0, split, torch.ones_like(split)),
            none.classes.index_add(0, split, p),
            none.certainty.index_add(0, split, (p * log_p).sum(dim=1)),
        )

    def __add__(self, other: "ClassScore") -> "ClassScore":
        return ClassScore(
            self.counts + other.counts,
            self.classes + other.classes,
            self.certainty + other.certainty,
        )

    def value(self) -> Spread:
        """exp of the mean KL(p(y|x) | p(y)) of a split: its mean and deviation over the splits."""
        if not bool((self.counts > 0).all()):
            raise UserError(
                f"an Inception score over {len(self.counts)} splits needs an image in each and "
                f"there are {int(self.counts.sum())} images: raise the count"
            )
        overall = self.classes / self.counts[:, None]
        divergence = self.certainty / self.counts - torch.xlogy(overall, overall).sum(dim=1)
        scores = divergence.exp()
        return Spread(float(scores.mean()), float(scores.std(correction=0)))


def clip_score(image_features: Tensor, text_features: Tensor) -> Tensor:
    """100 max(cos(image, text), 0) of each pair (Hessel et al. 2021)."""
    images, texts = checked(image_features), checked(text_features)
    if images.shape != texts.shape:
        raise ValueError(f"pairs have one shape, not {list(images.shape)}, {list(texts.shape)}")
    return 100 * cosine_similarity(images, texts, dim=1).clamp(min=0)


class Pairs(NamedTuple):
    """Images with their captions: features from two encoders, which need not share a space."""

    images: Rows
    texts: Rows
    captions: Sequence[str]
    """Which texts are the same: the distinct ones are what is searched."""


class Retrieval(NamedTuple):
    """How often an image finds its own caption."""

    recall: dict[int, float]
    """Share of images whose caption is among the k nearest, by k."""
    median_rank: float
    """1 is best."""
    captions: int
    """Distinct ones, that is candidates."""
    chance: dict[int, float]
    """Recall of the best guess that does not look at the image: the k most frequent captions."""
    chance_rank: float
    """Median rank in a random order."""


def caption_retrieval(known: Pairs, shown: Pairs, *, ks: Sequence[int] = (1, 5, 10)) -> Retrieval:
    """Finds the caption of each shown image among the distinct captions that are shown.

    A ridge regression from image to text features, fitted on the known pairs, brings the two
    encoders together. Known pairs are real and none of the shown, so the score is held out; the
    same with real images shown is what a perfect model would reach.
    """
    count = len(shown.captions)
    if not count or len(shown.images) != count or len(shown.texts) != count:
        raise UserError("caption retrieval needs images, each with a caption: name some that have")
    often = Counter(shown.captions)
    ranks = _ranks(fit_ridge(known.images, known.texts), shown)
    guesses = {k: sum(n for _, n in often.most_common(k)) / count for k in ks}
    return Retrieval(
        recall={k: float((ranks <= k).double().mean()) for k in ks},
        median_rank=float(ranks.quantile(0.5)),
        captions=len(often),
        chance=guesses,
        chance_rank=(len(often) + 1) / 2,
    )


class Ridge(NamedTuple):
    """A linear map from image to text features: y - text_mean = (x - image_mean) weights."""

    image_mean: Tensor
    text_mean: Tensor
    weights: Tensor  # [D, T]


def fit_ridge(images: Rows, texts: Rows) -> Ridge:
    """Ridge regression with the penalty that generalised cross-validation prefers.

    With X^T X = V L V^T, the fit at penalty p has df = sum L / (L + p) degrees of freedom, and the
    penalty is the one with the least |Y - Y_p|^2 / (n - 1 - df)^2 (Golub, Heath and Wahba 1979).
    """
    joint = _joint_moments(images, texts)
    dims = images[:0].shape[1]
    values, vectors = torch.linalg.eigh(joint.scatter[:dims, :dims])
    values = values.clamp(min=0)
    shared = vectors.T @ joint.scatter[:dims, dims:]
    power, total = shared.square().sum(dim=1), joint.scatter.diagonal()[dims:].sum()
    exponents = torch.linspace(-6, 3, 19, dtype=torch.float64)
    penalties = (values.mean().clamp(min=1e-30) * 10**exponents)[:, None]
    misses = total - (power * (values + 2 * penalties) / (values + penalties) ** 2).sum(dim=1)
    freedom = joint.count - 1 - (values / (values + penalties)).sum(dim=1)
    best = penalties[(misses.clamp(min=0) / freedom.square()).argmin()]
    weights = vectors @ (shared / (values + best)[:, None])
    return Ridge(joint.mean[:dims], joint.mean[dims:], weights)


def _joint_moments(images: Rows, texts: Rows) -> Moments:
    if len(images) != len(texts) or len(images) < 2:
        raise UserError(
            "the map from images to captions needs 2 known pairs or more, and there are "
            f"{len(images)} images and {len(texts)} captions: name a reference with captions"
        )
    total = Moments.none(images[:0].shape[1] + texts[:0].shape[1])
    for a, b in zip(blocks(images), blocks(texts), strict=True):
        total = total + Moments.of(torch.cat([checked(a), checked(b)], dim=1))
    return total


def _ranks(ridge: Ridge, shown: Pairs) -> Tensor:
    """Rank of each image's caption among the distinct ones; among equals, the middle."""
    first: dict[str, int] = {}
    for i, caption in enumerate(shown.captions):
        first.setdefault(caption, i)
    rows = torch.tensor(list(first.values()))  # of the texts, one per candidate
    numbers = {caption: n for n, caption in enumerate(first)}
    own = torch.tensor([numbers[caption] for caption in shown.captions])
    found, start = [], 0
    for block in blocks(shown.images):
        guess = (checked(block) - ridge.image_mean) @ ridge.weights
        found.append(_ranks_of(guess, own[start : start + len(block)], ridge, shown.texts, rows))
        start += len(block)
    return torch.cat(found)


def _ranks_of(guess: Tensor, own: Tensor, ridge: Ridge, texts: Rows, rows: Tensor) -> Tensor:
    """Ranks by the angle between guesses and texts, both seen from the mean text."""

    def seen(numbers: Tensor) -> Tensor:
        return normalize(checked(texts[rows[numbers]]) - ridge.text_mean, dim=1)

    right = (guess * seen(own)).sum(dim=1, keepdim=True)
    rank = torch.ones(len(guess), dtype=torch.float64)
    for numbers in torch.arange(len(rows)).split(BLOCK):
        score = guess @ seen(numbers).T
        other = own[:, None] != numbers
        rank += ((score > right) & other).sum(dim=1) + 0.5 * ((score == right) & other).sum(dim=1)
    return rank
