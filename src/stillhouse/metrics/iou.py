"""Mean intersection over union of classes, pooled over all pixels of all images.

    IoU_c = pixels that both call c / pixels that either calls c

A class that neither names says nothing and is left out of the mean; one that is only guessed has 0.
Pixels whose true label is `ignore` are not looked at.
"""

import torch
from torch import Tensor


class Confusion:
    """Counts of (true class, guessed class); those of two processes add up."""

    def __init__(self, classes: int, *, ignore: int = 255) -> None:
        self.classes, self.ignore = classes, ignore
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def update(self, guessed: Tensor, true: Tensor) -> None:
        """Labels of the same shape, any shape."""
        if guessed.shape != true.shape:
            raise ValueError(f"labels of shape {[*guessed.shape]} and {[*true.shape]} cannot match")
        seen = true != self.ignore
        rows, columns = true[seen].long(), guessed[seen].long()
        for labels in (rows, columns):
            if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
                raise ValueError(f"labels lie between 0 and {self.classes - 1}")
        pairs = torch.bincount(rows * self.classes + columns, minlength=self.classes**2)
        self.counts += pairs.view(self.classes, self.classes).cpu()

    def __add__(self, other: "Confusion") -> "Confusion":
        both = Confusion(self.classes, ignore=self.ignore)
        both.counts = self.counts + other.counts
        return both

    def iou(self) -> Tensor:
        """[classes] in float64; nan for a class that neither side names."""
        both = self.counts.diagonal().double()
        either = self.counts.sum(0) + self.counts.sum(1) - both
        return torch.where(either > 0, both / either, torch.nan)

    def mean_iou(self) -> float:
        return float(self.iou().nanmean())

    def accuracy(self) -> float:
        """Share of pixels that are right."""
        return float(self.counts.diagonal().sum() / self.counts.sum())
