"""How near a student comes to its teacher's long walks, beside solvers with as few evaluations.

Students of walks must end where these end, from the same noise: `distance`. One-step generators
draw from the same distribution, from noise of their own: `energy`.
"""

import json
from typing import Any

import torch
from torch import Tensor

from stillhouse.distill.sfd import NAME
from stillhouse.distill.walks import FewSteps
from stillhouse.engine.loop import Engine, Task
from stillhouse.files import write_whole
from stillhouse.pipelines.few_steps import read_walk
from stillhouse.process import starting_noise
from stillhouse.recipes import pictures
from stillhouse.recipes.distill.cards import PLOT, write_card
from stillhouse.recipes.distill.generators import Matched
from stillhouse.recipes.distill.settings import Comparison, DistillRun
from stillhouse.recipes.distill.students import (
    Source,
    as_student,
    guidance_in,
    load_source,
    teacher_folder,
)
from stillhouse.recipes.distill.watching import draw_all
from stillhouse.recipes.parts import (
    Ipndm,
    NoGuidance,
    SearchedGrid,
    solver,
)
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.subjects import Subject, known_labels
from stillhouse.solvers import search_grid

RECORD = "comparison.json"
GITS = "gits"
WALKED_BY = Ipndm(lower_order_final=False)  # as published: of the same order to the end


def compare(config: DistillRun, source: Source, engine: Engine, walk: FewSteps) -> dict[str, Any]:
    """What the run has cost and, if it was asked for, how near its student comes; and the card."""
    cost = evaluations_per_image(config, engine.task)
    record = {
        "preview_steps": source.long_walk(config.preview.steps),
        "images": engine.images,
        "start": walk.sigma_max,
        "evaluations_per_image": cost,
        "evaluations": cost * engine.images,
        "labels": some_labels(config, source.subject),
    }
    if config.comparison.count > generator(config):  # distributions are compared by pairs
        record |= measured(config, source, engine, walk)
    if engine.world.rank == 0:
        write_whole(config.out / RECORD, json.dumps(record, indent=2).encode())
        if "distance" in record and pictures.can_plot():
            plot(record, config)
        write_card(config, record)
    return record


def measured(config: DistillRun, source: Source, engine: Engine, walk: FewSteps) -> dict[str, Any]:
    """Distances of decoded images in [-1, 1], by kind and evaluations."""
    wanted = config.comparison
    counts, long = walk.evaluations, first_teacher(config, source, walk, engine)
    subject, steps = long.subject, long.long_walk(wanted.steps)
    base = SampleRun(seed=wanted.seed, batch=wanted.batch)

    def drawn(whose: Subject, grid: Tensor | None = None, **how: Any) -> Tensor:
        return draw_all(whose, base.model_copy(update=how), wanted.count, engine, grid)

    measure, apart = ("energy", energy) if generator(config) else ("distance", distance)
    # A teacher that is a student itself knows its own walks alone.
    walked: dict[str, Any] = {"solver": wanted.walk} if subject.walk is None else {}
    goal = drawn(subject, steps=steps, **walked)
    rows: dict[str, dict[int, float]] = {}
    with engine.networks[NAME].evaluating(config.shown) as network:
        student = as_student(source.subject, network, walk)
        found = {n: drawn(student, steps=n) for n in counts}
    rows["student"] = {n: apart(found[n], goal) for n in counts}
    spreads = {"teacher": spread(goal), "student": {n: spread(found[n]) for n in counts}}
    for name in wanted.solvers if subject.walk is None else ():
        search = searched(wanted, subject, counts, engine) if name == GITS else {}
        how = WALKED_BY if name == GITS else solver(name)
        found = {n: drawn(subject, search.get(n), solver=how, steps=n) for n in counts}
        rows[name] = {n: apart(found[n], goal) for n in counts}
    return {
        measure: rows,
        "spread": spreads,
        "count": wanted.count,
        "teacher_steps": steps,
        "teacher_solver": None if subject.walk else wanted.walk.model_dump(mode="json"),
        "first_teacher": bool(wanted.against),
    }


