"""`stillhouse sample`: images from a checkpoint (or a 2-D toy) with a record to repeat them.

Batches are cut from the global list of samples and dealt to processes in turn, and every sample's
randomness is keyed by its index: one process or eight, first run or resumed, image i is the same.
Running the same command again draws only the batches that are missing.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
)
from torch import Tensor

from stillhouse import __version__
from stillhouse.distill.walks import FewSteps
from stillhouse.engine.world import World, world
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.process import KeyedNoise, starting_noise
from stillhouse.recipes import pictures
from stillhouse.recipes.claims import differences, listed, make_folder
from stillhouse.recipes.parts import (
    ClassifierFree,
    Config,
    Dpmpp3M,
    Euler,
    Grid,
    Guidance,
    NativeGrid,
    NoGuidance,
    Renoise,
    SearchedGrid,
    Solver,
    TwoTermGuidance,
)
from stillhouse.recipes.progress import progress_bar
from stillhouse.recipes.subjects import Subject, Wish, load_subject
from stillhouse.solvers import Counted, Progress, search_grid

RECORD = "record.json"
TAUGHT: dict[str, tuple[Any, ...]] = {  # what a student's runs are recorded with
    "solver": (Euler(afs=True), Euler(), Renoise()),
    "grid": (),
}
STEPS = 10  # of a walk, unless something else is asked for


class Correction(Config):
    """Langevin steps on the samples of a one-step generator (`recipes/distill/correcting.py`)."""

    steps: NonNegativeInt = 0
    """--correct N is short for --correct.steps N; pictures before and after are all it makes."""
    level: PositiveFloat = 1.0
    """The noise level at which teacher and fake score are compared."""
    noise_step: Annotated[float, Field(gt=0, lt=1)] = 0.16
    """Size of the steps on the noise."""
    latent_step: Annotated[float, Field(ge=0, lt=1)] = 1e-4
    """Size of the steps on the latent."""


class SampleRun(Config):
    """A sampling run."""

    model: str = ""
    """A diffusers directory, a hub id, a run's folder, or toy:NAME for a 2-D target."""
    solver: SerializeAsAny[Solver] = Dpmpp3M()  # a student may bring one that nobody can ask for
    """--solver NAME is short for --solver.kind NAME; so are --grid and --guidance."""
    grid: Grid = NativeGrid()
    guidance: Guidance = NoGuidance()
    steps: PositiveInt | None = None
    """Steps of the walk, mostly of one evaluation each; of a few-step student, its evaluations.
    None: 10, or as many as the student can take."""
    count: PositiveInt = 64
    """How many samples."""
    seed: int = 0
    """Sample i follows from the seed and i alone."""
    batch: PositiveInt = 16
    """Samples per network call."""
    labels: tuple[int, ...] = ()
    """Classes to draw, in turn (--labels 1 2 3); all of them if not given."""
    null_label: int | None = None
    """The label that stands for no class, for classifier-free guidance."""
    prompt: tuple[str, ...] = ()
    """What to draw, in turn (--prompt 'a red apple' 'a blue car'), where the model takes text."""
    control: tuple[str, ...] = ()
    """How it is framed, as name=value (--control style=noto height=512), where it takes that."""
    prompt_encoder: str = ""
    """Folder or hub id of the model's text encoder, if it is not where the model says."""
    correct: Correction = Correction()
    out: Path = Path("samples")
    """Where images, grid.png and record.json go."""
    tensors: bool = False
    """Also keep the float32 samples, as safetensors per batch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the network; the state is always float32."""
    device: Annotated[str, Field(min_length=1)] = "auto"
    """auto: a GPU where there is one."""

    @property
    def step_count(self) -> int:
        """`steps`, or the usual number of them."""
        return STEPS if self.steps is None else self.steps


