"""Configs of objectives and of the densities they draw noise levels from. Each builds its part.

`build` is given the process that the network speaks, and the length of the run in images.
"""

from abc import ABC, abstractmethod
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from stillhouse.config import Config
from stillhouse.errors import UserError
from stillhouse.objectives.base import Objective
from stillhouse.objectives.consistency import EasyConsistency, ImprovedConsistency
from stillhouse.objectives.denoising import Constants, Denoising, Weighting
from stillhouse.objectives.flow import FlowMatching
from stillhouse.process import EDM, VP, Flow, Scaling, levels

# ---------------------------------------------------------------- densities


class DensityConfig(Config, ABC):
    """A distribution of noise levels."""

    shift: PositiveFloat = 1.0
    """Resolution relative to the one that the density was chosen for: levels times this."""

    def build(self, scaling: Scaling) -> levels.Density:
        density = self.density(scaling)
        return density if self.shift == 1 else levels.Shifted(density, self.shift)

    @abstractmethod
    def density(self, scaling: Scaling) -> levels.Density:
        """The density before the shift."""


class LogNormal(DensityConfig):
    """ln sigma is normal."""

    kind: Literal["log-normal"] = "log-normal"
    mean: float = -1.2
    """Of ln sigma."""
    std: PositiveFloat = 1.2
    """Of ln sigma."""

    def density(self, scaling: Scaling) -> levels.Density:
        return levels.LogNormal(self.mean, self.std)


class LogUniform(DensityConfig):
    """Uniform in log-SNR."""

    kind: Literal["log-uniform"] = "log-uniform"
    sigma_min: PositiveFloat | None = None
    """Lowest level; the process's own if not given."""
    sigma_max: PositiveFloat | None = None
    """Highest level; the process's own if not given."""

    def density(self, scaling: Scaling) -> levels.Density:
        return levels.LogUniform(
            self.sigma_min or scaling.sigma_min, self.sigma_max or scaling.sigma_max
        )


class LogitNormal(DensityConfig):
    """logit(t) of the flow time is normal."""

    kind: Literal["logit-normal"] = "logit-normal"
    mean: float = 0.0
    """Of logit(t)."""
    std: PositiveFloat = 1.0
    """Of logit(t)."""

    def density(self, scaling: Scaling) -> levels.Density:
        return levels.LogitNormal(self.mean, self.std)


class UniformTime(DensityConfig):
    """Uniform in the process's own time; whole timesteps where it counts those."""

    kind: Literal["uniform-time"] = "uniform-time"

    def density(self, scaling: Scaling) -> levels.Density:
        if isinstance(scaling, EDM):
            raise UserError(
                "an EDM process has no time that runs from data to noise: choose --objective."
                "density.kind log-normal or log-uniform"
            )
        return levels.UniformTime(scaling, discrete=isinstance(scaling, VP))


Density = Annotated[LogNormal | LogUniform | LogitNormal | UniformTime, Field(discriminator="kind")]


# ---------------------------------------------------------------- objectives


class DenoisingConfig(Config):
    """Squared error of the denoised image."""

    kind: Literal["denoising"] = "denoising"
    weighting: Weighting = "edm"
    """Weight per noise level: that of an error in x0, eps, v, the EDM network, flow; or min-snr."""
    gamma: PositiveFloat = 5.0
    """Largest signal-to-noise ratio that counts, for min-snr."""
    density: Density = LogNormal()

    def build(self, scaling: Scaling, images: float) -> Objective:
        sigma_data = scaling.sigma_data
        constants = Constants(sigma_data, self.gamma)
        return Denoising(self.density.build(scaling), self.weighting, constants)


class FlowConfig(Config):
    """Flow matching: squared error of the velocity."""

    kind: Literal["flow"] = "flow"
    density: Density = LogitNormal()

    def build(self, scaling: Scaling, images: float) -> Objective:
        # Uniform time means flow time here, whatever process the network was made for.
        process = scaling if isinstance(scaling, Flow) else Flow()
        return FlowMatching(self.density.build(process))


class ConsistencyConfig(Config):
    """Improved consistency training, from scratch."""

    kind: Literal["consistency"] = "consistency"
    sigma_min: PositiveFloat = 0.002
    """The smallest level of the grid."""
    sigma_max: PositiveFloat = 80.0
    """The largest."""
    first_steps: PositiveInt = 10
    """Levels of the grid at the beginning."""
    last_steps: PositiveInt = 1280
    """Levels of the grid, doubling from first to last over the run."""
    huber: PositiveFloat = 0.00054
    """Width of the quadratic part of the distance, per element."""
    density: Density = LogNormal(mean=-1.1, std=2.0)

    def build(self, scaling: Scaling, images: float) -> Objective:
        if self.sigma_min >= self.sigma_max or self.first_steps > self.last_steps:
            raise UserError("consistency needs sigma_min < sigma_max and first_steps <= last_steps")
        options = self.model_dump(exclude={"kind", "density"})
        density = self.density.build(scaling)
        return ImprovedConsistency(total_images=images, density=density, **options)


class EasyConsistencyConfig(Config):
    """Easy consistency tuning, from a trained diffusion model."""

    kind: Literal["easy-consistency"] = "easy-consistency"
    q: Annotated[float, Field(gt=1)] = 2.0
    """The gap between the two levels shrinks by this at every stage."""
    k: Annotated[float, Field(ge=0)] = 8.0
    """How much wider the gap between the levels is at small ones."""
    b: PositiveFloat = 1.0
    """k and b: how much wider the gap is at small levels, and how small those are."""
    stages: PositiveInt = 8
    """In which the gap shrinks."""
    huber: PositiveFloat = 1e-6
    """Width of the quadratic part of the distance, per element."""
    density: Density = LogNormal(mean=-1.1, std=2.0)

    def build(self, scaling: Scaling, images: float) -> Objective:
        options = self.model_dump(exclude={"kind", "density"})
        density = self.density.build(scaling)
        return EasyConsistency(total_images=images, density=density, **options)


ObjectiveConfig = Annotated[
    DenoisingConfig | FlowConfig | ConsistencyConfig | EasyConsistencyConfig,
    Field(discriminator="kind"),
]
