"""Precision, recall, density, coverage: known answers, edges, and memory that is bounded."""

import pytest
import torch
from metrics.watched import Asked, Made

from stillhouse.errors import UserError
from stillhouse.metrics.bank import BLOCK
from stillhouse.metrics.neighbours import Prdc, prdc, radii


def noise(count, dims=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dims, generator=generator)


def plain(real, fake, k):
    """The definitions on whole matrices of distances."""

    def kth(x):
        return torch.cdist(x, x).sort(dim=1).values[:, k]

    real, fake = real.double(), fake.double()
    apart, real_radii, fake_radii = torch.cdist(real, fake), kth(real), kth(fake)
    within = apart < real_radii[:, None]
    return Prdc(
        precision=float(within.any(0).double().mean()),
        recall=float((apart < fake_radii).any(1).double().mean()),
        density=float(within.sum(0).double().mean()) / k,
        coverage=float((apart.amin(1) < real_radii).double().mean()),
    )


@pytest.mark.parametrize("k", [1, 3, 5])
def test_all_four_are_their_definitions(k):
    real, fake = noise(90), 0.8 * noise(70, seed=1)
    assert prdc(real, fake, k=k) == pytest.approx(plain(real, fake, k))


def test_more_rows_than_a_block():
    real, fake = Asked(noise(BLOCK + 300)), Asked(0.8 * noise(2 * BLOCK + 1, seed=1))
    with Made() as made:
        ours = prdc(real, fake)
    assert max(real.most, fake.most) <= BLOCK
    assert made.largest <= BLOCK * (BLOCK + 6)
    assert ours == pytest.approx(plain(real.rows, fake.rows, 5))


def test_radii_are_exact_far_from_the_origin():
    x = noise(300).double() * 1e-2
    near, far = radii(x, 5), radii(x + 1000, 5)
    assert torch.allclose(near, far, rtol=1e-4)
    assert near[0] == pytest.approx(float((x - x[0]).norm(dim=1).sort().values[5]))


def test_equal_distributions_are_near_one_and_distant_ones_at_zero():
    real = noise(2000, 4)
    same = prdc(real, noise(2000, 4, seed=1))
    assert min(same.precision, same.recall, same.coverage) > 0.9
    assert same.density == pytest.approx(1, abs=0.05)
    assert prdc(real, noise(2000, 4, seed=1) + 100) == Prdc(0, 0, 0, 0)


def test_a_lost_half_shows_in_recall_and_coverage():
    real, fake = noise(1000, 4), noise(1000, 4, seed=1)
    real[::2, 0] += 100
    lost = prdc(real, fake)
    assert lost.precision > 0.9
    assert max(lost.recall, lost.coverage) <= 0.5


def test_identical_sets():
    """Each row is inside its own ball and k - 1 others (the k-th is on the edge), on average."""
    x = noise(200)
    assert prdc(x, x.clone(), k=5) == pytest.approx(Prdc(1, 1, 1, 1))


def test_copies_make_balls_of_no_size():
    copies = torch.ones(20, 3) * 0.1
    assert not radii(copies, 5).any()
    assert prdc(copies, copies.clone()) == Prdc(0, 0, 0, 0)  # nothing is inside of a point
    other = prdc(torch.cat([copies, noise(20, 3)]), copies)
    assert all(0 <= value <= 8 for value in other)


@pytest.mark.parametrize("k", [3, 5])
def test_sets_of_few_images(k):
    enough = noise(k + 1)
    assert radii(enough, k) == pytest.approx(torch.cdist(enough, enough).amax(dim=1))
    prdc(enough, noise(k + 1, seed=1), k=k)
    with pytest.raises(UserError, match=f"the samples have {k}: raise the count"):
        prdc(enough, noise(k), k=k)
    with pytest.raises(UserError, match=f"the reference has {k}"):
        prdc(noise(k), enough, k=k)


def test_numbers_that_are_none_are_refused():
    bad = noise(20)
    bad[3, 1] = torch.inf
    for sides in ((noise(20), bad), (bad, noise(20))):
        with pytest.raises(UserError, match="1 of 20 rows of features are not finite"):
            prdc(*sides)
