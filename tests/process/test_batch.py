"""Condition and Batch: rows are handled as one thing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stillhouse.process import Batch, Condition


def batch() -> Batch:
    cond = Condition(
        label=torch.arange(4), text=torch.randn(4, 3, 2), text_mask=torch.ones(4, 3).bool()
    )
    return Batch(torch.randn(4, 1, 2, 2), cond, ids=torch.arange(4) + 10)


@pytest.mark.parametrize("rows", [slice(1, 3), [1, 2], torch.tensor([False, True, True, False])])
def test_indexing_reaches_every_field(rows):
    whole, part = batch(), None
    part = whole[rows]
    assert len(part) == 2
    assert part.condition is not None
    assert part.condition.label is not None
    assert part.condition.label.tolist() == [1, 2]
    assert part.ids is not None
    assert part.ids.tolist() == [11, 12]
    assert part.noise is None
    assert torch.equal(part.data, whole.data[1:3])


def test_split_and_cat_give_the_same_back():
    whole = batch()
    again = Batch.cat([whole[:1], whole[1:4]])
    assert torch.equal(again.data, whole.data)
    assert again.condition is not None
    assert whole.condition is not None
    assert torch.equal(again.condition.text, whole.condition.text)
    assert torch.equal(again.condition.text_mask, whole.condition.text_mask)


def test_cat_refuses_fields_present_in_some_only():
    with pytest.raises(ValueError, match="'label'"):
        Condition.cat([Condition(label=torch.zeros(1)), Condition(pooled=torch.zeros(1, 2))])


@pytest.mark.parametrize("row", [1, np.int64(1), torch.tensor(1)])
def test_one_integer_is_refused_rather_than_dropping_the_axis(row):
    with pytest.raises(TypeError, match="slice"):
        batch()[row]


def test_keys_stay_on_the_host_and_levels_keep_their_precision():
    whole = replace(batch(), key=torch.arange(4), sigma=torch.tensor([1000.3, 501, 1, 2]).double())
    moved = whole.to("meta", torch.bfloat16)
    assert moved.data.device.type == "meta"
    assert moved.data.dtype == torch.bfloat16
    assert moved.key.device.type == moved.ids.device.type == "cpu"
    assert moved.sigma.dtype == torch.float64
    assert torch.equal(whole.to(dtype=torch.bfloat16).sigma, whole.sigma)


def test_to_casts_floating_tensors_only():
    moved = batch().to(dtype=torch.bfloat16)
    assert moved.data.dtype == torch.bfloat16
    assert moved.condition is not None
    assert moved.condition.label.dtype == torch.int64
    assert moved.condition.text_mask.dtype == torch.bool
    assert moved.condition.text.dtype == torch.bfloat16


def test_drop_replaces_marked_rows_by_the_null_condition():
    cond = batch().condition
    null = Condition(
        label=torch.tensor([9]), text=torch.zeros(1, 3, 2), text_mask=torch.zeros(1, 3).bool()
    )
    mask = torch.tensor([True, False, False, True])
    dropped = cond.drop(mask, null)
    assert dropped.label.tolist() == [9, 1, 2, 9]
    assert torch.equal(dropped.text[1:3], cond.text[1:3])
    assert not dropped.text[[0, 3]].any()
    assert not dropped.text_mask[[0, 3]].any()
    only = cond.drop(mask, null, only=["text"])
    assert torch.equal(only.label, cond.label)
    assert not only.text[0].any()
    label = cond.drop(mask, Condition(label=torch.tensor([9])))
    assert label.label.tolist() == [9, 1, 2, 9]
    assert torch.equal(label.text, cond.text)  # the null condition has none: it stays


def test_expand_repeats_one_row():
    assert Condition(pooled=torch.ones(1, 3)).expand(5).pooled.shape == (5, 3)
