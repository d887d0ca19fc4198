"""Flow matching: mean (u(x_t, t) - (noise - x0))^2 for x_t = (1 - t) x0 + t noise.

In noise-level space sigma = t/(1 - t) and x = x_t/(1 - t), so the denoiser's velocity is
u = ((1 + sigma) D - x)/(-sigma), and this is `Denoising` with the weighting `flow`. It is written
out here because the velocity is what people compare (Lipman et al. 2023; Liu et al. 2023). Times
are logit-normal (Esser et al. 2024, section 3.1) or uniform.
"""

from dataclasses import dataclass

from torch import Tensor

from stillhouse.objectives.base import Noised, Objective, per_sample_mean
from stillhouse.process import Batch, Denoiser, levels, predictions

DENSITY = levels.LogitNormal()


@dataclass(frozen=True)
class FlowMatching(Objective):
    """Squared error of the velocity, at levels drawn from a density."""

    density: levels.Density = DENSITY

    def sigmas(self, u: Tensor, batch: Batch) -> Tensor:
        return self.density.quantile(u)

    def losses(self, denoiser: Denoiser, noised: Noised) -> Tensor:
        x = noised.x
        denoised = denoiser(x, noised.sigma, noised.condition)
        velocity = predictions.from_x0("flow", x, denoised, noised.sigma)
        return per_sample_mean((velocity - noised.target("flow")) ** 2)
