"""Consistency training against closed forms.

For data N(m, s^2) the ODE from sigma to sigma_min is linear, so the consistency function is
f = m + g(sigma) (x - m) with g = sqrt((s^2 + sigma_min^2)/(s^2 + sigma^2)). On a grid of levels the
loss pairs x0 + t noise with x0 + r noise; the best g(t) given g(r) is the regression of one on the
other, g(t) = g(r) (s^2 + t r)/(s^2 + t^2), whose product over the grid tends to the above.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from stillhouse.objectives import Consistent, Denoising, Draws, EasyConsistency, ImprovedConsistency
from stillhouse.objectives.consistency import pseudo_huber
from stillhouse.process import EDM, Condition, Gaussian, NetworkDenoiser, predictions

MEAN, STD, SIGMA_MIN, SIGMA_MAX = 0.3, 0.7, 0.02, 10.0
DRAWS = Draws(seed=8)


def improved(steps: int, *, huber: float = 0.00054, **options) -> ImprovedConsistency:
    """iCT on a grid that stays at `steps` steps."""
    bounds = {"sigma_min": SIGMA_MIN, "sigma_max": SIGMA_MAX}
    fixed = {"first_steps": steps, "last_steps": steps, "total_images": 1.0}
    return ImprovedConsistency(**{**fixed, **bounds, "huber": huber, **options})


def sigmas_of(objective: ImprovedConsistency, steps: int) -> Tensor:
    index = torch.arange(steps + 1, dtype=torch.float64)
    return objective.grid(index, torch.tensor(float(steps), dtype=torch.float64))


class Exact:
    """The denoiser whose consistency function is a Gaussian's own, with its gain times `factor`."""

    def __init__(self, factor: float | Tensor = 1.0) -> None:
        self.factor = factor

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        gain = self.factor * ((STD**2 + SIGMA_MIN**2) / (STD**2 + sigma**2)).sqrt()
        landed = MEAN + predictions.rows(gain, x) * (x - MEAN)
        share = predictions.rows(SIGMA_MIN / sigma, x)
        return (landed - share * x) / (1 - share)


# ---------------------------------------------------------------- the parameterisation


@pytest.mark.parametrize("sigma_min", [0.0, 0.002, 0.5])
def test_the_boundary_condition_holds_exactly(sigma_min):
    torch.manual_seed(0)
    network = NetworkDenoiser(nn.Identity(), EDM(), "edm")
    network.network.forward = lambda x, time, cond: 3 * x + time[:, None]  # pyright: ignore
    x = torch.randn(5, 3)
    function = Consistent(network, sigma_min)
    assert torch.equal(function(x, torch.tensor(sigma_min)), x)
    levels = torch.tensor([sigma_min, sigma_min / 2, 1.0, sigma_min, 4.0], dtype=torch.float64)
    mixed = function(x, levels)
    assert torch.equal(mixed[[0, 1, 3]], x[[0, 1, 3]])
    assert torch.isfinite(mixed).all()
    assert not torch.isclose(mixed[[2, 4]], x[[2, 4]]).any()


def test_it_is_the_first_order_step_to_sigma_min_and_exact_for_the_oracle():
    x = torch.linspace(-20, 20, 9, dtype=torch.float64)[:, None]
    for sigma in (0.03, 0.5, 9.0):
        landed = Consistent(Exact(), SIGMA_MIN)(x, torch.tensor(sigma, dtype=torch.float64))
        flow = Gaussian(MEAN, STD).exact_flow(x, sigma, SIGMA_MIN)
        torch.testing.assert_close(landed, flow, rtol=1e-10, atol=1e-10)


