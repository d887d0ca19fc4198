"""The E-step against closed forms: densities, bookkeeping, and where runs end."""

import math
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from distill.chains import (
    Analytic,
    Line,
    drawn,
    gap_of,
    torch_noise,
    two_modes,
    two_modes_log_density,
)
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from stillhouse.distill.emd import (
    METHODS,
    Rows,
    Still,
    diff_instruct,
    dmd,
    emd,
    f_distill,
)
from stillhouse.distill.langevin import ChainNoise, Langevin, corrected
from stillhouse.errors import UserError
from stillhouse.process import GaussianMixture

# ---------------------------------------------------------------- drifts


class Bent:
    """g = z + sin(2z)/2, with its noisy density by quadrature: exact to rounding."""

    def __init__(self) -> None:
        self.nodes = torch.linspace(-9, 9, 4001, dtype=torch.float64)
        self.mass = -(self.nodes**2) / 2

    def __call__(self, z: Tensor, cond=None) -> Tensor:
        return z + torch.sin(2 * z) / 2

    def log_density(self, x: Tensor, sigma: float) -> Tensor:
        misses = -((x - self(self.nodes)) ** 2) / (2 * sigma**2)
        return (self.mass + misses).logsumexp(-1, keepdim=True)

    def score(self, x: Tensor, sigma: Tensor, cond=None) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.log_density(leaf, float(sigma[0])).sum(), leaf)
        return x + sigma.view(-1, 1) ** 2 * slope


@pytest.mark.parametrize("sigma", [0.3, 1.0, 4.0])
def test_the_drifts_are_the_gradients_of_the_joint_density(sigma):
    """By finite differences; a step without noise is its size times the drift."""
    student, given = Bent(), drawn(6, sigma)
    networks = Analytic(student, two_modes, student.score)

    def log_rho(eps, z):
        x_t = student(z) + sigma * eps
        density = two_modes_log_density(x_t, sigma) - student.log_density(x_t, sigma)
        return density - eps**2 / 2 - z**2 / 2

    step, quiet = 1e-3, lambda like, draw: torch.zeros_like(like)
    how = Langevin(1, step, step, stretch=0.1)
    found = corrected(
        student, gap_of(networks), given.z, given.eps, given.sigma.double(), how, quiet
    )
    d = 1e-5
    on_eps = (log_rho(given.eps + d, given.z) - log_rho(given.eps - d, given.z)) / (2 * d)
    on_z = (log_rho(given.eps, given.z + d) - log_rho(given.eps, given.z - d)) / (2 * d)
    assert torch.allclose((found.eps - given.eps) / step, on_eps, rtol=0, atol=1e-5)
    assert torch.allclose((found.z - given.z) / step, on_z, rtol=0, atol=1e-5)


class Skewed:
    """g = z A + b in the plane, whose noisy density is a Gaussian: J is no diagonal."""

    turned = torch.tensor([[0.9, 0.7], [-0.2, 0.5]], dtype=torch.float64)
    moved = torch.tensor([0.3, -0.4], dtype=torch.float64)

    def __call__(self, z: Tensor, cond=None) -> Tensor:
        return z @ self.turned + self.moved

    def spread(self, sigma: Tensor) -> Tensor:
        """[B, 2, 2]."""
        own = self.turned.T @ self.turned
        return own + sigma.double().view(-1, 1, 1) ** 2 * torch.eye(2, dtype=torch.float64)

    def score(self, x: Tensor, sigma: Tensor, cond=None) -> Tensor:
        pull = torch.linalg.solve(self.spread(sigma), (x - self.moved)[..., None])[..., 0]
        return x - sigma.double().view(-1, 1) ** 2 * pull

    def log_density(self, x: Tensor, sigma: Tensor) -> Tensor:
        return MultivariateNormal(self.moved, self.spread(sigma)).log_prob(x)


