"""Guidance takes denoisers and is one."""

import pytest
import torch

from stillhouse.process import TOYS, Condition, Gaussian
from stillhouse.solvers import Counted, autoguidance, classifier_free, sample_heun

X = torch.linspace(-2, 2, 12, dtype=torch.float64).view(6, 2)
SIGMA = torch.tensor(0.8, dtype=torch.float64)
LABELS = Condition(label=torch.tensor([0, 1, 2, 3, 4, 5]))
NULL = Condition(label=torch.tensor([7]))


@pytest.mark.parametrize("joined", [True, False])
def test_classifier_free_extrapolates_from_the_null_condition(joined):
    ring = TOYS["ring"]()
    guided = classifier_free(ring, NULL, 3.0, joined=joined)
    wanted, empty = ring(X, SIGMA, LABELS), ring(X, SIGMA, NULL.expand(6))
    torch.testing.assert_close(guided(X, SIGMA, LABELS), empty + 3.0 * (wanted - empty))


def test_weight_one_is_the_conditional_denoiser_at_no_extra_cost():
    counted = Counted(TOYS["ring"]())
    guided = classifier_free(counted, NULL, 1.0, joined=False)
    assert torch.equal(guided(X, SIGMA, LABELS), TOYS["ring"]()(X, SIGMA, LABELS))
    assert counted.evaluations == 1


def test_outside_its_interval_the_guide_is_not_evaluated():
    counted = Counted(TOYS["ring"]())
    guided = classifier_free(counted, NULL, 4.0, (0.3, 2.0), joined=False)
    for sigma, evaluations in ((0.3, 1), (0.31, 3), (2.0, 5), (2.1, 6)):
        guided(X, torch.tensor(sigma, dtype=torch.float64), LABELS)
        assert counted.evaluations == evaluations


@pytest.mark.parametrize("joined", [True, False])
def test_mixed_levels_in_one_batch_are_guided_per_sample(joined):
    sigma = torch.tensor([0.1, 0.5, 1.0, 1.5, 2.5, 9.0], dtype=torch.float64)
    guided = classifier_free(TOYS["ring"](), NULL, 4.0, (0.3, 2.0), joined=joined)
    together = guided(X, sigma, LABELS)
    apart = torch.cat([guided(X[i : i + 1], sigma[i], LABELS[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(together, apart)


def test_autoguidance_pushes_away_from_the_worse_model():
    good, bad = Gaussian(std=0.5), Gaussian(std=0.8)
    guided = autoguidance(good, bad, 2.0)
    expected = 2 * good(X, SIGMA) - bad(X, SIGMA)
    torch.testing.assert_close(guided(X, SIGMA), expected)


def test_guided_denoisers_sample_and_nest():
    ring = TOYS["ring"]()
    inner = classifier_free(ring, NULL, 2.0, joined=False)
    outer = autoguidance(inner, ring, 1.5, (0.1, 5.0))
    x = 10 * torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double()
    y = sample_heun(outer, x, torch.tensor([10.0, 2.0, 0.5, 0.05, 0.0]), LABELS)
    assert torch.isfinite(y).all()
    plain, empty = ring(X, SIGMA, LABELS), ring(X, SIGMA, NULL.expand(6))
    inside = empty + 2.0 * (plain - empty)
    torch.testing.assert_close(outer(X, SIGMA, LABELS), plain + 1.5 * (inside - plain))


def test_fields_that_have_no_null_keep_their_values():
    """Sizes and step counts belong to the sample, guided or not."""
    seen = []

    def spy(x, sigma, cond=None):
        seen.append(cond)
        return x

    sizes = torch.arange(12.0).view(6, 2)
    cond = Condition(label=torch.arange(6), control=sizes)
    classifier_free(spy, NULL, 2.0)(X, SIGMA, cond)
    assert torch.equal(seen[0].control, torch.cat([sizes, sizes]))
    assert seen[0].label.tolist() == [0, 1, 2, 3, 4, 5] + [7] * 6


def test_a_null_condition_that_replaces_nothing_is_refused():
    with pytest.raises(ValueError, match="none of the condition's fields"):
        classifier_free(TOYS["ring"](), Condition(pooled=torch.zeros(1, 2)), 2.0)(X, SIGMA, LABELS)


def test_a_missing_condition_is_named():
    with pytest.raises(ValueError, match="needs a condition"):
        classifier_free(TOYS["ring"](), NULL, 2.0)(X, SIGMA, None)
