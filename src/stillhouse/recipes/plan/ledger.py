"""What a computation allocates and computes, counted while it runs on tensors without storage.

A `Ledger` sees every storage come, change its size and go, and adds up operations. `Foreseen`
answers what only real numbers could: how much of each image a mask leaves.
"""

import weakref
from collections.abc import Collection, Iterable
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

FUSED: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FUSED_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ledger(TorchDispatchMode):
    """Bytes that come and go, in order, and operations. What is `known` already has no bytes."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.moments: list[tuple[int, int]] = []  # (which storage, bytes more)
        self.operations = 0  # in floating point
        self._numbers = count()
        self._live: dict[int, tuple[int, int]] = {}  # by address: which storage, its bytes
        self._references: dict[int, Any] = {}
        self._known = {local(tensor).untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.operations += formula(*args, **(kwargs or {}), out_val=result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(local(leaf).untyped_storage())
        return result

    def __enter__(self) -> "Ledger":
        # FSDP empties and fills its storages by a method that no dispatch sees.
        self._resize = resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            self._change(storage)
            return found

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def number(self, tensor: Tensor) -> int:
        """Which storage a tensor has, among those that have come."""
        return self._live[local(tensor).untyped_storage()._cdata][0]

    def peak(self, without: Collection[int] = ()) -> int:
        """The most bytes at once, of all storages but those named."""
        return max(accumulate(more for n, more in self.moments if n not in without), default=0)

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._live or address in self._known:
            return
        number = next(self._numbers)
        self._live[address] = number, size
        self.moments.append((number, size))
        self._references[address] = weakref.ref(storage, lambda _: self._leave(address))

    def _change(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            number, before = self._live[storage._cdata]
            self._live[storage._cdata] = number, storage.nbytes()
            self.moments.append((number, storage.nbytes() - before))

    def _leave(self, address: int) -> None:
        number, size = self._live.pop(address)
        self.moments.append((number, -size))
        self._references.pop(address)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; a plain tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of this process's shards."""
    return sum(t.numel() * t.element_size() for t in map(local, tensors))


class Foreseen(TorchFunctionMode):
    """Masks of a known length, where a network asks for the fewest and most tokens they leave."""

    def __init__(self, kept: tuple[int, int] | None) -> None:
        super().__init__()
        self.kept = kept

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.aminmax and self.kept:
            return self.kept
        return func(*args, **(kwargs or {}))


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


# torch's own, without its `FlopCounterMode`: that one keeps what it has seen until the collector
# comes, and knows no CPU's attention.
FORMULAS: dict[Any, Any] = {
    **flop_registry,
    FUSED: _attention_flops,
    FUSED_BACKWARD: _attention_backward_flops,
}
