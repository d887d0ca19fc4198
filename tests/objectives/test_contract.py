"""What every objective promises: noise applied once, keyed randomness, precision, gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stillhouse.objectives import (
    OBJECTIVES,
    WEIGHTINGS,
    Constants,
    Denoising,
    Draws,
    EasyConsistency,
    FlowMatching,
    ImprovedConsistency,
    Noised,
    Objective,
    drop_condition,
)
from stillhouse.process import (
    EDM,
    PREDICTIONS,
    VP,
    Batch,
    Condition,
    Denoiser,
    Flow,
    Gaussian,
    NetworkDenoiser,
    alphas_cumprod,
    betas,
    keyed_normal,
    predictions,
)

DRAWS = Draws(seed=3)
SCALINGS = {
    "x0": EDM(),
    "edm": EDM(),
    "eps": VP(alphas_cumprod(betas("linear"))),
    "v": VP(alphas_cumprod(betas("linear"))),
    "flow": Flow(),
}
OBJECTIVE_CASES: dict[str, Objective] = {
    **{f"denoising/{name}": Denoising(weighting=name) for name in WEIGHTINGS},
    "flow": FlowMatching(),
    "consistency": ImprovedConsistency(total_images=1000, first_steps=4, last_steps=64),
    "easy-consistency": EasyConsistency(total_images=1000),
}
everywhere = pytest.mark.parametrize("objective", OBJECTIVE_CASES.values(), ids=OBJECTIVE_CASES)


def test_every_objective_of_the_package_is_here():
    assert {type(objective) for objective in OBJECTIVE_CASES.values()} == set(OBJECTIVES.values())


class Spy(nn.Module):
    """A network that remembers its inputs and answers what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.answer: Tensor | None = None

    def forward(self, x: Tensor, time: Tensor, cond: Condition | None) -> Tensor:
        self.seen.append(x)
        return torch.zeros_like(x) if self.answer is None else self.answer


# ------------------------------------------------- noise enters once, input and target alike


def check_noise_is_applied_once(objective: Objective, kind: str, batch: Batch) -> None:
    """The input holds the batch's own noise, and the loss is 0 for exactly that noise's target."""
    spy, scaling = Spy(), SCALINGS[kind]
    denoiser = NetworkDenoiser(spy, scaling, kind)
    sigma = objective(denoiser, batch, DRAWS).sigma
    x = spy.seen[-1] / predictions.rows(scaling.input_scale(sigma), batch.data)
    recovered = (x - batch.data) / predictions.rows(sigma, x)
    torch.testing.assert_close(recovered, batch.noise, rtol=0, atol=1e-9)
    spy.answer = predictions.target(kind, batch.data, recovered, sigma, denoiser.scaling.sigma_data)
    again = objective(denoiser, batch, DRAWS).per_sample
    torch.testing.assert_close(again, torch.zeros_like(again), rtol=0, atol=1e-9)


def paired(batch: Batch) -> Batch:
    """As a coupling leaves it: the keyed noise, permuted."""
    noise = keyed_normal(batch.data.shape[1:], batch.key, seed=3).to(batch.data)
    return replace(batch, noise=noise[torch.randperm(len(noise), generator=_generator())])


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("objective", [Denoising(), Denoising(weighting="eps"), FlowMatching()])
def test_the_targets_noise_is_the_inputs_noise(objective, kind, make_batch):
    batch = replace(paired(make_batch(16, (2, 3))), sigma=torch.linspace(0.05, 20, 16).double())
    check_noise_is_applied_once(objective, kind, batch)


class PermutesTheInputOnly(FlowMatching):
    """The published mistake: noise permuted inside q_sample, the target keeps the old order."""

    def losses(self, denoiser: Denoiser, noised: Noised) -> Tensor:
        x = replace(noised, noise=noised.noise.roll(1, 0)).x
        velocity = predictions.from_x0("flow", x, denoiser(x, noised.sigma), noised.sigma)
        return ((velocity - noised.target("flow")) ** 2).flatten(1).mean(1)


class PermutesTheTargetOnly(FlowMatching):
    """The same mistake from the other side."""

    def losses(self, denoiser: Denoiser, noised: Noised) -> Tensor:
        other = replace(noised, noise=noised.noise.roll(1, 0))
        velocity = predictions.from_x0(
            "flow", noised.x, denoiser(noised.x, noised.sigma), noised.sigma
        )
        return ((velocity - other.target("flow")) ** 2).flatten(1).mean(1)


class NoisesTwice(Denoising):
    """The other published mistake: the data is replaced by already noised data."""

    def losses(self, denoiser: Denoiser, noised: Noised) -> Tensor:
        return super().losses(denoiser, replace(noised, x0=noised.x))


