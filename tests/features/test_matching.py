"""Correspondence: images of known displacement, sizes that are not square, the soft answer."""

import pytest
import torch
from torch.nn.functional import interpolate

from stillhouse.features.matching import Window, match, similarity


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_an_image_matches_itself():
    maps = [noise(32, 8, 12)]
    points = torch.tensor([[0.0, 0.0], [17.0, 30.0], [45.0, 29.0], [5.0, 2.0]])
    found = match(maps, maps, points, ((48, 32), (48, 32)))
    torch.testing.assert_close(found, points.double())


def test_a_shift_is_found_in_both_directions():
    """The target shows the source 3 cells to the right and 2 down: cells of 4 x 4 pixels."""
    source = noise(16, 10, 14)
    target = torch.roll(source, (2, 3), (1, 2))
    points = torch.tensor([[9.5, 13.5], [21.5, 5.5]])  # middles of cells
    found = match([source], [target], points, ((56, 40), (56, 40)))
    assert (found - points - torch.tensor([12.0, 8.0])).abs().max() <= 0.5


def test_images_of_other_shapes_than_the_square_that_the_network_saw():
    """A square map of a 200 x 100 source and an 80 x 160 target: each axis has its own scale."""
    source = noise(24, 10, 10)
    points = torch.tensor([[29.5, 74.5], [149.5, 14.5]])  # middles of cells (1, 7) and (7, 1)
    found = match([source], [source], points, ((200, 100), (80, 160)))
    expected = torch.tensor([[11.5, 119.5], [59.5, 23.5]]).double()
    assert (found - expected).abs().max() <= 0.5


def test_similarity_is_the_cosine_of_enlarged_features():
    source, target = noise(100, 5, 4), noise(100, 6, 3, seed=1)
    points = torch.tensor([[7.0, 2.0], [0.0, 9.0]])
    sizes = ((16, 10), (9, 12))
    found = similarity([source], [target], points, sizes)
    large = interpolate(source[None], (10, 16), mode="bilinear")[0]
    wanted = torch.stack([large[:, 2, 7], large[:, 9, 0]])
    other = interpolate(target[None], (12, 9), mode="bilinear")[0]
    expected = torch.cosine_similarity(wanted[:, :, None, None], other[None], dim=1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_points_may_be_on_another_device_than_the_maps():
    """Annotations are read on the host, maps lie on a GPU, for which the meta device stands in."""
    maps = [torch.empty(8, 5, 4, device="meta"), torch.empty(16, 10, 8, device="meta")]
    points, sizes = torch.tensor([[7.0, 2.0], [0.0, 9.0]], dtype=torch.float64), ((16, 10), (9, 12))
    alike = similarity(maps, maps, points, sizes)
    assert (alike.shape, alike.device.type) == ((2, 12, 9), "meta")
    found = match(maps, maps, points, sizes)
    assert (found.shape, found.device.type) == ((2, 2), "meta")


def test_several_activations_count_alike_whatever_their_scale_and_resolution():
    one, other = noise(8, 6, 6), noise(8, 12, 12, seed=3)
    points, sizes = torch.tensor([[20.0, 5.0]]), ((24, 24), (24, 24))
    both = similarity([1000 * one, other], [1000 * one, other], points, sizes)
    apart = [similarity([m], [m], points, sizes) for m in (one, other)]
    torch.testing.assert_close(both, sum(apart) / 2, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="in pairs"):
        similarity([one], [one, other], points, sizes)


def test_a_soft_answer_lies_between_pixels_and_within_its_window():
    """Two pixels equally alike: the hard answer is one of them, the soft one is in the middle."""
    target = torch.zeros(2, 5, 9)
    target[1] = 1
    target[:, 2, 3:5] = torch.tensor([1.0, 0.0])[:, None]
    source = torch.tensor([1.0, 0.0])[:, None, None].expand(2, 4, 4)
    points, sizes = torch.tensor([[1.0, 1.0]]), ((4, 4), (9, 5))
    assert match([source], [target], points, sizes).tolist() == [[3, 2]]
    soft = match([source], [target], points, sizes, Window(2, 0.01))
    torch.testing.assert_close(soft, torch.tensor([[3.5, 2.0]]).double(), atol=1e-6, rtol=0)
    assert match([source], [target], points, sizes, Window(0)).tolist() == [[3, 2]]
    # Far away there is a second one, which the window leaves out.
    target[:, 2, 8] = torch.tensor([1.0, 0.0])
    again = match([source], [target], points, sizes, Window(2, 0.01))
    torch.testing.assert_close(again, soft, atol=1e-6, rtol=0)


def test_a_window_at_the_border():
    target = noise(4, 3, 3)
    points = torch.tensor([[0.0, 0.0], [2.0, 2.0]])
    found = match([target], [target], points, ((3, 3), (3, 3)), Window(1, 1e-3))
    torch.testing.assert_close(found, points.double(), atol=1e-3, rtol=0)
