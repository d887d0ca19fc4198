"""Configs of the parts of a sampling run: solver, grid and guidance. Each builds its component.

Frozen, unknown keys are errors, and every choice is a union tagged by `kind`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter

from stillhouse.config import Config

if TYPE_CHECKING:
    from torch import Tensor

    from stillhouse.process import Condition, Denoiser, Scaling

    Load = Callable[[str], Denoiser]  # reads a checkpoint the way the run reads its own

Order = Annotated[int, Field(ge=1, le=4)]
Share = Annotated[float, Field(ge=0)]


# ---------------------------------------------------------------- solvers


class SolverConfig(Config):
    """What every solver takes."""

    afs: bool = False
    """Analytical first step: saves the first evaluation."""
    lower_order_final: bool = True
    """Lower the order over the last steps; it matters where these are wide, as on flow grids."""

    def build(self) -> "Callable[..., Tensor]":
        from stillhouse.solvers import SOLVERS

        options = self.model_dump()
        return partial(SOLVERS[options.pop("kind")], **options)


class Euler(SolverConfig):
    """First order; DDIM where the process is VP."""

    kind: Literal["euler"] = "euler"


class Heun(SolverConfig):
    """Second order, two evaluations per step (Karras et al. 2022)."""

    kind: Literal["heun"] = "heun"


class Dpm2(SolverConfig):
    """Second order, by a midpoint: two evaluations per step."""

    kind: Literal["dpm2"] = "dpm2"


class Ipndm(SolverConfig):
    """Multistep, of the slopes before (Zhang & Chen 2023)."""

    kind: Literal["ipndm"] = "ipndm"
    order: Order = 4
    """Steps back that it looks, and this one."""


class RhoAb(SolverConfig):
    """Adams-Bashforth in the noise level, exact on uneven grids."""

    kind: Literal["rho-ab"] = "rho-ab"
    order: Order = 3
    """Steps back that it looks, and this one."""


class Dpmpp2M(SolverConfig):
    """DPM-Solver++, second order multistep (Lu et al. 2022)."""

    kind: Literal["dpmpp-2m"] = "dpmpp-2m"
    variant: Literal["compat", "exact"] = "compat"
    """compat: the published formula; exact: second order on uneven grids."""


class Dpmpp3M(SolverConfig):
    """DPM-Solver++, third order multistep (Lu et al. 2022)."""

    kind: Literal["dpmpp-3m"] = "dpmpp-3m"
    variant: Literal["compat", "exact"] = "compat"
    """compat: the published formula; exact: third order."""


class UniPC(SolverConfig):
    """Predictor and corrector (Zhao et al. 2023)."""

    kind: Literal["unipc"] = "unipc"
    order: Order = 3
    """Of the predictor."""
    b: Literal["bh1", "bh2"] = "bh2"
    """The paper's two choices of B(h)."""
    corrector: bool = True
    """Correct each step by the next evaluation."""


class Deis(SolverConfig):
    """Exponential integrator with polynomials of the slopes before (Zhang & Chen 2023)."""

    kind: Literal["deis"] = "deis"
    order: Order = 3
    """Steps back that it looks, and this one."""


class EdmChurn(SolverConfig):
    """Heun with noise added before each step (Karras et al. 2022, algorithm 2)."""

    kind: Literal["edm-churn"] = "edm-churn"
    churn: Share = 40.0
    """How much noise is added, shared among the steps."""
    sigma_from: Share = 0.05
    """The lowest level at which noise is added."""
    sigma_to: Share = 50.0
    """Noise is added between these two levels."""
    noise_scale: Share = 1.003
    """Standard deviation of the added noise, a little over 1 against lost detail."""


class EulerAncestral(SolverConfig):
    """Euler with fresh noise after each step."""

    kind: Literal["euler-ancestral"] = "euler-ancestral"
    eta: Share = 1.0
    """Share of the noise: 0 is the ODE, 1 the reverse of the forward process."""


class DpmppSde(SolverConfig):
    """DPM-Solver++ of the SDE, two evaluations per step."""

    kind: Literal["dpmpp-sde"] = "dpmpp-sde"
    eta: Share = 1.0
    """Share of the noise: 0 is the ODE, 1 the reverse of the forward process."""


