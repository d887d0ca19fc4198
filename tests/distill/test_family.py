"""The losses beside EM distillation's against closed forms: SiD, DMD, f-distill and its ratio."""

import math

import pytest
import torch
from distill.chains import (
    Analytic,
    Line,
    drawn,
    torch_noise,
    two_modes,
    two_modes_log_density,
)
from torch import nn

from stillhouse.distill.emd import (
    METHODS,
    Rows,
    dmd,
    f_distill,
    log_ratio,
    sid,
    sid_terms,
)


def wavy_networks():
    """Denoisers with weights of their own and curvature, and a generator."""
    torch.manual_seed(0)
    generator, teacher, score = (nn.Linear(3, 3).double() for _ in range(3))

    def denoiser(layer):
        return lambda x, sigma, cond=None: torch.tanh(layer(x)) / sigma.view(-1, 1)

    networks = Analytic(lambda z, cond=None: generator(z), denoiser(teacher), denoiser(score))
    return networks, generator, teacher, score


def test_sid_without_its_correction_is_half_of_score_implicit_matching():
    """Luo et al. 2024: -<d'(y), s_F(x_t) - grad log q(x_t|x)> with y = s_F - s_T, d(y) = y^2."""
    g = torch.Generator().manual_seed(0)
    x, x_t, taught, faked = (torch.randn(50, 3, generator=g, dtype=torch.float64) for _ in range(4))
    s_t, s_f, conditional = taught - x_t, faked - x_t, x - x_t  # at sigma = 1
    y = (s_f - s_t).requires_grad_()
    (slope,) = torch.autograd.grad(y.square().sum(), y)
    matching = -slope * (s_f - conditional)
    assert (sid_terms(x, taught, faked, 1.0) - matching / 2).abs().max() < 1e-12


@pytest.mark.parametrize("k", [1.0, 1.2])
def test_sid_has_the_gradient_through_both_denoisers_and_leaves_none_in_them(k):
    networks, generator, teacher, score = wavy_networks()
    given = drawn(20, 0.6, size=3)
    sid(networks, given, torch_noise(), k=k).per_sample.sum().backward()
    found = generator.weight.grad.clone()
    assert all(p.grad is None for p in [*teacher.parameters(), *score.parameters()])
    generator.zero_grad()
    x = generator(given.z)
    x_t = x + 0.6 * given.eps
    taught, faked = networks.parts.teacher(x_t, given.sigma), networks.parts.score(x_t, given.sigma)
    gap = taught - faked
    size = (x - taught).abs().mean(1).detach()
    ((gap * (taught - x - k * gap)).sum(1) / size).sum().backward()
    assert torch.allclose(found, generator.weight.grad, rtol=1e-6)
    assert float(found.norm()) > 0.01


def test_dmd_divides_every_pull_by_the_teachers_distance():
    networks, generator, *_ = wavy_networks()
    given = drawn(20, 0.6, size=3)
    dmd(networks, given, torch_noise()).per_sample.sum().backward()
    found = generator.weight.grad.clone()
    generator.zero_grad()
    x = generator(given.z)
    x_t = (x + 0.6 * given.eps).detach()
    taught, faked = networks.parts.teacher(x_t, given.sigma), networks.parts.score(x_t, given.sigma)
    pull = (taught - faked) / (x - taught).abs().mean(1, keepdim=True)
    (0.5 * (x - (x + pull).detach()).square().sum()).backward()
    assert torch.allclose(found, generator.weight.grad, rtol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_levels_are_weighted(name):
    def gradient(weight):
        networks, generator, *_ = wavy_networks()
        given = drawn(20, 0.6, size=3)
        rows = Rows(given.z, given.eps, given.sigma, torch.full((20,), weight))
        METHODS[name](networks, rows, torch_noise()).per_sample.sum().backward()
        return generator.weight.grad

    assert torch.allclose(gradient(3.0), 3 * gradient(1.0), rtol=1e-6)


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_the_log_ratio_of_densities_is_unbiased(sigma):
    line, points, repeats = Line(2.04, 0.0).double(), [-3.0, -1.0, 0.7, 2.0, 3.5], 20_000
    x = torch.tensor(points, dtype=torch.float64)[:, None]
    with torch.no_grad():
        still = Analytic(line, two_modes, line.score).parts
        level = torch.full((len(points) * repeats,), sigma)
        many = x.repeat_interleave(repeats, 0)
        found = log_ratio(still, many, level, None, torch_noise(), draws=4).view(-1, repeats)
        true = (two_modes_log_density(x, sigma) - line.log_density(x, sigma)).flatten()
    error = found.std(1) / math.sqrt(repeats)
    assert ((found.mean(1) - true).abs() < 4 * error).all()
    assert (error < 0.015).all()


def test_the_log_ratio_asks_no_level_beyond_the_highest():
    line, x, sigma, highest, repeats = Line(2.04, 0.0).double(), 0.7, 0.3, 1.5, 20_000
    asked = []

    def teacher(x, level, cond=None):
        asked.append(level)
        return two_modes(x, level)

    with torch.no_grad():
        still = Analytic(line, teacher, line.score).parts
        many, levels = torch.full((repeats, 1), x).double(), torch.full((repeats,), sigma)
        ends = {"draws": 4, "highest": highest}
        found = log_ratio(still, many, levels, None, torch_noise(), **ends).flatten()
        # What the rest of the integral would add: the ratio under that much noise.
        wider = x + math.sqrt(highest**2 - sigma**2) * torch.randn(400_000, 1).double()
        rest = two_modes_log_density(wider, highest) - line.log_density(wider, highest)
        at = torch.tensor([[x]]).double()
        true = two_modes_log_density(at, sigma) - line.log_density(at, sigma) - rest.mean()
    assert torch.cat(asked).max() <= highest * (1 + 1e-9)
    error = found.std() / math.sqrt(repeats)
    assert abs(found.mean() - true.item()) < 4 * error
    assert error < 0.015
    assert abs(rest.mean()) > 4 * error  # or the end of the integral would not be seen


def test_f_distill_is_dmd_with_weights_of_the_ratio():
    networks, *_ = wavy_networks()
    given = drawn(20, 0.6, size=3)
    plain = dmd(networks, given, torch_noise()).per_sample
    assert torch.allclose(f_distill(networks, given, torch_noise(), power=0).per_sample, plain)
    found = f_distill(networks, given, torch_noise(), most=1e9)
    weights = found.numbers["log_ratio"].exp()
    assert torch.allclose(found.per_sample, weights * plain)
    bounded = f_distill(networks, given, torch_noise(), most=0.5)
    assert torch.allclose(bounded.per_sample, weights.clamp(max=0.5) * plain)
