"""One training step of a run as it is, on tensors without storage: what it keeps and computes.

Sharded networks are FSDP2's own, as the first of any number of processes that exist by name only
(torch's fake process group). So a step of any size on any number of GPUs is counted, not modelled,
on a laptop; casts and kernels are those of a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from stillhouse.data import DataConfig
from stillhouse.data.faults import FaultConfig, FaultLog
from stillhouse.engine import rows
from stillhouse.engine.sharding import Spread, blocks, computing, spread, syncing
from stillhouse.engine.updates import Loss
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models import DiffusersNetwork
from stillhouse.objectives import Draws
from stillhouse.pipelines.families import whole_folder
from stillhouse.pipelines.prompts import prompt_tokens
from stillhouse.process import Batch, Condition, NetworkDenoiser
from stillhouse.recipes.latents import build_codec, drawn_shape
from stillhouse.recipes.plan.ledger import Foreseen, Ledger, held
from stillhouse.recipes.prompting import PipelineText
from stillhouse.recipes.train.learner import Learner
from stillhouse.recipes.train.networks import Pretrained
from stillhouse.recipes.train.training import TrainRun, build_loader, count_classes

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Step:
    """What one step takes on the first process, which has the largest shards. Bytes."""

    weights: int
    trained: int  # the share of them that is trained: of this size are moments and averages
    tensors: int  # trained ones
    gradients: int
    activations: int  # and all else that comes and goes, but for gradients
    peak: int  # of gradients and activations together: some go as others come
    forward: float  # floating point operations per image
    operations: float  # the same of the whole step


@dataclass(frozen=True)
class Footprint:
    """Bytes that a process needs, by what they are for."""

    weights: float
    gradients: float
    optimiser: float
    averages: float
    activations: float
    together: float
    """The most at once: less than the sum, as gradients come while activations go."""


def footprint(config: TrainRun, step: Step, how: Spread) -> Footprint:
    trained = step.trained * (not how.offload)  # which keeps all of it on the host
    counters = 4 * step.tensors * (config.optim.kind != "adamw-8bit")
    optimiser = moments(config, trained) + counters
    weights = step.weights * (not how.offload)
    averages = len(config.averages) * trained
    # ddp keeps its gradients, in buckets, from step to step.
    peak = step.gradients + step.activations if how.sharding == "ddp" else step.peak
    return Footprint(
        weights=weights,
        gradients=step.gradients,
        optimiser=optimiser,
        averages=averages,
        activations=step.activations,
        together=weights + optimiser + averages + peak,
    )


def moments(config: TrainRun, trained: float) -> float:
    """Bytes of the optimiser's two, for so many bytes of weights in float32."""
    if config.optim.kind == "adamw-8bit":  # a byte per number, and a float32 per 256 of them
        return 2 * trained / 4 * (1 + 4 / 256)
    return 2 * trained


# ---------------------------------------------------------------- the network


def shadow(config: TrainRun) -> DiffusersNetwork:
    """The network on the meta device: shapes without memory, so any size fits."""
    classes = config.classes or _classes(config)
    text, width = config.text.foreseen(config.data) or (None, 0)
    parts = config.parts(text)
    shape = drawn_shape(config, build_codec(config, CPU))
    if isinstance(config.network, Pretrained):  # reads its weights; whose sizes are all that counts
        return config.network.network(shape, classes, parts, width).to("meta")
    with torch.device("meta"):
        return config.network.network(shape, classes, parts, width)


def _classes(config: TrainRun) -> int:
    if isinstance(config.data, DataConfig) and not config.data.columns.label:
        return 0
    return count_classes(config, build_loader(config, World(0, 1, CPU), ()))


