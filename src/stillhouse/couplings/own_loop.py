"""For people who keep their own training loop: one line that pairs noise with data."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from stillhouse.couplings.assignment import (
    BLOCK,
    Assignment,
    Cost,
    any_swap,
    check_shapes,
    warn_of_nothing_to_swap,
)
from stillhouse.couplings.conditional import Conditional
from stillhouse.process import Condition

Tensors = Tensor | Sequence[Tensor]


def assign(
    x: Tensors,
    noise: Tensors,
    labels: Tensor | Sequence[int] | None = None,
    *,
    mask: Tensor | None = None,
    cost: Cost = "l2",
    standardise: bool = False,
    block: int = BLOCK,
) -> Tensor:
    """`index`, a permutation: datum i should meet noise[index[i]], in its input and in its target.

        noise = torch.randn_like(latents)
        noise = noise[stillhouse.couplings.assign(latents, noise)]   # the line to add

    `x` is what noise is added to (latents after scaling), of any dtype and on any device that the
    noise is on, or a list of tensors, of which only those of one shape swap. With `labels`, whole
    numbers, noise stays within its class, as a model that is told the class needs it. `mask` marks
    the real part of padded data. The caller waits for the solve, which happens on the host.
    """
    make = Assignment if labels is None else Conditional
    coupling = make(cost=cost, standardise=standardise, block=block)
    known = None if labels is None else _whole_numbers(labels)
    if known is not None and known.shape != (len(x),):
        raise ValueError(f"{len(x)} data need one label each, not labels {(*known.shape,)}")
    if len(x) != len(noise):
        raise ValueError(f"{len(x)} data need as many noises, not {len(noise)}")
    if isinstance(x, Tensor) and isinstance(noise, Tensor):
        index = coupling(x, noise, Condition(label=known), mask=mask).index
        return index.to(x.device)
    if mask is not None:
        raise ValueError("a mask goes with data padded to one shape, not with a list of tensors")
    return _by_shape(coupling, list(x), list(noise), known)


def _by_shape(
    coupling: Assignment, x: list[Tensor], noise: list[Tensor], labels: Tensor | None
) -> Tensor:
    shapes: dict[torch.Size, list[int]] = defaultdict(list)
    for row, datum in enumerate(x):
        shapes[datum.shape].append(row)
    index, swapped = torch.arange(len(x)), False
    for rows in map(torch.tensor, shapes.values()):
        for row in rows:
            check_shapes(x[row][None], noise[row][None])
        cond = Condition(label=None if labels is None else labels.cpu()[rows])
        if any_swap(coupling.groups(len(rows), coupling.condition(cond))):
            data, pool = (torch.stack([values[row] for row in rows]) for values in (x, noise))
            index[rows], swapped = rows[coupling(data, pool, cond).index], True
    if x and not swapped:
        warn_of_nothing_to_swap(len(x))
    return index.to(x[0].device) if x else index


def _whole_numbers(labels: Tensor | Sequence[int]) -> Tensor:
    said = "labels are whole numbers, one per datum, with one of its own for a label left out"
    try:
        known = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{said}, not {labels!r}") from error
    if known.numel() and known.is_floating_point():
        raise ValueError(f"{said}, not {known.dtype}")
    return known
