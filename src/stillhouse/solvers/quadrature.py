"""Weights of multistep solvers on uneven grids: integrals of Lagrange polynomials.

    w_j    = integral from a to b of kernel(s) l_j(s) ds
    l_j(s) = prod_{m != j} (s - n_m)/(n_j - n_m)

by Gauss-Legendre quadrature with 24 nodes, which is exact to rounding for polynomials of the
degrees used here and for exponentials over any step that occurs. (The closed forms by repeated
division, phi_{k+1} = phi_k/H - 1/k!, lose digits at small steps.)
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np


@cache
def _legendre() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(24)


def lagrange_weights(
    nodes: Sequence[float],
    start: float,
    end: float,
    kernel: Callable[[np.ndarray], np.ndarray] | None = None,
) -> list[float]:
    """One weight per node, so that sum_j w_j f(n_j) integrates `kernel * f` from start to end."""
    unit, weight = _legendre()
    s = 0.5 * (start + end) + 0.5 * (end - start) * unit
    measure = 0.5 * (end - start) * weight * (1.0 if kernel is None else kernel(s))
    return [float(measure @ _basis(nodes, j, s)) for j in range(len(nodes))]


def _basis(nodes: Sequence[float], j: int, s: np.ndarray) -> np.ndarray:
    others = [node for m, node in enumerate(nodes) if m != j]
    return np.prod([(s - node) / (nodes[j] - node) for node in others], axis=0) * np.ones_like(s)


def exponential_weights(nodes: Sequence[float], start: float, end: float) -> list[float]:
    """Weights of D at `nodes` (in lambda) in the exact solution of the probability-flow ODE,

    x' = (s'/s) x + integral of exp(lambda - lambda') D(lambda) dlambda.
    """
    return lagrange_weights(nodes, start, end, lambda lam: np.exp(lam - end))


def phi(h: float) -> tuple[float, float, float]:
    """phi1 = expm1(-H), phi2 = phi1/H + 1, phi3 = phi2/H - 1/2 (DPM-Solver++'s constants)."""
    phi1 = math.expm1(-h)
    phi2 = phi1 / h + 1
    return phi1, phi2, phi2 / h - 0.5
