"""Processes to train in, each written as the diffusers scheduler config that is saved with it.

The adapter is read back from that config, so that a model is trained as exactly what a reader of
its folder will take it for.
"""

from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from stillhouse.config import Config
from stillhouse.errors import UserError
from stillhouse.pipelines.families import scheduler_config, whole_folder
from stillhouse.pipelines.schedules import PREDICTION_NAMES, Trained, read_schedule
from stillhouse.process.betas import alphas_cumprod, betas, shifted_betas

# An error of 1% in eps is then ten standard deviations of the data in x0.
NO_SIGNAL = 1000


class Process(Config, ABC):
    """What a network is told and asked for at each noise level."""

    @abstractmethod
    def scheduler(self) -> dict[str, Any]:
        """The config of a diffusers scheduler."""

    def build(self) -> Trained:
        """Scaling and prediction."""
        return read_schedule(self.scheduler())

    @property
    def note(self) -> str:
        """What a user should know of it before training."""
        return ""


class Edm(Process):
    """Karras et al. 2022: preconditioned, told ln(sigma)/4."""

    kind: Literal["edm"] = "edm"
    sigma_data: PositiveFloat = 0.5
    """Standard deviation of the data."""
    sigma_min: PositiveFloat = 0.002
    """The smallest noise level of a walk."""
    sigma_max: PositiveFloat = 80.0
    """The largest, where a walk begins."""

    def scheduler(self) -> dict[str, Any]:
        return {
            "_class_name": "EDMEulerScheduler",
            "prediction_type": "epsilon",  # diffusers' word for the network of EDM
            **self.model_dump(exclude={"kind"}),
        }


class Vp(Process):
    """Variance preserving, in discrete timesteps (Ho et al. 2020)."""

    kind: Literal["vp"] = "vp"
    prediction: Literal["eps", "v", "x0"] = "eps"
    """What the network says: the noise, v, or the image."""
    betas: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "linear"
    """The noise schedule, by diffusers' names."""
    timesteps: PositiveInt = 1000
    """How many there are."""
    zero_snr: bool = False
    """Let the last timestep be pure noise; needs prediction v or x0."""
    shift: PositiveFloat = 1.0
    """Resolution relative to the one that the betas were chosen for: every timestep's noise level
    times this."""

    def scheduler(self) -> dict[str, Any]:
        names = {ours: theirs for theirs, ours in PREDICTION_NAMES.items()}
        return {
            "_class_name": "DDIMScheduler",
            "num_train_timesteps": self.timesteps,
            "prediction_type": names[self.prediction],
            "timestep_spacing": "trailing",
            "clip_sample": False,
            **self._schedule(),
        }

    @property
    def note(self) -> str:
        if self.prediction != "eps" or self.build().scaling.sigma_max < NO_SIGNAL:
            return ""
        return (
            f"the last timesteps of betas {self.betas} hold no signal, and eps-prediction says "
            "nothing about x0 there: walks from the first level on draw noise. Train with "
            "--process.prediction v, or draw with --grid polynomial --grid.sigma-max 80"
        )

    def _schedule(self) -> dict[str, Any]:
        if self.shift == 1:
            return {"beta_schedule": self.betas, "rescale_betas_zero_snr": self.zero_snr}
        abar = alphas_cumprod(betas(self.betas, self.timesteps), zero_terminal_snr=self.zero_snr)
        table = shifted_betas(abar, self.shift).tolist()
        return {"trained_betas": table, "rescale_betas_zero_snr": self.zero_snr}


class RectifiedFlow(Process):
    """Straight lines between data and noise (Lipman et al. 2023; Liu et al. 2023)."""

    kind: Literal["flow"] = "flow"
    shift: PositiveFloat = 1.0
    """Moves the sampling grid towards noise."""

    def scheduler(self) -> dict[str, Any]:
        return {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": self.shift}


class Own(Process):
    """That of the pipeline which is fine-tuned, as its scheduler's config says."""

    kind: Literal["own"] = "own"
    path: str = ""
    """The pipeline, if it is not --model."""

    def scheduler(self) -> dict[str, Any]:
        return scheduler_config(whole_folder(self.path))

    def build(self) -> Trained:
        try:
            return super().build()
        except ValueError as error:
            raise UserError(f"{self.path} cannot be trained: {error}") from error


ProcessConfig = Annotated[Edm | Vp | RectifiedFlow | Own, Field(discriminator="kind")]
