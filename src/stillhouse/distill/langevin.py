"""The E-step of EM distillation: Langevin steps on a sample's noise and latent (Xie et al. 2024).

With x = g(z), x_t = x + sigma eps and R = D_T(x_t) - D_F(x_t), the teacher's answer less that of
the fake score, which knows the generator's own samples,

    rho(eps, z) ~ q(x_t)/p(x_t) exp(-|eps|^2/2 - |z|^2/2)

is the teacher's noisy density q, joined with the latents that lead there; p is the generator's. Its
log has the gradients R/sigma - eps and J^T R/sigma^2 - z, where J = dg/dz, so K times

    eps += e (R/sigma - eps)     + sqrt(2e) n
    z   += h (J^T R/sigma^2 - z) + sqrt(2h) n'

J^T R is one vector-Jacobian product through the generator: no graph goes through the teacher or the
fake score, and none outlives its step. The generator's sample at z_K then learns to move by a
shift:

| bookkeeping | shift                  |                                                       |
|-------------|------------------------|-------------------------------------------------------|
| `full`      | sigma eps_K            | what EM asks for, with all of the chain's noise       |
| `cancel`    | d = (1 - e) d + e R    | the same without that noise; biased once z moves      |
| `stein`     | R at the last point    | one more evaluation of teacher, score and generator   |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.process import NoiseSource, keyed_normal
from stillhouse.process.predictions import rows

Bookkeeping = Literal["full", "cancel", "stein"]
Latent = Callable[[Tensor], Tensor]  # a generator under its condition: z -> x
Gap = Callable[[Tensor, Tensor], Tensor]  # (x_t, sigma) -> R, without a graph


@dataclass(frozen=True)
class Langevin:
    """How the chain walks. The sizes of its steps are those of the paper for ImageNet.

    A step on z is stable while h |J|^2/sigma^2 < 2, and small levels break that first. So h is
    bounded level by level: h(sigma) = min(latent_step, sigma^2/stretch^2), half of what is stable
    where no |J| exceeds `stretch`. It depends on the level alone, not on the state of the chain,
    which would bend the density that is sampled; where the bound does not bind, h is the latent
    step itself. `Corrected.stiffness` says how near to 2 a chain came.
    """

    steps: int = 16  # K
    noise_step: float = 0.4**2  # e, of eps
    latent_step: float = 0.004**2  # h, of z; 0: z stays, and the generator is called once
    bookkeeping: Bookkeeping = "cancel"
    stretch: float = 1.0

    def __post_init__(self) -> None:
        if self.bookkeeping not in get_args(Bookkeeping):
            known = ", ".join(get_args(Bookkeeping))
            raise UserError(f"bookkeeping is one of {known}, not {self.bookkeeping!r}")
        if self.steps < 0 or not 0 < self.noise_step < 1 or not 0 <= self.latent_step < 1:
            raise UserError(
                "a chain takes 0 steps or more, on the noise of a size between 0 and 1, on the "
                "latent of 0 to below 1"
            )
        if self.stretch <= 0:
            raise UserError("the largest stretch of a generator is a number above 0")

    @property
    def moving(self) -> bool:
        """Whether z walks too."""
        return self.latent_step > 0

    def latent_steps(self, sigma: Tensor) -> Tensor:
        """h of every sample [B], float64."""
        return (sigma.double() / self.stretch).square().clamp(max=self.latent_step)


@dataclass(frozen=True)
class ChainNoise:
    """Unit noise of a chain: row r depends on (seed, keys[r]) and the number of the draw alone."""

    keys: list[int]
    seed: int
    stream: str = "distill/langevin"

    def __call__(self, like: Tensor, draw: int) -> Tensor:
        shape, purpose = like.shape[1:], f"{self.stream}/{draw}"
        return keyed_normal(shape, self.keys, seed=self.seed, purpose=purpose).to(like)


class Corrected(NamedTuple):
    """Where a chain ended, and how it went there."""

    z: Tensor
    eps: Tensor
    shift: Tensor  # what the generator's sample at z should move by
    gaps: Tensor  # [B, K] root mean square of R, step by step
    drift: Tensor  # [B] that of what R, and no noise, has added to eps
    agreement: Tensor  # [B] share of elements that R pulls in the end where it pulled before
    stiffness: Tensor  # [B] largest h |J^T R|^2/(|R| sigma)^2, at most h |J|^2/sigma^2


def corrected(
    generator: Latent,
    gap: Gap,
    z: Tensor,
    eps: Tensor,
    sigma: Tensor,
    how: Langevin,
    noise: NoiseSource,
) -> Corrected:
    """The chain from (eps, z) at levels sigma [B]; draw 2i of `noise` is for eps, 2i + 1 for z."""
    s, e, h = rows(sigma, z), how.noise_step, rows(how.latent_steps(sigma), z)
    moved, last = torch.zeros_like(eps), torch.zeros_like(eps)
    gaps: list[Tensor] = []
    stiffness = torch.zeros_like(sigma)
    z, eps, x = z.detach(), eps.detach(), None
    for i in range(how.steps):
        if x is None or how.moving:
            z, x = traced(generator, z, how.moving)
        last = gap(x.detach() + s * eps, sigma)
        if how.moving:
            (back,) = torch.autograd.grad(x, z, last)
            # fmax: what is not a number from its first step on is no fault of the chain
            stiffness = torch.fmax(stiffness, _stiffness(back, last, h / s**2))
            z = z.detach()
            z = z + h * (back / s**2 - z) + (2 * h).sqrt() * noise(z, 2 * i + 1)
        eps = eps + e * (last / s - eps) + math.sqrt(2 * e) * noise(eps, 2 * i)
        moved = (1 - e) * moved + e * last
        gaps.append(root_mean_square(last))
    shift = moved
    if how.bookkeeping == "full":
        shift = s * eps
    elif how.bookkeeping == "stein":
        if x is None or how.moving:
            _, x = traced(generator, z, False)
        shift = gap(x.detach() + s * eps, sigma)
    each = torch.stack(gaps, 1) if gaps else sigma.new_zeros(len(sigma), 0)
    agreement = (moved * last > 0).flatten(1).double().mean(1)
    return Corrected(z, eps, shift, each, root_mean_square(moved / s), agreement, stiffness)


def traced(generator: Latent, z: Tensor, graph: bool) -> tuple[Tensor, Tensor]:
    """z as the leaf of a new graph, if one is wanted, and its sample."""
    with torch.set_grad_enabled(graph):
        leaf = z.detach().requires_grad_(graph)
        return leaf, generator(leaf)


def root_mean_square(values: Tensor) -> Tensor:
    """[B, ...] -> [B], float64."""
    return values.detach().flatten(1).double().square().mean(1).sqrt()


def _stiffness(back: Tensor, gap: Tensor, scale: Tensor) -> Tensor:
    """scale |J^T R|^2/|R|^2; 0 where there is no R."""
    ratio = root_mean_square(back) / root_mean_square(gap).clamp(min=1e-30)
    return scale.flatten().double() * ratio**2