class Dpmpp2MSde(SolverConfig):
    """DPM-Solver++ of the SDE, second order multistep."""

    kind: Literal["dpmpp-2m-sde"] = "dpmpp-2m-sde"
    eta: Share = 1.0
    """Share of the noise: 0 is the ODE, 1 the reverse of the forward process."""


Solver = Annotated[
    Euler
    | Heun
    | Dpm2
    | Ipndm
    | RhoAb
    | Dpmpp2M
    | Dpmpp3M
    | UniPC
    | Deis
    | EdmChurn
    | EulerAncestral
    | DpmppSde
    | Dpmpp2MSde,
    Field(discriminator="kind"),
]

SolverName = Literal[
    "euler",
    "heun",
    "dpm2",
    "ipndm",
    "rho-ab",
    "dpmpp-2m",
    "dpmpp-3m",
    "unipc",
    "deis",
    "edm-churn",
    "euler-ancestral",
    "dpmpp-sde",
    "dpmpp-2m-sde",
]


class Renoise(SolverConfig):
    """Of consistency students alone, which bring it with them: clean, and noise anew."""

    kind: Literal["renoise"] = "renoise"

    def build(self) -> "Callable[..., Tensor]":
        from stillhouse.solvers import sample_renoise

        return partial(sample_renoise, **self.model_dump(exclude={"kind"}))


def solver(name: str) -> Solver:
    """A solver with its defaults."""
    return TypeAdapter(Solver).validate_python({"kind": name})


# ---------------------------------------------------------------- grids


class NativeGrid(Config):
    """The model's own scheduler's levels, then 0."""

    kind: Literal["native"] = "native"

    def build(self, scaling: "Scaling", steps: int) -> "Tensor":
        return scaling.native_grid(steps)


class RangedGrid(Config, ABC):
    """A grid over a range of sigma, the model's own where not given."""

    sigma_min: PositiveFloat | None = None
    """Lowest level; the model's own if not given."""
    sigma_max: PositiveFloat | None = None
    """First level; the model's own if not given."""
    to_zero: bool = True
    """End with a step to sigma = 0 rather than at sigma_min."""

    def build(self, scaling: "Scaling", steps: int) -> "Tensor":
        from stillhouse.process import levels

        count = steps if self.to_zero else steps + 1
        low, high = self.sigma_min or scaling.sigma_min, self.sigma_max or scaling.sigma_max
        grid = self.levels(count, low, high, scaling)
        return levels.to_zero(grid) if self.to_zero else grid

    @abstractmethod
    def levels(self, count: int, low: float, high: float, scaling: "Scaling") -> "Tensor":
        """`count` levels from `high` down to `low`."""


class BelowCap(RangedGrid):
    """A grid in sigma itself, which must not be spaced from a cap that stands for infinity."""

    below_cap: PositiveFloat = 80.0
    """Where the signal vanishes at first (flow, zero-SNR): the level after that first one."""

    def levels(self, count: int, low: float, high: float, scaling: "Scaling") -> "Tensor":
        import torch

        from stillhouse.process import SIGMA_CAP

        if high < SIGMA_CAP or count == 1:
            return self.spaced(count, low, high)
        rest = self.spaced(count - 1, low, self.below_cap)
        return torch.cat([rest.new_tensor([SIGMA_CAP]), rest])

    @abstractmethod
    def spaced(self, count: int, low: float, high: float) -> "Tensor":
        """`count` levels between finite ends."""


class PolynomialLevels(BelowCap):
    """Even in sigma^(1/rho)."""

    rho: PositiveFloat = 7.0
    """Larger: more levels at little noise."""

    def spaced(self, count: int, low: float, high: float) -> "Tensor":
        from stillhouse.process import levels

        return levels.polynomial(count, low, high, self.rho)


class PolynomialGrid(PolynomialLevels):
    """Even in sigma^(1/rho)."""

    kind: Literal["polynomial"] = "polynomial"


class LogSnrGrid(BelowCap):
    """Even in log-SNR."""

    kind: Literal["log-snr"] = "log-snr"

    def spaced(self, count: int, low: float, high: float) -> "Tensor":
        from stillhouse.process import levels

        return levels.uniform_log_snr(count, low, high)


