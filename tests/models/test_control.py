"""Gamma, the layout of control, and its embedding, by closed forms."""

import math

import pytest
import torch

from stillhouse.models.control import SHAPES, Control, Gamma, Layout, sinusoids
from stillhouse.process import EDM, VP, Flow
from stillhouse.process.betas import alphas_cumprod, betas

LAYOUT = Layout(
    composition=("flip", "crop_top"),
    styles=(("style", ("flat", "drawn", "3d")),),
    detail=("height",),
)


def control(gamma=None, seed=0):
    torch.manual_seed(seed)
    return Control(LAYOUT, gamma or Gamma(), 16)


def said(rows, dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype)


# ---------------------------------------------------------------- gamma


@pytest.mark.parametrize("shape", ["cosine", "late"])
@pytest.mark.parametrize("alpha", [1.0, 4.0, 8.0])
def test_detail_counts_fully_without_noise_and_not_at_all_in_pure_noise(shape, alpha):
    gamma = Gamma(shape, alpha)
    assert gamma(torch.tensor([0.0])).item() == 1.0
    assert gamma(torch.tensor([1000.0])).item() == 0.0
    between = gamma(torch.linspace(0, 1000, 101))
    assert (between.diff() <= 0).all()


def test_near_the_end_gamma_is_what_the_formula_says():
    assert Gamma("cosine", 1.0)(torch.tensor([999.0], dtype=torch.float64)).item() == pytest.approx(
        (1 + math.cos(math.pi * 0.999)) / 2, rel=1e-6
    )
    assert Gamma("cosine", 1.0)(torch.tensor([999.0])).item() == pytest.approx(2.5e-6, rel=0.03)


def test_the_two_shapes_are_the_ones_of_the_table():
    u = torch.linspace(0, 1, 11, dtype=torch.float64)
    assert torch.allclose(SHAPES["cosine"](u, 3.0), ((1 + (math.pi * u).cos()) / 2) ** 3)
    assert torch.allclose(SHAPES["late"](u, 2.0), (1 - (math.pi * (1 - u) ** 2).cos()) / 2)
    assert SHAPES["late"](u, 1.0).sub(SHAPES["cosine"](u, 1.0)).abs().max() < 1e-15
    assert (SHAPES["constant"](u, 5.0) == 1).all()


@pytest.mark.parametrize("scaling", [EDM(), VP(alphas_cumprod(betas("linear"))), Flow()])
def test_it_is_told_the_time_of_every_process(scaling):
    gamma = Gamma("cosine", 2.0, scaling.time_max, isinstance(scaling, EDM))
    sigma = torch.tensor([1e-6, 0.5, scaling.sigma_max], dtype=torch.float64).clamp(
        min=scaling.sigma_min
    )
    first, middle, last = gamma(scaling.time_at(sigma)).tolist()
    assert last == 0.0
    assert 0.99 < first <= 1.0
    assert 0.05 < middle < first


def test_every_row_has_the_gamma_of_its_own_time():
    module = control()
    values = said([[0.0, 2.0, 1.0, 64.0]] * 3)
    times = torch.tensor([0.0, 400.0, 1000.0])
    together = module(values, times)
    alone = torch.cat([module(values[i : i + 1], times[i : i + 1]) for i in range(3)])
    assert torch.allclose(together, alone, atol=1e-6)
    assert not torch.allclose(together[0], together[2])


# ---------------------------------------------------------------- what is said


def test_at_the_noisy_end_detail_says_nothing_and_composition_does():
    module = control()
    last = torch.tensor([1000.0])
    one, other = said([[0.0, 2.0, 1.0, 64.0]]), said([[0.0, 2.0, 1.0, 999.0]])
    assert torch.equal(module(one, last), module(other, last))
    assert not torch.equal(module(one, 0 * last), module(other, 0 * last))
    for column in range(3):
        moved = one.clone()
        moved[0, column] = 0.0 if column else 1.0
        assert not torch.equal(module(one, last), module(moved, last))
        assert not torch.equal(module(one, 0 * last), module(moved, 0 * last))


def test_with_a_constant_weight_detail_speaks_at_every_level():
    module = control(Gamma("constant"))
    last = torch.tensor([1000.0])
    one, other = said([[0.0, 2.0, 1.0, 64.0]]), said([[0.0, 2.0, 1.0, 999.0]])
    assert not torch.equal(module(one, last), module(other, last))


def test_what_is_not_said_is_not_zero_and_not_a_number_never_gets_through():
    module = control()
    time = torch.tensor([100.0])
    silent = torch.full((1, 4), torch.nan)
    zeros = torch.zeros(1, 4)
    assert module(silent, time).isfinite().all()
    assert not torch.equal(module(silent, time), module(zeros, time))
    module(silent, time).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


def test_sinusoids_are_those_of_time():
    from diffusers.models.embeddings import get_timestep_embedding

    values = torch.tensor([[0.0], [1.0], [37.5]])
    theirs = get_timestep_embedding(values[:, 0], 256, flip_sin_to_cos=True, downscale_freq_shift=0)
    assert torch.allclose(sinusoids(values), theirs, atol=1e-5)


def test_columns_are_counted_and_named():
    assert LAYOUT.names == ("flip", "crop_top", "style", "height")
    with pytest.raises(ValueError, match=r"3 columns.*flip, crop_top, style, height"):
        control()(torch.zeros(1, 3), torch.zeros(1))


def test_a_row_is_said_by_name():
    row = LAYOUT.row({"style": "drawn", "height": 64})
    assert row.shape == (1, 4)
    assert row[0, 2:].tolist() == [1.0, 64.0]
    assert row[0, :2].isnan().all()
    with pytest.raises(ValueError, match="oil is none of flat, drawn, 3d"):
        LAYOUT.row({"style": "oil"})
    with pytest.raises(ValueError, match="colour is none of flip, crop_top, style, height"):
        LAYOUT.row({"colour": 1})
