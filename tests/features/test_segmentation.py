"""Heads: pixels where they belong, labels that can be learnt, votes that are counted."""

import pytest
import torch
from torch import nn

from stillhouse.errors import UserError
from stillhouse.features.segmentation import (
    HEADS,
    IGNORE,
    Ensemble,
    fit,
    labelled_pixels,
    linear,
    pixel_features,
    pixel_mlp,
)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_pixels_are_read_where_they_are():
    """Maps of two resolutions that hold their own places, in pixels of an 16 x 8 image."""
    x = (torch.arange(16) + 0.0).expand(8, 16)
    y = (torch.arange(4) * 2 + 0.5)[:, None].expand(4, 8)
    pixels = torch.tensor([[0, 1], [9, 4], [15, 6]])
    rows = pixel_features([x[None], y[None]], pixels, (16, 8))
    torch.testing.assert_close(rows, torch.tensor([[0, 1.0], [9, 4.0], [15, 6.0]]))


def test_labelled_pixels_are_the_mask_s_and_never_ignored_ones():
    mask = torch.randint(0, 3, (10, 20), generator=torch.Generator().manual_seed(0))
    mask[3:6] = IGNORE
    pixels, labels = labelled_pixels(mask, 50, key=4)
    assert pixels.shape == (50, 2)
    assert len({tuple(p) for p in pixels.tolist()}) == 50
    assert torch.equal(mask[pixels[:, 1], pixels[:, 0]], labels)
    assert IGNORE not in labels
    again, _ = labelled_pixels(mask, 50, key=4)
    other, _ = labelled_pixels(mask, 50, key=5)
    assert torch.equal(pixels, again)
    assert not torch.equal(pixels, other)
    assert len(labelled_pixels(mask, 1000, key=0)[0]) == 140


def test_an_mlp_has_the_protocol_s_widths():
    head = pixel_mlp(3520, 34)
    widths = [(m.in_features, m.out_features) for m in head if isinstance(m, nn.Linear)]
    assert widths == [(3520, 128), (128, 32), (32, 34)]
    assert [m.num_features for m in head if isinstance(m, nn.BatchNorm1d)] == [128, 32]


def ring(count, seed):
    """Two classes that no line can part: within and beyond a circle."""
    x = noise(count, 2, seed=seed)
    return x, (x.square().sum(1) > 1.4).long()


@pytest.mark.parametrize(("head", "least", "most"), [("mlp", 0.9, 1.0), ("linear", 0.3, 0.7)])
def test_an_mlp_learns_what_a_line_cannot(head, least, most):
    rows, labels = ring(1500, 0)
    test, truth = ring(500, 1)
    found = fit(HEADS[head], rows, labels, 2, members=3, steps=200)
    assert least <= float((found(test) == truth).float().mean()) <= most


def test_a_linear_head_learns_a_line_whatever_the_scale():
    rows, test = noise(800, 5), noise(400, 5, seed=1)
    scale, offset = torch.tensor([1e3, 1.0, 1e-3, 1.0, 1.0]), 50.0
    labels, truth = ((x[:, 0] + 2 * x[:, 2] > 0).long() for x in (rows, test))
    found = fit(linear, rows * scale + offset, labels, 2, steps=400, lr=1e-2)
    assert float((found(test * scale + offset) == truth).float().mean()) > 0.95


class Says(nn.Module):
    def __init__(self, label):
        super().__init__()
        self.label = label

    def forward(self, x):
        return nn.functional.one_hot(torch.full((len(x),), self.label), 4).float()


def test_the_majority_wins_and_the_first_of_equals():
    zero, one = torch.zeros(2), torch.ones(2)
    for labels, winner in (((3, 1, 3), 3), ((2, 1, 2, 1), 1), ((0, 1, 2, 2), 2)):
        assert (
            Ensemble([Says(n) for n in labels], zero, one)(torch.zeros(5, 2)).tolist()
            == [winner] * 5
        )


def test_an_image_is_segmented_line_by_line():
    """The class is the column's half and the row's third; the image is larger than its map."""
    x = torch.linspace(0, 1, 12).expand(18, 12)
    y = torch.linspace(0, 1, 18)[:, None].expand(18, 12)
    maps = [torch.stack([x, y])]

    class Where(nn.Module):
        def forward(self, rows):
            return nn.functional.one_hot((rows[:, 0] > 0.5) + 2 * (rows[:, 1] > 0.4), 4).float()

    found = Ensemble([Where()], torch.zeros(2), torch.ones(2)).segment(maps, (24, 36))
    assert found.shape == (36, 24)
    assert found[0].tolist() == [0] * 12 + [1] * 12
    assert found[:, 0].tolist() == [0] * 15 + [2] * 21


def test_the_same_seed_gives_the_same_heads_and_members_differ():
    rows, labels = ring(200, 0)
    before = torch.random.get_rng_state()
    one, two = (fit(pixel_mlp, rows, labels, 2, members=2, steps=5) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [[head[0].weight for head in found.heads] for found in (one, two)]
    assert torch.equal(weights[0][0], weights[1][0])
    assert not torch.equal(weights[0][0], weights[0][1])
    with pytest.raises(UserError, match="two labelled pixels"):
        fit(pixel_mlp, rows[:1], labels[:1], 2)