class NoisesTheTarget(Denoising):
    """Its other half: the input is right, and the target is the noised data."""

    def losses(self, denoiser: Denoiser, noised: Noised) -> Tensor:
        error = denoiser(noised.x, noised.sigma) - noised.x
        return (error**2).flatten(1).mean(1)


@pytest.mark.parametrize(
    "broken", [PermutesTheInputOnly, PermutesTheTargetOnly, NoisesTwice, NoisesTheTarget]
)
@pytest.mark.parametrize("kind", PREDICTIONS)
def test_the_published_mistakes_are_caught(broken, kind, make_batch):
    batch = replace(paired(make_batch(16)), sigma=torch.full((16,), 1.3).double())
    with pytest.raises(AssertionError, match="not close"):
        check_noise_is_applied_once(broken(), kind, batch)


@pytest.mark.parametrize("name", ["consistency", "easy-consistency"])
def test_teacher_and_student_see_the_same_noise(name, make_batch):
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        seen.append((x, sigma))
        return x

    batch = paired(make_batch(32, (2, 3), first=600))
    OBJECTIVE_CASES[name](spy, batch, DRAWS)
    assert len(seen) == 2
    assert (seen[0][1] < seen[1][1]).any()
    for x, sigma in seen:
        inside = sigma != 1.0  # where the teacher stands at the boundary it is told 1
        recovered = (x - batch.data) / predictions.rows(sigma, x)
        torch.testing.assert_close(recovered[inside], batch.noise[inside], rtol=0, atol=1e-8)


@everywhere
def test_noise_of_the_batch_is_used_and_vanishes_at_sigma_zero(objective, make_batch):
    batch = make_batch(8)
    usual = objective(Gaussian(std=0.7), batch, DRAWS)
    other = objective(Gaussian(std=0.7), paired(batch), DRAWS)
    assert torch.equal(usual.sigma, other.sigma)
    assert not torch.allclose(usual.per_sample, other.per_sample)
    noised = Noised(batch.data, torch.ones_like(batch.data), torch.zeros(8).double())
    assert torch.equal(noised.x, batch.data)


# ---------------------------------------------------------------- randomness


@everywhere
@pytest.mark.parametrize("size", [1, 5, 24])
def test_a_samples_loss_does_not_depend_on_the_split(objective, size, make_batch):
    batch, denoiser = make_batch(24, first=480), Gaussian(std=0.4)
    whole = objective(denoiser, batch, DRAWS)
    parts = [objective(denoiser, batch[i : i + size], DRAWS) for i in range(0, 24, size)]
    assert torch.equal(torch.cat([part.sigma for part in parts]), whole.sigma)
    per_sample = torch.cat([part.per_sample for part in parts])
    torch.testing.assert_close(per_sample, whole.per_sample, rtol=1e-12, atol=0)
    assert float(whole.total) == pytest.approx(float(per_sample.mean()))


@everywhere
def test_seed_and_key_both_matter_and_the_global_generator_does_not(objective, make_batch):
    denoiser, batch = Gaussian(std=0.4), make_batch(8)
    state = torch.get_rng_state()
    loss = objective(denoiser, batch, DRAWS)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1234)
    assert torch.equal(objective(denoiser, batch, DRAWS).per_sample, loss.per_sample)
    for other in (
        objective(denoiser, batch, Draws(seed=4)),
        objective(denoiser, replace(batch, key=batch.key + 8), DRAWS),
    ):
        assert not torch.isclose(other.per_sample, loss.per_sample).any()


@everywhere
def test_what_the_prefetch_draws_is_what_the_objective_would_have_drawn(objective, make_batch):
    batch, denoiser = make_batch(12, first=700), Gaussian(std=0.4)
    early = objective.prepare(batch, DRAWS)
    assert torch.equal(early.noise, keyed_normal((8,), batch.key, seed=3))
    assert early.sigma.dtype == torch.float64
    again = objective.prepare(early, Draws(seed=5))
    assert again.noise is early.noise
    usual = objective(denoiser, batch, DRAWS)
    assert torch.equal(objective(denoiser, early, DRAWS).per_sample, usual.per_sample)
    # The prefetch may hand over float32 levels: a pair of levels stays the same pair.
    rounded = objective(denoiser, replace(early, sigma=early.sigma.float()), DRAWS)
    torch.testing.assert_close(rounded.per_sample, usual.per_sample, rtol=1e-2, atol=1e-6)


def test_a_batch_without_key_needs_noise_and_sigma(make_batch):
    batch = replace(make_batch(4), key=None)
    with pytest.raises(ValueError, match=r"Batch\.key"):
        Denoising()(Gaussian(), batch, DRAWS)
    full = replace(batch, noise=torch.randn(4, 8), sigma=torch.ones(4))
    assert Denoising()(Gaussian(), full, DRAWS).per_sample.shape == (4,)
    with pytest.raises(ValueError, match="images seen"):
        EasyConsistency(total_images=10)(Gaussian(), full, DRAWS)


