"""What travels with the data: `Condition` (what to draw) and `Batch` (data, condition, keys)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


class Record:
    """A frozen dataclass of optional per-sample tensors, handled row by row as one thing.

    Every field is a tensor whose first axis counts samples, another `Record`, or None (absent).
    """

    def map(self, function: Any) -> Self:
        """The record with `function` applied to every field that is present."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return replace(self, **{k: function(v) for k, v in values.items() if v is not None})  # type: ignore[type-var]

    def __len__(self) -> int:
        """Number of samples; 0 for a record without any field."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None and len(value):
                return len(value)
        return 0

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> Self:
        """Rows by slice, index tensor or mask. One integer would drop the axis: use a slice."""
        rows = rows if isinstance(rows, slice) else torch.as_tensor(rows)
        if isinstance(rows, Tensor) and rows.ndim == 0:
            raise TypeError("index a record by a slice or a tensor, not by one integer")
        return self.map(lambda value: value[rows])

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Self:
        """Moves every tensor; `dtype` casts the floating ones only."""

        def move(value: Any) -> Any:
            keep = isinstance(value, Tensor) and not value.is_floating_point()
            return value.to(device=device, dtype=None if keep else dtype, non_blocking=non_blocking)

        return self.map(move)

    def expand(self, count: int) -> Self:
        """Repeats a record of one row to `count` rows without copying."""
        return self.map(
            lambda v: v.expand(count, *v.shape[1:]) if isinstance(v, Tensor) else v.expand(count)
        )

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Joins records that have the same fields present."""
        joined: dict[str, Any] = {}
        for field in fields(cls):  # type: ignore[arg-type]
            values = [getattr(part, field.name) for part in parts]
            present = [value is not None for value in values]
            if any(present) and not all(present):
                raise ValueError(f"cannot join records: {field.name!r} is present in some only")
            if all(present) and values:
                kind = type(values[0])
                joined[field.name] = (
                    kind.cat(values) if isinstance(values[0], Record) else torch.cat(values)
                )
        return cls(**joined)


@dataclass(frozen=True, eq=False)
class Condition(Record):
    """What is known about the wanted image, as optional tensors with one row per sample."""

    label: Tensor | None = None  # [B] class index
    text: Tensor | None = None  # [B, L, C] token embeddings
    text_mask: Tensor | None = None  # [B, L] true where the token is real
    pooled: Tensor | None = None  # [B, C] one vector per prompt
    control: Tensor | None = None  # [B, K] sizes, crops, flips: composition and detail
    steps: Tensor | None = None  # [B] number of sampling steps (step-conditioned students)
    hidden: Tensor | None = None  # [B, tokens] true where masked training does not show the image

    def same_as(self, other: "Condition") -> bool:
        """Whether every field is the very same tensor: nothing was replaced."""
        return all(getattr(self, f.name) is getattr(other, f.name) for f in fields(self))

    def drop(self, rows: Tensor, null: "Condition", *, only: Sequence[str] = ()) -> "Condition":
        """Replaces the marked rows by `null` (one row), in all fields or in `only` those named.

        `rows` is a boolean mask. This is the condition dropout of classifier-free guidance. A field
        that `null` does not have (sizes, step counts) keeps its value: there is no "none" of it.
        """
        changed: dict[str, Tensor] = {}
        for field in fields(self):
            value, empty = getattr(self, field.name), getattr(null, field.name)
            if value is None or empty is None or (only and field.name not in only):
                continue
            mask = rows.to(value.device).view(-1, *[1] * (value.ndim - 1))
            changed[field.name] = torch.where(mask, empty.to(value), value)
        return replace(self, **changed)


@dataclass(frozen=True, eq=False)
class Batch(Record):
    """One training batch. `key` is the global image index that keys all randomness of a row."""

    data: Tensor
    condition: Condition | None = None
    ids: Tensor | None = None  # [B] sample ids in the data set
    key: Tensor | None = None  # [B] images seen before this one, over the whole run
    noise: Tensor | None = None  # drawn by the prefetch; objectives draw by key where absent
    sigma: Tensor | None = None  # [B]

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Self:
        """Moves and casts, but `key` and `ids` stay on the host, where randomness is drawn, and
        `sigma` keeps its precision: in bfloat16 timestep 501 would be 500."""
        moved = super().to(device, dtype, non_blocking=non_blocking)
        sigma = self.sigma
        if sigma is not None:
            sigma = sigma.to(device, non_blocking=non_blocking)
        return replace(moved, key=self.key, ids=self.ids, sigma=sigma)
