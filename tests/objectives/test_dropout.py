"""Condition dropout of two-term guidance: semantics and control are lost independently."""

from dataclasses import replace

import pytest
import torch

from stillhouse.objectives import Draws, drop_condition
from stillhouse.objectives.base import drop_apart
from stillhouse.process import Condition

DRAWS = Draws(seed=3)
NULL = Condition(
    label=torch.tensor([-1]), pooled=torch.zeros(1, 2), control=torch.full((1, 3), -1.0)
)


def framed(batch):
    """With a text's vector and a control beside the label."""
    count = len(batch.data)
    more = {"pooled": torch.ones(count, 2), "control": torch.ones(count, 3)}
    return replace(batch, condition=replace(batch.condition, **more))


def marks(batch):
    """Which samples have lost their semantics, and which their control."""
    lost = batch.condition.label < 0
    assert torch.equal(lost, batch.condition.pooled[:, 0] == 0)  # text and label go together
    return lost, batch.condition.control[:, 0] < 0


def test_semantics_and_control_are_dropped_independently_at_their_rates(make_batch):
    count, rates = 8000, {"semantics": 0.3, "control": 0.2}
    batch = framed(make_batch(count))
    dropped = drop_apart(batch, NULL, DRAWS, **rates)
    lost, bare = marks(dropped)
    cells = {(True, True): 0.06, (True, False): 0.24, (False, True): 0.14, (False, False): 0.56}
    for (semantics, control), share in cells.items():
        found = float(((lost == semantics) & (bare == control)).double().mean())
        assert found == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)
    part = drop_apart(batch[17:400], NULL, DRAWS, **rates)
    assert torch.equal(marks(part)[0], lost[17:400])
    assert torch.equal(marks(part)[1], bare[17:400])
    other = drop_apart(batch, NULL, DRAWS, semantics=0.9, control=0.2)
    assert torch.equal(marks(other)[1], bare)  # one rate does not move the other's draws


def test_without_dropping_control_the_same_samples_are_dropped_as_ever(make_batch):
    """Golden: a run keeps its draws, with or without a null control."""
    batch = framed(make_batch(4000))
    single = drop_condition(make_batch(4000), Condition(label=torch.tensor([-1])), 0.1, DRAWS)
    for null in (NULL, replace(NULL, control=None)):
        lost, bare = marks(drop_apart(batch, null, DRAWS, semantics=0.1, control=0.0))
        assert torch.equal(lost, single.condition.label < 0)
        assert not bare.any()
    assert lost[:40].nonzero().flatten().tolist() == [27, 30, 35]


def test_a_batch_without_condition_is_left_alone(make_batch):
    batch = replace(make_batch(3), condition=None)
    assert drop_apart(batch, NULL, DRAWS, semantics=0.5, control=0.5) is batch
