"""Conditional assignment: within a class, or at a price between conditions."""

import pytest
import torch
from couplings.checks import normal

from stillhouse.couplings import Assignment, Conditional
from stillhouse.errors import UserError
from stillhouse.process import Condition

LABELS = torch.arange(60) % 4
X, NOISE = normal(60, 5) + LABELS[:, None], normal(60, 5, seed=1)
COND = Condition(label=LABELS)
SOFT = Conditional(mode="soft", weight=1.0)


def test_noise_never_leaves_its_class_and_is_nearest_within():
    found = Conditional()(X, NOISE, COND)
    assert torch.equal(LABELS[found.index], LABELS)
    for label in range(4):
        rows = (label == LABELS).nonzero().flatten()
        alone = Assignment()(X[rows], NOISE[rows]).index
        assert torch.equal(found.index[rows], rows[alone])
    assert 0 < found.reduction < Assignment()(X, NOISE).reduction


def test_blocks_apply_within_a_class():
    found = Conditional(block=5)(X, NOISE, COND).index
    rows = (LABELS == 2).nonzero().flatten()
    for piece in rows.split(5):
        assert sorted(found[piece].tolist()) == piece.tolist()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_the_price_goes_from_plain_to_within_class_whatever_the_scale(scale):
    x = scale * X
    plain, within = Assignment()(x, NOISE).index, Conditional()(x, NOISE, COND).index
    free = Conditional(mode="soft", weight=0)(x, NOISE, COND).index
    dear = Conditional(mode="soft", weight=1e4)(x, NOISE, COND).index
    assert torch.equal(free, plain)
    assert torch.equal(dear, within)
    shares = []
    for weight in (0, 0.5, 1, 2, 8):
        found = Conditional(mode="soft", weight=weight)(x, NOISE, COND).index
        shares.append(int((LABELS[found] == LABELS).sum()))
    assert shares == sorted(shares)
    assert shares[0] < shares[2] < shares[-1] == 60


def test_text_is_compared_by_the_angle_of_its_embedding():
    topics = torch.nn.functional.one_hot(LABELS, 4).float()
    pooled = Condition(pooled=topics * torch.rand(60, 1).add(0.5))
    assert torch.equal(SOFT(X, NOISE, pooled).index, SOFT(X, NOISE, COND).index)
    mask = torch.tensor([[True, True, False]]).expand(60, 3)
    text = topics[:, None].repeat(1, 3, 1)
    text[:, 2] = torch.randn(60, 4) * 100  # padding
    tokens = Condition(text=text, text_mask=mask)
    assert torch.equal(SOFT(X, NOISE, tokens).index, SOFT(X, NOISE, COND).index)
    without = Condition(text=topics[:, None])
    assert torch.equal(SOFT(X, NOISE, without).index, SOFT(X, NOISE, COND).index)


def test_texts_without_an_embedding_are_one_condition():
    """An empty caption's may be 0: such rows swap freely with each other, dearly with others."""
    topics = torch.nn.functional.one_hot(LABELS, 4).float()
    topics[LABELS == 0] = 0
    found = SOFT(X, NOISE, Condition(pooled=topics))
    assert torch.equal(found.index, SOFT(X, NOISE, COND).index)


def test_near_texts_swap_sooner_than_far_ones():
    angle = torch.linspace(0, torch.pi, 60)
    cond = Condition(pooled=torch.stack([angle.cos(), angle.sin()], 1))
    x = normal(60, 5)
    spans = []
    for weight in (0.0, 2.0, 20.0):
        index = Conditional(mode="soft", weight=weight)(x, NOISE, cond).index
        spans.append(float((angle[index] - angle).abs().mean()))
    assert spans[0] > spans[1] > spans[2]


@pytest.mark.parametrize("cond", [None, Condition(), Condition(pooled=torch.ones(60, 2))])
def test_what_it_needs_is_said(cond):
    with pytest.raises(UserError, match=r"needs labels, .*--coupling\.kind assignment"):
        Conditional()(X, NOISE, cond)
    if cond is None or cond.pooled is None:
        with pytest.raises(UserError, match="labels or text embeddings"):
            SOFT(X, NOISE, cond)


def test_an_embedding_that_is_no_number_is_named():
    pooled = torch.ones(60, 2)
    pooled[3] = float("nan")
    with pytest.raises(UserError, match="row 3 of the batch's text embedding holds NaN"):
        SOFT(X, NOISE, Condition(pooled=pooled))
