"""Conditional assignment: noise near the data that says nothing about the condition.

Under plain assignment noise predicts the class (a probe finds 20% on CIFAR-10, chance is 10%): the
network learns to read it there, and at sampling, where noise and condition are independent, it
reads wrongly. Two cures: swap within a class only, which leaves exactly no trace, or let a swap
between rows of different condition cost extra (Cheng & Schwing 2025, "The Curse of Conditions").
"""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, cat
from torch.nn.functional import normalize

from stillhouse.couplings.assignment import Assignment, blocks, check_choice
from stillhouse.couplings.pairing import check_rows
from stillhouse.errors import UserError
from stillhouse.process import Condition

Mode = Literal["within-class", "soft"]


@dataclass(frozen=True)
class Conditional(Assignment):
    """Assignment that heeds the label, or for `soft` the text's embedding where there is none."""

    mode: Mode = "within-class"
    weight: float = 2.0  # of a full difference in condition, in deviations of the cost

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, get_args(Mode))

    def condition(self, cond: Condition | None) -> Tensor | None:
        """Labels [B], or embeddings [B, C + 1] of length 1; those of no length agree."""
        if cond is not None and cond.label is not None:
            return cond.label.cpu()
        found = None if cond is None or self.mode == "within-class" else _embedding(cond)
        if found is None:
            kinds = "labels" if self.mode == "within-class" else "labels or text embeddings"
            raise UserError(
                f"a conditional coupling ({self.mode}) needs {kinds}, and this batch has none: "
                "choose --coupling.kind assignment"
            )
        check_rows(found, "text embedding")
        rows = normalize(found.detach().float(), dim=1).cpu()
        return cat([rows, (rows == 0).all(1, keepdim=True).float()], dim=1)

    def groups(self, count: int, condition: Tensor | None) -> list[Tensor]:
        if self.mode == "soft" or condition is None:
            return super().groups(count, condition)
        classes = [(condition == label).nonzero().flatten() for label in condition.unique()]
        return [piece for rows in classes for piece in blocks(rows, self.block)]

    def costs(self, x: Tensor, noise: Tensor, rows: Tensor, condition: Tensor | None) -> Tensor:
        cost = super().costs(x, noise, rows, condition)
        if self.mode == "within-class" or condition is None:
            return cost
        return cost / cost.std().clamp(min=1e-12) + self.weight * apart(condition[rows]).to(cost)


def apart(condition: Tensor) -> Tensor:
    """[n, n] how different conditions are: 0 or 1 for labels, 1 - cosine for embeddings."""
    if condition.ndim == 1:
        return (condition[:, None] != condition[None]).float()
    return 1 - condition @ condition.T


def _embedding(cond: Condition) -> Tensor | None:
    """One vector per prompt: the pooled one, or the mean over its real tokens."""
    if cond.pooled is not None or cond.text is None:
        return cond.pooled
    if cond.text_mask is None:
        return cond.text.float().mean(1)
    real = cond.text_mask.to(cond.text.device).bool()[..., None]
    text = cond.text.float().masked_fill(~real, 0.0)
    return text.sum(1) / real.sum(1).clamp(min=1)
