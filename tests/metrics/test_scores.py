"""Inception score under any split, CLIP score, and captions found again."""

from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics.watched import Asked, Made

from stillhouse.errors import UserError
from stillhouse.metrics.bank import BLOCK
from stillhouse.metrics.scores import ClassScore, Pairs, caption_retrieval, clip_score, fit_ridge


def noise(count, dims, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dims, generator=generator)


def score(logits, splits=10):
    return ClassScore.of(logits, torch.arange(len(logits)), len(logits), splits).value()


def test_the_score_is_its_definition():
    logits = noise(57, 6).double() * 2
    values = []
    for s in range(10):
        p = logits[s * 57 // 10 : (s + 1) * 57 // 10].softmax(1)
        values.append((p * (p / p.mean(0)).log()).sum(1).mean().exp())
    values = torch.stack(values)
    expected = float(values.mean()), float(values.std(correction=0))
    assert score(logits) == pytest.approx(expected, rel=1e-12)


def test_the_score_of_certain_and_of_uncertain_classes():
    certain = 1000 * torch.eye(5).repeat(20, 1)  # probabilities that are exactly 0
    assert score(certain) == pytest.approx((5, 0), rel=1e-12)
    assert score(torch.zeros(100, 5)) == pytest.approx((1, 0), abs=1e-12)
    assert score(certain[:1].repeat(50, 1)) == pytest.approx((1, 0), abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    total=st.integers(10, 200),
    parts=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 200),
    splits=st.sampled_from([1, 3, 10]),
    seed=st.integers(0, 10**6),
)
def test_every_split_is_the_same(total, parts, batch, splits, seed):
    logits = 3 * noise(total, 7, seed)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    processes = [
        reduce(
            add,
            [ClassScore.of(logits[b], b, total, splits) for b in order[rank::parts].split(batch)],
            ClassScore.none(7, splits),
        )
        for rank in range(parts)
    ]
    assert reduce(add, processes).value() == pytest.approx(score(logits, splits), rel=1e-10)


def test_misplaced_and_missing_images():
    logits = noise(20, 3)
    with pytest.raises(ValueError, match="0 to 19"):
        ClassScore.of(logits, torch.arange(1, 21), 20)
    with pytest.raises(UserError, match="there are 9 images: raise the count"):
        score(logits[:9])
    with pytest.raises(UserError, match="not finite"):
        score(logits * torch.nan)


def test_clip_scores_are_cosines_without_negative_ones():
    image = torch.tensor([[3.0, 4.0], [1.0, 0.0], [1.0, 0.0], [2.0, 2.0]])
    text = torch.tensor([[6.0, 8.0], [0.0, 2.0], [-5.0, 0.0], [1.0, 0.0]])
    assert clip_score(image, text).tolist() == pytest.approx([100, 0, 0, 50 * 2**0.5])
    with pytest.raises(UserError, match="not finite"):
        clip_score(image * torch.inf, text)
    with pytest.raises(ValueError, match="one shape"):
        clip_score(image, text[:3])


def world(count, seed, *, images=24, texts=10, blur=0.0, distinct=None):
    """Images are a linear function of their captions, in a space of their own."""
    text = noise(distinct or count, texts, seed).repeat(count, 1)[:count]
    image = 3 + text @ noise(texts, images, seed=99) + blur * noise(count, images, seed + 1)
    return Pairs(image, text + 5, [str(i % (distinct or count)) for i in range(count)])


def test_a_linear_relation_finds_every_caption():
    found = caption_retrieval(world(300, 0), world(200, 10))
    assert found.recall == {1: 1.0, 5: 1.0, 10: 1.0}
    assert found.median_rank == 1
    assert (found.captions, found.chance_rank) == (200, 100.5)
    assert found.chance == {1: 0.005, 5: 0.025, 10: 0.05}


@pytest.mark.parametrize("known", [40, 300])
def test_unrelated_pairs_are_at_chance(known):
    """Also with fewer pairs than dimensions, where a map without a penalty would fit anything."""
    blind, shown = world(known, 0, images=64), world(1000, 10, images=64)
    blind = blind._replace(images=noise(known, 64, seed=5))
    shown = shown._replace(images=noise(1000, 64, seed=6))
    found = caption_retrieval(blind, shown)
    for k, chance in found.chance.items():
        assert abs(found.recall[k] - chance) < 4 * (chance / 1000) ** 0.5
    assert found.median_rank == pytest.approx(found.chance_rank, rel=0.1)


