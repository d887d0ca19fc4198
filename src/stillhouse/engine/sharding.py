"""How one network is spread over processes: `none | ddp | fsdp | hsdp`, precision, recomputation.

FSDP2's `fully_shard` and activation checkpointing are applied per block (the members of the
network's module lists), which is where they pay; compilation too.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from stillhouse.config import Config
from stillhouse.engine.world import World
from stillhouse.errors import UserError

Kind = Literal["none", "ddp", "fsdp", "hsdp"]


class Spread(Config):
    """How a network is spread and computed."""

    sharding: Kind = "none"
    """none: one process; ddp: copies; fsdp: sharded; hsdp: sharded within groups, copied across."""
    shard_size: int = 0
    """hsdp: processes per sharding group; a node's by default."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: computed in bfloat16, weights, gradients and updates in float32."""
    checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool = False
    """torch.compile, block by block; on a CPU, of networks without convolutions."""
    offload: bool = False
    """fsdp/hsdp: keep parameters and optimiser state in host memory."""


APART = "called_apart"  # which models set on modules that are called from outside their block


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts: members of the outermost module lists."""
    for child in network.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


def spread(network: nn.Module, how: Spread, world: World) -> nn.Module:
    """The network as the loop calls it. fsdp and hsdp change it in place, ddp wraps it."""
    if how.sharding == "none" and world.size > 1:
        raise UserError(
            f"{world.size} processes and sharding 'none': each would train its own copy. Choose "
            "ddp, fsdp or hsdp."
        )
    if how.offload and how.sharding not in ("fsdp", "hsdp"):
        raise UserError("offloading is a way of sharding: choose --spread.sharding fsdp or hsdp")
    if how.checkpointing:
        _checkpoint(network)
    if how.compile:
        _compile(network, world.device)
    if how.sharding in ("fsdp", "hsdp"):
        return _fully_shard(network, how, world)
    network.to(world.device)
    if how.sharding == "ddp":
        return nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    return network


def _compile(network: nn.Module, device: torch.device) -> None:
    parts = list(blocks(network))
    # Blocks of one kind and several sizes: its search for an order of strides fails (torch 2.13).
    if device.type == "cpu" and any(isinstance(m, nn.Conv2d) for p in parts for m in p.modules()):
        raise UserError(
            "torch's compiler fails with convolutions on a CPU: leave --spread.compile out"
        )
    for block in parts:
        block.compile()


def _checkpoint(network: nn.Module) -> None:
    from torch.distributed._composable import checkpoint

    for block in blocks(network):
        checkpoint(block)


def _fully_shard(network: nn.Module, how: Spread, world: World) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": _mesh(how, world)}
    if how.precision == "bf16":
        # Inputs are left alone: in bfloat16 timestep 501 would be 500. Autocast casts where it may.
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=False
        )
    if how.offload and world.device.type != "cpu":  # without a GPU all is in host memory anyway
        options["offload_policy"] = CPUOffloadPolicy()
    # A part that is also called from outside its block must be gathered by itself.
    apart = [part for part in network.modules() if getattr(part, APART, False)]
    for part in [*apart, *blocks(network)]:
        fully_shard(part, **options)
    fully_shard(network, **options)
    return network


def shard_group(how: Spread, processes: int) -> int:
    """hsdp: how many processes share one copy."""
    return how.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", processes))


def _mesh(how: Spread, world: World) -> DeviceMesh:
    device = world.device.type
    if how.sharding == "fsdp":
        return init_device_mesh(device, (world.size,), mesh_dim_names=("shard",))
    group = shard_group(how, world.size)
    if world.size % group:
        raise UserError(f"{world.size} processes cannot be split into groups of {group}")
    shape = (world.size // group, group)
    return init_device_mesh(device, shape, mesh_dim_names=("copy", "shard"))


def syncing(network: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients travel between processes with the last micro-batch only."""
    if isinstance(network, nn.parallel.DistributedDataParallel):
        return nullcontext() if last else network.no_sync()
    if isinstance(network, FSDPModule):
        network.set_requires_gradient_sync(last)
    return nullcontext()


def computing(how: Spread, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast for bf16. Sharded networks cast their blocks too; what is outside follows here."""
    if how.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def inner(network: nn.Module) -> nn.Module:
    """The network itself, without a wrapper: for EMA, checkpoints and vector-Jacobian products."""
    if isinstance(network, nn.parallel.DistributedDataParallel):
        return network.module
    return network