class TimeGrid(RangedGrid):
    """Even in the process's own time, fractions allowed."""

    kind: Literal["time"] = "time"

    def levels(self, count: int, low: float, high: float, scaling: "Scaling") -> "Tensor":
        from stillhouse.process import levels

        return levels.uniform_time(count, scaling, low, high)


class SearchedGrid(PolynomialLevels):
    """The best levels of a fine polynomial grid, found on a few samples (GITS)."""

    kind: Literal["searched"] = "searched"
    fine: Annotated[int, Field(ge=3)] = 61
    """Levels to choose from."""
    samples: PositiveInt = 256
    """Samples that the search walks with."""
    gamma: PositiveFloat = 1.15
    """Weight of later jumps."""


Grid = Annotated[
    NativeGrid | PolynomialGrid | LogSnrGrid | TimeGrid | SearchedGrid,
    Field(discriminator="kind"),
]


# ---------------------------------------------------------------- guidance


class NoGuidance(Config):
    """The model as it is."""

    kind: Literal["none"] = "none"

    @property
    def calls(self) -> int:
        """Of a network, for one answer."""
        return 1

    def build(self, denoiser: "Denoiser", null: "Condition | None", load: "Load") -> "Denoiser":
        return denoiser


class GuidedConfig(Config):
    """Guidance within an interval of noise levels."""

    weight: float = 2.0
    """1 is no guidance; more is stronger."""
    low: Share = 0.0
    """Guide only while low < sigma <= high."""
    high: Share = 1e5
    """The default is beyond every noise level."""

    @property
    def interval(self) -> tuple[float, float]:
        """Everywhere, or as asked for."""
        everywhere = self.low == 0 and self.high >= 1e5
        return (0.0, float("inf")) if everywhere else (self.low, self.high)

    @property
    def calls(self) -> int:
        """Of a network, for one answer within the interval."""
        return 1 + (self.weight != 1)


class ClassifierFree(GuidedConfig):
    """Away from what the model says when told nothing (Ho & Salimans 2022)."""

    kind: Literal["classifier-free"] = "classifier-free"

    def build(self, denoiser: "Denoiser", null: "Condition | None", load: "Load") -> "Denoiser":
        from stillhouse.errors import UserError
        from stillhouse.solvers import classifier_free

        if null is None:
            raise UserError(
                "classifier-free guidance needs the label that stands for no class: give it as "
                "--null-label"
            )
        # What is drawn is dropped; how it is framed stays.
        semantics = replace(null, control=None)
        return classifier_free(denoiser, semantics, self.weight, self.interval)


class TwoTermGuidance(GuidedConfig):
    """For models with control: what is drawn and how it is framed are guided apart."""

    kind: Literal["two-term"] = "two-term"
    control: float = 1.0
    """Share of the control: 1 with it, 0 without, more exaggerates it."""

    @property
    def calls(self) -> int:
        return super().calls + (self.control not in (0, 1))

    def build(self, denoiser: "Denoiser", null: "Condition | None", load: "Load") -> "Denoiser":
        from stillhouse.errors import UserError
        from stillhouse.solvers import TwoTerm

        if null is None or null.control is None:
            raise UserError(
                "two-term guidance needs a model that takes control: choose --guidance "
                "classifier-free"
            )
        return TwoTerm(denoiser, null, self.weight, self.control, self.interval)


class Autoguidance(GuidedConfig):
    """Away from a worse model (Karras et al. 2024)."""

    kind: Literal["autoguidance"] = "autoguidance"
    model: str = ""
    """The worse model to push away from: a directory or hub id."""

    def build(self, denoiser: "Denoiser", null: "Condition | None", load: "Load") -> "Denoiser":
        from stillhouse.errors import UserError
        from stillhouse.solvers import autoguidance

        if not self.model:
            raise UserError("autoguidance needs the worse model: give it as --guidance.model")
        return autoguidance(denoiser, load(self.model), self.weight, self.interval)


Guidance = Annotated[
    NoGuidance | ClassifierFree | TwoTermGuidance | Autoguidance, Field(discriminator="kind")
]
