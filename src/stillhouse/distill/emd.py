"""EM distillation and its family: how a one-step generator learns from two denoisers.

x = g(z) is the generator's sample, x_t = x + sigma eps the same with noise. D_T is the teacher's
answer at x_t, D_F that of the fake score, which was trained on the generator's own samples, and
R = D_T - D_F: R/sigma^2 is the difference of the two scores. With sg() for what no gradient passes,
<a, b> and | |^2 sums over the elements of a sample and w a weight of its level:

| name            | loss of a sample                                      | paper            |
|-----------------|-------------------------------------------------------|------------------|
| `emd`           | 1/2 w |x - sg(x + shift)|^2 after K steps of Langevin | Xie et al. 2024  |
| `diff-instruct` | w <sg(-R), x>                                         | Luo et al. 2023  |
| `dmd`           | 1/2 w |x - sg(x + R/mean|x - D_T|)|^2                 | Yin et al. 2024  |
| `sid`           | w <R, (D_T - x) - k R>/sg(mean|x - D_T|)              | Zhou et al. 2024 |
| `f-distill`     | that of `dmd`, times sg(q(x_t)/p(x_t))                | Xu et al. 2025   |

`sid` alone has a gradient that passes the two denoisers; it ends in x, and not in their weights.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stillhouse.distill.langevin import Langevin, corrected, root_mean_square
from stillhouse.process import Condition, Denoiser, NoiseSource, Record
from stillhouse.process.predictions import rows

Generator = Callable[[Tensor, Condition | None], Tensor]  # (z, condition) -> x


@dataclass(frozen=True, eq=False)
class Rows(Record):
    """What one update of a generator begins with."""

    z: Tensor
    eps: Tensor
    sigma: Tensor  # [B]
    weight: Tensor  # [B] w
    condition: Condition | None = None


class Still(NamedTuple):
    """The three networks without dropout. Gradients reach their inputs where they are asked for."""

    generator: Generator
    teacher: Denoiser
    score: Denoiser


class Networks(Protocol):
    """What the family works with."""

    def generate(self, z: Tensor, cond: Condition | None) -> Tensor:
        """Samples with a gradient into the generator's weights."""
        ...

    def still(self) -> AbstractContextManager[Still]:
        """The networks as they are evaluated; a graph of theirs must be used up within."""
        ...


class Outcome(NamedTuple):
    """What an update of the generator is made of."""

    per_sample: Tensor  # [B] losses
    x: Tensor  # samples
    numbers: dict[str, Tensor]  # [B] each, to watch: losses of this family say nothing


Method = Callable[[Networks, Rows, NoiseSource], Outcome]


# ---------------------------------------------------------------- the family


def emd(
    networks: Networks, given: Rows, noise: NoiseSource, *, chain: Langevin | None = None
) -> Outcome:
    """Forward KL by EM. K = 1 with a latent that stays is `diff_instruct` times the noise step."""
    chain, cond = chain or Langevin(), given.condition
    with torch.no_grad(), networks.still() as still:
        found = corrected(
            lambda z: still.generator(z, cond),
            lambda x_t, sigma: still.teacher(x_t, sigma, cond) - still.score(x_t, sigma, cond),
            given.z,
            given.eps,
            given.sigma,
            chain,
            noise,
        )
    x = networks.generate(found.z, cond)
    numbers = {
        "gap": found.gaps.mean(1) if chain.steps else torch.zeros_like(given.sigma),
        "drift": found.drift,
        "agreement": found.agreement,
        "stiffness": found.stiffness,
    }
    return Outcome(given.weight.to(x) * attracted(x, found.shift), x.detach(), numbers)


def diff_instruct(networks: Networks, given: Rows, noise: NoiseSource) -> Outcome:
    """Reverse KL: samples follow the difference of the scores."""
    x, seen = _sampled(networks, given)
    per_sample = given.weight.to(x) * summed(-seen.gap * x)
    return Outcome(per_sample, x.detach(), seen.numbers)


def dmd(networks: Networks, given: Rows, noise: NoiseSource) -> Outcome:
    """Reverse KL, every pull divided by how far the teacher's answer is from the sample."""
    x, seen = _sampled(networks, given)
    per_sample = given.weight.to(x) * attracted(x, seen.gap / rows(seen.size, x))
    return Outcome(per_sample, x.detach(), seen.numbers)


def sid(networks: Networks, given: Rows, noise: NoiseSource, *, k: float = 1.2) -> Outcome:
    """Fisher divergence: also through the denoisers, into x alone."""
    x = networks.generate(given.z, given.condition)
    with networks.still() as still, torch.enable_grad():
        leaf = x.detach().requires_grad_()
        seen = judged(still, leaf, given)
        values = summed(sid_terms(leaf, seen.teacher, seen.score, k)) / seen.size
        # With respect to x: neither the weights of the denoisers nor their graphs are left behind.
        (slope,) = torch.autograd.grad(values.sum(), leaf)
    per_sample = values.detach() + summed(slope * (x - x.detach()))
    return Outcome(given.weight.to(x) * per_sample, x.detach(), seen.numbers)