def test_it_is_the_published_parameterisation_up_to_sigma_min():
    """c_skip = s^2/((sigma - m)^2 + s^2), c_out = s (sigma - m)/sqrt(s^2 + sigma^2)."""
    s, m = 0.5, 0.002
    sigma = torch.logspace(math.log10(m), 2, 500, dtype=torch.float64)
    skip, scale = predictions.reading("edm", sigma, s)
    published_out = s * (sigma - m) / (s**2 + sigma**2).sqrt()
    torch.testing.assert_close((1 - m / sigma) * scale, published_out, rtol=1e-9, atol=1e-12)
    ours = m / sigma + (1 - m / sigma) * skip
    published_skip = s**2 / ((sigma - m) ** 2 + s**2)
    assert float((ours - published_skip).abs().max()) < 1.01 * m / (4 * s)


def test_pseudo_huber_is_the_published_distance_over_the_root_of_the_dimension():
    torch.manual_seed(0)
    difference = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    c = 0.00054 * math.sqrt(192)
    published = ((difference**2).sum((1, 2, 3)) + c**2).sqrt() - c
    torch.testing.assert_close(pseudo_huber(difference, 0.00054) * math.sqrt(192), published)
    tiny = pseudo_huber(torch.full((1, 4), 1e-9), 0.1)  # float32: no cancellation
    assert float(tiny) == pytest.approx(1e-18 / 0.2, rel=1e-4)
    zero = torch.zeros(1, 4, requires_grad=True)
    pseudo_huber(zero, 1e-6).sum().backward()
    assert not zero.grad.any()


# ---------------------------------------------------------------- closed forms


def test_the_loss_of_the_exact_function_vanishes_with_the_steps(make_batch):
    """What is left is the spread of noise given x, first order in t - r: half per doubling."""
    batch = make_batch(400, (16,), mean=MEAN, std=STD)
    losses = []
    for steps in (40, 80, 160, 320):
        # A wide Huber is the square over 2c: E difference^2/(t - r) is linear in t - r.
        objective = improved(steps, huber=100.0)
        losses.append(float(objective(Exact(), batch, DRAWS).total))
    ratios = [b / a for a, b in itertools.pairwise(losses)]
    assert ratios == pytest.approx([0.5, 0.5, 0.5], abs=0.06)


@pytest.mark.parametrize("huber", [0.00054, 100.0])
def test_the_exact_function_is_where_the_gradient_vanishes(huber, make_batch):
    """Both papers' claim in the limit of small steps: d loss/d gain is 0 at the exact function."""
    batch = make_batch(3000, (16,), mean=MEAN, std=STD)

    def slope(steps: int, exponent: float) -> float:
        power = torch.tensor(exponent, dtype=torch.float64, requires_grad=True)

        def denoiser(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
            gain = ((STD**2 + SIGMA_MIN**2) / (STD**2 + sigma**2)) ** (power / 2 - 0.5)
            return Exact(gain)(x, sigma)

        loss = improved(steps, huber=huber)(denoiser, batch, DRAWS)
        return float(torch.autograd.grad(loss.total, power)[0])

    wrong = [slope(160, 0.9), slope(160, 1.1)]
    assert wrong[0] < 0 < wrong[1]
    assert abs(slope(160, 1.0)) < 0.12 * min(map(abs, wrong))


class Table(nn.Module):
    """A consistency function with one gain per level of a grid, as a denoiser."""

    def __init__(self, sigmas: Tensor, gains: Tensor) -> None:
        super().__init__()
        self.sigmas, self.gains = sigmas, nn.Parameter(gains)

    def forward(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        index = (sigma[:, None] - self.sigmas).abs().argmin(1)
        landed = MEAN + self.gains[index][:, None] * (x - MEAN)
        share = predictions.rows(SIGMA_MIN / sigma, x)
        return (landed - share * x) / (1 - share)


def best_gains(sigmas: Tensor) -> Tensor:
    """The product of regressions (see the top of this file)."""
    r, t = sigmas[:-1], sigmas[1:]
    factors = (STD**2 + t * r) / (STD**2 + t**2)
    return torch.cat([torch.ones(1, dtype=torch.float64), factors.cumprod(0)])


def test_best_gains_tend_to_the_ode():
    sigmas = sigmas_of(improved(4000), 4000)
    exact = ((STD**2 + SIGMA_MIN**2) / (STD**2 + sigmas**2)).sqrt()
    torch.testing.assert_close(best_gains(sigmas), exact, rtol=5e-3, atol=0)


def test_training_a_table_of_gains_reaches_the_closed_form(make_batch):
    steps = 8
    objective = improved(steps)
    sigmas = sigmas_of(objective, steps)
    model = Table(sigmas, torch.full((steps + 1,), 0.5, dtype=torch.float64))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.04)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 250)
    for step in range(250):
        batch = make_batch(48, (32,), mean=MEAN, std=STD, first=48 * step)
        optimiser.zero_grad()
        objective(model, batch, DRAWS).total.backward()
        optimiser.step()
        schedule.step()
    torch.testing.assert_close(
        model.gains.detach()[1:], best_gains(sigmas)[1:], rtol=0.02, atol=0.005
    )


