"""Mean IoU by hand, with pixels to ignore and classes that are absent."""

import math

import pytest
import torch

from stillhouse.metrics.iou import Confusion


def test_a_hand_made_example_with_ignored_pixels_and_an_absent_class():
    """True 0 0 0 1 1 x, guessed 0 0 1 1 0 2: class 0 2/4, class 1 1/3, classes 2 and 3 nowhere."""
    sums = Confusion(4)
    true = torch.tensor([[0, 0, 0], [1, 1, 255]], dtype=torch.uint8)
    sums.update(torch.tensor([[0, 0, 1], [1, 0, 2]]), true)
    first, second, third, fourth = sums.iou().tolist()
    assert (first, second) == (0.5, pytest.approx(1 / 3))
    assert math.isnan(third)  # guessed on an ignored pixel only
    assert math.isnan(fourth)
    assert sums.mean_iou() == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert sums.accuracy() == pytest.approx(3 / 5)


def test_a_class_that_is_only_guessed_has_0():
    sums = Confusion(3)
    sums.update(torch.tensor([0, 0, 2]), torch.tensor([0, 0, 0]))
    assert sums.mean_iou() == pytest.approx((2 / 3 + 0) / 2)


def test_pixels_are_pooled_over_images():
    """3 of 4 right in one image and 0 of 1 in the other: pooled, not a mean of two."""
    one, two = Confusion(2), Confusion(2)
    one.update(torch.tensor([0, 0, 0, 1]), torch.zeros(4))
    two.update(torch.tensor([0]), torch.ones(1))
    both = one + two
    assert both.iou().tolist() == [3 / 5, 0]
    assert both.mean_iou() != (one.mean_iou() + two.mean_iou()) / 2


def test_true_and_guessed_are_not_mixed_up():
    sums = Confusion(2)
    sums.update(torch.tensor([1, 1]), torch.tensor([0, 0]))
    assert sums.counts.tolist() == [[0, 2], [0, 0]]


def test_labels_that_are_no_classes():
    with pytest.raises(ValueError, match="between 0 and 1"):
        Confusion(2).update(torch.tensor([2]), torch.tensor([0]))
    with pytest.raises(ValueError, match="between 0 and 1"):
        Confusion(2).update(torch.tensor([0]), torch.tensor([-1]))
    with pytest.raises(ValueError, match="cannot match"):
        Confusion(2).update(torch.zeros(2), torch.zeros(3))
    assert math.isnan(Confusion(2).mean_iou())
