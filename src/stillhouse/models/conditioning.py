"""What a network is told besides what its own class takes: a wrapper that leaves its keys alone.

| part | reads | goes to |
|---|---|---|
| `tokens` | label | attention, as learnt tokens: a class for networks that take text |
| `control` | control | the time path |
| `steps` | steps | the time path, zero at first: the step count of a few-step student |

The backbone stays an ordinary diffusers model. Its parts are saved in a second file beside it.

The vector for the time path travels inside the time: a network that takes `timestep` [B] is given
[B, 1 + width], and the module that embeds time takes the two apart. So nothing is kept between
calls, and whatever runs a block again (activation checkpointing) sees what the first call saw.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.models.control import SHAPES, Control, Gamma, Layout, Scalars
from stillhouse.models.padding import Padding, PaddingKind
from stillhouse.process import Condition

NO_COLUMNS, GAMMA = Layout(), Gamma()


@dataclass(frozen=True)
class Text:
    """How prompts become tokens: what a model must be given at sampling as it was in training."""

    encoder: str  # as `TextEncoder` takes it
    digest: str  # of the encoder's weights, tokenizer and length
    length: int  # tokens
    padding: PaddingKind = "noisy"
    beta: float = 0.02

    def pad(self, cond: Condition, key: Tensor | Sequence[int], seed: int) -> Condition:
        """As its captions were. Text reaches the network through attention alone: its pooled
        vector is left out."""
        return replace(Padding(self.padding, self.beta)(cond, key, seed=seed), pooled=None)


@dataclass(frozen=True)
class Parts:
    """Which parts there are. Saved as JSON beside their weights."""

    classes: int = 0  # 0: labels are not made tokens
    tokens: int = 1  # per class
    layout: Layout = NO_COLUMNS
    gamma: Gamma = GAMMA
    steps: bool = False
    text: Text | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> "Parts":
        if not all(isinstance(facts[key], dict) for key in ("layout", "gamma")):
            raise ValueError("layout and gamma must be objects")
        layout = {key: _frozen(value) for key, value in facts["layout"].items()}
        text = None if facts["text"] is None else Text(**facts["text"])
        gamma = Gamma(**facts["gamma"])
        if gamma.shape not in SHAPES:
            raise ValueError(f"gamma has the shape {gamma.shape}, not {', '.join(SHAPES)}")
        return cls(**facts | {"layout": Layout(**layout), "gamma": gamma, "text": text})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class Conditioning(nn.Module):
    """The parts, for a backbone of these widths."""

    def __init__(self, parts: Parts, *, time_width: int, token_width: int) -> None:
        super().__init__()
        self.parts = parts
        self.token_width = token_width
        # One class more stands for none.
        many = (parts.classes + 1, parts.tokens * token_width)
        self.tokens = nn.Embedding(*many) if parts.classes else None
        named = bool(parts.layout.names)
        self.control = Control(parts.layout, parts.gamma, time_width) if named else None
        self.steps = Scalars(1, time_width, zero=True) if parts.steps else None

    @property
    def null_control(self) -> Tensor | None:
        """[1, K] that says nothing."""
        return self.parts.layout.row({}) if self.parts.layout.names else None

    def needs(self, backbone: dict[str, tuple[int | None, ...]]) -> dict[str, Any]:
        """The condition fields that a call must have, given those of the backbone."""
        needs = {k: v for k, v in backbone.items() if k != "pooled"}
        if self.tokens is not None:
            needs.pop("text", None)
            needs["label"] = ()
        if self.control is not None:
            needs["control"] = (len(self.parts.layout.names),)
        return needs | ({"steps": ()} if self.steps is not None else {})

    def forward(self, time: Tensor, cond: Condition) -> tuple[Tensor, Condition]:
        """The time, with a vector to add to its embedding where there is one; and the condition
        as the backbone takes it."""
        if self.tokens is not None and cond.label is not None:
            text = self.tokens(cond.label).unflatten(1, (self.parts.tokens, self.token_width))
            cond = replace(cond, text=text, label=None)
        added: list[Tensor] = []
        if self.control is not None and cond.control is not None:
            added.append(self.control(cond.control, time))
            cond = replace(cond, control=None)  # which some backbones would read as their own
        if self.steps is not None and cond.steps is not None:
            added.append(self.steps(cond.steps.float()[:, None]).float())
        if not added:
            return time, cond
        # float32: in bfloat16 timestep 501 would be 500.
        return torch.cat([time.float()[:, None], sum(added[1:], added[0])], 1), cond


def conditioned(model: nn.Module, parts: Parts, token_width: int = 0) -> Conditioning:
    """The parts for this model, whose time path is opened for them where they need it."""
    by_time = bool(parts.layout.names) or parts.steps
    time_width = open_time_path(model) if by_time else 0
    return Conditioning(parts, time_width=time_width, token_width=token_width)


# ---------------------------------------------------------------- the way into a backbone


def taken_apart(time: Tensor) -> tuple[Tensor, Tensor | None]:
    """The time itself [B], and the vector that follows it where one does."""
    return (time, None) if time.ndim == 1 else (time[:, 0], time[:, 1:])


class TakesVector:
    """Of a module that embeds time: adds what follows the time itself."""

    def forward(self, timestep: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inner: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        time, added = taken_apart(timestep)
        embedded = inner(time, *args, **kwargs)
        return embedded if added is None else embedded + added.to(embedded)


class TakesVectorAside:
    """The same of a U-Net's, which is given time as sinusoids already, and the vector beside."""

    def forward(self, sample: Tensor, condition: Tensor | None = None) -> Tensor:
        embedded: Tensor = super().forward(sample)  # type: ignore[misc]
        return embedded if condition is None else embedded + condition.to(embedded)


