"""Fine-tuning: a training run whose network, process, text and codec are those of one pipeline.

| part of the run | kind | what the pipeline decides |
|---|---|---|
| `network` | tuned | the weights to go on from; all of them, or adapters (LoRA) beside them |
| `process` | own | betas, prediction, shift: its scheduler's config |
| `objective` | own | unit weight on what it predicts, at noise levels as it was trained on |
| `text` | pipeline | text encoders, what a dropped caption becomes, sizes it is told |
| `codec` | | its vae |
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeFloat, PositiveInt

from stillhouse.config import Config
from stillhouse.data import ControlConfig, DataConfig
from stillhouse.engine.loop import Engine
from stillhouse.engine.world import first_process
from stillhouse.errors import UserError, one_line
from stillhouse.models import DiffusersNetwork
from stillhouse.models.adapters import inject, keep_learnt, lora_options, require_peft
from stillhouse.models.conditioning import Parts
from stillhouse.objectives.base import Objective
from stillhouse.objectives.configs import (
    DenoisingConfig,
    FlowConfig,
    LogitNormal,
    LogNormal,
    UniformTime,
)
from stillhouse.pipelines import load_codec, load_denoiser
from stillhouse.pipelines.families import (
    downscale,
    family_of,
    network_config,
    scheduler_config,
    whole_folder,
)
from stillhouse.pipelines.prompts import prompt_digest
from stillhouse.pipelines.save import save_lora, save_pipeline
from stillhouse.pipelines.schedules import Trained, read_schedule
from stillhouse.process import Flow, Scaling
from stillhouse.recipes.latents import prepared
from stillhouse.recipes.prompting import PipelineText
from stillhouse.recipes.train.folders import handed_on
from stillhouse.recipes.train.learner import NAME, Learner
from stillhouse.recipes.train.networks import Pretrained
from stillhouse.recipes.train.processes import Own
from stillhouse.recipes.train.starting import check_process
from stillhouse.recipes.train.watching import PREFIX

if TYPE_CHECKING:
    from stillhouse.recipes.train.training import TrainRun


# ---------------------------------------------------------------- the network


class Tuned(Pretrained):
    """The network of a pipeline, to be trained further: all weights, or adapters beside them."""

    kind: Literal["tuned"] = "tuned"  # type: ignore[assignment]
    path: str = ""
    """The pipeline, if it is not --model."""
    method: Literal["full", "lora"] = "full"
    """All weights, or LoRA adapters."""
    rank: PositiveInt = 16
    """Of LoRA's adapters."""
    alpha: NonNegativeFloat = 0.0
    """Adapters count alpha / rank; 0: as much as the rank, so 1."""
    targets: tuple[str, ...] = ()
    """Ends of the names of layers that get adapters; those of attention if not given."""

    def network(
        self, shape: tuple[int, ...], classes: int, parts: Parts, text_width: int = 0
    ) -> DiffusersNetwork:
        """What it is told follows from its class: `parts` are not for it."""
        network: Any = load_denoiser(whole_folder(self.path)).network
        _fit(network, shape, self.path)
        if self.method == "lora":
            self.add_adapters(network.model)
        return network

    def check(self, trained: Trained) -> None:
        own: Any = read_schedule(scheduler_config(whole_folder(self.path)))
        check_process(self.path, own, trained)

    def adapter(self) -> dict[str, Any]:
        """The arguments of peft's LoraConfig."""
        targets = list(self.targets or family_of(whole_folder(self.path)).lora)
        return lora_options(self.rank, targets, self.alpha)

    def add_adapters(self, model: Any) -> None:
        adapter = self.adapter()
        try:
            inject(model, adapter, init_lora_weights="gaussian")
        except ValueError as error:  # no layer has such a name, or it is of another kind
            raise UserError(
                f"--network.targets {' '.join(adapter['target_modules'])}: {one_line(error)}"
            ) from error
        keep_learnt(model)


def _fit(network: DiffusersNetwork, shape: tuple[int, ...], name: str) -> None:
    """A U-Net takes any size: what it draws here follows from its config, as it is in memory."""
    model: Any = network.model
    made_for = network.data_shape
    if made_for[0] != shape[0]:
        raise UserError(f"{name} draws {made_for[0]} channels, its vae encodes {shape[0]}")
    if network.convention.convolutional and made_for != shape:
        model.register_to_config(sample_size=shape[-1])


# ---------------------------------------------------------------- the objective


class OwnObjective(Config):
    """Unit weight on what the pipeline's network predicts, at levels as it was trained on."""

    kind: Literal["own"] = "own"

    def build(self, scaling: Scaling, images: float) -> Objective:
        raise UserError("--objective own is for fine-tuning: name a pipeline as --model")


def own_objective(trained: Trained) -> DenoisingConfig | FlowConfig:
    """Uniform timesteps (Ho et al. 2020), or a logit-normal time under the sampler's own shift
    (Esser et al. 2024, sections 3.1 and 5.3.2)."""
    if isinstance(trained.scaling, Flow):
        return FlowConfig(density=LogitNormal(shift=trained.scaling.shift_scale))
    if trained.prediction == "edm":
        return DenoisingConfig(weighting="edm", density=LogNormal())
    return DenoisingConfig(weighting=trained.prediction, density=UniformTime())


