"""Points of a toy: keyed like images, and distributed like the toy."""

from itertools import islice

import pytest
import torch

from stillhouse.data import PointsConfig
from stillhouse.process import TOYS, Batch


def take(count, **options) -> Batch:
    loader = PointsConfig(labels=True).build(**{"batch": 60, "seed": 3, **options})
    return Batch.cat([item.batch for item in islice(loader, count)])


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_processes_draws_the_same_points(world):
    whole = take(4)
    shares = [take(4, rank=rank, world=world) for rank in range(world)]
    order = torch.cat([share.key for share in shares]).argsort()
    parts = Batch.cat(shares)[order]
    assert torch.equal(parts.data, whole.data)
    assert torch.equal(parts.condition.label, whole.condition.label)


def test_it_goes_on_where_it_was():
    items = list(islice(PointsConfig().build(batch=60, seed=3), 3))
    later = next(iter(PointsConfig().build(batch=60, seed=3, resume=[items[1].state])))
    assert torch.equal(later.batch.data, items[2].batch.data)


@pytest.mark.parametrize("toy", TOYS)
def test_points_are_of_the_toy(toy):
    """Mean and covariance of 20,000 points within five standard errors of the mixture's own."""
    loader = PointsConfig(toy=toy).build(batch=20_000, seed=0, stop=20_000)
    (item,) = loader
    mixture, points = TOYS[toy](), item.batch.data.double()
    mean = mixture.weights @ mixture.means
    spread = mixture.means - mean
    within = (mixture.weights @ mixture.stds**2) * torch.eye(2)
    covariance = spread.T @ (mixture.weights[:, None] * spread) + within
    error = (covariance.diagonal() / 20_000).sqrt()
    assert ((points.mean(0) - mean).abs() < 5 * error).all()
    torch.testing.assert_close(points.T.cov(), covariance, atol=0.03, rtol=0)


def test_labels_are_those_of_their_places():
    batch = take(5)
    upper = batch.data[:, 1] > 0.4  # only the first moon reaches up there
    assert upper.any()
    assert (batch.condition.label[upper] == 0).all()