def run(config: SampleRun) -> dict[str, Any]:
    """Draws what is missing and returns the record that it wrote."""
    if config.correct != Correction():  # `recipes/distill/correcting.py` runs those that have steps
        raise UserError("samples are corrected by Langevin steps: say how many, with --correct 300")
    with world(config.device) as here:
        subject = load_subject(config.model, wish_of(config, here.device))
        config = walked(config, subject)
        here.first(lambda: claim_folder(config, subject, here.device))
        # One grid for all: a search could tip over by a rounding on another process.
        record = read_record(config.out)
        grid = torch.tensor(record["sigmas"], dtype=torch.float64)
        started, mine = time.perf_counter(), draw_missing(config, subject, grid, here)
        drawn = int(here.total(mine))
        seconds = time.perf_counter() - started
        if here.rank == 0:
            finish(config, subject, record, drawn, seconds)
    return {**record, "drawn_now": drawn}


def wish_of(config: SampleRun, device: torch.device) -> Wish:
    """What a model is asked for."""
    return Wish(
        config.guidance,
        config.labels,
        config.null_label,
        getattr(torch, config.dtype),
        device,
        config.prompt,
        config.control,
        config.prompt_encoder,
    )


# ---------------------------------------------------------------- the walk


def walked(config: SampleRun, subject: Subject) -> SampleRun:
    """The run with all that its subject decides: a student walks as it was taught to."""
    walk = subject.walk
    if walk is None:
        return config.model_copy(update={"steps": config.step_count})
    check_student(config, walk)
    steps = config.steps or max(walk.evaluations)
    walk.timestamps(steps)  # or it is refused
    taught = Euler(afs=walk.afs) if walk.step == "euler" else Renoise()
    return config.model_copy(update={"steps": steps, "solver": taught, "grid": NativeGrid()})


def check_student(config: SampleRun, walk: FewSteps) -> None:
    """What a student has learnt is not to be asked for again, or otherwise."""
    if walk.guidance is not None and not isinstance(config.guidance, NoGuidance):
        raise UserError(f"{config.model} has learnt its teacher's guidance: leave --guidance out")
    if walk.drop == 0 and isinstance(config.guidance, ClassifierFree | TwoTermGuidance):
        raise UserError(
            f"{config.model} has always been told what to draw, so it cannot be guided: leave "
            "--guidance out, or distil it with --drop 0.1"
        )
    usual = {name: SampleRun.model_fields[name].default for name in ("solver", "grid")}
    for name, value in usual.items():
        if getattr(config, name) not in (value, *TAUGHT[name]):
            raise UserError(f"{config.model} walks as it was taught to: leave --{name} out")


def build_grid(config: SampleRun, subject: Subject, device: torch.device) -> Tensor:
    """The noise levels of the run; a searched grid is found here, the same on every process."""
    if subject.walk is not None:
        return subject.walk.levels(config.step_count, subject.scaling)
    try:
        if isinstance(config.grid, SearchedGrid):
            return _search(config, config.grid, subject, device)
        return config.grid.build(subject.scaling, config.step_count)
    except ValueError as error:
        raise UserError(
            f"there is no such grid: {error}; choose other --steps or another grid"
        ) from error


def _search(
    config: SampleRun, grid: SearchedGrid, subject: Subject, device: torch.device
) -> Tensor:
    fine = grid.build(subject.scaling, grid.fine - 1)
    count = config.step_count + 1
    if count > len(fine):
        raise UserError(f"{config.step_count} steps cannot be chosen from --grid.fine {grid.fine}")
    print(f"searching a grid: {2 * (len(fine) - 1)} evaluations of {grid.samples} samples ...")
    noise = starting_noise(subject.shape, range(grid.samples), seed=config.seed + 1).to(device)
    found = search_grid(
        subject.denoiser,
        subject.scaling.start(noise, fine[0]),
        fine,
        [count],
        subject.condition(range(grid.samples), device),
        gamma=grid.gamma,
        batch=config.batch,
    )
    return found[count]


# ---------------------------------------------------------------- drawing


