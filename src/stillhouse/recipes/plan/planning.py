"""`--dry-run`: the resolved run, the size of its network, and the memory it will take.

Nothing is computed: a step is taken on tensors without storage (see `shadows`). Data are opened
only to count their classes, where the config does not say.
"""

from dataclasses import asdict

import torch
from torch import nn

from stillhouse.config import spell_settings
from stillhouse.engine.loop import check_shared
from stillhouse.engine.world import World
from stillhouse.recipes.latents import build_codec
from stillhouse.recipes.plan.shadows import Footprint, footprint, measure, shadow
from stillhouse.recipes.plan.stored import checkpoint, exported
from stillhouse.recipes.train.coupled import check_coupling, coupling_note
from stillhouse.recipes.train.measuring import Evaluation
from stillhouse.recipes.train.training import TrainRun
from stillhouse.recipes.train.tuning import fitted

GB = 1e9  # as in a plan


def describe(config: TrainRun, processes: int) -> str:
    """What `stillhouse train` would do on so many processes."""
    check_shared(config.batch, processes)
    config = fitted(config)
    check_coupling(config.coupling, classes=config.labelled, captions=config.captioned)
    network = shadow(config)
    count = sum(p.numel() for p in network.parameters())
    lines = [
        *spell_settings(config),
        "",
        f"{type(network.model).__name__} with {count / 1e6:.2f}M parameters",
    ]
    lines += [f"  {name:<24} {size / 1e6:8.2f}M" for name, size in sizes(network.model)]
    lines += ["", f"memory per process, of {processes}, counted without storage:"]
    found = asdict(memory(config, processes))
    lines += [f"  {name:<24} {size / GB:8.3f} GB" for name, size in found.items()]
    steps = config.goal // config.batch
    stored = checkpoint(config, network)
    model = exported(config, network, build_codec(config, torch.device("cpu")))
    lines += ["", f"{config.images} images in {steps} steps of {config.batch}"]
    lines += [
        f"a checkpoint takes {stored.size / GB:.3f} GB, the exported model {model.size / GB:.3f} GB"
    ]
    if isinstance(config.evaluation, Evaluation):
        lines += [_evaluations(config, config.evaluation)]
    leaks = coupling_note(config.coupling, classes=config.labelled, captions=config.captioned)
    lines += ["", leaks] if leaks else []
    return "\n".join(lines)


def _evaluations(config: TrainRun, evaluation: Evaluation) -> str:
    moments = -(-config.images // evaluation.every)
    return (
        f"{moments} evaluations, each of {evaluation.count} samples against {evaluation.reference}"
    )


def sizes(model: nn.Module) -> list[tuple[str, int]]:
    """Parameters of the parts, by name."""
    return [
        (name, count)
        for name, part in model.named_children()
        if (count := sum(p.numel() for p in part.parameters()))
    ]


def memory(config: TrainRun, processes: int) -> Footprint:
    """Of one process, the first of so many."""
    here = World(0, processes, torch.device("cpu"))
    how = config.network_config(here).spread
    return footprint(config, measure(config, how, processes), how)
