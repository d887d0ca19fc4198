"""`stillhouse distill`: a checkpoint into a student of few evaluations, without data.

    RUN/run.json       the resolved config        RUN/samples/      the teacher above its student
    RUN/log.jsonl      every number               RUN/model/        the student, with its card
    RUN/checkpoints/   to resume from             RUN/comparison.json, .png

Running the same command again resumes; any number of processes, under torchrun.
"""

from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch

from stillhouse.config import spell_settings
from stillhouse.distill.matching import SCORE
from stillhouse.distill.progressive import halvings
from stillhouse.distill.trajectories import Starts
from stillhouse.distill.walks import FewSteps
from stillhouse.engine.loop import Engine, Hook, Task
from stillhouse.engine.updates import NetworkConfig
from stillhouse.engine.world import World, world
from stillhouse.errors import UserError
from stillhouse.process import NetworkDenoiser
from stillhouse.recipes.distill.comparing import compare, evaluations_per_image
from stillhouse.recipes.distill.generators import Matched
from stillhouse.recipes.distill.lessons import Lesson, Wanted
from stillhouse.recipes.distill.methods import WALKS, ProgressiveConfig, Sfd
from stillhouse.recipes.distill.scores import FOLDER, ScoreExporter, exported, with_score
from stillhouse.recipes.distill.settings import DistillRun, read_evaluations
from stillhouse.recipes.distill.students import (
    Source,
    load_source,
    load_student,
    teacher_digest,
    teacher_folder,
)
from stillhouse.recipes.distill.told import Conditions
from stillhouse.recipes.distill.watching import StudentDrawer, StudentExporter
from stillhouse.recipes.parts import NoGuidance
from stillhouse.recipes.train.folders import (
    check_origins,
    check_settings,
    handed_on,
    read_record,
    write_record,
)
from stillhouse.recipes.train.sessions import (
    build_trackers,
    carried_out,
    newest,
    open_store,
    opening,
    stopping,
    store_of,
)


def run(config: DistillRun) -> DistillRun:
    """Distils to the end, from the last checkpoint where there is one; returns the last stage."""
    stages = stages_of(config)
    for stage in stages:
        carried_out(stage, distil)
    return stages[-1]