def draw_missing(config: SampleRun, subject: Subject, grid: Tensor, here: World) -> int:
    """Draws this process's share of the batches that are not there yet; returns their samples."""
    todo = list(missing_batches(config, subject, here))
    total = sum(map(len, todo))
    label = "drawing" if here.size == 1 else f"drawing (process {here.rank} of {here.size})"
    with progress_bar(label, total, "images", shown=here.rank == 0) as advance:
        for batch in todo:
            share = len(batch) / (len(grid) - 1)
            states = draw_batch(
                config, subject, grid, batch, here.device, lambda _, share=share: advance(share)
            )
            check_finite(states, batch)
            try:
                save_batch(config, subject, batch, states)
            except OSError as error:
                raise UserError(
                    f"{config.out} cannot be written to ({error}). Make room and run the same "
                    "command again: it goes on where it stopped."
                ) from error
    return total


def missing_batches(config: SampleRun, subject: Subject, here: World) -> Iterator[list[int]]:
    """Whole batches, so that a resumed batch has the shape, and the bits, of the first try."""
    for number, first in enumerate(range(0, config.count, config.batch)):
        batch = list(range(first, min(first + config.batch, config.count)))
        mine = number % here.size == here.rank
        if mine and not all(_is_whole(f, len(batch)) for f in batch_files(config, subject, batch)):
            yield batch


def _is_whole(file: Path, rows: int) -> bool:
    """Files appear whole; a batch of tensors may still be from when the run was shorter."""
    if file.suffix != ".safetensors" or not file.is_file():
        return file.is_file()
    from safetensors import safe_open

    with safe_open(file, "pt") as stored:
        return stored.get_slice("samples").get_shape()[0] == rows


def batch_files(config: SampleRun, subject: Subject, batch: list[int]) -> list[Path]:
    """The files that a finished batch leaves."""
    tensors = [config.out / "tensors" / f"{batch[0]:06d}.safetensors"]
    if subject.toy is not None:
        return tensors
    images = [image_file(config, index) for index in batch]
    return images + tensors if config.tensors else images


def image_file(config: SampleRun, index: int) -> Path:
    return config.out / "images" / f"{index:06d}.png"


def draw_batch(
    config: SampleRun,
    subject: Subject,
    grid: Tensor,
    indices: list[int],
    device: torch.device,
    callback: Callable[[Progress], None] | None = None,
) -> Tensor:
    """The samples with these indices, [B, *shape], before any decoding."""
    noise = starting_noise(subject.shape, indices, seed=config.seed).to(device)
    cond = subject.condition(indices, device, config.seed)
    first = subject.scaling.start(noise, grid[0])
    if subject.walk is not None:
        first = subject.walk.grids(subject.scaling).start(noise, float(grid[0]))
        cond = subject.walk.condition(cond, config.step_count, noise)
    return config.solver.build()(
        subject.denoiser,
        first,
        grid,
        cond,
        generator=KeyedNoise(indices, seed=config.seed),
        callback=callback,
    )


def check_finite(states: Tensor, indices: Sequence[int], how: str = "") -> None:
    """Refuses samples that are no images; `how` they were drawn, where several ways are tried."""
    if not bool(torch.isfinite(states).all()):
        raise UserError(
            f"samples {indices[0]} to {indices[-1]} are not finite{how and f' ({how})'}. Are the "
            "weights whole? Try --dtype float32, more steps, or less guidance."
        )


def save_batch(config: SampleRun, subject: Subject, batch: list[int], states: Tensor) -> None:
    """Writes images, and the tensors where asked for; each file appears whole."""
    if subject.toy is None:
        for index, image in zip(batch, subject.decode(states), strict=True):
            pictures.save_png(image, image_file(config, index))
    if config.tensors or subject.toy is not None:
        from safetensors.torch import save

        target = config.out / "tensors" / f"{batch[0]:06d}.safetensors"
        write_whole(target, save({"samples": states.contiguous().cpu()}))


# ---------------------------------------------------------------- the record


