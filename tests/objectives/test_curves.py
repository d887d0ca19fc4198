"""Validation on independent noise, and the loss per noise level."""

import math
from dataclasses import replace

import pytest
import torch

from stillhouse.objectives import (
    Denoising,
    Draws,
    EasyConsistency,
    FlowMatching,
    ImprovedConsistency,
    LevelCurve,
    Loss,
    log_edges,
    validate,
    validation_loss,
)
from stillhouse.process import Gaussian, levels

DRAWS = Draws(seed=6)
OBJECTIVES = [
    Denoising(),
    FlowMatching(),
    ImprovedConsistency(total_images=1e6),
    EasyConsistency(total_images=1e6),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_validation_ignores_what_a_coupling_left_in_the_batch(objective, make_batch):
    batch, denoiser = make_batch(16), Gaussian(std=0.5)
    plain = validation_loss(objective, denoiser, batch, DRAWS)
    coupled = replace(batch, noise=batch.data.clone(), sigma=torch.ones(16))
    assert torch.equal(
        validation_loss(objective, denoiser, coupled, DRAWS).per_sample, plain.per_sample
    )
    assert not torch.equal(objective(denoiser, batch, DRAWS).per_sample, plain.per_sample)
    assert not plain.per_sample.requires_grad


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_an_image_meets_the_same_validation_noise_at_any_time_of_the_run(objective, make_batch):
    batch, denoiser = make_batch(16), Gaussian(std=0.5)
    first = validation_loss(objective, denoiser, batch, DRAWS)
    later = replace(batch, key=batch.key + 900)[[5, 3]]
    again = validation_loss(objective, denoiser, later, DRAWS)
    torch.testing.assert_close(again.per_sample, first.per_sample[[5, 3]], rtol=1e-12, atol=0)
    without_ids = replace(batch, ids=None)
    by_key = validation_loss(objective, denoiser, without_ids, DRAWS)
    assert not torch.equal(by_key.sigma, first.sigma)


@pytest.mark.parametrize("objective", OBJECTIVES[2:], ids=lambda o: type(o).__name__)
def test_validation_stands_at_the_end_of_a_curriculum(objective, make_batch):
    """So that its losses are comparable over the run; training is at the start of it here."""
    batch, denoiser, draws = make_batch(16), Gaussian(std=0.5), Draws(6, "validation")
    validation = validation_loss(objective, denoiser, batch, DRAWS)
    rows = replace(batch, key=batch.ids)
    assert torch.equal(validation.per_sample, objective.settled()(denoiser, rows, draws).per_sample)
    assert not torch.isclose(
        validation.per_sample, objective(denoiser, rows, draws).per_sample
    ).any()


def test_validation_noise_is_not_training_noise_of_the_same_number(make_batch):
    batch = make_batch(8)
    assert not torch.isclose(Draws(6, "validation").normal(batch), Draws(6).normal(batch)).any()


def test_bins_hold_the_mean_loss_of_their_levels():
    edges = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    sigma = torch.tensor([0.01, 0.5, 1.0, 3.0, 500.0], dtype=torch.float64)
    values = torch.tensor([1.0, 2.0, 4.0, 5.0, 9.0])
    curve = LevelCurve.of(Loss(values.mean(), values, sigma), edges)
    assert curve.count.tolist() == [2, 3]  # what lies outside counts at the ends
    assert curve.mean.tolist() == [1.5, 6.0]
    assert curve.overall == pytest.approx(float(values.mean()))
    empty = LevelCurve.of(Loss(values[:1].mean(), values[:1], sigma[:1]), edges)
    assert empty.mean.isnan().tolist() == [False, True]


def test_curves_add_up_over_batches(make_batch):
    edges, denoiser = log_edges(0.01, 10.0, 6), Gaussian(std=0.5)
    batch = make_batch(60)
    whole = validate(Denoising(), denoiser, [batch], DRAWS, edges)
    parts = validate(Denoising(), denoiser, [batch[:7], batch[7:31], batch[31:]], DRAWS, edges)
    assert torch.equal(parts.count, whole.count)
    torch.testing.assert_close(parts.total, whole.total)
    assert float(whole.count.sum()) == 60
    with pytest.raises(ValueError, match="different bins"):
        whole + validate(Denoising(), denoiser, [batch], DRAWS, log_edges(0.01, 11.0, 6))


def test_the_curve_of_the_exact_denoiser_is_the_closed_form(make_batch):
    edges = log_edges(0.05, 5.0, 5)
    objective = Denoising(levels.LogUniform(0.05, 5.0), "x0")
    curve = validate(objective, Gaussian(std=0.7), [make_batch(1500, (64,))], DRAWS, edges)
    for low, high, mean in zip(edges, edges[1:], curve.mean, strict=False):
        sigma = levels.LogUniform(float(low), float(high)).quantile(torch.linspace(0, 1, 201))
        expected = (sigma**2 * 0.49 / (0.49 + sigma**2)).mean()
        assert float(mean) == pytest.approx(float(expected), rel=0.1)


def test_a_loss_that_is_not_a_number_hides_no_other():
    """One skipped update would blank its noise levels for a whole line of the log."""
    edges = log_edges(0.01, 10.0, 2)
    sigma, values = torch.tensor([0.05, 0.05, 1.0]), torch.tensor([1.0, math.nan, 2.0])
    curve = LevelCurve.of(Loss(values.mean(), values, sigma), edges)
    assert curve.mean.tolist() == [1.0, 2.0]
