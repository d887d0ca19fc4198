"""What a student is told while it is distilled: classes and prompts in turn, without any images."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stillhouse.data import Columns, numbered_captions
from stillhouse.data.sources import class_names
from stillhouse.errors import UserError
from stillhouse.process import Condition, keyed_uniform
from stillhouse.recipes.judge.captions import read_prompts
from stillhouse.recipes.judge.galleries import find_data
from stillhouse.recipes.subjects import Subject
from stillhouse.recipes.telling import long_stride

HOST = torch.device("cpu")


def find_prompts(name: str, column: str) -> tuple[str, ...]:
    """The lines of a text file, or the captions of a data set; each once."""
    # A file that is no data set is a list; what is neither says so in `read_prompts`.
    listed = not name or Path(name).suffix == ".txt"
    if listed and column:
        raise UserError("--prompt-column is of a data set that --prompts names: leave it out")
    if not name:
        return ()
    data = None if listed else find_data(name, Columns(text=column or "text"))
    if data is None:
        found = read_prompts(name)
    else:
        loader = data.build(batch=1, seed=0, rank=0, world=1)
        found = numbered_captions(loader).texts
    prompts = tuple(dict.fromkeys(line for text in found if (line := text.strip())))
    if not prompts:
        raise UserError(f"{name} holds no prompt")
    return prompts


def find_labels(name: str, column: str, known: tuple[int, ...]) -> tuple[int, ...]:
    """The classes of a data set, as often as it has them, and in all stretches about as often.

    `known`: those of the teacher, without the one that stands for none.
    """
    data = find_data(name, Columns(image=""))
    if data is None:
        raise UserError(f"{name} is no data set: give one whose classes --labels-of can deal")
    images = data.source.open_indexed(data.columns)
    if images.faults:
        raise UserError(f"{name}: {images.faults[0]}. Repair or remove it")
    column = column or data.columns.label or "label"
    found, among = list[int](), set(known)
    for label in images.column(column):
        if not isinstance(label, int) or label not in among:
            raise UserError(
                f"the column {column!r} of {name} holds {label!r}, which is no class of the "
                f"teacher: its {len(known)} go from {min(known)} to {max(known)}"
            )
        found.append(int(label))
    named = class_names(images.data.features, Columns(label=column))
    if named and len(named) != len(known):
        raise UserError(
            f"{name} has {len(named)} classes and the teacher {len(known)}: they may not "
            "be the same. Give the teacher's own data, or choose by --labels"
        )
    found.sort()
    stride = long_stride(len(found))
    return tuple(found[i * stride % len(found)] for i in range(len(found)))


def unknown(cond: Condition, null: Condition) -> list[str]:
    """What is told, and has nothing that stands for its absence."""
    told = ("label", "text")
    return [
        name for name in told if getattr(cond, name) is not None and getattr(null, name) is None
    ]


@dataclass(frozen=True)
class Conditions:
    """What `subject` tells the samples with these numbers, but for a share that hears nothing."""

    subject: Subject
    seed: int
    drop: float = 0.0  # so that guidance can still be applied to the student

    def __post_init__(self) -> None:
        cond, null = self.subject.condition([0], HOST, self.seed), self.subject.null
        if self.drop and (cond is None or null is None or unknown(cond, null)):
            raise UserError(
                "--drop leaves out what a model is told, and it is not known what stands for "
                "nothing: give --null-label, or leave --drop out"
            )

    def __call__(self, key: Tensor) -> Condition | None:
        cond, null = self.subject.condition(key.tolist(), HOST, self.seed), self.subject.null
        if cond is None or null is None or not self.drop:
            return cond
        drawn = keyed_uniform(key, seed=self.seed, purpose="distill/drop")
        return cond.drop(drawn < self.drop, null.to(HOST))
