"""Solvers walk a state from sigma_max to 0. Stateless functions; guidance makes denoisers.

| name | function | order | evaluations a step |
|---|---|---|---|
| `euler` | `sample_euler` | 1 | 1 |
| `heun` | `sample_heun` | 2 | 2 |
| `dpm2` | `sample_dpm2` | 2 | 2 |
| `ipndm` | `sample_ipndm` | 2 on uneven grids | 1 |
| `rho-ab` | `sample_rho_ab` | k | 1 |
| `dpmpp-2m` | `sample_dpmpp_2m` | 2 | 1 |
| `dpmpp-3m` | `sample_dpmpp_3m` | 2 (`compat`), 3 (`exact`) | 1 |
| `unipc` | `sample_unipc` | k + 1 | 1 |
| `deis` | `sample_deis` | k | 1 |
| `edm-churn` | `sample_edm_churn` | stochastic | 2 |
| `euler-ancestral` | `sample_euler_ancestral` | stochastic | 1 |
| `dpmpp-sde` | `sample_dpmpp_sde` | stochastic | 2 |
| `dpmpp-2m-sde` | `sample_dpmpp_2m_sde` | stochastic | 1 |
"""

from collections.abc import Callable

from torch import Tensor

from stillhouse.solvers.adams import sample_ipndm, sample_rho_ab
from stillhouse.solvers.dpmpp import sample_dpmpp_2m, sample_dpmpp_3m
from stillhouse.solvers.exponential import sample_deis, sample_unipc
from stillhouse.solvers.guidance import Guided, TwoTerm, autoguidance, classifier_free
from stillhouse.solvers.onestep import sample_dpm2, sample_edm_churn, sample_euler, sample_heun
from stillhouse.solvers.renoise import sample_renoise
from stillhouse.solvers.sde import sample_dpmpp_2m_sde, sample_dpmpp_sde, sample_euler_ancestral
from stillhouse.solvers.search import search_grid
from stillhouse.solvers.walk import Counted, Options, Point, Progress

SOLVERS: dict[str, Callable[..., Tensor]] = {
    "euler": sample_euler,
    "heun": sample_heun,
    "dpm2": sample_dpm2,
    "ipndm": sample_ipndm,
    "rho-ab": sample_rho_ab,
    "dpmpp-2m": sample_dpmpp_2m,
    "dpmpp-3m": sample_dpmpp_3m,
    "unipc": sample_unipc,
    "deis": sample_deis,
    "edm-churn": sample_edm_churn,
    "euler-ancestral": sample_euler_ancestral,
    "dpmpp-sde": sample_dpmpp_sde,
    "dpmpp-2m-sde": sample_dpmpp_2m_sde,
}
STOCHASTIC = frozenset({"edm-churn", "euler-ancestral", "dpmpp-sde", "dpmpp-2m-sde"})

__all__ = [
    "SOLVERS",
    "STOCHASTIC",
    "Counted",
    "Guided",
    "Options",
    "Point",
    "Progress",
    "TwoTerm",
    "autoguidance",
    "classifier_free",
    "sample_deis",
    "sample_dpm2",
    "sample_dpmpp_2m",
    "sample_dpmpp_2m_sde",
    "sample_dpmpp_3m",
    "sample_dpmpp_sde",
    "sample_edm_churn",
    "sample_euler",
    "sample_euler_ancestral",
    "sample_heun",
    "sample_ipndm",
    "sample_renoise",
    "sample_rho_ab",
    "sample_unipc",
    "search_grid",
]