def start_record(config: SampleRun, subject: Subject) -> dict[str, Any]:
    """Everything that decides what the samples are, but for the grid."""
    return {
        "run": config.model_dump(mode="json", exclude={"out", "device"}),
        "files": subject.fingerprints(),
        # numpy draws the noise, and may change its stream with a version.
        "versions": {name: version(name) for name in ("torch", "numpy", "diffusers")}
        | {"stillhouse": __version__},
    }


def read_record(out: Path) -> dict[str, Any]:
    """The record of an output folder."""
    try:
        return dict(json.loads((out / RECORD).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{out / RECORD} cannot be read ({error}). Remove it to start over."
        ) from error


def write_record(out: Path, record: dict[str, Any]) -> None:
    """The record, so that a resumed run finds it."""
    write_whole(out / RECORD, json.dumps(record, indent=2).encode())


def claim_folder(config: SampleRun, subject: Subject, device: torch.device) -> None:
    """Starts the output folder, or makes sure that it belongs to this very run."""
    out, record = config.out, start_record(config, subject)
    for folder in (out, out / "images", out / "tensors"):
        make_folder(folder)
    drawn = any((out / "images").iterdir()) or any((out / "tensors").iterdir())
    if not drawn:  # nothing here yet that a mistake of an earlier try could spoil
        record["sigmas"] = build_grid(config, subject, device).tolist()
        write_record(out, record)
        return
    if not (out / RECORD).is_file():
        raise UserError(f"{out} holds images but no {RECORD}: choose another --out")
    old = read_record(out)
    changed = differences(old.get("run", {}), record["run"], _free(config, subject))
    changed += differences(old.get("files", {}), record["files"])
    if changed:
        raise UserError(
            f"{out} holds samples of another run ({listed(changed)}). Choose another --out, or "
            "remove it."
        )


def _free(config: SampleRun, subject: Subject) -> set[str]:
    """What may change between tries. A checkpoint is known by its files, not by how it is spelled;
    the batch may change (to save memory) where no batches are stored."""
    if subject.toy is not None:
        return {"count"}
    return {"count", "model", "prompt_encoder"} | (set() if config.tensors else {"batch"})


def finish(
    config: SampleRun, subject: Subject, record: dict[str, Any], drawn: int, seconds: float
) -> None:
    """The picture, and the record with what was measured."""
    if subject.toy is None:
        shown = [image_file(config, i) for i in range(min(config.count, 64))]
        pictures.image_grid(shown, config.out / "grid.png")
    else:
        draw_trajectories(config, subject, torch.tensor(record["sigmas"], dtype=torch.float64))
    record["run"]["count"] = config.count
    record["evaluations_per_sample"] = count_evaluations(config, record["sigmas"])
    if drawn:
        speed = round(drawn / seconds, 3)
        session = {"drawn": drawn, "seconds": round(seconds, 3), "samples_per_second": speed}
        record["sessions"] = [*record.get("sessions", []), session]
    write_record(config.out, record)


def count_evaluations(config: SampleRun, sigmas: list[float]) -> int:
    """Evaluations of the (guided) denoiser per sample, counted by walking the grid."""
    counted = Counted(lambda x, sigma, cond=None: 0.5 * x)
    grid = torch.tensor(sigmas, dtype=torch.float64)
    config.solver.build()(counted, torch.ones(1, 1), grid, generator=KeyedNoise([0], seed=0))
    return counted.evaluations


def draw_trajectories(config: SampleRun, subject: Subject, grid: Tensor) -> None:
    """The walks of the first samples beside all ends."""
    assert subject.toy is not None
    device = torch.device("cpu")
    indices = list(range(config.count))
    states = [subject.scaling.start(starting_noise((2,), indices, seed=config.seed), grid[0])]
    draw_batch(config, subject, grid, indices, device, lambda p: states.append(p.x))
    data = subject.toy.sample(3000, torch.Generator().manual_seed(0))
    title = f"{config.model}, {config.solver.kind}, {config.step_count} steps"
    pictures.trajectories(torch.stack(states), grid, data, title, config.out / "trajectories.png")


__all__ = ["SampleRun", "run"]
