"""One update of one network: micro-batches, sync, precision, backward, the decision, the step.

The engine owns the whole of it, because the choice whether gradients are synchronised is made in
the forward pass, and whether an update is skipped must be agreed on by all processes. A task only
says how micro-batches become losses.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states

from stillhouse.config import Config
from stillhouse.engine import rows
from stillhouse.engine.ema import Averages, Profile
from stillhouse.engine.optimisers import AdamW, Optimiser
from stillhouse.engine.sharding import Spread, computing, inner, spread, syncing
from stillhouse.engine.world import World

# micro-batch -> (loss of each of its samples [B], whatever the task needs afterwards)
Loss = Callable[[Any], tuple[Tensor, Any]]


class NetworkConfig(Config):
    """How one network is trained."""

    optimiser: Optimiser = AdamW()
    spread: Spread = Spread()
    clip: PositiveFloat = math.inf
    """Largest norm of the gradient over all parameters."""
    micro_batch: Annotated[int, Field(ge=0)] = 0
    """Samples per forward and backward on each process; 0: the whole batch at once."""
    averages: tuple[Profile, ...] = ()
    """Moving averages of the weights to keep."""


@dataclass(frozen=True)
class Update:
    """What an update did."""

    loss: float  # mean over the global batch
    gradient_norm: float  # before clipping
    lr: float
    skipped: bool
    carry: Any = None  # what the task's function returned, joined and detached


@dataclass
class Trained:
    """A network in training: the module to call, its optimiser, its settings."""

    module: nn.Module
    optimiser: torch.optim.Optimizer
    averages: Averages
    config: NetworkConfig
    world: World
    moved: bool = False  # whether its weights changed since they were last averaged

    @classmethod
    def start(cls, network: nn.Module, config: NetworkConfig, world: World) -> "Trained":
        """Spreads the network first: the rest must see the parameters as they are kept."""
        module = spread(network, config.spread, world)
        optimiser = config.optimiser.build([p for p in module.parameters() if p.requires_grad])
        return cls(module, optimiser, Averages(inner(module), config.averages), config, world)

    @property
    def inner(self) -> nn.Module:
        return inner(self.module)

    def update(self, loss: Loss, batch: Any, *, images: float, total: float) -> Update:
        """One step of the optimiser on `batch`, this process's share; `images` were seen before.

        Accumulation equals the large batch: each sample counts 1/N with N the global count.
        """
        count = rows.count_rows(batch) * self.world.size
        part, carry = self._backward(loss, batch, count)
        norm = self._gradient_norm()
        mean, good = self._agree(part, norm, count)
        lr = self.config.optimiser.rate(images + count, total)
        if good:
            self._step(lr)
        self.optimiser.zero_grad(set_to_none=True)
        return Update(mean, norm, lr, not good, carry)

    def _agree(self, part: float, norm: float, count: float) -> tuple[float, bool]:
        """The global mean loss, and whether all is finite: one exchange for both.

        A collective decision: one process that skips while others step would be a silent fork.
        """
        bad = not (math.isfinite(part) and math.isfinite(norm))
        mine = torch.tensor([part, bad, count, count**2], dtype=torch.float64)
        mean, bads, counts, squares = self.world.sum(mine).tolist()
        if squares * self.world.size != counts**2:
            raise RuntimeError("an update needs as many rows on every process")
        return mean, not bads

    def _backward(self, loss: Loss, batch: Any, count: float) -> tuple[float, Any]:
        """Gradients of the mean over the global batch; this process's part of the mean loss."""
        size = self.config.micro_batch or rows.count_rows(batch)
        pieces, carries = list(rows.cut(batch, size)), []
        mean = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for i, piece in enumerate(pieces):
            with syncing(self.module, last=i == len(pieces) - 1):
                with computing(self.config.spread, self.world.device):
                    per_sample, carry = loss(piece)
                part = per_sample.float().sum() / count
                # ddp and fsdp average over processes; the mean over samples is a sum.
                (part * self._averaged_over).backward()
            mean += part.detach().double()
            carries.append(carry)
        return float(mean), rows.join(carries)

    @property
    def _averaged_over(self) -> int:
        return 1 if self.config.spread.sharding == "none" else self.world.size

    def _gradient_norm(self) -> float:
        """Clips in place and returns the norm before; sharded gradients count as one."""
        # The optimiser has the list: walking through the modules takes half as long as the norm.
        groups = self.optimiser.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, self.config.clip, foreach=True)
        full = getattr(norm, "full_tensor", None)
        return float(norm if full is None else full())

    def _step(self, lr: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.moved = True

    @contextmanager
    def evaluating(self, average: str = "") -> Iterator[nn.Module]:
        """The network to measure or draw with: an average's weights, no gradient, no dropout.

        Every process must enter, and call a sharded network equally often.
        """
        network, training = self.inner, self.inner.training
        shown = self.averages.applied(average) if average else nullcontext()
        try:
            with shown, torch.no_grad(), computing(self.config.spread, self.world.device):
                yield network.eval()
        finally:
            network.train(training)

    def weights(self, average: str = "") -> dict[str, Tensor]:
        """All weights on the host, those of an average where one is named.

        Every process must call it; where the network is sharded only the first gets them.
        """
        shown = self.averages.applied(average) if average else nullcontext()
        whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        with shown:
            found: dict[str, Any] = states.get_model_state_dict(self.inner, options=whole)
            # Without sharding these are the network's own tensors, which will change.
            return {name: tensor.clone() for name, tensor in found.items()}

    def average(self, images: int) -> None:
        """Once per batch, however many updates it made; not after a batch that was skipped."""
        if self.moved:
            self.averages.update(images)
            self.moved = False