def stages_of(config: DistillRun) -> list[DistillRun]:
    """A run per stage: progressive distillation has several, in folders of their own."""
    if not isinstance(config.method, ProgressiveConfig):
        return [paced(config)]
    last, *others = read_evaluations(config.evaluations)
    if others:
        raise UserError("progressive distillation ends with one number of evaluations: name it")
    counts, found = halvings(config.method.first, last), list[DistillRun]()
    share = max(config.batch, config.images // len(counts) // config.batch * config.batch)
    for steps in counts:
        changes: dict[str, Any] = {
            "evaluations": str(steps),
            "images": share,
            "method": config.method.model_copy(update={"first": 2 * steps}),
            "out": config.out / f"{steps}-steps",
            "checkpoints": config.checkpoints and f"{config.checkpoints}/{steps}-steps",
        }
        if found:  # the teacher's guidance is in its student
            against = config.comparison.against or config.model
            changes |= {"model": str(found[-1].out), "guidance": NoGuidance()}
            changes["comparison"] = config.comparison.model_copy(update={"against": against})
        found.append(paced(config.model_copy(update=changes)))
    return found


def paced(config: DistillRun) -> DistillRun:
    """A short run too is told of, drawn and kept on its way, where nothing else was asked for."""
    log = config.log_every or min(1_280, -(-config.images // 50))
    often = min(12_800, -(-config.images // 8))
    changes: dict[str, Any] = {
        "log_every": log,
        "checkpoint_every": config.checkpoint_every or often,
        "preview": config.preview.model_copy(update={"every": config.preview.every or often}),
    }
    return config.model_copy(update=changes)


def distil(config: DistillRun, here: World, caught: list[int]) -> int:
    """The run of one process among all."""
    numbers = read_evaluations(config.evaluations)  # or there is no run, and no folder of it
    with ExitStack() as stack:
        store, found = open_store(config, here, stack)
        check_walks(config)
        source, walk, student, task = networks(config, numbers, here)
        starts = build_starts(config, source)
        hooks = build_hooks(config, source, student, walk)
        trackers = build_trackers(config, here, stack)
        engine = build_engine(config, task, here, store=store, trackers=trackers, hooks=hooks)
        if found is not None:
            engine.resume(found)
        parameters = sum(p.numel() for p in student.parameters())
        origins = origins_of(source)
        here.first(lambda: write_record(config, parameters, origins))  # when nothing is refused
        feed = starts.feed(engine.images, config.batch, here)
        looked = [] if found else [hook for _, hook in hooks if isinstance(hook, StudentDrawer)]
        notes = [tell_cost(config, task), *([] if found is None else found.skipped)]
        with stopping(engine, caught):
            engine.run(feed, opening(here, notes), looked)
        if engine.stopped:
            for _, hook in hooks:
                if not isinstance(hook, StudentDrawer):
                    hook(engine)
        else:
            compare(config, source, engine, walk)
    return engine.images


def networks(
    config: DistillRun, numbers: tuple[int, ...], here: World
) -> tuple[Source, FewSteps, NetworkDenoiser, Task]:
    """The teacher, the walks to learn, the student, and the task that teaches it."""
    source = load_source(config, here)
    if config.comparison.against:  # loaded at the end, but missed now
        teacher_folder(config.comparison.against)
    walk = plan_walk(config, source, numbers)
    torch.manual_seed(config.seed)  # what is new in it is the same on every process
    student = load_student(config, source, walk)
    source = with_score(config, source, here)
    return source, walk, student, config.method.task(lesson(config, source, student, walk, here))


def describe(config: DistillRun) -> str:
    """What `stillhouse distill` would do; refused is what it would refuse, nothing is written."""
    first, *later = stages_of(config)
    with world(config.device) as here:
        if before := read_record(first.out):
            check_settings(first, before["config"], str(first.out))
        with closing(store_of(first)) as store:
            newest(first, store)
        check_walks(first)
        source, _, student, task = networks(first, read_evaluations(first.evaluations), here)
        check_origins(first.out, origins_of(source))
        parameters = sum(p.numel() for p in student.parameters())
        build_starts(first, source)
        build_engine(first, task, here)
    lines = [
        *spell_settings(paced(config)),
        "",
        f"a student with {parameters / 1e6:.2f}M parameters, {first.goal} images in "
        f"{first.goal // first.batch} steps of {first.batch}",
        tell_cost(first, task),
    ]
    for stage in later:
        (steps,) = read_evaluations(stage.evaluations)
        task = replace(task, steps=steps)  # type: ignore[type-var]
        lines.append(f"then {stage.goal} images in {stage.out}: {tell_cost(stage, task)}")
    return "\n".join(lines)


def build_starts(config: DistillRun, source: Source) -> Starts:
    """Where walks begin, and what is told on them."""
    conditions = Conditions(source.subject, config.seed, config.drop)
    return Starts(source.subject.shape, config.seed, conditions, distinct_walks(config))


def build_engine(config: DistillRun, task: Task, here: World, **around: Any) -> Engine:
    found = {name: network_config(config, name, here) for name in task.modules()}
    return Engine(task, config, found, here, **around)


def origins_of(source: Source) -> dict[str, str]:
    """Digests of what the student is made from."""
    return {
        "teacher": teacher_digest(source.folder),
        "prompts": digest(source.prompts),
        "labels": digest(map(str, source.subject.labels)),
    }


def tell_cost(config: DistillRun, task: Task) -> str:
    each = evaluations_per_image(config, task)
    return (
        f"{each:g} network evaluations per image, {spell_count(each * config.goal)} in all "
        "(a backward pass is two)"
    )


def spell_count(number: float) -> str:
    """Millions from one on."""
    return f"{number / 1e6:,.1f} million" if number >= 1e6 else f"{number:,.0f}"


def check_walks(config: DistillRun) -> None:
    if not read_record(config.out) and (config.out / WALKS).is_dir():
        raise UserError(
            f"{config.out / WALKS} holds walks of a run that is gone, perhaps of another "
            "teacher: remove it, or choose another --out"
        )


def distinct_walks(config: DistillRun) -> int:
    """How many walks of the teacher are made; 0: one for every image."""
    walks = getattr(config.method, "walks", 0)
    if walks % config.batch:
        raise UserError(f"--method.walks {walks} is no multiple of the batch of {config.batch}")
    dealt = isinstance(config.method, Sfd)  # whose walks are of one number of steps each
    least = config.batch * len(read_evaluations(config.evaluations)) if dealt else 0
    if 0 < walks < least:
        raise UserError(f"--method.walks {walks}: a batch for each number of steps makes {least}")
    return walks


def network_config(config: DistillRun, name: str, here: World) -> NetworkConfig:
    """A fake score learns faster than the generator, and is never averaged."""
    found, method = config.network_config(here), config.method
    if name != SCORE or not isinstance(method, Matched):
        return found
    optimiser = found.optimiser.model_copy(update={"lr": method.score_rate * found.optimiser.lr})
    return found.model_copy(update={"optimiser": optimiser, "averages": ()})


def plan_walk(config: DistillRun, source: Source, numbers: tuple[int, ...]) -> FewSteps:
    """The walks that the student is to learn."""
    bare, guidance = source.subject.bare, config.guidance
    assert bare is not None
    network: Any = bare.network
    guided = None if isinstance(guidance, NoGuidance) else guidance.model_dump(mode="json")
    if guided is None and source.subject.walk is not None:
        guided = source.subject.walk.guidance  # of an earlier stage
    told = network.told.steps
    walk = config.method.walk(Wanted(bare.scaling, numbers, guided, config.exportable, told))
    return replace(walk, drop=config.drop)


def lesson(
    config: DistillRun, source: Source, student: NetworkDenoiser, walk: FewSteps, here: World
) -> Lesson:
    earlier = source.subject.walk
    if earlier is not None and not isinstance(config.guidance, NoGuidance):
        raise UserError("the teacher is a student already: leave --guidance out")
    if isinstance(config.method, Sfd) and config.method.lpips and source.subject.codec is not None:
        raise UserError(
            "LPIPS compares images, and this model draws latents: leave --method.lpips out"
        )
    bare = source.subject.bare
    assert bare is not None
    return Lesson(
        student,
        source.subject.denoiser,
        bare.scaling,
        walk,
        earlier,
        here,
        config.seed,
        config.out,
        source.score,
    )


def build_hooks(
    config: DistillRun, source: Source, student: NetworkDenoiser, walk: FewSteps
) -> list[tuple[int, Hook]]:
    drawer = StudentDrawer(config.preview, source, walk, config.shown, config.out)
    exporter = build_exporter(config, source, student, walk)
    hooks: list[tuple[int, Hook]] = [
        (config.preview.every, drawer),
        (config.checkpoint_every, exporter),
    ]
    if exported(config, source):
        score = ScoreExporter(source, student, config.out / FOLDER)
        hooks.append((config.checkpoint_every, score))
    return hooks


def build_exporter(
    config: DistillRun, source: Source, student: NetworkDenoiser, walk: FewSteps
) -> StudentExporter:
    facts = handed_on(config, dict.fromkeys(("model", "preview", "comparison"), True))
    return StudentExporter(config, source, student, walk, facts)


def digest(told: Iterable[str]) -> str:
    """Of what is told itself: a file of the same name may say something else by now."""
    return sha256("\n".join(told).encode()).hexdigest()