def test_in_the_plane_every_row_drifts_by_its_own_level_and_the_whole_jacobian():
    """As above, where J^T and J differ and a batch has many levels, one of them bounded."""
    student, given = Skewed(), drawn(4, 1.0, size=2)
    sigma = torch.tensor([0.05, 0.3, 1.0, 4.0], dtype=torch.float64)
    ends = torch.tensor([[0.5, 0.1], [-0.3, 0.8], [0.1, -0.9]], dtype=torch.float64)
    teacher = GaussianMixture(ends, torch.tensor([0.2, 0.3, 0.25]), torch.tensor([0.5, 0.3, 0.2]))

    def log_rho(eps, z):
        x_t = student(z) + sigma[:, None] * eps
        v = teacher.stds.double() ** 2 + sigma[:, None] ** 2
        away = (x_t[:, None] - ends).square().sum(2) / (2 * v)
        real = (teacher.weights.double().log() - v.log() - away).logsumexp(1)
        length = (eps.square().sum(1) + z.square().sum(1)) / 2
        return real - student.log_density(x_t, sigma) - length

    eps, z = (t.clone().requires_grad_() for t in (given.eps, given.z))
    on_eps, on_z = torch.autograd.grad(log_rho(eps, z).sum(), (eps, z))
    step, quiet = 1e-3, lambda like, draw: torch.zeros_like(like)
    how, networks = Langevin(1, step, step, stretch=2.5), Analytic(student, teacher, student.score)
    found = corrected(student, gap_of(networks), given.z, given.eps, sigma, how, quiet)
    sizes = torch.tensor([(0.05 / 2.5) ** 2, step, step, step], dtype=torch.float64)[:, None]
    assert torch.allclose((found.eps - given.eps) / step, on_eps, rtol=0, atol=1e-5)
    assert torch.allclose((found.z - given.z) / sizes, on_z, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- bookkeeping


class Kept:
    """Noise that is remembered."""

    def __init__(self) -> None:
        self.source, self.draws = torch_noise(), dict[int, Tensor]()

    def __call__(self, like, draw):
        self.draws[draw] = self.source(like, draw)
        return self.draws[draw]


@pytest.mark.parametrize("latent_step", [0.0, 0.01])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 16])
def test_the_shift_is_what_is_left_of_eps_without_its_noise(steps, latent_step):
    line, e, sigma, kept = Line(0.7, 0.4).double(), 0.16, 0.6, Kept()
    given = drawn(50, sigma)
    networks = Analytic(line, two_modes, line.score)
    how = Langevin(steps, e, latent_step)
    found = corrected(line, gap_of(networks), given.z, given.eps, given.sigma, how, kept)
    part = (1 - e) ** steps * given.eps
    for i in range(steps):
        part = part + (1 - e) ** (steps - 1 - i) * math.sqrt(2 * e) * kept.draws[2 * i]
    assert torch.allclose(sigma * (found.eps - part), found.shift, atol=1e-6)
    assert set(kept.draws) == set(range(0, 2 * steps, 1 if latent_step else 2))


def test_full_and_stein_are_read_at_the_end_of_the_same_chain():
    line, given = Line(0.7, 0.4).double(), drawn(50, 0.6)
    gap = gap_of(Analytic(line, two_modes, line.score))

    def walked(bookkeeping, latent_step):
        how = Langevin(5, 0.16, latent_step, bookkeeping)
        return corrected(line, gap, given.z, given.eps, given.sigma, how, torch_noise())

    for latent_step in (0.0, 0.01):
        full, stein = walked("full", latent_step), walked("stein", latent_step)
        cancel = walked("cancel", latent_step)
        assert torch.equal(full.z, stein.z)
        assert torch.equal(full.eps, cancel.eps)
        s = given.sigma[:, None].double()
        assert torch.allclose(full.shift, s * full.eps)
        x_t = line(stein.z) + s * stein.eps
        assert torch.allclose(stein.shift, gap(x_t, given.sigma), atol=1e-12)
        assert torch.equal(walked("cancel", latent_step).drift, full.drift)


