"""Every objective under every coupling: one noise for input and target, chosen once."""

from dataclasses import replace

import pytest
import torch
from objectives.test_contract import (
    OBJECTIVE_CASES,
    NoisesTheTarget,
    NoisesTwice,
    PermutesTheInputOnly,
    PermutesTheTargetOnly,
    check_noise_is_applied_once,
)
from torch import Tensor

from stillhouse.couplings import Assignment, Conditional, Independent, Nearest
from stillhouse.engine.rows import cut
from stillhouse.objectives import (
    Denoising,
    Draws,
    FlowMatching,
    Noised,
    drop_condition,
    log_edges,
    pair_noise,
    validate,
)
from stillhouse.process import PREDICTIONS, Batch, Condition, Gaussian, predictions

DRAWS = Draws(seed=3)
COUPLINGS = {
    "independent": Independent(),
    "assignment": Assignment(),
    "nearest": Nearest(k=4),
    "within-class": Conditional(),
    "soft": Conditional(mode="soft"),
}
coupled = pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
everywhere = pytest.mark.parametrize("objective", OBJECTIVE_CASES.values(), ids=OBJECTIVE_CASES)


# ---------------------------------------------------------------- one noise, input and target


def at_levels(batch: Batch, sigma: Tensor) -> Batch:
    """In float64, so that noise can be recovered."""
    return replace(batch, noise=batch.noise.double(), sigma=sigma.double())


@coupled
@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("objective", [Denoising(), Denoising(weighting="eps"), FlowMatching()])
def test_the_targets_noise_is_the_noise_that_was_chosen(coupling, objective, kind, make_batch):
    batch, pairing = pair_noise(make_batch(20, (2, 3)), coupling, DRAWS)
    check_noise_is_applied_once(objective, kind, at_levels(batch, torch.linspace(0.05, 20, 20)))
    if isinstance(coupling, Assignment):
        usual = DRAWS.normal(batch)
        assert torch.equal(batch.noise, usual[pairing.index])
        assert not torch.equal(batch.noise, usual)


@pytest.mark.parametrize(
    "broken", [PermutesTheInputOnly, PermutesTheTargetOnly, NoisesTwice, NoisesTheTarget]
)
@pytest.mark.parametrize("kind", PREDICTIONS)
def test_the_published_mistakes_are_caught_under_a_coupling(broken, kind, make_batch):
    batch = pair_noise(make_batch(16), Assignment(), DRAWS).batch
    with pytest.raises(AssertionError, match="not close"):
        check_noise_is_applied_once(broken(), kind, at_levels(batch, torch.full((16,), 1.3)))


class AssignsInside(FlowMatching):
    """As copied into many repositories: paired again within the noising, the target is not."""

    def losses(self, denoiser, noised: Noised) -> Tensor:
        index = Assignment()(noised.x0, noised.noise).index
        x = replace(noised, noise=noised.noise[index]).x
        velocity = predictions.from_x0("flow", x, denoiser(x, noised.sigma), noised.sigma)
        return ((velocity - noised.target("flow")) ** 2).flatten(1).mean(1)


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_assignment_inside_the_noising_is_caught(kind, make_batch):
    batch = pair_noise(make_batch(16), Independent(), DRAWS).batch
    with pytest.raises(AssertionError, match="not close"):
        check_noise_is_applied_once(AssignsInside(), kind, at_levels(batch, torch.full((16,), 1.3)))


@coupled
@everywhere
def test_every_objective_takes_every_coupling(coupling, objective, make_batch):
    """Seen through the denoiser: at each level it is called with, the noise is the chosen one."""
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        seen.append((x, sigma))
        return x

    batch = pair_noise(make_batch(32, (2, 3), first=600), coupling, DRAWS).batch
    objective(spy, batch, DRAWS)
    assert seen
    for x, sigma in seen:
        inside = sigma != 1.0  # where a consistency teacher stands at the boundary it is told 1
        recovered = (x - batch.data) / predictions.rows(sigma, x)
        expected = batch.noise.double()
        torch.testing.assert_close(recovered[inside], expected[inside], rtol=0, atol=1e-8)


def test_at_sigma_zero_only_data_is_left(make_batch):
    batch = pair_noise(make_batch(16), Assignment(), DRAWS).batch
    gaps = []
    for sigma in (1.0, 1e-3, 0.0):
        noised = Noised.of(replace(batch, sigma=torch.full((16,), sigma).double()))
        gaps.append(float((noised.x - batch.data).norm()))
    assert gaps[1] == pytest.approx(gaps[0] / 1000)
    assert gaps[2] == 0


