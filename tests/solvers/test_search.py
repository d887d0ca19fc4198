"""The schedule search: dynamic programming against brute force, and grids that really help."""

from itertools import combinations, pairwise

import pytest
import torch
from oracles import rk4_reference, spec_mixture

from stillhouse.process import EDM, TOYS, Gaussian, NetworkDenoiser, levels, predictions
from stillhouse.process.noise import starting_noise
from stillhouse.solvers import sample_deis, sample_euler
from stillhouse.solvers.search import cheapest_path, jump_costs, search_grid


@pytest.mark.parametrize("gamma", [1.0, 1.15])
@pytest.mark.parametrize("jumps", [1, 2, 3, 4, 6])
def test_the_path_is_the_brute_force_minimum(jumps, gamma):
    generator = torch.Generator().manual_seed(jumps)
    cost = torch.rand(7, 7, generator=generator, dtype=torch.float64)
    cost = cost.masked_fill(torch.ones(7, 7).tril().bool(), torch.inf)

    def total(path):  # the first jump counts once, the next gamma times, and so on
        return sum(gamma**k * cost[a, b] for k, (a, b) in enumerate(pairwise(path)))

    best = min(((0, *mid, 6) for mid in combinations(range(1, 6), jumps - 1)), key=total)
    assert tuple(cheapest_path(cost, jumps, gamma)) == best


def test_costs_are_the_euler_jumps_miss():
    fine = levels.polynomial(61, 0.006, 80.0)
    x = 80.0 * torch.tensor([[1.0], [-0.5]], dtype=torch.float64)
    data = Gaussian()
    cost = jump_costs(data, x, fine)
    j, i = 20, 35
    at_j, at_i = (data.exact_flow(x, 80.0, float(fine[k])) for k in (j, i))
    ratio = float(fine[i] / fine[j])
    jump = ratio * at_j + (1 - ratio) * data(at_j, fine[j])
    assert float(cost[j, i]) == pytest.approx(float((jump - at_i).abs().mean()), rel=0.02)
    assert torch.isinf(cost[j, : j + 1]).all()


def test_searched_grids_beat_rho_7_on_the_mixture():
    data, fine = spec_mixture(), levels.polynomial(61, 0.006, 80.0)
    generator = torch.Generator().manual_seed(0)
    search_x, test_x = (
        80.0 * torch.randn(256, 1, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    truth = rk4_reference(data, test_x, 80.0, 0.006, steps=2000)
    grids = search_grid(data, search_x, fine, list(range(4, 9)))
    for count, grid in grids.items():
        assert len(grid) == count
        assert set(grid.tolist()) <= set(fine.tolist())
        ours = sample_euler(data, test_x, grid)
        rho = sample_euler(data, test_x, levels.polynomial(count, 0.006, 80.0))
        assert (ours - truth).norm() < (rho - truth).norm(), count


def test_the_search_does_not_depend_on_its_batch():
    data, fine = spec_mixture(), levels.polynomial(21, 0.006, 80.0)
    x = 80.0 * torch.linspace(-2, 2, 10, dtype=torch.float64)[:, None]
    whole, parts = (search_grid(data, x, fine, [4, 6], batch=b) for b in (None, 3))
    assert all(torch.equal(whole[n], parts[n]) for n in (4, 6))


def test_more_jumps_than_levels_is_refused():
    with pytest.raises(ValueError, match="1 to 4 jumps"):
        cheapest_path(torch.ones(5, 5), 5)


class Mlp(torch.nn.Module):
    """A small network on the plane, told its time as a number."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 96, 96, 96]
        layers = [
            layer for a, b in pairwise(widths) for layer in (torch.nn.Linear(a, b), torch.nn.SiLU())
        ]
        self.body = torch.nn.Sequential(*layers, torch.nn.Linear(96, 2))

    def forward(self, x, time, cond):
        return self.body(torch.cat([x, time[:, None].to(x)], 1))


def trained_on_moons(seed: int, steps: int = 1500) -> NetworkDenoiser:
    """EDM's denoising loss on the two moons, a few seconds."""
    torch.manual_seed(seed)
    denoiser = NetworkDenoiser(Mlp(), EDM(0.7), "edm")
    optimiser = torch.optim.Adam(denoiser.parameters(), 3e-3)
    data, density = TOYS["moons"]().sample(20_000).float(), levels.LogNormal(-1.0, 1.6)
    for _ in range(steps):
        x0 = data[torch.randint(len(data), (512,))]
        sigma, noise = density.quantile(torch.rand(512)), torch.randn_like(x0)
        x = x0 + predictions.rows(sigma, x0) * noise
        output = predictions.from_x0("edm", x, denoiser(x, sigma), sigma, 0.7)
        loss = (output - predictions.target("edm", x0, noise, sigma, 0.7)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return denoiser.eval()


@pytest.mark.slow
def test_searched_grids_beat_rho_7_on_a_small_network():
    denoiser, fine = trained_on_moons(seed=0), levels.polynomial(61, 0.006, 80.0)
    search_x = 80.0 * starting_noise((2,), range(256), seed=1)
    test_x = 80.0 * starting_noise((2,), range(1024), seed=0)
    truth = sample_deis(denoiser, test_x, levels.polynomial(400, 0.006, 80.0))
    for count, grid in search_grid(denoiser, search_x, fine, list(range(4, 9))).items():
        ours = sample_euler(denoiser, test_x, grid)
        rho = sample_euler(denoiser, test_x, levels.polynomial(count, 0.006, 80.0))
        assert (ours - truth).norm() < (rho - truth).norm(), count