def test_a_chain_tells_how_it_went():
    line, given = Line(2.0, 0.5).double(), drawn(9, 1.0)
    gap, seen = gap_of(Analytic(line, two_modes, line.score)), []

    def watched(x, sigma):
        seen.append(gap(x, sigma))
        return seen[-1]

    how = Langevin(3, 0.16, 0.01)
    found = corrected(line, watched, given.z, given.eps, given.sigma, how, torch_noise())
    assert torch.allclose(found.gaps, torch.stack([r.abs().flatten() for r in seen], 1))
    assert torch.allclose(found.drift, (found.shift / given.sigma[:, None]).abs().flatten())
    # J = 2 everywhere and sigma = 1, so h |J|^2/sigma^2 is .04.
    assert found.stiffness.tolist() == pytest.approx([0.04] * 9)
    agrees = (found.shift * seen[-1] > 0).double().flatten()
    assert torch.equal(found.agreement, agrees)


def test_noise_is_keyed_by_sample_and_draw():
    like = torch.zeros(3, 2, 2)
    whole, part = ChainNoise([4, 5, 6], 0), ChainNoise([5], 0)
    assert torch.equal(whole(like, 3)[1:2], part(like[:1], 3))
    assert not torch.equal(whole(like, 3), whole(like, 4))
    assert not torch.equal(whole(like, 3), ChainNoise([4, 5, 6], 1)(like, 3))


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("dimensions", [1, 3])
def test_no_step_is_no_gradient_and_one_is_diff_instruct_times_its_size(dimensions):
    line = Line(0.7, 0.4).double() if dimensions == 1 else nn.Linear(3, 3).double()
    far = lambda x, sigma, cond=None: 0.5 * x.tanh()  # noqa: E731
    near = lambda x, sigma, cond=None: 0.3 * x  # noqa: E731
    given = drawn(40, 0.6, size=dimensions)
    networks = Analytic(lambda z, cond=None: line(z), far, near)

    def gradient(method):
        line.zero_grad()
        method(networks, given, torch_noise()).per_sample.mean().backward()
        return torch.cat([p.grad.flatten() for p in line.parameters()])

    none = gradient(partial(emd, chain=Langevin(0, 0.16, 0.0)))
    one = gradient(partial(emd, chain=Langevin(1, 0.16, 0.0)))
    plain = gradient(diff_instruct)
    assert torch.count_nonzero(none) == 0
    assert float(plain.norm()) > 0.01
    assert torch.allclose(one, 0.16 * plain, rtol=1e-12)