def test_recall_falls_with_blur():
    known = [world(400, 0, blur=b) for b in (0.0, 2.0, 8.0, 30.0)]
    shown = [world(300, 10, blur=b) for b in (0.0, 2.0, 8.0, 30.0)]
    found = [caption_retrieval(*pair) for pair in zip(known, shown, strict=True)]
    recalls = [f.recall[5] for f in found]
    assert recalls == sorted(recalls, reverse=True)
    assert recalls[0] == 1 > recalls[1] > recalls[3]
    assert [f.median_rank for f in found] == sorted(f.median_rank for f in found)


def test_repeated_captions_are_one_candidate():
    found = caption_retrieval(world(300, 0), world(200, 10, distinct=4), ks=(1, 2, 10))
    assert found.captions == 4
    assert found.recall == {1: 1, 2: 1, 10: 1}
    assert found.chance == {1: 0.25, 2: 0.5, 10: 1}
    uneven = world(8, 10, distinct=2)._replace(captions=["a"] * 6 + ["b"] * 2)
    assert caption_retrieval(world(300, 0), uneven).chance[1] == 0.75


def test_images_that_say_nothing_do_not_win():
    """Every caption is as near as any other: the middle rank, not the first."""
    known = world(100, 0)
    known = known._replace(images=torch.ones(100, 24))
    found = caption_retrieval(known, world(50, 10))
    assert found.recall[10] == 0
    assert found.median_rank == 25.5


def test_the_map_is_a_regression():
    known = world(200, 0, blur=0.5)
    ridge = fit_ridge(known.images, known.texts)
    x, y = (rows.double() - rows.double().mean(0) for rows in known[:2])
    least_squares = torch.linalg.lstsq(x, y).solution
    fitted, best = (float((y - x @ w).square().sum()) for w in (ridge.weights, least_squares))
    assert best <= fitted < 1.05 * best
    assert ridge.image_mean.tolist() == pytest.approx(known.images.double().mean(0).tolist())


def test_the_penalty_is_one_that_holds_for_other_pairs():
    """Few noisy pairs in many dimensions: the map that fits them best is a bad one."""
    known, other = (world(80, seed, images=64, blur=3.0) for seed in (0, 10))
    ridge = fit_ridge(known.images, known.texts)
    x, y = known.images.double() - ridge.image_mean, known.texts.double() - ridge.text_mean
    new_x, new_y = other.images.double() - ridge.image_mean, other.texts.double() - ridge.text_mean

    def miss(weights):
        return float((new_y - new_x @ weights).square().mean())

    gram, eye = x.T @ x, torch.eye(64, dtype=torch.float64)
    tried = [miss(torch.linalg.solve(gram + p * eye, x.T @ y)) for p in 10.0 ** torch.arange(-3, 8)]
    assert miss(ridge.weights) < 1.1 * min(tried)
    assert miss(ridge.weights) < 0.7 * tried[0]


def test_retrieval_is_block_by_block():
    known, shown = world(2 * BLOCK, 0, images=4, texts=3), world(BLOCK + 9, 10, images=4, texts=3)
    watched = [Pairs(Asked(p.images), Asked(p.texts), p.captions) for p in (known, shown)]
    with Made() as made:
        found = caption_retrieval(*watched)
    assert all(rows.most <= BLOCK for pairs in watched for rows in pairs[:2])
    assert made.largest <= BLOCK**2
    assert found.recall[1] > 0.99


def test_pairs_that_are_none_are_refused():
    known, shown = world(50, 0), world(40, 10)
    with pytest.raises(UserError, match="2 known pairs or more"):
        caption_retrieval(known._replace(images=known.images[:1], texts=known.texts[:1]), shown)
    with pytest.raises(UserError, match="each with a caption"):
        caption_retrieval(known, shown._replace(captions=shown.captions[:3]))
    with pytest.raises(UserError, match="each with a caption"):
        caption_retrieval(known, Pairs(known.images[:0], known.texts[:0], []))
    for bad in (known, shown):
        broken = bad._replace(images=bad.images * torch.nan)
        with pytest.raises(UserError, match="not finite"):
            caption_retrieval(*(broken if pairs is bad else pairs for pairs in (known, shown)))