def _imagine(network: nn.Module) -> None:
    """Moves it from the meta device to a CPU that is only imagined, where autocast casts."""
    made: dict[Tensor, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if tensor not in made:
            empty = torch.empty_like(tensor, device=CPU)
            whole = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(empty, tensor.requires_grad) if whole else empty
        return made[tensor]

    for module in network.modules():
        tables: list[Any] = [module._parameters, module._buffers]
        for kept in tables:
            kept.update({name: moved(t) for name, t in kept.items() if t is not None})


# ---------------------------------------------------------------- the step


def measure(config: TrainRun, how: Spread, processes: int) -> Step:
    """A step of this run, spread like this."""
    share = max(1, config.batch // processes)
    size = min(config.micro_batch or share, share)
    # Of micro-batches two will do: gradients of the first are there during the second.
    count = 2 * size if size < share else size
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _gathering(how, processes) as world:
        learner = _learner(config, world)
        with fake:
            _imagine(learner.denoiser)
        kept = _kept(learner, count)
        _spread(learner.denoiser, how, world)
        engine = _Engine(learner.denoiser, how, size)
        with fake, Foreseen(kept):
            batch = _batch(learner, count, told_tokens(config), bool(kept))
            learner.step(batch, engine)  # type: ignore[arg-type]
    return engine.found()


@contextmanager
def _gathering(how: Spread, processes: int) -> Iterator[World]:
    """The first of so many processes."""
    if how.sharding not in ("fsdp", "hsdp"):
        yield World(0, 1, CPU)
        return
    if dist.is_initialized():
        raise UserError("a plan is made by one process: call it without torchrun")
    dist.init_process_group("fake", rank=0, world_size=processes)
    try:
        yield World(0, processes, CPU)
    finally:
        dist.destroy_process_group()


def _learner(config: TrainRun, world: World) -> Learner:
    trained = config.process.build()
    return Learner(
        NetworkDenoiser(shadow(config), trained.scaling, trained.prediction).train(),
        config.objective.build(trained.scaling, config.images),
        Draws(config.seed),
        None,
        0.0,
        world,
        FaultLog(FaultConfig()),
    )


def _spread(network: nn.Module, how: Spread, world: World) -> None:
    plain = how.model_copy(update={"compile": False, "offload": False})
    if how.sharding in ("fsdp", "hsdp"):
        spread(network, plain, world)
    elif how.checkpointing:
        from torch.distributed._composable import checkpoint

        for block in blocks(network):
            checkpoint(block)


def _kept(learner: Learner, count: int) -> tuple[int, int] | None:
    """The fewest and the most tokens that masked training shows of the first images."""
    network: Any = learner.denoiser.network
    data = torch.empty(count, *network.data_shape, device="meta")
    said = learner.hide(Batch(data, key=torch.arange(count))).condition
    if said is None or said.hidden is None:
        return None
    fewest, most = (~said.hidden).sum(1).aminmax()
    return int(fewest), int(most)


def told_tokens(config: TrainRun) -> int:
    """Of a caption, as the network attends to it; 1 where it is told none."""
    text = config.text
    if isinstance(text, PipelineText):
        return prompt_tokens(whole_folder(text.path), text.length)
    foreseen = text.foreseen(config.data)
    return foreseen[0].length if foreseen else 1


def _batch(learner: Learner, count: int, tokens: int, masked: bool) -> Batch:
    """So many rows of all that a step takes, without content."""
    network: Any = learner.denoiser.network
    data = torch.empty(count, *network.data_shape)
    cond = anything(network, count, tokens)
    if masked:
        hidden = torch.zeros(count, network.model.grid**2, dtype=torch.bool)
        cond = replace(cond, hidden=hidden)
    sigma = torch.ones(count, dtype=torch.float64)
    return Batch(data, cond, key=torch.arange(count), noise=torch.empty_like(data), sigma=sigma)


def anything(network: DiffusersNetwork, count: int, tokens: int) -> Condition:
    """Rows of all that the network must be told, without content."""
    said: dict[str, Any] = {}
    for name, shape in network.condition_shapes.items():
        kind = torch.long if name == "label" else torch.float32
        full = [tokens if size is None else size for size in shape]
        said[name] = torch.zeros(count, *full, dtype=kind)
    return Condition(**said)


class _Engine:
    """Stands in for the engine: runs an update up to the gradients, under a ledger."""

    def __init__(self, module: nn.Module, how: Spread, size: int) -> None:
        self.module, self.how, self.size = module, how, size
        self.ledger = Ledger([*module.parameters(), *module.buffers()])
        self.forward, self.count = 0.0, 0

    def __getitem__(self, name: str) -> nn.Module:
        return self.module

    def update(self, name: str, loss: Loss, batch: Batch) -> Any:
        """As `Trained` does it: the last micro-batch exchanges gradients."""
        self.count, carries = len(batch.data), []
        pieces = list(rows.cut(batch, self.size))
        with self.ledger:
            for i, piece in enumerate(pieces):
                before = self.ledger.operations
                with syncing(self.module, last=i == len(pieces) - 1):
                    with computing(self.how, CPU):
                        per_sample, carry = loss(piece)
                    self.forward += self.ledger.operations - before
                    per_sample.float().sum().backward()
                carries.append(carry)
        return rows.join(carries)

    def found(self) -> Step:
        parameters = list(self.module.parameters())
        trained = [p for p in parameters if p.requires_grad]
        gradients = [p.grad for p in trained if p.grad is not None]
        own = {self.ledger.number(gradient) for gradient in gradients}
        return Step(
            weights=held([*parameters, *self.module.buffers()]),
            trained=held(trained),
            tensors=len(trained),
            gradients=held(gradients),
            activations=self.ledger.peak(without=own),
            peak=self.ledger.peak(),
            forward=self.forward / self.count,
            operations=self.ledger.operations / self.count,
        )
