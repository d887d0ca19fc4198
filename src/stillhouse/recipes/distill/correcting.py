"""`stillhouse sample STUDENT --correct 300`: a generator's samples before and after a correction.

The chain of EM distillation at one noise level, as long as one likes: noise and latent walk to
where the teacher would have them, and the generator draws again. What changes is what it has yet to
learn.

    OUT/correction.png   rows before, each above the same after        OUT/correction.json
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from stillhouse.distill.langevin import ChainNoise, Langevin, corrected, root_mean_square
from stillhouse.distill.matching import generated
from stillhouse.engine.world import world
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.process import Denoiser, keyed_normal, starting_noise
from stillhouse.process.levels import LogUniform
from stillhouse.recipes import pictures
from stillhouse.recipes.claims import make_folder
from stillhouse.recipes.distill.generators import Matched
from stillhouse.recipes.distill.methods import Method
from stillhouse.recipes.distill.scores import FOLDER, load_score
from stillhouse.recipes.distill.students import guidance_in, teacher_digest, teacher_folder
from stillhouse.recipes.parts import NoGuidance
from stillhouse.recipes.sampling import SampleRun, check_student, wish_of
from stillhouse.recipes.subjects import Subject, load_subject
from stillhouse.recipes.train.folders import read_record

COLUMNS = 8


class Moved(NamedTuple):
    """Images before and after, and how their chains went."""

    before: Tensor
    after: Tensor
    moved: Tensor  # [B] from one to the other, of states: latents where the model draws these
    gaps: Tensor  # [B, K]
    stiffness: Tensor  # [B]


def run(config: SampleRun) -> Path:
    """Draws the picture and returns where it is."""
    check_wish(config)
    with world(config.device) as here:
        if here.size > 1:
            raise UserError("samples are corrected by one process: leave torchrun out")
        plain = replace(wish_of(config, here.device), guidance=NoGuidance(), dtype=torch.float32)
        student = load_subject(config.model, plain)
        walk = student.walk
        if walk is None or walk.grid != "single":
            raise UserError(
                f"{config.model} is no one-step generator (stillhouse distill --method emd), and "
                "only those have samples to correct"
            )
        check_student(config, walk)
        record = read_record(home(config))
        if not record or not (home(config) / FOLDER).is_dir():
            raise UserError(
                f"{config.model} is corrected with its teacher and its fake score, which are known "
                "to the run that it came from: name RUN/model. Of a whole pipeline a run keeps its "
                "score only if it was distilled with --method.score lora"
            )
        guidance = guidance_in(walk)
        taught = teacher_folder(record["config"]["model"])
        if record.get("teacher") not in (None, teacher_digest(taught)):
            raise UserError(
                f"{config.model} was distilled from another teacher than is in {taught} now: bring "
                "that one back to correct its samples"
            )
        null = record["config"]["null_label"]  # of the guidance that it was taught with
        taught_as = replace(plain, guidance=guidance, null_label=null)
        subject = load_subject(str(taught), taught_as)
        method: Any = TypeAdapter(Method).validate_python(record["config"]["method"])
        assert isinstance(method, Matched)  # as its walk is a single step
        check_learnt(config.correct.level, method.levels(subject.scaling))
        teacher, score = load_score(home(config) / FOLDER, subject, guidance)
        starts = range(0, config.count, config.batch)
        batches = [list(range(i, min(i + config.batch, config.count))) for i in starts]
        parts = [walked(config, student, teacher, score, some, here.device) for some in batches]
    return draw(config, student, Moved(*map(torch.cat, zip(*parts, strict=True))))


def check_wish(config: SampleRun) -> None:
    """What a picture of a correction would ignore."""
    if config.steps not in (None, 1):
        raise UserError(
            f"a generator takes one step, and --correct {config.correct.steps} is the number of "
            "Langevin steps: leave --steps out"
        )
    if config.tensors or config.dtype != "float32":
        raise UserError(
            "--correct makes pictures alone, in float32: leave --tensors and --dtype out"
        )
    if not isinstance(config.guidance, NoGuidance):
        raise UserError("samples are corrected towards the teacher as it was: leave --guidance out")


def check_learnt(level: float, learnt: LogUniform) -> None:
    """Elsewhere the fake score is still as its teacher was, and knows nothing of the generator."""
    low, high = learnt.sigma_min, learnt.sigma_max
    if not low <= level <= high:
        raise UserError(
            f"--correct.level {level:g} is no level at which the fake score has learnt: give one "
            f"from {low:g} to {high:g}"
        )


def home(config: SampleRun) -> Path:
    """Of the run that the generator came from."""
    folder = Path(config.model)
    return folder.parent if folder.name == "model" else folder


def walked(
    config: SampleRun,
    student: Subject,
    teacher: Denoiser,
    score: Denoiser,
    indices: list[int],
    device: torch.device,
) -> Moved:
    """The samples with these numbers, which do not depend on those beside them."""
    assert student.walk is not None
    how, start = config.correct, student.walk.sigma_max
    z = starting_noise(student.shape, indices, seed=config.seed).float().to(device)
    eps = keyed_normal(student.shape, indices, seed=config.seed, purpose="correct").to(z)
    cond, sigma = student.condition(indices, device, config.seed), z.new_full((len(z),), how.level)

    def generate(z: Tensor) -> Tensor:
        return generated(student.denoiser, z, start, cond)

    def gap(x: Tensor, sigma: Tensor) -> Tensor:
        with torch.no_grad():
            return teacher(x, sigma, cond) - score(x, sigma, cond)

    chain = Langevin(how.steps, how.noise_step, how.latent_step)
    found = corrected(generate, gap, z, eps, sigma, chain, ChainNoise(indices, config.seed))
    with torch.no_grad():
        states = generate(z), generate(found.z)
    moved = root_mean_square(states[1] - states[0])
    before, after = (student.decode(state).cpu() for state in states)
    return Moved(before, after, moved, found.gaps, found.stiffness)


def draw(config: SampleRun, student: Subject, found: Moved) -> Path:
    before, after, moved, gaps, _ = found
    make_folder(config.out)
    target = config.out / "correction.png"
    facts = {
        "steps": config.correct.steps,
        "level": config.correct.level,
        "gap": {"first": float(gaps[:, 0].mean()), "last": float(gaps[:, -1].mean())},
        "moved": float(moved.mean()),
        "stiffness": float(found.stiffness.max()),
    }
    write_whole(config.out / "correction.json", (json.dumps(facts, indent=2) + "\n").encode())
    if student.toy is not None:
        backdrop = student.toy.sample(2000, torch.Generator().manual_seed(0))
        pictures.save_points(before, backdrop, config.out / "before.png")
        pictures.save_points(after, backdrop, target)
        return target
    columns = min(COLUMNS, config.count)
    blank = before.new_ones(before[:1].shape)  # white
    tiles = []
    for first in range(0, config.count, columns):
        for images in (before, after):
            row = images[first : first + columns]
            tiles += [*row, *blank.expand(columns - len(row), *blank.shape[1:])]
    pictures.save_tiles([pictures.to_pil(tile) for tile in tiles], target, columns=columns)
    return target