class HandsVectorOn:
    """Of a plain U-Net's sinusoids: the vector follows them, each row that of a sample.

    That network multiplies times with a row of ones, so time and vector come as [1 + width, B].
    """

    def forward(self, timesteps: Tensor) -> Tensor:
        inner: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        if timesteps.ndim == 1:
            return inner(timesteps)
        time, added = timesteps[0], timesteps[1:]
        return torch.cat([inner(time), added.T], 1)


class TakesVectorBehind:
    """Of what embeds such sinusoids: what is more than those is the vector."""

    def forward(self, sample: Tensor, condition: Tensor | None = None) -> Tensor:
        inner: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        count = self.linear_1.in_features  # type: ignore[attr-defined]
        embedded = inner(sample[:, :count], condition)
        return embedded if sample.shape[1] == count else embedded + sample[:, count:]


# Classes of diffusers that embed time, and what is mixed into them.
EMBEDDERS: dict[str, type] = {
    "CombinedTimestepLabelEmbeddings": TakesVector,  # DiT, MDT: one in every block
    "PixArtAlphaCombinedTimestepSizeEmbeddings": TakesVector,
    "CombinedTimestepTextProjEmbeddings": TakesVector,  # SD3
}


def open_time_path(model: nn.Module) -> int:
    """Lets the model's embedders take a vector beside time, in place; its width.

    Only the class of a module changes, to one with the same parameters: no key does.
    """
    if hasattr(model, "time_width"):  # a class of ours, which takes it as it is
        return model.time_width  # type: ignore[return-value]
    kinds = {base.__name__ for base in type(model).__mro__}
    embedder: Any = getattr(model, "time_embedding", None)  # of U-Nets
    if "UNet2DModel" in kinds:
        found = [(embedder, TakesVectorBehind), (model.time_proj, HandsVectorOn)]
    elif "UNet2DConditionModel" in kinds:
        if embedder.cond_proj is not None:
            raise ValueError("this U-Net takes a time condition already (time_cond_proj_dim)")
        found = [(embedder, TakesVectorAside)]
    else:
        found = [(m, EMBEDDERS[n]) for m in model.modules() if (n := _known(m, EMBEDDERS))]
    if not found:
        raise ValueError(f"a {type(model).__name__} has no time path that control could take")
    for module, mixin in found:
        if not isinstance(module, mixin):
            module.__class__ = _mixed(mixin, type(module))
    first: Any = found[0][0]
    return getattr(first, "timestep_embedder", first).linear_2.out_features


def _known(module: nn.Module, names: dict[str, type]) -> str:
    """The name under which the module's class, or one it derives from, is listed."""
    return next((b.__name__ for b in type(module).__mro__ if b.__name__ in names), "")


@cache
def _mixed(mixin: type, base: type) -> type:
    return type(base.__name__, (mixin, base), {})
