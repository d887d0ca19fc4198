"""Guidance takes denoisers and is one."""

import pytest
import torch

from stillhouse.process import TOYS, Condition, Gaussian
from stillhouse.solvers import Counted, autoguidance, classifier_free, sample_heun
from stillhouse.solvers.guidance import TwoTerm

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


# ---------------------------------------------------------------- two terms

FRAMED = Condition(label=LABELS.label, control=torch.arange(12.0).double().view(6, 2) / 7)
NOTHING = Condition(label=NULL.label, control=torch.full((1, 2), -1.0).double())
# (weight, control) and the terms of weight other than 0: D(c, s), D(0, s), D(0, 0)
CASES = {
    (3.0, 0.4): "cs s -",
    (3.0, 1.0): "cs -",
    (3.0, 0.0): "s -",
    (1.0, 0.4): "cs s",
    (1.0, 1.0): "cs",
    (1.0, 0.0): "s",
    (0.0, 0.4): "-",
    (0.0, 1.0): "-",
    (-1.5, 2.0): "cs s -",
}
every_case = pytest.mark.parametrize(("weight", "control"), CASES)


def framed_ring(x, sigma, cond=None):
    """Labels move it as the ring's do, control in its own way; every channel is moved."""
    away = cond.control.to(x).sum(1, keepdim=True)
    return TOYS["ring"]()(x, sigma, cond) + torch.sin(away) * torch.tensor([1.0, 0.5]).to(x)


def by_the_formula(weight, control, x=X, sigma=SIGMA, cond=FRAMED):
    null = NOTHING.expand(len(x))
    both = framed_ring(x, sigma, cond)
    bare = framed_ring(x, sigma, Condition(label=cond.label, control=null.control))
    empty = framed_ring(x, sigma, null)
    return weight * (control * both + (1 - control) * bare) + (1 - weight) * empty


@every_case
@pytest.mark.parametrize("joined", [True, False])
def test_two_terms_are_weighed_as_in_the_formula(weight, control, joined):
    found = TwoTerm(framed_ring, NOTHING, weight, control, joined=joined)(X, SIGMA, FRAMED)
    torch.testing.assert_close(found, by_the_formula(weight, control))
    assert found.shape == X.shape


@every_case
def test_terms_of_no_weight_are_not_evaluated_and_the_others_share_a_batch(weight, control):
    seen = []

    def spy(x, sigma, cond=None):
        kept = {(True, True): "cs", (True, False): "s", (False, False): "-"}
        rows = zip((cond.label != 7).tolist(), (cond.control[:, 0] != -1).tolist(), strict=True)
        seen.append(" ".join(dict.fromkeys(kept[row] for row in rows)))
        return framed_ring(x, sigma, cond)

    TwoTerm(spy, NOTHING, weight, control)(X, SIGMA, FRAMED)
    assert seen == [CASES[weight, control]]
    seen.clear()
    TwoTerm(spy, NOTHING, weight, control, joined=False)(X, SIGMA, FRAMED)
    assert seen == CASES[weight, control].split()


@pytest.mark.parametrize("interval", [(0.0, float("inf")), (0.3, 2.0)])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("weight", [0.5, 1.0, 4.0])
def test_whole_control_is_classifier_free_guidance_to_the_bit(interval, joined, weight):
    sigma = torch.tensor([0.1, 0.5, 1.0, 1.5, 2.5, 9.0], dtype=torch.float64)
    for level in (SIGMA, sigma):
        found = TwoTerm(framed_ring, NOTHING, weight, 1.0, interval, joined)(X, level, FRAMED)
        plain = classifier_free(framed_ring, NOTHING, weight, interval, joined=joined)
        assert torch.equal(found, plain(X, level, FRAMED))


def test_both_weights_one_is_the_denoiser_to_the_bit():
    found = TwoTerm(framed_ring, NOTHING, 1.0, 1.0)(X, SIGMA, FRAMED)
    assert torch.equal(found, framed_ring(X, SIGMA, FRAMED))


@pytest.mark.parametrize(("weight", "control"), [(4.0, 0.3), (0.0, 0.3), (4.0, 0.0)])
def test_outside_its_interval_two_term_guidance_leaves_the_model_to_itself(weight, control):
    counted = Counted(framed_ring)
    guided = TwoTerm(counted, NOTHING, weight, control, (0.3, 2.0))
    for level in (0.3, 2.1):
        sigma = torch.tensor(level, dtype=torch.float64)
        assert torch.equal(guided(X, sigma, FRAMED), framed_ring(X, sigma, FRAMED))
    assert counted.evaluations == 2
    sigma = torch.tensor([0.1, 0.5, 1.0, 1.5, 2.5, 9.0], dtype=torch.float64)
    inside = (sigma > 0.3) & (sigma <= 2.0)
    formula = by_the_formula(weight, control, sigma=sigma)
    wanted = torch.where(inside[:, None], formula, framed_ring(X, sigma, FRAMED))
    torch.testing.assert_close(guided(X, sigma, FRAMED), wanted)


def test_two_term_guidance_is_a_denoiser_and_keeps_what_has_no_null():
    seen = []

    def spy(x, sigma, cond=None):
        seen.append(cond.steps)
        return framed_ring(x, sigma, cond)

    steps = torch.arange(6)
    cond = Condition(label=FRAMED.label, control=FRAMED.control, steps=steps)
    x = 10 * torch.randn(6, 2, generator=torch.Generator().manual_seed(0)).double()
    y = sample_heun(TwoTerm(spy, NOTHING, 2.0, 0.5), x, torch.tensor([10.0, 1.0, 0.0]), cond)
    assert torch.isfinite(y).all()
    assert all(torch.equal(found, steps.repeat(3)) for found in seen)


def test_two_terms_need_the_nothing_of_both():
    with pytest.raises(ValueError, match="needs a condition"):
        TwoTerm(framed_ring, NOTHING, 2.0, 0.5)(X, SIGMA)
    with pytest.raises(ValueError, match="none of the condition's control"):
        TwoTerm(framed_ring, NULL, 2.0, 0.5)(X, SIGMA, FRAMED)
    with pytest.raises(ValueError, match="none of the condition's control"):
        TwoTerm(framed_ring, NOTHING, 2.0, 0.5)(X, SIGMA, LABELS)
    bare = Condition(control=NOTHING.control)
    with pytest.raises(ValueError, match="none of the condition's fields"):
        TwoTerm(framed_ring, bare, 2.0, 0.5)(X, SIGMA, FRAMED)
    alone = TwoTerm(framed_ring, bare, 1.0, 0.5)(X, SIGMA, FRAMED)  # guides by control only
    torch.testing.assert_close(alone, by_the_formula(1.0, 0.5))