@pytest.mark.parametrize("bookkeeping", ["cancel", "stein"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(bookkeeping):
    line, given = Line(0.7, 0.4), drawn(20, 0.6, dtype=torch.float32)
    networks = Analytic(line, line.score, line.score)
    how = Langevin(16, 0.16, 0.01, bookkeeping)
    found = corrected(line, gap_of(networks), given.z, given.eps, given.sigma, how, torch_noise())
    assert torch.count_nonzero(found.shift) == torch.count_nonzero(found.gaps) == 0
    for name, method in METHODS.items():
        line.zero_grad()
        method(networks, given, torch_noise()).per_sample.sum().backward()
        assert float(line.a.grad) == float(line.b.grad) == 0, name


# ---------------------------------------------------------------- stability


def test_small_levels_take_smaller_steps_on_the_latent():
    how = Langevin(latent_step=0.01, stretch=2.0)
    levels = torch.tensor([1.0, 0.2, 0.1, 0.001], dtype=torch.float64)
    assert how.latent_steps(levels).tolist() == pytest.approx([0.01, 0.01, 0.0025, 2.5e-7])
    assert how.latent_steps(levels)[0] == 0.01


def test_a_bounded_step_is_stable_where_the_plain_one_is_not():
    """Towards a narrow teacher at sigma = .05, J = 2: h |J|^2/sigma^2 would be 16."""
    line, given = Line(2.0, 0.0).double(), drawn(100, 0.05)
    networks = Analytic(line, lambda x, sigma, cond=None: 0 * x, line.score)

    def reached(stretch):
        how = Langevin(16, 0.16, 0.01, stretch=stretch)
        walk = corrected(
            line, gap_of(networks), given.z, given.eps, given.sigma, how, torch_noise()
        )
        return float(walk.z.abs().max()), float(walk.stiffness.max())

    wild, stiff = reached(1e-3)
    calm, soft = reached(2.0)
    assert stiff == pytest.approx(16, rel=1e-3)
    assert wild > 1e6
    assert soft == pytest.approx(1, rel=1e-3)
    assert calm < 5


@pytest.mark.parametrize(
    "wrong",
    [{"bookkeeping": "none"}, {"steps": -1}, {"noise_step": 1.5}, {"latent_step": -1e-3},
     {"latent_step": 1.0}, {"stretch": 0.0}],
)  # fmt: skip
def test_chains_that_cannot_be_walked_are_refused(wrong):
    with pytest.raises(UserError):
        Langevin(**wrong)


# ---------------------------------------------------------------- where runs end


def trained(method, log_snr: float, *, students: int = 4, iterations: int = 600):
    """(A, B) of students that begin collapsed: the mean over the last fifth."""
    torch.manual_seed(0)
    line, source, batch = Line(0.5, 1.0, students), torch_noise(0), 1024
    networks = Analytic(line, two_modes, line.score)
    optimiser = torch.optim.Adam(line.parameters(), lr=0.02, betas=(0.0, 0.99))
    rows, tail = torch.empty(students * batch, 1), []
    levels, weights = torch.full((len(rows),), math.exp(-log_snr / 2)), torch.ones(len(rows))
    for i in range(iterations):
        given = Rows(source(rows, 0), source(rows, 0), levels, weights)
        optimiser.zero_grad()
        (method(networks, given, source).per_sample.sum() / batch).backward()
        optimiser.step()
        if i >= 0.8 * iterations:
            tail.append(torch.stack([line.a.detach().flatten(), line.b.detach().flatten()]))
    return torch.stack(tail).mean(0)


def chain(steps: int, latent_step: float, bookkeeping="cancel"):
    return partial(emd, chain=Langevin(steps, 0.16, latent_step, bookkeeping))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "a", "b"),
    [
        (chain(1, 0.0), 0.46, 1.97),  # collapsed
        (chain(16, 0.0), 1.81, 0.0),  # covers both modes
        (chain(16, 0.01, "full"), 2.05, 0.0),  # the optimum of forward KL is (2.04, 0)
    ],
    ids=["K=1", "K=16", "K=16, full, with latents"],
)
def test_a_longer_chain_covers_both_modes(method, a, b):
    """Four students of other noise agree within the specification's .1."""
    found = trained(method, log_snr=1.0)
    assert found[0].tolist() == pytest.approx([a] * 4, abs=0.1)
    assert found[1].tolist() == pytest.approx([b] * 4, abs=0.1)


@pytest.mark.slow
def test_cancelled_noise_is_biased_once_latents_move():
    """The specification's 2.19; the optimum is 2.04."""
    found = trained(chain(16, 0.01), log_snr=1.0)
    assert found[0].tolist() == pytest.approx([2.19] * 4, abs=0.1)
    assert float(found[0].mean()) > 2.13


@pytest.mark.slow
@pytest.mark.parametrize(("bookkeeping", "a"), [("full", 2.08), ("stein", 1.90)])
def test_longer_steps_on_latents_leave_the_other_shifts_near_the_optimum(bookkeeping, a):
    """The specification's numbers. It has 3.33 for cancelled noise, which does not end here: A is
    2.6, 3.0, 3.4, 4.1 after 240, 360, 480, 600 iterations, and steps near their bound.
    """
    found = trained(chain(16, 0.04, bookkeeping), log_snr=1.0)
    assert found[0].tolist() == pytest.approx([a] * 4, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 16])
