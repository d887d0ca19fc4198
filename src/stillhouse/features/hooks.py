"""Reading activations during a run of the network, by plain forward hooks.

`read(model, activations, run)` calls `run` and gives what fired. Once the last wanted activation
has fired, the rest of the network is not computed; no hook is left behind, whatever happens.
Tokens are laid out as maps [B, C, height, width] by the input of the module that made tokens of it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stillhouse.errors import UserError
from stillhouse.features.activation import Activation
from stillhouse.features.attention import Attended, Which, is_joint, mean_map, projection

Done = Callable[[Tensor], None]  # is given an activation as soon as it is known


class _Enough(BaseException):
    """Everything wanted has fired. No `except Exception` on its way should catch it."""


class Frame:
    """How the tokens lie that are made of a module's input [B, C, height, width]."""

    def __init__(self, module: nn.Module, patch: int) -> None:
        self.module, self.patch = module, patch
        self.rows, self.height, self.width = 0, 0, 0

    def watch(self) -> RemovableHandle:
        return self.module.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = _input(args, kwargs)
        self.rows = len(x)
        self.height, self.width = (side // self.patch for side in x.shape[-2:])

    @property
    def tokens(self) -> int:
        """Of all images together."""
        return self.rows * self.height * self.width

    def lay_out(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B, C, height, width], without copying."""
        if tokens.shape[1] != self.height * self.width:
            raise UserError(
                f"the network computes {tokens.shape[1]} tokens of an image of {self.height} x "
                f"{self.width}: features can be read of whole images only, so leave masks out"
            )
        return tokens.transpose(1, 2).unflatten(2, (self.height, self.width))


def read(
    model: nn.Module,
    activations: Sequence[Activation],
    run: Callable[[], object],
    *,
    early_stop: bool = True,
) -> dict[str, Tensor]:
    """The activations by id, of the first time that each module runs."""
    found: dict[str, Tensor] = {}
    versions: dict[str, int] = {}

    def done(name: str, value: Tensor) -> None:
        if name in found:
            return
        found[name], versions[name] = value, _version(value)
        if early_stop and len(found) == len(activations):
            raise _Enough

    with ExitStack() as stack, torch.no_grad():
        for handle in _attach(model, activations, done):
            stack.callback(handle.remove)
        with suppress(_Enough):
            run()
    silent = [activation.id for activation in activations if activation.id not in found]
    if silent:
        raise UserError(
            f"{', '.join(silent[:3])} did not run ({len(silent)} in all): does the network compute "
            "attention in a way of its own? Put diffusers' default processors back"
        )
    if any(_version(value) != versions[name] for name, value in found.items()):
        raise UserError(
            "the network changes activations after it has computed them, as FreeU does: call "
            "disable_freeu() first"
        )
    return {activation.id: found[activation.id] for activation in activations}


def _version(value: Tensor) -> int:
    """How often it was changed in place; inference tensors do not count."""
    return 0 if value.is_inference() else value._version


def _attach(
    model: nn.Module, activations: Sequence[Activation], done: Callable[[str, Tensor], None]
) -> list[RemovableHandle]:
    frames: dict[str, Frame] = {}
    for activation in activations:
        if activation.frame and activation.frame not in frames:
            module = model.get_submodule(activation.frame)
            frames[activation.frame] = Frame(module, activation.patch)
    handles = [frame.watch() for frame in frames.values()]
    try:
        for activation in activations:
            frame = frames.get(activation.frame)
            handles += _listen(model, activation, frame, partial(done, activation.id))
    except BaseException:  # a module that is not there must not leave the others hooked
        for handle in handles:
            handle.remove()
        raise
    return handles


def _listen(
    model: nn.Module, activation: Activation, frame: Frame | None, done: Done
) -> list[RemovableHandle]:
    module = model.get_submodule(activation.module)
    if frame is None:
        if activation.kind == "in":
            return [_before(module, lambda args, kwargs: done(_input(args, kwargs)))]
        return [_after(module, lambda output: done(_tensor(output, activation.part)))]
    if activation.is_map:
        return _listen_to_attention(module, activation.kind, frame, done)
    if activation.kind == "ffn-inner":
        block = model.get_submodule(activation.module.removesuffix(".ff.net.0"))
        dim = getattr(block, "_chunk_dim", 0)
        return [_after(module, Chunks(frame, dim, done).add)]
    which = activation.module.rpartition(".to_")[2]
    if which in ("q", "k", "v"):
        attention = model.get_submodule(activation.module.rpartition(".")[0])
        source = projection(attention, cast(Which, which))
        return [_after(source.module, lambda out: done(frame.lay_out(source.take(out))))]
    part = activation.part
    return [_after(module, lambda out: done(frame.lay_out(_tensor(out, part))))]


class Chunks:
    """A feed-forward layer that is run on parts of the tokens, one after the other."""

    def __init__(self, frame: Frame, dim: int, done: Done) -> None:
        self.frame, self.dim, self.done = frame, dim, done
        self.pieces: list[Tensor] = []

    def add(self, piece: Tensor) -> None:
        self.pieces.append(piece)
        if sum(p.shape[0] * p.shape[1] for p in self.pieces) >= self.frame.tokens:
            whole = self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces, self.dim)
            self.pieces = []
            self.done(self.frame.lay_out(whole))


class Pieces:
    """The parts of a map of attention; the map itself is computed once they are all there."""

    def __init__(self, attention: Any, kind: str, frame: Frame, done: Done) -> None:
        self.attention, self.kind, self.frame, self.done = attention, kind, frame, done
        self.needed: list[Which] = ["q", "k"]
        if is_joint(attention):
            self.needed.append("text-k")
        self.there: dict[str, Tensor] = {}
        self.bias: Tensor | None = None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.there = {}
        self.bias = kwargs.get("attention_mask", args[2] if len(args) > 2 else None)

    def add(self, which: Which, value: Tensor) -> None:
        self.there[which] = value
        if len(self.there) < len(self.needed):
            return
        query, key, text = (self.there.get(name) for name in ("q", "k", "text-k"))
        assert query is not None
        assert key is not None
        found = mean_map(self.attention, Attended(query, key, text, self.bias))
        self.there = {}
        if text is not None:
            found = found.split([key.shape[1], text.shape[1]], -1)[self.kind == "cross-map"]
        self.done(self.frame.lay_out(found.to(query.dtype)))


def _listen_to_attention(
    attention: nn.Module, kind: str, frame: Frame, done: Done
) -> list[RemovableHandle]:
    pieces = Pieces(attention, kind, frame, done)
    handles = [_before(attention, pieces.begin)]
    for which in pieces.needed:
        source = projection(attention, which)

        def add(output: Tensor, which: Which = which, take: Any = source.take) -> None:
            pieces.add(which, take(output))

        handles.append(_after(source.module, add))
    return handles


def _before(module: nn.Module, see: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Any:
    return module.register_forward_pre_hook(
        lambda _, args, kwargs: see(args, kwargs), with_kwargs=True
    )


def _after(module: nn.Module, see: Callable[[Any], None]) -> RemovableHandle:
    return module.register_forward_hook(lambda _, args, output: see(output))


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _tensor(output: Any, part: int) -> Tensor:
    """diffusers' modules give a tensor, several, or an object that holds one."""
    if isinstance(output, Tensor):
        return output
    return output[part] if isinstance(output, tuple) else output.sample
