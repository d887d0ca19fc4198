"""Averages of the weights over training: several at once, sharded like the weights themselves.

An average moves by `average += (1 - beta) (weights - average)` after every update of the weights.
Three profiles say what beta is; progress is counted in images, so none depends on the batch size
but `constant`:

| profile     | beta                                | share of the weights at time tau          |
|-------------|-------------------------------------|-------------------------------------------|
| `half-life` | 2^-(added/half-life)                | halves with every half-life               |
| `constant`  | the decay                           | shrinks by the decay with every update    |
| `power`     | (1 - added/images)^(gamma + 1)      | (gamma + 1) tau^gamma/images^(gamma + 1)  |

The power function (Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion
Models", section 3) forgets the start of training, and its width stays the same share `sigma_rel` of
the training so far. Snapshots of two or more of them, taken now and then, give any other width
afterwards: `synthesize`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from stillhouse.config import Config
from stillhouse.errors import UserError

Weights = dict[str, Tensor]


# ---------------------------------------------------------------- profiles


class HalfLife(Config):
    """What was learnt this many images ago counts half."""

    kind: Literal["half-life"] = "half-life"
    images: PositiveFloat = 500_000
    ramp: Annotated[float, Field(ge=0)] = 0.05
    """The half-life is at most this share of the images seen, so that early weights go; 0: off."""

    @property
    def name(self) -> str:
        return f"half-life-{self.images:g}"

    def beta(self, images: int, added: int, updates: int) -> float:
        """As EDM's training loop: the ramp counts the images before this update."""
        ramped = (images - added) * self.ramp if self.ramp else math.inf
        half_life = min(self.images, ramped)
        return 0.5 ** (added / half_life) if half_life else 0.0


class ConstantDecay(Config):
    """The same decay at every update, whatever the batch size."""

    kind: Literal["constant"] = "constant"
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.9999
    warmup: bool = True
    """Begin with (1 + n)/(10 + n) after n updates."""

    @property
    def name(self) -> str:
        return f"constant-{self.decay:g}"

    def beta(self, images: int, added: int, updates: int) -> float:
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay


class PowerFunction(Config):
    """A power function of training time whose width is a share of the training so far."""

    kind: Literal["power"] = "power"
    sigma_rel: Annotated[float, Field(gt=0, lt=0.28)] = 0.1
    """Standard deviation of the profile, as a share of the training so far."""

    @property
    def name(self) -> str:
        return f"power-{self.sigma_rel:g}"

    def beta(self, images: int, added: int, updates: int) -> float:
        """Karras et al. 2024, eq. 127: exact for steps of any size; the first is a copy."""
        return (1 - added / images) ** (exponent(self.sigma_rel) + 1)


Profile = Annotated[HalfLife | ConstantDecay | PowerFunction, Field(discriminator="kind")]


@cache
def exponent(sigma_rel: float) -> float:
    """gamma of sigma_rel^2 = (gamma + 1)/((gamma + 2)^2 (gamma + 3)) (Algorithm 2)."""
    t = sigma_rel**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


# ---------------------------------------------------------------- averages


class Averages:
    """The averages of one module's trainable parameters, in float32 or wider.

    Make it after the module is sharded and on its device: averages of DTensors are DTensors of the
    same placement, and every operation is on local shards. Buffers are not averaged: the module's
    own are current.
    """

    def __init__(self, module: nn.Module, profiles: Sequence[Profile]) -> None:
        names = [profile.name for profile in profiles]
        if len(set(names)) < len(names):
            raise UserError(f"the same average is asked for twice: {', '.join(sorted(names))}")
        _reshard(module)
        self.module = module
        self.profiles = {profile.name: profile for profile in profiles}
        self.images, self.updates = 0, 0
        self._parameters = {k: p for k, p in module.named_parameters() if p.requires_grad}
        self.weights = {name: self._copies() for name in self.profiles}
        self._applied = False

    def _copies(self) -> Weights:
        return {name: _wide(p.detach().clone()) for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, images: float) -> None:
        """After an update of the weights, with the images seen up to and including it."""
        added = int(images) - self.images
        if added <= 0:
            raise ValueError(
                f"averages have seen {self.images} images already, not fewer: {images}"
            )
        if self._applied:
            raise RuntimeError("the module holds an average now: leave `applied` before training")
        latest = [_wide(_local(p)) for p in self._parameters.values()]
        for name, profile in self.profiles.items():
            beta = profile.beta(int(images), added, self.updates)
            torch._foreach_lerp_(_locals(self.weights[name]), latest, 1 - beta)
        self.images, self.updates = int(images), self.updates + 1

    @contextmanager
    def applied(self, name: str) -> Iterator[nn.Module]:
        """The module with an average as its weights; afterwards it is what it was, to the bit.

        Buffers that an evaluation changes are put back too.
        """
        if name not in self.weights:
            raise UserError(f"there is no average {name!r}; there are: {', '.join(self.weights)}")
        _reshard(self.module)
        parameters, buffers = self._locals(), [_local(b) for b in self.module.buffers()]
        kept = [tensor.detach().clone() for tensor in [*parameters, *buffers]]
        self._applied = True
        try:
            _copy(parameters, _locals(self.weights[name]))
            yield self.module
        finally:
            _reshard(self.module)
            _copy([*parameters, *buffers], kept)
            self._applied = False

    def _locals(self) -> list[Tensor]:
        return [_local(p) for p in self._parameters.values()]

    # ---------------- state

    def state_dict(self) -> dict[str, Any]:
        """`averages`: the tensors themselves, not copies; `progress`: values for JSON."""
        progress = {"images": self.images, "updates": self.updates}
        return {"averages": self.weights, "progress": progress}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the values over; the tensors stay this object's own."""
        _same_names("averages", state["averages"], self.weights)
        for name, weights in self.weights.items():
            _same_names(f"parameters in average {name!r}", state["averages"][name], weights)
        for name, weights in self.weights.items():
            _copy(_locals(weights), _locals({k: state["averages"][name][k] for k in weights}))
        self.images = int(state["progress"]["images"])
        self.updates = int(state["progress"]["updates"])

    def snapshots(self, dtype: torch.dtype | None = None) -> list["Snapshot"]:
        """Copies of the power-function averages as they are now, to synthesize others from."""
        return [
            Snapshot(self.images, profile.sigma_rel, _copied(self.weights[name], dtype))
            for name, profile in self.profiles.items()
            if isinstance(profile, PowerFunction)
        ]


