"""Fake scores of one-step generators: as adapters on the teacher, and where scores are kept.

With `--method.score lora` teacher and fake score are one network, which the engine trains and
spreads. The teacher is that network without its adapters, in pictures and comparisons too.

    RUN/score   of a full one: a model like its teacher; of adapters: these alone, in peft's layout
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stillhouse.distill.lora_score import LoraScore
from stillhouse.distill.matching import SCORE
from stillhouse.distill.trajectories import frozen
from stillhouse.engine.loop import Engine
from stillhouse.engine.sharding import computing
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models.adapters import WEIGHTS, add_adapters, load_adapters, save_adapters
from stillhouse.pipelines import checkpoint_files, load_denoiser, save_denoiser
from stillhouse.pipelines.load import read_json
from stillhouse.process import Condition, Denoiser, NetworkDenoiser
from stillhouse.recipes.distill.generators import Matched, SidConfig
from stillhouse.recipes.distill.settings import DistillRun
from stillhouse.recipes.distill.students import Source, shares_teacher
from stillhouse.recipes.distill.watching import unclipped
from stillhouse.recipes.parts import Guidance
from stillhouse.recipes.subjects import Subject
from stillhouse.recipes.train.watching import PREFIX

FOLDER = "score"  # in the run's, beside the generator's
Adding = Callable[[nn.Module], dict[str, Any]]  # adapters to a network; peft's options of them


# ---------------------------------------------------------------- one network for both


@dataclass(frozen=True)
class Shared:
    """A teacher and a fake score in one network."""

    score: LoraScore
    options: dict[str, Any]  # of its adapters
    subject: Subject  # the teacher


def with_score(config: DistillRun, source: Source, here: World) -> Source:
    """The source with a fake score on its teacher's own network, where one is asked for."""
    check_gradients(config)
    if not shares_teacher(config):
        return source
    method: Any = config.method
    computed = partial(computing, config.spread, here.device)
    adding = partial(add_adapters, rank=method.score_rank)
    found = share(source.subject, config.guidance, adding, computed)
    return replace(source, subject=found.subject, score=found.score, adapters=found.options)


def check_gradients(config: DistillRun) -> None:
    """What would not be learnt, or not from the teacher."""
    shared, sid = shares_teacher(config), isinstance(config.method, SidConfig)
    if config.teacher == "float16" and (shared or sid):
        raise UserError(
            "a gradient goes through the teacher's layers with --method.score lora and with sid, "
            "and vanishes in float16: give --teacher bfloat16"
        )
    if shared and sid and config.spread.checkpointing:
        raise UserError(
            "sid goes back through teacher and fake score, and what is recomputed there cannot "
            "tell them apart: leave --spread.checkpointing or --method.score lora out"
        )


def share(
    subject: Subject,
    guidance: Guidance,
    adding: Adding,
    computed: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Shared:
    """A fake score in the network of `subject`, and what is left of that without it."""
    bare = subject.bare
    assert bare is not None
    network: Any = bare.network
    options = adding(network.model)
    # Without the teacher's clipping: the score of samples that go beyond it must be learnt too.
    score = LoraScore(NetworkDenoiser(network, bare.scaling, bare.prediction))
    teacher = Bounded(score.teacher, bare.clip, computed)
    first = next(network.parameters())
    guide = partial(load_guide, dtype=first.dtype, device=first.device)
    guided = guidance.build(teacher, subject.null, guide)
    return Shared(score, options, replace(subject, denoiser=guided))


def load_guide(name: str, **how: Any) -> NetworkDenoiser:
    """Of a subject that was loaded with it before, so it fits."""
    found = load_denoiser(name, **how)
    network: Any = found.network
    network.for_inference()
    return found


@dataclass(frozen=True)
class Bounded:
    """Answers as the teacher's own denoiser gives them, computed as its network is kept."""

    denoiser: Denoiser
    clip: float | None
    computed: Callable[[], AbstractContextManager[Any]]

    def __call__(self, x: Tensor, sigma: Tensor, cond: Condition | None = None) -> Tensor:
        with self.computed():
            found = self.denoiser(x, sigma, cond)
        return found if self.clip is None else found.clamp(-self.clip, self.clip)


# ---------------------------------------------------------------- where they are kept


@dataclass(frozen=True)
class ScoreExporter:
    """Writes the fake score of a generator, with which its samples can be corrected."""

    source: Source
    student: NetworkDenoiser  # whose architecture a full one has
    folder: Path

    def __call__(self, engine: Engine) -> None:
        found = engine.networks[SCORE].weights()
        if engine.world.rank:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.source.score is not None:
            prefix = f"denoiser.{PREFIX}model."
            weights = {name.removeprefix(prefix): w for name, w in found.items()}
            metadata = {"images": str(engine.images)}
            return save_adapters(self.folder, weights, self.source.adapters, metadata)
        weights = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
        scheduler = unclipped(read_json(checkpoint_files(self.source.folder)["scheduler"][0]))
        network: Any = self.student.network
        facts = {"images": engine.images}
        return save_denoiser(self.folder, network, weights, scheduler, facts=facts)


def exported(config: DistillRun, source: Source) -> bool:
    """Whether the run keeps its fake score; no full one where a student is a whole pipeline."""
    return isinstance(config.method, Matched) and (source.score is not None or not source.pipeline)


def load_score(folder: Path, teacher: Subject, guidance: Guidance) -> tuple[Denoiser, Denoiser]:
    """The teacher and the fake score that a run has kept in `folder`."""
    bare = teacher.bare
    assert bare is not None
    if (folder / WEIGHTS).is_file():
        found = share(teacher, guidance, partial(load_adapters, folder=folder))
        return found.subject.denoiser, frozen(found.score)  # pyright: ignore[reportReturnType]
    device = next(bare.parameters()).device
    return teacher.denoiser, load_denoiser(folder, device=device).eval()
