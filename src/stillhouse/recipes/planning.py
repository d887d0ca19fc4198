"""`--dry-run`: the resolved run, the size of its network, and the memory it will take.

Nothing is computed: the network is built, and called once, on tensors without storage. Data are
opened only to count their classes, where the config does not say.
"""

from typing import Any

import torch
from torch import nn

from stillhouse.data import DataConfig
from stillhouse.engine.sharding import blocks, shard_group
from stillhouse.engine.world import World
from stillhouse.models import DiffusersNetwork
from stillhouse.process import Condition
from stillhouse.recipes.latents import build_codec, drawn_shape
from stillhouse.recipes.measuring import Evaluation
from stillhouse.recipes.networks import Pretrained
from stillhouse.recipes.training import TrainRun, build_loader, count_classes

GB = 2**30


def describe(config: TrainRun, processes: int) -> str:
    """What `stillhouse train` would do on so many processes."""
    network = shadow(config)
    count = sum(p.numel() for p in network.parameters())
    lines = [f"{key:<34} {value}" for key, value in _flat(config.model_dump(mode="json"))]
    lines += ["", f"{type(network.model).__name__} with {count / 1e6:.2f}M parameters"]
    lines += [f"  {name:<24} {size / 1e6:8.2f}M" for name, size in sizes(network.model)]
    lines += ["", f"memory per process, of {processes}, estimated:"]
    found = memory(config, network, processes)
    lines += [f"  {name:<24} {size / GB:8.3f} GB" for name, size in found.items()]
    lines += [f"  {'together':<24} {sum(found.values()) / GB:8.3f} GB"]
    steps = -(-config.images // config.batch)
    stored = 4 * count * (3 + len(config.averages))
    lines += ["", f"{config.images} images in {steps} steps of {config.batch}"]
    lines += [
        f"a checkpoint takes {stored / GB:.3f} GB, the exported model {4 * count / GB:.3f} GB"
    ]
    if isinstance(config.evaluation, Evaluation):
        lines += [_evaluations(config, config.evaluation)]
    return "\n".join(lines)


def _evaluations(config: TrainRun, evaluation: Evaluation) -> str:
    moments = -(-config.images // evaluation.every)
    return (
        f"{moments} evaluations, each of {evaluation.count} samples against {evaluation.reference}"
    )


def shadow(config: TrainRun) -> DiffusersNetwork:
    """The network on the meta device: shapes without memory, so any size fits."""
    classes = config.classes or _classes(config)
    text, width = config.text.foreseen(config.data) or (None, 0)
    parts = config.parts(text)
    shape = drawn_shape(config, build_codec(config, torch.device("cpu")))
    if isinstance(config.network, Pretrained):  # reads its weights; whose sizes are all that counts
        return config.network.network(shape, classes, parts, width).to("meta")
    with torch.device("meta"):
        return config.network.network(shape, classes, parts, width)


def _classes(config: TrainRun) -> int:
    if isinstance(config.data, DataConfig) and not config.data.columns.label:
        return 0
    return count_classes(config, build_loader(config, World(0, 1, torch.device("cpu")), ()))


def sizes(model: nn.Module) -> list[tuple[str, int]]:
    """Parameters of the parts, by name."""
    return [
        (name, count)
        for name, part in model.named_children()
        if (count := sum(p.numel() for p in part.parameters()))
    ]


def memory(config: TrainRun, network: DiffusersNetwork, processes: int) -> dict[str, float]:
    """Bytes by what they are for. Sharded parts are divided among the processes that share them."""
    weights = 4.0 * sum(p.numel() for p in network.parameters())
    spread = config.spread
    groups = {"fsdp": processes, "hsdp": shard_group(spread, processes)}
    share = 1 / groups.get(spread.sharding, 1)
    moments = 2 * weights / (4 if config.optim.kind == "adamw-8bit" else 1)
    rows = config.micro_batch or config.batch // processes
    return {
        "weights": weights * share,
        "gradients": weights * share,
        "optimiser": moments * share,
        "averages": len(config.averages) * weights * share,
        "activations": rows * activations(config, network),
    }


def activations(config: TrainRun, network: DiffusersNetwork) -> float:
    """Bytes per sample that the forward pass keeps for the backward pass.

    Counted on a call without storage; with recomputation it is a rough guess, the square root of
    the number of blocks less.
    """
    kept: dict[int, int] = {}
    own = {p.untyped_storage()._cdata for p in network.parameters()}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = tensor.numel() * tensor.element_size()
        return tensor

    x = torch.empty(2, *network.data_shape, device="meta")
    text = network.told.text
    cond = anything(network, text.length if text else 1)
    # One call of two samples: some parts treat a batch of one otherwise.
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = network(x, torch.empty(2, device="meta"), cond)
    del output
    total = sum(kept.values()) / 2
    if config.spread.precision == "bf16":
        total /= 2  # what autocast keeps is mostly in bfloat16
    if config.spread.checkpointing:
        total /= max(len(list(blocks(network))), 1) ** 0.5
    return total


def anything(network: DiffusersNetwork, tokens: int) -> Condition:
    """Two rows of all that the network must be told, without content."""
    said: dict[str, Any] = {}
    for name, shape in network.condition_shapes.items():
        kind = torch.long if name == "label" else torch.float32
        full = [tokens if size is None else size for size in shape]
        said[name] = torch.zeros(2, *full, dtype=kind, device="meta")
    return Condition(**said)


def _flat(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in tree.items():
        inner = (
            _flat(value, f"{path}{key}.") if isinstance(value, dict) else [(f"{path}{key}", value)]
        )
        rows += inner
    return rows
