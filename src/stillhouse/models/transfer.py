"""Transfer: the weights of one network carried to another resolution, dataset, condition or codec.

    account = transfer(source, target)    # fills target in place; print(account)

| fate | what it means |
|---|---|
| kept | copied; where only a part was, the account says which |
| resampled | positions, for another number of patches (see `positions`) |
| fresh | left as the target was built, and why |
| dropped | of the source, without a place in the target |

Every parameter and buffer of the target is kept, resampled or fresh; every one of the source is
used or dropped. Control that is new to the network changes nothing at first.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from stillhouse.errors import UserError
from stillhouse.models.conditioning import Parts
from stillhouse.models.control import SINUSOIDS, Control, Scalars
from stillhouse.models.networks import DiffusersNetwork, convention_of
from stillhouse.models.positions import Positions, carry_positions, data_size

Fate = Literal["kept", "resampled", "fresh", "dropped"]
FATES: tuple[Fate, ...] = ("kept", "resampled", "fresh", "dropped")

# What is tied to the data and may have to start anew, as patterns of weights' names.
HEADS: dict[str, tuple[str, ...]] = {
    "input": ("model.pos_embed.proj.*", "model.conv_in.*", "model.first.*"),
    "output": ("model.proj_out.*", "model.proj_out_2.*", "model.conv_out.*", "model.last.*"),
    "classes": (
        "*.class_embedder.embedding_table.weight",
        "model.class_embedding.weight",
        "model.label.weight",
        "conditioning.tokens.weight",
    ),
    "text": (
        "model.caption_projection.*",
        "model.context_embedder.*",
        "model.encoder_hid_proj.*",
        "model.*.attentions.*.attn2.to_[kv].weight",
    ),
}
TOO_LITTLE = 0.1  # a smaller share that was carried over is a mistake
NAMES = 3  # of tensors that a line of the account shows
NOTHING_YET = "control: new, and changes nothing at first"


# ---------------------------------------------------------------- the account


@dataclass(frozen=True)
class Entry:
    """What became of one tensor."""

    name: str
    fate: Fate
    weights: int
    why: str = ""


@dataclass(frozen=True)
class Account:
    """What became of every tensor; `print` it."""

    entries: tuple[Entry, ...]
    changes: tuple[str, ...] = ()  # of the configs
    scale: float = 1.0  # side of the target's images over the source's: noise is shifted by it

    def of(self, fate: Fate) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.fate == fate)

    @property
    def share(self) -> float:
        """Of the target's weights, how much came from the source."""
        sizes = {fate: sum(entry.weights for entry in self.of(fate)) for fate in FATES}
        carried = sizes["kept"] + sizes["resampled"]
        return carried / max(1, carried + sizes["fresh"])

    def __str__(self) -> str:
        lines = [f"{self.share:.1%} of the weights were carried over"]
        for fate in FATES:
            lines += [f"{fate:9}  {line}" for line in _summary(self.of(fate))]
        return "\n".join([*lines, *(f"{'changed':9}  {change}" for change in self.changes)])


