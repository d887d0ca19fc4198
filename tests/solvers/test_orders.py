"""Measured convergence orders in float64 on a mixture whose ODE is known (spec, item 2)."""

import math
from functools import cache, partial

import numpy as np
import pytest
import torch
from oracles import rk4_reference, spec_mixture
from torch import Tensor

from stillhouse import solvers
from stillhouse.process import levels

ORDERS = {
    "euler": (solvers.sample_euler, 1.0),
    "heun": (solvers.sample_heun, 2.0),
    "dpm2": (solvers.sample_dpm2, 2.0),
    "ipndm-2": (partial(solvers.sample_ipndm, order=2), 2.0),
    "ipndm-3": (partial(solvers.sample_ipndm, order=3), 2.0),
    "ipndm-4": (partial(solvers.sample_ipndm, order=4), 2.0),
    "rho-ab-2": (partial(solvers.sample_rho_ab, order=2), 1.97),
    "rho-ab-3": (partial(solvers.sample_rho_ab, order=3), 2.94),
    "rho-ab-4": (partial(solvers.sample_rho_ab, order=4), 3.89),
    "dpmpp-2m": (solvers.sample_dpmpp_2m, 2.0),
    "dpmpp-2m exact": (partial(solvers.sample_dpmpp_2m, variant="exact"), 2.0),
    "dpmpp-3m": (solvers.sample_dpmpp_3m, 2.0),
    "dpmpp-3m exact": (partial(solvers.sample_dpmpp_3m, variant="exact"), 3.05),
    "unipc-2 bh1": (partial(solvers.sample_unipc, order=2, b="bh1"), 3.05),
    "unipc-2 bh2": (partial(solvers.sample_unipc, order=2, b="bh2"), 3.05),
    "unipc-3": (partial(solvers.sample_unipc, order=3), 3.95),
    "deis-2": (partial(solvers.sample_deis, order=2), 2.0),
    "deis-3": (partial(solvers.sample_deis, order=3), 3.0),
    # The stochastic solvers without their noise are these ODE methods.
    "edm-churn 0": (partial(solvers.sample_edm_churn, churn=0.0), 2.0),
    "euler-ancestral 0": (partial(solvers.sample_euler_ancestral, eta=0.0), 1.0),
    "dpmpp-sde 0": (partial(solvers.sample_dpmpp_sde, eta=0.0), 2.0),
    "dpmpp-2m-sde 0": (partial(solvers.sample_dpmpp_2m_sde, eta=0.0), 2.0),
}


@cache
def start_and_truth() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 80 * torch.randn(64, 1, dtype=torch.float64, generator=generator)
    return x, rk4_reference(spec_mixture(), x, 80.0, 0.006)


def error(solver, steps: int) -> float:
    x, truth = start_and_truth()
    y = solver(spec_mixture(), x, levels.polynomial(steps, 0.006, 80.0))
    return float((y - truth).square().mean().sqrt())


STEPS = (80, 160, 320, 640)
# The published 3M comes to its order from below: 1.70, 1.89 and 1.95 over the three doublings, 1.85
# over all of them. Its order is read off the last two.
LATER = {"dpmpp-3m": STEPS[1:]}


@pytest.mark.parametrize("name", ORDERS)
def test_measured_order(name):
    solver, expected = ORDERS[name]
    steps = LATER.get(name, STEPS)
    errors = [math.log(error(solver, n)) for n in steps]
    slope = -np.polyfit([math.log(n) for n in steps], errors, 1)[0]
    assert slope == pytest.approx(expected, abs=0.15)


def test_compat_and_exact_3m_are_told_apart():
    compat = error(solvers.sample_dpmpp_3m, 640)
    exact = error(partial(solvers.sample_dpmpp_3m, variant="exact"), 640)
    assert exact < compat / 10