# ---------------------------------------------------------------- what stays


@coupled
def test_data_labels_keys_and_levels_stay(coupling, make_batch):
    batch = make_batch(20, (2, 3))
    paired = pair_noise(batch, coupling, DRAWS).batch
    for name in ("data", "condition", "ids", "key", "sigma"):
        assert getattr(paired, name) is getattr(batch, name)
    for objective in OBJECTIVE_CASES.values():
        plain = objective.prepare(batch, DRAWS).sigma
        assert torch.equal(objective.prepare(paired, DRAWS).sigma, plain)


@everywhere
@pytest.mark.filterwarnings("ignore:nothing to swap")
@pytest.mark.parametrize(
    ("coupling", "count"),
    [(Independent(), 12), (Assignment(), 1), (Conditional(), 1), (Nearest(k=1), 12)],
    ids=["independent", "one row", "one row of a class", "nearest of one"],
)
def test_no_choice_is_no_coupling_to_the_bit(objective, coupling, count, make_batch):
    batch, denoiser = make_batch(count), Gaussian(std=0.4)
    state = torch.get_rng_state()
    paired = pair_noise(batch, coupling, DRAWS).batch
    assert torch.equal(torch.get_rng_state(), state)
    plain = objective(denoiser, batch, DRAWS)
    assert torch.equal(objective(denoiser, paired, DRAWS).per_sample, plain.per_sample)


@coupled
def test_the_same_keys_give_the_same_pairing_again(coupling, make_batch):
    """What a resume relies on: nothing is remembered, and other keys give another pairing."""
    first = pair_noise(make_batch(20, first=200), coupling, DRAWS).batch
    pair_noise(make_batch(20), coupling, DRAWS)
    torch.randn(3)
    again = pair_noise(make_batch(20, first=200), coupling, DRAWS).batch
    assert torch.equal(again.noise, first.noise)
    other = pair_noise(make_batch(20, first=200), coupling, Draws(seed=4)).batch
    assert not torch.isclose(other.noise, first.noise).any(1).all()


@coupled
@everywhere
def test_validation_is_the_same_with_and_without(coupling, objective, make_batch):
    batch, edges = make_batch(20), log_edges(0.01, 50, 5)
    paired = pair_noise(batch, coupling, DRAWS).batch
    curves = [validate(objective, Gaussian(std=0.5), [b], DRAWS, edges) for b in (batch, paired)]
    assert torch.equal(curves[0].total, curves[1].total)


# ---------------------------------------------------------------- the pool


@everywhere
def test_the_pool_is_the_whole_batch_whatever_the_micro_batches(objective, make_batch):
    batch, denoiser = make_batch(24, first=480), Gaussian(std=0.4)
    whole = objective.prepare(pair_noise(batch, Assignment(), DRAWS).batch, DRAWS)
    expected = objective(denoiser, whole, DRAWS).per_sample
    losses = [objective(denoiser, rows, DRAWS).per_sample for rows in cut(whole, 5)]
    torch.testing.assert_close(torch.cat(losses), expected, rtol=1e-12, atol=0)
    early = [pair_noise(rows, Assignment(), DRAWS) for rows in cut(batch, 5)]
    split = torch.cat([part.batch.noise for part in early])
    assert not torch.equal(split, whole.noise)  # the mistake: cut first, pair afterwards
    near = [float((batch.data - noise).norm()) for noise in (whole.noise, split)]
    assert near[0] < near[1]


def test_a_dropped_condition_is_a_class_of_its_own(make_batch):
    null = Condition(label=torch.tensor([9]))
    batch = drop_condition(make_batch(60), null, 0.4, DRAWS)
    labels = batch.condition.label
    index = pair_noise(batch, Conditional(), DRAWS).pairing.index
    assert torch.equal(labels[index], labels)
    dropped = labels == 9
    assert 10 < int(dropped.sum()) < 50
    classes = batch.key % 5
    assert bool((classes[index] != classes)[dropped].any())  # of any class, as the network sees it


def test_noise_that_is_there_is_not_chosen_again(make_batch):
    batch = pair_noise(make_batch(8), Assignment(), DRAWS).batch
    with pytest.raises(ValueError, match="has noise already"):
        pair_noise(batch, Assignment(), DRAWS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_drawn_in_float32_whatever_the_data(dtype, make_batch):
    batch = make_batch(12).to(dtype=dtype)
    for coupling in COUPLINGS.values():
        assert pair_noise(batch, coupling, DRAWS).batch.noise.dtype == torch.float32
