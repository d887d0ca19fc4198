"""The probe: its answers counted by hand."""

import pytest
import torch

from stillhouse.couplings import Leak, LeakProbe


def image(*values: float) -> torch.Tensor:
    return torch.tensor([values]).reshape(1, 1, 2, 2)


X = torch.cat([image(1, 0, 0, 0), image(0, 1, 0, 0), image(3, 0, 0, 0), image(0, 3, 0, 0)])
LABELS = torch.tensor([4, 7, 4, 7])


def test_answers_are_counted():
    probe = LeakProbe()
    assert probe(X, X, LABELS) == Leak()  # the first batch is learnt only
    noise = torch.cat([image(1, 0, 9, 9), image(0, 1, 0, 9), image(0, 2, 0, 0), image(5, 0, 0, 0)])
    labels = torch.tensor([4, 7, 4, 9])  # 9 is not known yet
    leak = probe(X, noise, labels)
    # It says 4, 7, 7, where 4, 7, 4 are true: by chance (1 * 2 + 2 * 1) / 3 would be right.
    assert (leak.right, leak.asked) == (2, 3)
    assert leak.by_chance == pytest.approx(4 / 3)
    assert (leak + leak).accuracy == pytest.approx(2 / 3)
    assert probe(X, noise, labels).asked == 4


def test_shapes_of_equal_size_are_not_mixed():
    probe = LeakProbe()
    probe(X, X, LABELS)
    tall = X.reshape(4, 1, 4, 1)
    assert probe(tall, tall, LABELS) == Leak()
    assert probe(X, X, LABELS).accuracy == 1
    swapped = probe(tall, tall, LABELS.flip(0))  # by its own means, each other's image
    assert swapped.accuracy == 0