# ---------------------------------------------------------------- the run


def fitted(config: "TrainRun") -> "TrainRun":
    """The run with all that its pipeline decides; one that fine-tunes nothing stays as it is."""
    if not isinstance(config.network, Tuned):
        if config.model:
            raise UserError(
                "--model names a pipeline to fine-tune: use `stillhouse train finetune`, or "
                "--network tuned"
            )
        return config
    name = config.network.path or config.model
    folder = whole_folder(name)
    changes: dict[str, Any] = {
        "model": name,
        "network": config.network.model_copy(update={"path": name}),
        "codec": config.codec or name,
        "data": _telling_sizes(config.data, family_of(folder).reports),
    }
    if isinstance(config.process, Own):
        changes["process"] = _named(config.process, name)
    if isinstance(config.text, PipelineText):
        changes["text"] = _named(config.text, name)
    if isinstance(config.objective, OwnObjective):
        changes["objective"] = own_objective(Own(path=name).build())
    config = config.model_copy(update=changes)
    _check(config)
    _check_parts(config, folder)
    _check_size(config, folder)
    return config


def _named(part: Any, name: str) -> Any:
    return part.model_copy(update={"path": part.path or name})


def _telling_sizes(data: Any, reports: tuple[Any, ...]) -> Any:
    """The data with the control that the pipeline's network is told, and no other."""
    if not isinstance(data, DataConfig):
        raise UserError("a pipeline is fine-tuned on images: give --data.kind images")
    wanted = ControlConfig(composition=reports)
    if data.columns.styles or data.control not in (wanted, ControlConfig()):
        raise UserError(
            "a pipeline is told what it was trained with: leave --data.control and "
            "--data.columns.styles out"
        )
    return data.model_copy(update={"control": wanted})


def _check(config: "TrainRun") -> None:
    if not isinstance(config.text, PipelineText):
        raise UserError(
            "a pipeline draws what it is told: give --text pipeline, and the column of captions as "
            "--data.columns.text"
        )
    if isinstance(config.network, Tuned) and config.network.method == "lora":
        require_peft()  # before anything is encoded
    if config.stages:
        raise UserError("a pipeline is fine-tuned at its own resolution: leave --stages out")
    if config.init_from:
        raise UserError("--model goes on with a network as it is: leave --init-from out")


def _check_parts(config: "TrainRun", folder: Path) -> None:
    """What is exported meets the pipeline's own text encoders and vae: no others may teach it."""
    text: Any = config.text
    name, path = config.model, text.path
    if path != name and prompt_digest(whole_folder(path)) != prompt_digest(folder):
        raise UserError(f"--text.path {path} has other text encoders than {name}: leave it out")
    codec = load_codec(config.codec) if config.codec != name else None
    own = load_codec(folder) if codec is not None else None
    if codec is not None and own is not None and codec.digest != own.digest:
        raise UserError(f"--codec {config.codec} is not the vae of {name}: leave it out")


def _check_size(config: "TrainRun", folder: Path) -> None:
    """A transformer has positions for one size; a U-Net takes others, but knows its own."""
    network, scale = network_config(folder), downscale(folder)
    wanted, side = int(network.get("sample_size") or 0), config.data.shape[-1]
    drawn = side if prepared(config) is not None else side / scale
    if family_of(folder).network == "transformer" and drawn != wanted:
        raise UserError(
            f"{config.model} was made for images of {wanted * scale} pixels: give "
            f"--data.image.size {wanted * scale}"
        )
    if wanted and drawn != wanted and first_process():
        print(
            f"{config.model} was made for images of {wanted * scale} pixels and is trained on "
            f"{drawn * scale:g}: --data.image.size {wanted * scale} gives it its own size",
            file=sys.stderr,
            flush=True,
        )


# ---------------------------------------------------------------- export


@dataclass(frozen=True)
class PipelineExporter:
    """Writes what was tuned: the pipeline with its new network, or the adapters alone."""

    learner: Learner
    average: str
    network: Tuned
    facts: Mapping[str, Any]
    folder: Path

    def __call__(self, engine: Engine) -> None:
        found = engine.networks[NAME].weights(self.average)
        if engine.world.rank:
            return
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
        facts = {**self.facts, "images": engine.images, "average": self.average}
        source = whole_folder(self.network.path)
        if self.network.method == "full":
            network: Any = self.learner.denoiser.network
            save_pipeline(self.folder, source, network, weights, facts=facts)
        else:
            save_lora(self.folder, source, weights, self.network.adapter(), facts=facts)


def exported_facts(config: "TrainRun") -> dict[str, Any]:
    """What goes with the weights; the pipeline's own places are of this machine too."""
    places = {"path": True}
    whole = dict.fromkeys(("evaluation", "codec", "model"), True)
    return handed_on(config, {**whole, "network": places, "process": places, "text": places})
