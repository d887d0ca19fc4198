"""Real steps for tests, by a process or by torchrun: prints the bytes that were held as JSON.

python costs_process.py RUNS.json, a list of runs, which are measured one after the other
"""

import gc
import json
import sys
from bisect import bisect_left, insort
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from stillhouse.data.faults import FaultConfig, FaultLog
from stillhouse.engine.updates import Trained
from stillhouse.engine.world import World, world
from stillhouse.models.conditioning import Parts
from stillhouse.objectives import Draws
from stillhouse.process import Batch, Condition, NetworkDenoiser
from stillhouse.recipes.train.learner import Learner
from stillhouse.recipes.train.training import TrainRun

PRODUCTS = {"aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm"}


class Alone:
    """The engine's part that a learner calls."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    def __getitem__(self, name: str) -> Any:
        return self.trained.module

    def update(self, name: str, loss: Any, batch: Batch) -> Any:
        return self.trained.update(loss, batch, images=0, total=1).carry


def build(config: TrainRun, here: World) -> Learner:
    process = config.process.build()
    torch.manual_seed(0)
    network = config.network.network(config.data.shape, config.classes, Parts())
    return Learner(
        NetworkDenoiser(network, process.scaling, process.prediction).train(),
        config.objective.build(process.scaling, config.images),
        Draws(0),
        None,
        0.0,
        here,
        FaultLog(FaultConfig()),
    )


def batch_of(learner: Learner, config: TrainRun, here: World) -> Batch:
    count = config.batch // here.size
    data = torch.randn(count, *config.data.shape)
    cond = Condition(label=torch.zeros(count, dtype=torch.long))
    batch = Batch(data, cond, key=torch.arange(count))
    return learner.objective.prepare(learner.hide(batch), learner.draws)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def stored(tensors: Any) -> int:
    """Bytes of distinct storages, whatever looks into them."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in map(local, tensors)}
    return sum(storage.nbytes() for storage in found.values())


def without_scratch(events: list[Any]) -> list[Any]:
    """Without what a kernel takes for itself, and gives back before it ends.

    No part of a plan: on CPUs without bfloat16 units that is a float32 copy of every product.
    """
    own = [event for event in events if event.name == "[memory]"]
    returned = {e.extra_fields.ptr for e in own if e.extra_fields.alloc_size < 0}
    taken = {e.extra_fields.ptr for e in own if e.extra_fields.alloc_size > 0}
    scratch = returned & taken
    return [e for e in events if e not in own or e.extra_fields.ptr not in scratch]


def allocations(trace: profile) -> list[tuple[int, int, bool]]:
    """(address, bytes, whether by a collective) in time; bytes below 0 where they are given back"""
    found = []
    todo = [(event, False) for event in trace.profiler.kineto_results.experimental_event_tree()]
    while todo:
        event, inside = todo.pop()
        inside = inside or event.name.startswith("c10d::")
        kept = without_scratch(event.children) if event.name in PRODUCTS else event.children
        todo += [(child, inside) for child in kept]
        if event.name == "[memory]":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size, inside))
    return [rest for _, *rest in sorted(found)]


def allocated(trace: profile) -> int:
    """The most bytes that the allocator had given at once, beyond those at the start.

    Without gloo's own: it has no reduce-scatter, and all-reduces a copy instead, as NCCL does not.
    What its threads give back is not traced, and gone when its place is given again; so a step may
    seem larger than it was, never smaller.
    """
    live, most = Live(), 0
    for place, size, by_collective in allocations(trace):
        live.free(place, max(size, 1))
        if size > 0 and not by_collective:
            live.take(place, size)
        most = max(most, live.bytes)
    return most


class Live:
    """What is allocated now."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.places: list[int] = []  # in order
        self.bytes = 0

    def take(self, place: int, size: int) -> None:
        self.sizes[place] = size
        insort(self.places, place)
        self.bytes += size

    def free(self, place: int, size: int) -> None:
        """All that overlaps with so many bytes from there."""
        first = bisect_left(self.places, place)
        if first and (before := self.places[first - 1]) + self.sizes[before] > place:
            first -= 1
        last = bisect_left(self.places, place + size)
        for gone in self.places[first:last]:
            self.bytes -= self.sizes.pop(gone)
        del self.places[first:last]


def held(config: TrainRun, here: World) -> dict[str, int]:
    learner = build(config, here)
    trained = Trained.start(learner.denoiser, config.network_config(here), here)
    engine: Any = Alone(trained)
    batch, gradients = batch_of(learner, config, here), 0
    norm = trained._gradient_norm

    def counted() -> float:
        nonlocal gradients
        gradients = stored(p.grad for p in trained.inner.parameters() if p.grad is not None)
        return norm()

    trained._gradient_norm = counted  # type: ignore[method-assign]
    for _ in range(2):  # moments come with the first step, ddp's last buckets with the second
        learner.step(batch, engine)
    peaks = []
    for _ in range(1 if here.size == 1 else 5):  # of a process alone, they are the same
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            learner.step(batch, engine)
        peaks.append(allocated(trace))
    state = [v for values in trained.optimiser.state.values() for v in values.values()]
    averages = [w for weights in trained.averages.weights.values() for w in weights.values()]
    module = trained.inner
    return {
        "weights": stored([*module.parameters(), *module.buffers()]),
        "gradients": gradients,
        "optimiser": stored(state),
        "averages": stored(averages),
        "peak": min(peaks),
    }


def main() -> None:
    runs = [TrainRun.model_validate(run) for run in json.loads(Path(sys.argv[1]).read_text())]
    with world("cpu") as here:
        for config in runs:
            found = here.gather(held(config, here))
            gc.collect()  # or the next would be measured beside this one
            if here.rank == 0:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