def test_noise_of_another_shape_is_refused(make_batch):
    full = replace(make_batch(4), noise=torch.randn(1, 8), sigma=torch.ones(4))
    with pytest.raises(ValueError, match=r"\(4, 8\) needs noise of its shape"):
        Denoising()(Gaussian(), full, DRAWS)


# ---------------------------------------------------------------- precision and gradients


def small_denoiser(dtype: torch.dtype = torch.float32) -> NetworkDenoiser:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))

        def forward(self, x: Tensor, time: Tensor, cond: Condition | None) -> Tensor:
            return self.layers(torch.cat([x, time[:, None].to(x)], 1))

    return NetworkDenoiser(Small().to(dtype), EDM(), "edm")


@everywhere
def test_losses_are_float32_under_bfloat16(objective, make_batch):
    batch, denoiser = make_batch(64, dtype=torch.float32, first=300), small_denoiser()
    exact = objective(denoiser, batch, DRAWS)
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(denoiser, batch.to(dtype=torch.bfloat16), DRAWS)
    assert loss.per_sample.dtype == loss.total.dtype == torch.float32
    loss.total.backward()
    gradients = [p.grad for p in denoiser.parameters()]
    assert all(g is not None and torch.isfinite(g).all() and g.any() for g in gradients)
    if isinstance(objective, Denoising) and objective.weighting == "edm":
        assert loss.total.item() == pytest.approx(exact.total.item(), rel=0.02)


@everywhere
def test_the_gradient_is_the_derivative_of_the_student_alone(objective, make_batch):
    """By finite differences of the gain of a denoiser; the teacher's evaluation stays put."""
    batch, exact = make_batch(16, first=500), Gaussian(std=0.7)
    gain = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)

    def loss(step: float = 0.0) -> Tensor:
        def denoiser(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
            moved = gain + step if torch.is_grad_enabled() else gain
            return moved * exact(x, sigma)

        return objective(denoiser, batch, DRAWS).total

    (gradient,) = torch.autograd.grad(loss(), gain)
    slope = (loss(1e-7) - loss(-1e-7)).detach() / 2e-7
    torch.testing.assert_close(gradient, slope, rtol=1e-5, atol=1e-7)


def test_the_condition_reaches_the_denoiser(make_batch):
    seen = []

    def denoiser(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        seen.append(cond.label)
        return x

    for objective in OBJECTIVE_CASES.values():
        objective(denoiser, make_batch(4), DRAWS)
    assert all(label.tolist() == [0, 1, 2, 3] for label in seen)


# ---------------------------------------------------------------- condition dropout


def test_conditions_are_dropped_by_key_at_their_rate(make_batch):
    batch, null = make_batch(4000), Condition(label=torch.tensor([-1]))
    dropped = drop_condition(batch, null, 0.1, DRAWS).condition.label < 0
    assert float(dropped.double().mean()) == pytest.approx(0.1, abs=4 * (0.09 / 4000) ** 0.5)
    part = drop_condition(batch[17:40], null, 0.1, DRAWS).condition.label < 0
    assert torch.equal(part, dropped[17:40])
    twice = drop_condition(drop_condition(batch, null, 0.1, DRAWS), null, 0.1, DRAWS)
    assert torch.equal(twice.condition.label < 0, dropped)
    assert torch.equal(drop_condition(batch, null, 0.0, DRAWS).condition.label, batch.key % 5)
    assert (drop_condition(batch, null, 1.0, DRAWS).condition.label == -1).all()


def test_fields_can_be_dropped_independently(make_batch):
    batch = make_batch(2000)
    batch = replace(batch, condition=replace(batch.condition, pooled=torch.ones(2000, 2)))
    null = Condition(label=torch.tensor([-1]), pooled=torch.zeros(1, 2))
    once = drop_condition(batch, null, 0.5, DRAWS, only=["label"])
    both = drop_condition(once, null, 0.5, DRAWS, only=["pooled"])
    assert torch.equal(once.condition.pooled, batch.condition.pooled)
    joint = (both.condition.label < 0) & (both.condition.pooled[:, 0] == 0)
    assert float(joint.double().mean()) == pytest.approx(0.25, abs=0.05)


def test_a_batch_without_condition_is_left_alone(make_batch):
    batch = replace(make_batch(3), condition=None)
    assert drop_condition(batch, Condition(), 0.5, DRAWS) is batch


def test_min_snr_takes_its_gamma():
    objective = Denoising(weighting="min-snr", constants=Constants(gamma=2.0))
    sigma = torch.tensor([0.1, 0.70710678, 2.0], dtype=torch.float64)
    assert objective.weight(sigma).tolist() == pytest.approx([2.0, 2.0, 0.25])
