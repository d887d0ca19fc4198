"""The task of plain training: one network, one update per batch, a loss per noise level."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.couplings import Coupling, Pairing
from stillhouse.couplings.leak import Leak, LeakProbe
from stillhouse.data import FaultLog
from stillhouse.engine.loop import Engine
from stillhouse.engine.world import World, memory_gb
from stillhouse.models import Codec
from stillhouse.models.transfer import Account
from stillhouse.objectives import Draws, LevelCurve, Loss, Objective, drop_apart, log_edges
from stillhouse.objectives.base import row_keys
from stillhouse.objectives.consistency import Pairs
from stillhouse.objectives.pairing import pair_noise
from stillhouse.process import Batch, Condition, NetworkDenoiser
from stillhouse.recipes.subjects import Subject
from stillhouse.recipes.telling import Texts, preview_speech

NAME = "denoiser"  # of the one network
NAMED = 5  # faults in the data that a log line names
EDGES = log_edges(0.002, 80.0, 20)  # of noise levels, for curves; beyond counts at the ends


@dataclass
class Learner:
    """What the engine drives."""

    denoiser: NetworkDenoiser
    objective: Objective
    draws: Draws
    null: Condition | None  # what a dropped condition becomes
    drop: float
    world: World
    faults: FaultLog
    classes: int = 0
    log_ids: bool = False
    coupling: Coupling | None = None
    texts: Texts | None = None  # captions, where the network is told them
    drop_control: float = 0.0
    codec: Codec | None = None  # between images and what the network draws
    stored: bool = True  # whether data are such already
    account: Account | None = None  # what was carried over from another network
    losses: list[Loss] = field(default_factory=list)  # since the last log line, as are the others
    ids: list[int] = field(default_factory=list)
    pairings: list[tuple[Pairing, Leak]] = field(default_factory=list)
    ahead: dict[int, tuple[Pairing, Leak]] = field(default_factory=dict)  # by first key, untrained
    probe: LeakProbe = field(default_factory=LeakProbe)

    def modules(self) -> Mapping[str, nn.Module]:
        return {NAME: self.denoiser}

    def steps(self, wanted: int) -> int:
        """Of a walk that draws: a consistency model lands in one, more follow no ODE of its own."""
        return 1 if isinstance(self.objective, Pairs) else wanted

    def subject(self, denoiser: Any) -> Subject:
        """What is drawn in training: classes and styles in turn, captions from all over."""
        network: Any = self.denoiser.network
        shape = network.data_shape
        return Subject(
            denoiser,
            self.denoiser.scaling,
            shape,
            {},
            tuple(range(self.classes)),
            self.codec,
            speech=preview_speech(network.told, shape, self.texts, self.classes),
        )

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Of what is drawn, decoded."""
        network: Any = self.denoiser.network
        _, *sides = network.data_shape
        if self.codec is None:
            return network.data_shape
        return self.codec.image_channels, *(side * self.codec.downscale for side in sides)

    def prepare(self, batch: Batch) -> Batch:
        """What the prefetch does in advance: all that is drawn by key, and which noise is met."""
        batch = self.latents(batch)
        label = batch.condition.label if batch.condition else None
        if self.texts is not None:
            batch = self.texts.tell(batch)
        if self.null is not None:
            control = 0.0 if self.null.control is None else self.drop_control
            batch = drop_apart(batch, self.null, self.draws, semantics=self.drop, control=control)
        if self.coupling is not None:
            batch, pairing = pair_noise(batch, self.coupling, self.draws)
            leak = Leak() if label is None else self.probe(batch.data, batch.noise, label)  # type: ignore[arg-type]
            self.ahead[int(row_keys(batch)[0])] = pairing, leak
        if self.texts is not None:
            batch = self.texts.pad(batch, self.draws.seed)
        return self.objective.prepare(self.hide(batch), self.draws)

    def latents(self, batch: Batch) -> Batch:
        """The same, encoded where the network draws latents and the data are images."""
        if self.codec is None or self.stored:
            return batch
        return replace(batch, data=self.codec.encode(batch.data).to(batch.data.device))

    def hide(self, batch: Batch) -> Batch:
        """The same, with what masked training does not show of each image."""
        hidden = getattr(self.denoiser.network.model, "hidden", None)  # type: ignore[union-attr]
        if hidden is None:
            return batch
        said = batch.condition or Condition()
        marks = hidden(batch.data, row_keys(batch), seed=self.draws.seed)
        return replace(batch, condition=replace(said, hidden=marks))

    def step(self, batch: Batch, engine: Engine) -> None:
        denoiser: Any = engine[NAME]

        def loss(rows: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            cond = rows.condition
            if cond is None or cond.hidden is None:
                found = self.objective(denoiser, rows, self.draws)
                return found.per_sample, (found.per_sample, found.sigma)
            whole = replace(rows, condition=replace(cond, hidden=None))
            found, filled = (self.objective(denoiser, r, self.draws) for r in (whole, rows))
            return found.per_sample + filled.per_sample, (found.per_sample, found.sigma)

        moved = batch.to(self.world.device, non_blocking=True)
        per_sample, sigma = engine.update(NAME, loss, moved)
        self.losses.append(Loss(per_sample.mean(), per_sample, sigma))
        if self.coupling is not None:
            self.pairings.append(self.ahead.pop(int(row_keys(batch)[0])))
        if self.log_ids and batch.ids is not None:
            self.ids += batch.ids.tolist()

    def report(self) -> dict[str, Any]:
        losses, self.losses = self.losses, []
        curve = sum((LevelCurve.of(loss, EDGES) for loss in losses), LevelCurve.none(EDGES))
        numbers: dict[str, Any] = {"levels": total_curve(curve, self.world).as_lists()}
        if self.coupling is not None:
            numbers |= self.report_coupling()
        numbers["memory_gb"] = max(self.world.gather(memory_gb(self.world.device)))
        found = [str(fault) for share in self.world.gather(self.faults.new()) for fault in share]
        if found:
            numbers |= {"faults": len(found), "fault_examples": found[:NAMED]}
        if self.log_ids:
            ids, self.ids = self.ids, []
            numbers["ids"] = [i for share in self.world.gather(ids) for i in share]
        return numbers

    def report_coupling(self) -> dict[str, float]:
        """Of the batches trained on since the last line."""
        found, self.pairings = self.pairings, []
        rows = [
            (p.cost_before, p.cost_after, p.seconds, 1.0, leak.right, leak.by_chance, leak.asked)
            for p, leak in found
        ]
        total = torch.tensor(rows, dtype=torch.float64).reshape(-1, 7).sum(0)
        before, after, seconds, count, right, chance, asked = self.world.sum(total).tolist()
        if not count:
            return {}
        numbers = {"coupling/reduction": 1 - after / before, "coupling/seconds": seconds / count}
        if asked:
            numbers |= {"coupling/leak": right / asked, "coupling/chance": chance / asked}
        return numbers


def total_curve(curve: LevelCurve, here: World) -> LevelCurve:
    """The curve over all processes."""
    total, count = here.sum(torch.stack([curve.total, curve.count]))
    return LevelCurve(curve.edges, total, count)