def _summary(entries: tuple[Entry, ...]) -> Iterator[str]:
    """One line for each reason, with the names of what it holds for; numbers in them are stars."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.why, []).append(entry)
    for why, group in groups.items():
        tensors = f"{len(group)} tensors" if len(group) > 1 else "1 tensor"
        count = f"{tensors}, {sum(entry.weights for entry in group):,} numbers"
        names = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", e.name) for e in group))
        more = [f"{len(names) - NAMES} more"] if len(names) > NAMES else []
        yield f"{count}: {why} ({', '.join([*names[:NAMES], *more])})" if why else count


# ---------------------------------------------------------------- the transfer


class Outcome(NamedTuple):
    """Of a tensor of the target."""

    fate: Fate
    why: str = ""
    used: str = ""  # the tensor of the source that it came from, in whole or in part


@torch.no_grad()
def transfer(
    source: DiffusersNetwork,
    target: DiffusersNetwork,
    *,
    positions: Positions = "resample",
    fresh: Collection[str] = (),
) -> Account:
    """Fills `target`, newly built, with the weights of `source`.

    `fresh` names what shall not be carried over although it would fit: `classes` for other classes
    of the same number, `input` and `output` for another codec, `text` for another encoder, or
    patterns of weights' names. Call it before optimiser, averages and sharding: tables of positions
    may be replaced.
    """
    _check_kind(source.model, target.model)
    scale, outcomes = _scale(source.model, target.model), _carry_control(source, target)
    for part, said in carry_positions(source.model, target.model, positions).items():
        name = f"model.{part}"
        outcomes[name] = Outcome("resampled" if said else "kept", said, name)
    old, new = _tensors(source), _tensors(target)
    anew = _anew(source, target, fresh)
    for name in new.keys() - outcomes.keys():
        part = Part(name, old.get(name), new[name], anew.get(name, ""))
        outcomes[name] = _carry(part, source, target)
    entries = [Entry(n, outcomes[n].fate, t.numel(), outcomes[n].why) for n, t in new.items()]
    used = {outcome.used for outcome in outcomes.values()}
    for name, tensor in old.items():
        if name not in used:
            why = "made anew" if name in new else "not in the target"
            entries.append(Entry(name, "dropped", tensor.numel(), why))
    account = Account(tuple(entries), tuple(_changes(source, target)), scale)
    if account.share < TOO_LITTLE:
        raise UserError(
            f"hardly anything of the checkpoint fits this network ({account.share:.1%} of its "
            "weights): choose a network of the same name, width and depth"
        )
    return account


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def _check_kind(source: nn.Module, target: nn.Module) -> None:
    if convention_of(source) is not convention_of(target):
        kinds = type(target).__name__, type(source).__name__
        raise UserError(f"a {kinds[0]} cannot go on from a {kinds[1]}: choose the same network")


def _scale(source: nn.Module, target: nn.Module) -> float:
    sizes = [data_size(model) for model in (target, source)]
    new, old = (size[0] if isinstance(size, tuple | list) else size for size in sizes)
    return new / old if new and old else 1.0


def _changes(source: DiffusersNetwork, target: DiffusersNetwork) -> Iterator[str]:
    """What the two say otherwise of themselves."""
    old, new = _public(source), _public(target)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"{key}: {old.get(key) or 'none'} -> {new.get(key) or 'none'}"


def _public(network: DiffusersNetwork) -> dict[str, Any]:
    config: Any = network.model.config
    # What positions are computed from is told with them.
    apart = ("sample_size", "interpolation_scale", "pos_embed_max_size")
    found = {k: v for k, v in config.items() if k[0] != "_" and k not in apart}
    parts = network.conditioning.parts if network.conditioning is not None else Parts()
    found |= {
        "class": type(network.model).__name__,
        "size": data_size(network.model),
        "control": ", ".join(parts.layout.names),
        "detail counts by": parts.gamma if parts.layout.detail else None,
        "classes as tokens": parts.classes,
        "text encoder": parts.text,
        "told its steps": parts.steps,
    }
    # Through a file tuples become lists.
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


# ---------------------------------------------------------------- weights by name


def _anew(
    source: DiffusersNetwork, target: DiffusersNetwork, fresh: Collection[str]
) -> dict[str, str]:
    """What is not carried over although it, or a part of it, would fit; and why."""
    old, new = _tensors(source), _tensors(target)
    found: dict[str, str] = {}
    for head in ("input", "text"):  # a bias would fit where its weight does not
        names = _matching(HEADS[head], new)
        odd = next((n for n in names if n in old and old[n].shape != new[n].shape), None)
        if odd is not None:
            found |= dict.fromkeys(names, f"{head}: {_shapes(old[odd], new[odd])}")
    if _other_text(source, target):
        names = _matching(HEADS["text"], new)
        found |= dict.fromkeys(names, "text: tokens come from another encoder")
    for wish in fresh:
        names = _matching(HEADS.get(wish, (wish,)), new)
        if not names and wish not in HEADS:
            raise UserError(f"{wish} is no weight of the network, nor one of {', '.join(HEADS)}")
        found |= dict.fromkeys(names, f"{wish}: as asked for")
    return found


def _matching(patterns: Collection[str], names: Collection[str]) -> list[str]:
    return [n for n in names if any(fnmatchcase(n, pattern) for pattern in patterns)]


def _other_text(source: DiffusersNetwork, target: DiffusersNetwork) -> bool:
    """Whether tokens are known to come from elsewhere; a bare network does not say."""
    if source.conditioning is None or target.conditioning is None:
        return False
    old, new = source.conditioning.parts.text, target.conditioning.parts.text
    return new is not None and (old is None or old.digest != new.digest)


def _shapes(old: Tensor, new: Tensor) -> str:
    now, before = (" x ".join(map(str, tensor.shape)) for tensor in (new, old))
    return f"{now}, was {before}"


class Part(NamedTuple):
    """A tensor of the target, and what the source has by its name."""

    name: str
    old: Tensor | None
    new: Tensor
    anew: str  # why it shall not be copied


def _carry(part: Part, source: DiffusersNetwork, target: DiffusersNetwork) -> Outcome:
    """Copies where it fits; else what part of it does."""
    name, old, new, anew = part
    if old is None:
        return Outcome("fresh", anew or "new to the network")
    if old.shape == new.shape and not anew:
        new.copy_(old)
        return Outcome("kept", used=name)
    head = next((head for head, like in HEADS.items() if _matching(like, [name])), "")
    why = anew or (f"{head}: " if head else "") + _shapes(old, new)
    rows = None
    if head == "classes" and old.shape[1:] == new.shape[1:]:
        rows = _carry_null(old, new, source.null_label, target.null_label)
    elif head == "output" and not anew:
        rows = _carry_image(old, new, source.model.config, target.model.config)
    return Outcome("fresh", why) if rows is None else Outcome(rows[0], f"{why}; {rows[1]}", name)


def _carry_null(old: Tensor, new: Tensor, was: int | None, now: int | None) -> Any:
    """The row for no class means the same in both."""
    if was is None or now is None:
        return None
    new[now] = old[was].to(new)
    return "fresh", "the row for none was kept"


def _carry_image(old: Tensor, new: Tensor, was: Any, now: Any) -> Any:
    """Of a network that also predicts variances, which are the channels after the image's."""
    given, wanted = was.out_channels or was.in_channels, now.out_channels or now.in_channels
    if not given > wanted == was.in_channels == now.in_channels:
        return None
    # Rows of patches are (row, column, channel); a convolution's are channels.
    rows = old.unflatten(0, (-1, given))[:, :wanted].flatten(0, 1)
    if rows.shape != new.shape:
        return None
    new.copy_(rows)
    return "kept", f"{wanted} of {given} channels, without variances"