# ---------------------------------------------------------------- the teacher


@pytest.mark.parametrize(
    "objective", [improved(16), EasyConsistency(total_images=100)], ids=["improved", "easy"]
)
def test_no_gradient_flows_through_the_teacher(objective, make_batch):
    """The gradient is that of a student against a constant, written out by hand."""
    batch = objective.prepare(make_batch(32, first=60), DRAWS)
    gain = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    calls = []

    def denoiser(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        out = gain * x
        calls.append((torch.is_grad_enabled(), out.requires_grad, x, sigma))
        return out

    (gradient,) = torch.autograd.grad(objective(denoiser, batch, DRAWS).total, gain)
    assert [(grad, out) for grad, out, _, _ in calls] == [(False, False), (True, True)]
    t = batch.sigma
    r = objective.lower(t, batch.key)
    free = gain.detach().clone().requires_grad_()

    def landed(gain: Tensor, sigma: Tensor) -> Tensor:
        x = batch.data + sigma[:, None] * batch.noise.double()
        return Consistent(lambda x, sigma, cond=None: gain * x, objective.sigma_min)(x, sigma)

    constant = landed(gain, r).detach()
    loss = pseudo_huber(landed(free, t) - constant, objective.huber) / (t - r)
    (expected,) = torch.autograd.grad(loss.mean(), free)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=0)


def test_teacher_and_student_drop_the_same_units(make_batch):
    masks = []

    def denoiser(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        masks.append(nn.functional.dropout(torch.ones_like(x), 0.5))
        return x

    for expected in (2, 4):
        improved(8)(denoiser, make_batch(4), DRAWS)
        assert len(masks) == expected
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[3])  # and the generator has moved on


def test_gradients_survive_autocast_after_the_teachers_pass(make_batch):
    """Autocast keeps cast weights: those cast without gradient must not serve the student."""
    network = nn.Linear(8, 8)
    denoiser = lambda x, sigma, cond=None: network(x).to(x)  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        loss = improved(8)(denoiser, make_batch(4, dtype=torch.float32), DRAWS)
    loss.total.backward()
    assert network.weight.grad is not None
    assert network.weight.grad.any()


# ---------------------------------------------------------------- improved: grid and curriculum


def test_steps_double_over_the_run():
    """K' = K/(log2(1280/10) + 1): eight stages of equal length, 10 to 1280."""
    objective = ImprovedConsistency(total_images=800)
    images = torch.tensor([0, 99, 100, 399, 400, 700, 799, 800, 10**6])
    assert objective.steps(images).tolist() == [10, 10, 20, 80, 160, 1280, 1280, 1280, 1280]
    assert objective.settled().steps(torch.tensor([800])).tolist() == [1280]
    uneven = ImprovedConsistency(total_images=300, first_steps=10, last_steps=50)
    assert uneven.steps(torch.tensor([0, 100, 200, 299])).tolist() == [10, 20, 40, 50]