def f_distill(
    networks: Networks,
    given: Rows,
    noise: NoiseSource,
    *,
    power: float = 1.0,
    most: float = 20.0,
    draws: int = 4,
    highest: float = math.inf,
) -> Outcome:
    """An f-divergence: `dmd` with every sample weighted by (q/p)^power, at most `most`.

    `power` 1 is forward KL, 0 is reverse KL, between them lie the alpha-divergences. The paper
    reads q/p from a discriminator, which needs data. Here it is estimated by `log_ratio`. That is
    unbiased, but its exponential is not (too large by half the variance, in logarithms); and where
    generator and teacher differ in many dimensions, log q/p is a sum over them all: most weights
    are then near 0 or at the bound. For images choose a power of about 1/dimensions, or `emd`,
    which reaches forward KL without a ratio.
    """
    x, seen = _sampled(networks, given)
    x_t = noisy(x.detach(), given)
    with torch.no_grad(), networks.still() as still:
        found = log_ratio(
            still, x_t, given.sigma, given.condition, noise, draws=draws, highest=highest
        )
    weight = given.weight * (power * found).exp().clamp(max=most)
    per_sample = weight.to(x) * attracted(x, seen.gap / rows(seen.size, x))
    return Outcome(per_sample, x.detach(), seen.numbers | {"log_ratio": found})


METHODS: dict[str, Method] = {
    "emd": emd,
    "diff-instruct": diff_instruct,
    "dmd": dmd,
    "sid": sid,
    "f-distill": f_distill,
}


# ---------------------------------------------------------------- parts


class Judged(NamedTuple):
    """What the two denoisers say of noisy samples."""

    teacher: Tensor  # D_T
    score: Tensor  # D_F
    size: Tensor  # [B] mean |x - D_T|, without gradient

    @property
    def gap(self) -> Tensor:
        return self.teacher - self.score

    @property
    def numbers(self) -> dict[str, Tensor]:
        return {"gap": root_mean_square(self.gap)}


def noisy(x: Tensor, given: Rows) -> Tensor:
    """x_t."""
    return x + rows(given.sigma, x) * given.eps


def judged(still: Still, x: Tensor, given: Rows) -> Judged:
    """D_T and D_F of samples; with a graph where x has one."""
    x_t, level, cond = noisy(x, given), given.sigma, given.condition
    taught, faked = still.teacher(x_t, level, cond), still.score(x_t, level, cond)
    size = (x - taught).detach().flatten(1).abs().mean(1)
    return Judged(taught, faked, size.clamp(min=1e-8))  # 0 where the teacher leaves all as it is


def _sampled(networks: Networks, given: Rows) -> tuple[Tensor, Judged]:
    """Samples with a gradient, and what is said of them, without one."""
    x = networks.generate(given.z, given.condition)
    with torch.no_grad(), networks.still() as still:
        return x, judged(still, x.detach(), given)


def attracted(x: Tensor, shift: Tensor) -> Tensor:
    """1/2 |x - sg(x + shift)|^2 per sample, so that its gradient is -shift to the last bit."""
    return 0.5 * summed((x - x.detach() - shift).square())


def sid_terms(x: Tensor, taught: Tensor, faked: Tensor, k: float) -> Tensor:
    """R ((D_T - x) - k R), element by element."""
    gap = taught - faked
    return gap * ((taught - x) - k * gap)


def summed(values: Tensor) -> Tensor:
    """[B, ...] -> [B]."""
    return values.flatten(1).sum(1)


# ---------------------------------------------------------------- the ratio of densities


def log_ratio(
    still: Still,
    x_t: Tensor,
    sigma: Tensor,
    cond: Condition | None,
    noise: NoiseSource,
    *,
    draws: int = 1,
    highest: float = math.inf,
) -> Tensor:
    """log q(x_t)/p(x_t) [B] from the denoisers alone, 2 evaluations of each per draw.

    Unbiased where both are exact at every level. Networks know none beyond their `highest`: there
    the integral ends, short of the ratio of the two densities under so much noise, which is small.

    As noise of variance v is added both densities become the same, and the heat equation says how:
    d log p/dv = (lap log p + |grad log p|^2)/2 at a point that stays. By parts, with y = x_t +
    sqrt(v) n and R and D = (D_T + D_F)/2 at y, whose level is s^2 = sigma^2 + v,

        log q/p = integral over v of E[<R/s^2, (y - D)/s^2 - n/sqrt(v)>]

    which is the pointwise I-MMSE relation (Kong et al. 2023) of teacher and score. Levels are
    v = c^2 u/(1 - u) with c^2 = sigma^2 + 1 and u uniform up to where v ends, which is 1 if it does
    not; -n is taken along with n, or small v would be all noise.
    """
    wide = sigma.double() ** 2 + 1
    last = (highest**2 - sigma.double() ** 2).clamp(min=0)
    reach = torch.where(last.isinf(), 1.0, last / (wide + last))
    first = torch.special.ndtr(noise(x_t.flatten(1)[:, :1], 0).double()).squeeze(1)
    total = torch.zeros_like(wide)
    for j in range(draws):
        u = (reach * (j + first) / draws).clamp(1e-6, 1 - 1e-6)
        at = partial(_ratio_slope, still, x_t, sigma, wide * u / (1 - u), cond)
        unit = noise(x_t, j + 1)
        total = total + reach * wide / (1 - u) ** 2 * (at(unit) + at(-unit)) / 2
    return total / draws


def _ratio_slope(
    still: Still, x_t: Tensor, sigma: Tensor, v: Tensor, cond: Condition | None, unit: Tensor
) -> Tensor:
    """What is integrated over v, at one n."""
    level, root = (sigma.double() ** 2 + v).sqrt(), rows(v.sqrt(), x_t)
    y, square = x_t + root * unit, rows(level**2, x_t)
    taught, faked = still.teacher(y, level, cond), still.score(y, level, cond)
    away = (y - (taught + faked) / 2) / square - unit / root
    return summed((taught - faked) / square * away).double()