# ---------------------------------------------------------------- control


def _carry_control(source: DiffusersNetwork, target: DiffusersNetwork) -> dict[str, Outcome]:
    """Columns by their names, wherever they stand."""
    old, new = (n.conditioning.control if n.conditioning else None for n in (source, target))
    outcomes: dict[str, Outcome] = {}
    if new is None:
        return outcomes
    for group in ("composition", "detail"):
        if getattr(new, group) is not None:
            for name, outcome in _carry_scalars(old, new, group).items():
                full = f"conditioning.control.{group}.{name}"
                outcomes[full] = outcome._replace(used=full if outcome.fate == "kept" else "")
    for i, (style, values) in enumerate(new.layout.styles):
        name = f"styles.style{i}.weight"
        outcome = _carry_style(old, style, values, new.get_parameter(name))
        outcomes[f"conditioning.control.{name}"] = outcome
    return outcomes


def _carry_scalars(old: Control | None, new: Control, group: str) -> dict[str, Outcome]:
    ours: Scalars = getattr(new, group)
    theirs: Scalars | None = getattr(old, group, None)
    names, were = (getattr(c.layout, group) if c else () for c in (new, old))
    parts = [name for name, _ in ours.named_parameters()]
    fits = theirs is not None and theirs.outward.weight.shape == ours.outward.weight.shape
    if theirs is None or not fits or not set(names) & set(were):
        nn.init.zeros_(ours.outward.weight)
        nn.init.zeros_(ours.outward.bias)
        return dict.fromkeys(parts, Outcome("fresh", NOTHING_YET))
    blocks = dict(zip(were, theirs.inward.weight.split(SINUSOIDS, 1), strict=True))
    nothing = torch.zeros_like(theirs.inward.weight[:, :SINUSOIDS])
    ours.inward.weight.copy_(torch.cat([blocks.get(name, nothing) for name in names], 1))
    ours.inward.bias.copy_(theirs.inward.bias)
    ours.outward.load_state_dict(theirs.outward.state_dict())
    same = dict.fromkeys(parts, Outcome("kept"))
    return same | {"inward.weight": Outcome("kept", _told(names, were))}


def _carry_style(old: Control | None, style: str, values: tuple[str, ...], new: Tensor) -> Outcome:
    """One row per value; the last is "not said", and what a new value starts from."""
    known = dict(old.layout.styles) if old else {}
    name = f"styles.style{list(known).index(style)}.weight" if style in known else ""
    if old is None or not name or old.get_parameter(name).shape[1] != new.shape[1]:
        new.zero_()
        return Outcome("fresh", NOTHING_YET)
    were = known[style]
    rows = [were.index(value) if value in were else len(were) for value in values]
    new.copy_(old.get_parameter(name)[[*rows, len(were)]])
    return Outcome("kept", _told(values, were), f"conditioning.control.{name}")


def _told(names: tuple[str, ...], were: tuple[str, ...]) -> str:
    """What is said that was not, and what is no longer said."""
    new, gone = (sorted(set(a) - set(b)) for a, b in ((names, were), (were, names)))
    parts = [f"{', '.join(new)} new, and change nothing at first"] if new else []
    parts += [f"{', '.join(gone)} dropped"] if gone else []
    return f"control: {'; '.join(parts)}" if parts else ""