def test_pairs_are_neighbours_on_the_grid_drawn_by_the_density(make_batch):
    """p(i) ~ erf((ln s_(i+1) - m)/(sqrt(2) d)) - erf((ln s_i - m)/(sqrt(2) d))."""
    objective = ImprovedConsistency(total_images=1e9, sigma_max=80.0)
    batch = make_batch(6000, (1,))
    t = objective.prepare(batch, DRAWS).sigma
    r = objective.lower(t, batch.key)
    sigmas = sigmas_of(objective, 10)
    assert sigmas[0] == 0.002
    assert sigmas[-1] == 80.0
    upper = (t[:, None] == sigmas).double().argmax(1)
    assert torch.equal(sigmas[upper], t)
    assert torch.equal(sigmas[upper - 1], r)
    z = (sigmas.log() + 1.1) / (2 * math.sqrt(2))
    mass = z.erf().diff()
    expected = mass / mass.sum()
    counts = (upper - 1).bincount(minlength=10) / 6000
    assert ((counts - expected).abs() < 4 * (expected / 6000).sqrt() + 1e-3).all()


def test_levels_of_a_batch_follow_each_samples_own_place_in_the_curriculum(make_batch):
    objective = ImprovedConsistency(total_images=80)
    batch = make_batch(20, (1,), first=5)  # the grid doubles between images 9 and 10
    t = objective.prepare(batch, DRAWS).sigma
    for row, steps in ((0, 10), (4, 10), (5, 20), (14, 20), (15, 40)):
        place = objective.place(t[row], torch.tensor(float(steps)))
        assert float(place) == pytest.approx(round(float(place)), abs=1e-9)


def test_a_level_between_the_grids_looks_down_to_the_next():
    objective = improved(8)
    sigmas, images = sigmas_of(objective, 8), torch.zeros(3)
    between = (sigmas[3:6] + sigmas[4:7]) / 2
    assert torch.equal(objective.lower(between, images), sigmas[3:6])
    assert torch.equal(objective.lower(sigmas[3:6].float(), images), sigmas[2:5])


# ---------------------------------------------------------------- easy: ratios and stages


def test_ratios_are_the_published_ones():
    objective = EasyConsistency(total_images=80)
    t = torch.tensor([0.01, 0.5, 2.0, 20.0], dtype=torch.float64)
    for stage in range(8):
        r = objective.lower(t, torch.full((4,), 10 * stage + 3))
        gap = (1 + 8 / (1 + t.exp())) / 2 ** (stage + 1)
        torch.testing.assert_close(r, t * (1 - gap).clamp(min=0))
    assert objective.stage(torch.tensor([0, 9, 10, 79, 80, 999])).tolist() == [0, 0, 1, 7, 7, 7]
    assert float(objective.settled().stage(torch.tensor(80))) == 7


def test_tuning_starts_as_denoising(make_batch):
    """At stage 0 the teacher of small levels is the datum itself."""
    batch = replace(make_batch(64), sigma=torch.linspace(0.01, 1.0, 64).double())
    objective, denoiser = EasyConsistency(total_images=1e6), Gaussian(std=0.5)
    loss = objective(denoiser, batch, DRAWS)
    square = Denoising(weighting="x0")(denoiser, batch, DRAWS).per_sample
    torch.testing.assert_close(loss.per_sample, square.sqrt() / batch.sigma, rtol=1e-3, atol=0)


def test_tuning_has_its_least_gradient_at_the_consistency_function(make_batch):
    """The limit of small gaps again: at the last stages the denoiser is no longer the optimum."""
    objective = EasyConsistency(total_images=1.0, stages=8, position=1.0, huber=100.0)
    batch = make_batch(3000, (16,), mean=0.0, std=STD)

    def slope(exponent: float) -> float:
        power = torch.tensor(exponent, dtype=torch.float64, requires_grad=True)

        def denoiser(x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
            return predictions.rows((STD**2 / (STD**2 + sigma**2)) ** power, x) * x

        loss = objective(denoiser, batch, DRAWS)
        return float(torch.autograd.grad(loss.total, power)[0])

    consistency, denoising = slope(0.5), slope(1.0)
    assert denoising > 0
    assert abs(consistency) < 0.1 * denoising
