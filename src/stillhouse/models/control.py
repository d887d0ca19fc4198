"""Control conditions reach a network through its time path alone, semantics through attention.

    temb = MLP_t(sincos(t)) + E_h(composition) + gamma(t) E_l(detail) + E_n(steps)

Composition (crop, flip, aspect, a style) holds at every noise level. Detail (the original size) may
only matter once the content is decided: gamma is 1 without noise and 0 in pure noise. With a
constant weight, as in SDXL, another size is another image (Berrada et al. 2024, section 3.1).

| gamma | u = t/T from data (0) to noise (1) |
|---|---|
| `cosine` | ((1 + cos(pi u))/2)^alpha |
| `late` | (1 - cos(pi (1 - u)^alpha))/2 |
| `constant` | 1 |

A value that is not a number means "not said": what is dropped in training, for guidance.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Shape = Literal["cosine", "late", "constant"]
SINUSOIDS = 256  # numbers that stand for one scalar


# ---------------------------------------------------------------- how much of the detail


def cosine(u: Tensor, alpha: float) -> Tensor:
    return ((1 + (math.pi * u).cos()) / 2) ** alpha


def late(u: Tensor, alpha: float) -> Tensor:
    return (1 - (math.pi * (1 - u) ** alpha).cos()) / 2


def constant(u: Tensor, alpha: float) -> Tensor:
    return torch.ones_like(u)


SHAPES: dict[Shape, Callable[[Tensor, float], Tensor]] = {
    "cosine": cosine,
    "late": late,
    "constant": constant,
}


@dataclass(frozen=True)
class Gamma:
    """The weight of detail, as a function of the network's own time."""

    shape: Shape = "cosine"
    alpha: float = 8.0
    last: float = 1000.0  # the time of pure noise
    log_sigma: bool = False  # time is ln(sigma)/4, as EDM tells it

    def __call__(self, time: Tensor) -> Tensor:
        return SHAPES[self.shape](self.fraction(time), self.alpha)

    def fraction(self, time: Tensor) -> Tensor:
        """u in [0, 1]; for EDM the time of the flow through the same levels."""
        if not self.log_sigma:
            return (time / self.last).clamp(0, 1)
        # sigma/(1 + sigma) = sigmoid(ln sigma), and 1 at the last level.
        last = torch.sigmoid(time.new_full((), 4 * self.last))
        return (torch.sigmoid(4 * time) / last).clamp(0, 1)


# ---------------------------------------------------------------- what is said


@dataclass(frozen=True)
class Layout:
    """The columns of `Condition.control`, in order: composition, styles, detail."""

    composition: tuple[str, ...] = ()
    styles: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name, and its values by number
    detail: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.composition, *(name for name, _ in self.styles), *self.detail)

    def row(self, said: Mapping[str, float | str]) -> Tensor:
        """[1, K] from values by name, those of styles by theirs; what is not said is no number."""
        values = dict(self.styles)
        strange = [name for name in said if name not in self.names]
        if strange:
            raise ValueError(f"{strange[0]} is none of {', '.join(self.names) or 'no controls'}")
        return torch.tensor([[self._number(said.get(n), values.get(n)) for n in self.names]])

    def _number(self, value: float | str | None, values: tuple[str, ...] | None) -> float:
        if value is None:
            return math.nan
        if values is None:
            return float(value)
        if value not in values:
            raise ValueError(f"{value} is none of {', '.join(values)}")
        return float(values.index(str(value)))

    def parts(self, control: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three groups of columns."""
        first, second, third = len(self.composition), len(self.styles), len(self.detail)
        if control.shape[1] != first + second + third:
            raise ValueError(
                f"control has {control.shape[1]} columns, the network was made for "
                f"{', '.join(self.names) or 'none'}"
            )
        composition, styles, detail = control.split([first, second, third], 1)
        return composition, styles, detail


def sinusoids(values: Tensor, count: int = SINUSOIDS) -> Tensor:
    """[B, K] -> [B, K * count], as times are embedded; zeros where a value is not a number."""
    half = count // 2
    places = torch.arange(half, dtype=torch.float32, device=values.device)
    angle = values.float()[..., None] * torch.exp(-math.log(10_000) / half * places)
    waves = torch.cat([angle.cos(), angle.sin()], -1)
    return torch.where(values.isnan()[..., None], 0.0, waves).flatten(1)


class Scalars(nn.Module):
    """E: sinusoids of every scalar, then Linear-SiLU-Linear."""

    def __init__(self, count: int, width: int, *, zero: bool = False) -> None:
        super().__init__()
        self.inward = nn.Linear(count * SINUSOIDS, width)
        self.outward = nn.Linear(width, width)
        if zero:  # a trained network is not changed by it at first
            nn.init.zeros_(self.outward.weight)
            nn.init.zeros_(self.outward.bias)

    def forward(self, values: Tensor) -> Tensor:
        waves = sinusoids(values).to(self.inward.weight.dtype)
        return self.outward(nn.functional.silu(self.inward(waves)))


def _table(count: int, width: int) -> nn.Embedding:
    """Small at first: a vector of deviation 1 would drown the embedding of time."""
    table = nn.Embedding(count, width)
    nn.init.normal_(table.weight, std=0.02)
    return table


class Control(nn.Module):
    """Composition, styles and detail as one vector, to be added to the embedding of time."""

    def __init__(self, layout: Layout, gamma: Gamma, width: int) -> None:
        super().__init__()
        self.layout, self.gamma = layout, gamma
        self.composition = Scalars(len(layout.composition), width) if layout.composition else None
        # One more than there are styles stands for "not said".
        self.styles = nn.ModuleDict(
            {f"style{i}": _table(len(v) + 1, width) for i, (_, v) in enumerate(layout.styles)}
        )
        self.detail = Scalars(len(layout.detail), width) if layout.detail else None

    def forward(self, control: Tensor, time: Tensor) -> Tensor:
        """`control` [B, K] as the layout says, `time` [B] as the network is told it."""
        composition, styles, detail = self.layout.parts(control)
        tables = self.styles.values()
        parts = [table(self._rows(styles[:, i], i)) for i, table in enumerate(tables)]
        if self.composition is not None:
            parts.append(self.composition(composition))
        if self.detail is not None:
            weight = self.gamma(time.float())[:, None]
            parts.append(weight * self.detail(detail).float())
        return torch.stack([part.float() for part in parts]).sum(0)

    def _rows(self, style: Tensor, which: int) -> Tensor:
        unsaid = float(len(self.layout.styles[which][1]))
        return torch.where(style.isnan(), unsaid, style).long()