def first_teacher(config: DistillRun, source: Source, walk: FewSteps, engine: Engine) -> Source:
    """Whose long walks count: guided as those were that the student knows."""
    name = config.comparison.against
    if not name:
        return source
    guidance = guidance_in(walk) if read_walk(teacher_folder(name)) is None else NoGuidance()
    other = config.model_copy(update={"model": name, "guidance": guidance})
    return load_source(other, engine.world, source)


def searched(
    wanted: Comparison, subject: Subject, counts: tuple[int, ...], engine: Engine
) -> dict[int, Tensor]:
    """GITS: the best levels for each number of steps, by one fine walk of a few samples."""
    device, indices = engine.world.device, range(wanted.searched)
    most = max(wanted.fine, max(counts) + 1)  # or there are too few to choose from
    fine = SearchedGrid(fine=most).build(subject.scaling, most - 1)
    noise = starting_noise(subject.shape, indices, seed=wanted.seed + 1).to(device)
    cond = subject.condition(indices, device)
    first = subject.scaling.start(noise, fine[0])
    found = search_grid(subject.denoiser, first, fine, [n + 1 for n in counts], cond)
    return {n: found[n + 1] for n in counts}


def evaluations_per_image(config: DistillRun, task: Task) -> float:
    """Of networks, a backward pass counted as two; walks that are kept are made once."""
    walks = getattr(config.method, "walks", 0) or config.goal
    each = task.evaluations_per_image  # type: ignore[attr-defined]
    return each.total(config.guidance.calls, min(1.0, walks / config.goal))


def some_labels(config: DistillRun, subject: Subject) -> list[int]:
    """The classes that the student was told, where the teacher knows others as well."""
    assert subject.bare is not None
    network: Any = subject.bare.network
    null = network.null_label if config.null_label is None else config.null_label
    told = set(subject.labels)
    return sorted(told) if set(known_labels(network.classes or 0, null)) - told else []


def distance(found: Tensor, goal: Tensor) -> float:
    return float((found.double() - goal.double()).square().mean().sqrt())


def energy(found: Tensor, goal: Tensor) -> float:
    """How far apart two distributions are, from 0 to 1: (2 E|x - y| - E|x - x'| - E|y - y'|)/(2
    E|x - y|), the energy coefficient (Szekely & Rizzo 2013).

    Without bias, so it may fall below 0: of pairs of different numbers alone, as samples of one
    number have their noise in common; classes are then dealt alike to all three.
    """
    x, y = found.double().flatten(1), goal.double().flatten(1)
    if not len(x):  # the first process alone has samples
        return float("nan")
    other = ~torch.eye(len(x), dtype=torch.bool)
    across, own, theirs = (
        float(torch.cdist(a, b)[other].mean()) for a, b in ((x, y), (x, x), (y, y))
    )
    return (2 * across - own - theirs) / max(2 * across, 1e-30)


def generator(config: DistillRun) -> bool:
    return isinstance(config.method, Matched)


def spread(found: Tensor) -> float:
    """The standard deviation of an element over samples, root mean square of all elements."""
    return float(found.double().var(0, correction=0).mean().sqrt())


def plot(record: dict[str, Any], config: DistillRun) -> None:
    """The same as curves."""
    plt = pictures.pyplot()
    figure, axis = plt.subplots(figsize=(4.6, 3.6), layout="constrained")
    for name, values in record["distance"].items():
        own = name == "student"
        label = "student" if own else f"teacher, {name}"
        axis.plot(list(values), list(values.values()), marker="o", lw=2 if own else 1, label=label)
    axis.set(
        xlabel="evaluations",
        ylabel=f"distance to {record['teacher_steps']} steps of the teacher",
        xticks=list(record["distance"]["student"]),
        ylim=(0, None),
    )
    figure.legend(loc="outside upper center", ncols=2, fontsize=8, frameon=False)  # hides no dot
    figure.savefig(config.out / PLOT, dpi=110)
    plt.close(figure)