def _local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, sharing its memory; a plain tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():
        return to_local()


def _locals(weights: Weights) -> list[Tensor]:
    return [_local(tensor) for tensor in weights.values()]


def _wide(tensor: Tensor) -> Tensor:
    """At least float32: in half precision an average stops moving."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _copied(weights: Weights, dtype: torch.dtype | None) -> Weights:
    return {k: w.to(dtype, copy=True) if dtype else w.clone() for k, w in weights.items()}


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        if targets:
            torch._foreach_copy_(targets, sources)


def _reshard(module: nn.Module) -> None:
    """FSDP2 may keep gathered weights after a forward pass, which would hide a change of shards."""
    for part in module.modules():
        reshard = getattr(part, "reshard", None)
        if reshard is not None:
            reshard()


def _same_names(what: str, stored: Iterable[str], here: Iterable[str]) -> None:
    lacking, extra = sorted(set(here) - set(stored)), sorted(set(stored) - set(here))
    if lacking or extra:
        raise UserError(
            f"the {what} in this checkpoint are not those of the run: it lacks {lacking or 'none'} "
            f"and has {extra or 'none'} besides. Resume with the settings it was written with."
        )


# ---------------------------------------------------------------- post-hoc synthesis


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A power-function average at one moment of training."""

    images: int
    sigma_rel: float
    weights: Weights


def inner_product(
    images_a: np.ndarray, gamma_a: np.ndarray, images_b: np.ndarray, gamma_b: np.ndarray
) -> np.ndarray:
    """The integral of two profiles' product (Karras et al. 2024, eq. 151).

    With p_a(tau) = (a + 1) tau^a/t_a^(a + 1) up to t_a, and t_a <= t_b, it is
    (a + 1)(b + 1)/(a + b + 1) (t_a/t_b)^b/t_b; the other way round the roles change.
    """
    first, last = np.minimum(images_a, images_b), np.maximum(images_a, images_b)
    longer = np.where(images_a < images_b, gamma_b, gamma_a)  # the exponent of the later one
    share = (gamma_a + 1) * (gamma_b + 1) / (gamma_a + gamma_b + 1)
    return share * (first / last) ** longer / last


def coefficients(
    stored: Sequence[tuple[float, float]], sigma_rel: float, images: float
) -> list[float]:
    """What to multiply snapshots (images, sigma_rel) by, to get the profile that is asked for.

    The least squares fit of profiles solves A c = b with A and b their inner products (Algorithm
    3). Snapshots later than `images` count 0. Rows are scaled to a unit diagonal, and directions
    that rounding has swallowed are left out.
    """
    chosen = [i for i, (seen, _) in enumerate(stored) if 0 < seen <= images]
    if not chosen:
        raise UserError(f"no snapshot was taken within the first {images:g} images")
    seen = np.array([stored[i][0] for i in chosen], dtype=np.float64)
    gamma = np.array([exponent(stored[i][1]) for i in chosen])
    wanted = np.array(images, dtype=np.float64), np.array(exponent(sigma_rel))
    a = inner_product(seen[:, None], gamma[:, None], seen, gamma)
    scale = np.diag(a) ** -0.5
    b = scale * inner_product(seen, gamma, *wanted)
    found = scale * np.linalg.lstsq(scale[:, None] * a * scale, b, rcond=1e-13)[0]
    result = np.zeros(len(stored))
    result[chosen] = found / found.sum()
    return result.tolist()


def combine(parts: Iterable[tuple[float, Weights]]) -> Weights:
    """The sum of coefficient * weights, one part in memory at a time if `parts` is a generator."""
    total: Weights = {}
    for coefficient, weights in parts:
        if not total:
            total = {k: torch.zeros_like(_wide(w)) for k, w in weights.items()}
        _same_names("parameters of a snapshot", weights, total)
        shards = [_wide(_local(weights[k])) for k in total]
        torch._foreach_add_(_locals(total), shards, alpha=coefficient)
    return total


def synthesize(
    snapshots: Sequence[Snapshot], sigma_rel: float, images: float | None = None
) -> Weights:
    """The average of any width, at any moment (by default the last), from stored snapshots."""
    moment = max(s.images for s in snapshots) if images is None else images
    found = coefficients([(s.images, s.sigma_rel) for s in snapshots], sigma_rel, moment)
    return combine((c, s.weights) for c, s in zip(found, snapshots, strict=True) if c)