def test_without_noisy_levels_a_student_stays_collapsed(steps):
    """With all of its noise and latents that move, two of four get away."""
    found = trained(chain(steps, 0.0), log_snr=2.0)
    assert (found[0] < 0.5).all()
    assert (found[1] > 1.9).all()


@pytest.mark.slow
def test_weights_of_the_density_ratio_make_a_student_cover_both_modes():
    """Reverse KL stays at one of them; B is not settled after so few steps."""
    assert (trained(dmd, log_snr=1.0)[0] < 0.5).all()
    assert (trained(f_distill, log_snr=1.0)[0] > 1.5).all()


@pytest.mark.parametrize(("steps", "ratio"), [(1, 27.0), (16, 2.5)])
def test_cancellation_lowers_the_variance_of_the_gradient(steps, ratio):
    """At (2.04, 0) and log-SNR 0: the gradient of A is -shift z."""
    line, given = Line(2.04, 0.0).double(), drawn(200_000, 1.0)
    gap = gap_of(Analytic(line, two_modes, line.score))

    def variance(bookkeeping):
        how = Langevin(steps, 0.16, 0.0, bookkeeping)
        with torch.no_grad():
            found = corrected(line, gap, given.z, given.eps, given.sigma, how, torch_noise())
        return float((found.shift * found.z).var())

    assert variance("full") / variance("cancel") == pytest.approx(ratio, rel=0.05)


# ---------------------------------------------------------------- a ring, with a perceptron


class Empirical:
    """The exact fake score of 1024 fresh samples."""

    def __init__(self, network: nn.Module, source) -> None:
        with torch.no_grad():
            self.own = network(source(torch.empty(1024, 2), 0))

    def __call__(self, x, sigma, cond=None):
        return (-(torch.cdist(x, self.own) ** 2) / (2 * sigma.view(-1, 1) ** 2)).softmax(
            1
        ) @ self.own


class OnRing:
    def __init__(self, std: float, source) -> None:
        angle = torch.arange(8) * math.pi / 4
        means = 2 * torch.stack([angle.cos(), angle.sin()], 1)
        self.teacher = GaussianMixture(means, torch.full((8,), std), torch.ones(8))
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
        )
        self.source = source

    def generate(self, z, cond):
        return self.network(z)

    @contextmanager
    def still(self):
        score = Empirical(self.network, self.source)
        yield Still(lambda z, cond: self.network(z), self.teacher, score)

    def share_inside(self, std: float) -> float:
        """Of samples within three standard deviations of a mode."""
        with torch.no_grad():
            x = self.network(self.source(torch.empty(8000, 2), 0))
        nearest = torch.cdist(x, self.teacher.means.float()).min(1).values
        return float((nearest < 3 * std).double().mean())


def share_on_ring(bookkeeping, std: float) -> float:
    source, rows = torch_noise(0), torch.empty(256, 2)
    networks = OnRing(std, source)
    optimiser = torch.optim.Adam(networks.network.parameters(), lr=2e-3, betas=(0.0, 0.99))
    for _ in range(600):
        u = torch.special.ndtr(source(rows[:, 0], 0))
        given = Rows(source(rows, 0), source(rows, 0), 0.2 * 10**u, torch.ones(len(rows)))
        optimiser.zero_grad()
        chain(1, 0.0, bookkeeping)(networks, given, source).per_sample.mean().backward()
        optimiser.step()
    return networks.share_inside(std)


@pytest.mark.slow
@pytest.mark.parametrize("std", [0.1, 0.2])
def test_cancellation_puts_more_samples_into_modes(std):
    """About twice as many; the specification's own runs have 41% and 18%, 72% and 46%."""
    assert share_on_ring("cancel", std) > 1.3 * share_on_ring("full", std)
