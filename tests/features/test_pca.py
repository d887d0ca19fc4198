"""Streaming components are those of all images at once."""

import pytest
import torch

from stillhouse.errors import UserError
from stillhouse.features.pca import StreamingPCA


def images(count=12, channels=10, height=6, width=4):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(channels, channels, generator=generator) * torch.logspace(0, -2, channels)
    raw = torch.randn(count, channels, height, width, generator=generator)
    return torch.einsum("dc,bchw->bdhw", mixing, raw) + 5


def streamed(*batches):
    pca = StreamingPCA(batches[0].shape[1])
    for batch in batches:
        pca.update(batch)
    return pca


@pytest.mark.parametrize("cuts", [(12,), (1, 11), (5, 4, 3)])
def test_any_split_gives_the_components_of_all(cuts):
    features = images()
    rows = features.permute(0, 2, 3, 1).flatten(0, 2).double()
    centred = rows - rows.mean(0)
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    found = streamed(*features.split(cuts)).components(4)
    expected = values[:4] ** 2 / (len(rows) - 1)
    torch.testing.assert_close(found.variances, expected, rtol=1e-9, atol=0)
    aligned = (found.directions * directions[:4]).sum(1).abs()
    torch.testing.assert_close(aligned, torch.ones_like(aligned), rtol=0, atol=1e-9)
    torch.testing.assert_close(found.mean, rows.mean(0), rtol=1e-9, atol=0)


def test_two_halves_add_up():
    features = images()
    whole = streamed(features).components(3)
    halves = (streamed(features[:7]) + streamed(features[7:])).components(3)
    torch.testing.assert_close(halves.directions, whole.directions, rtol=0, atol=1e-9)


def test_maps_are_projected_cell_by_cell():
    features = images()
    found = streamed(features).components(3)
    maps = found.project(features)
    assert maps.shape == (12, 3, 6, 4)
    assert maps.dtype == torch.float32
    rows = found.project(features.permute(0, 2, 3, 1).flatten(0, 2))
    torch.testing.assert_close(maps.permute(0, 2, 3, 1).flatten(0, 2), rows, rtol=0, atol=1e-4)
    torch.testing.assert_close(rows.var(0).double(), found.variances, rtol=1e-4, atol=0)
    assert float(rows.mean(0).abs().max()) < 1e-3


def test_directions_have_one_sign_only():
    found = streamed(images()).components(10).directions
    largest = found.gather(1, found.abs().argmax(1, keepdim=True))
    assert bool((largest > 0).all())


def test_too_many_components_are_refused():
    with pytest.raises(UserError, match="up to 10 components, not 11"):
        streamed(images()).components(11)
    with pytest.raises(UserError, match="3 cells of 10 channels have up to 2"):
        streamed(torch.randn(3, 10)).components(3)
    with pytest.raises(ValueError, match="4 channels, not 10"):
        streamed(images()).update(torch.randn(2, 4))
