"""`stillhouse sample`: images from a checkpoint (or a 2-D toy) with a record to repeat them.

Batches are cut from the global list of samples and dealt to processes in turn, and every sample's
randomness is keyed by its index: one process or eight, first run or resumed, image i is the same.
Running the same command again draws only the batches that are missing.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from stillhouse import __version__
from stillhouse.errors import UserError
from stillhouse.process import KeyedNoise, starting_noise
from stillhouse.recipes import pictures
from stillhouse.recipes.parts import (
    Config,
    Dpmpp3M,
    Grid,
    Guidance,
    NativeGrid,
    NoGuidance,
    SearchedGrid,
    Solver,
)
from stillhouse.recipes.processes import World, world
from stillhouse.recipes.progress import progress_bar
from stillhouse.recipes.subjects import Subject, Wish, load_subject
from stillhouse.solvers import Counted, Progress, search_grid

RECORD = "record.json"


class SampleRun(Config):
    """A sampling run."""

    model: str = ""
    """A diffusers directory, a hub id, or toy:NAME for a 2-D target."""
    solver: Solver = Dpmpp3M()
    grid: Grid = NativeGrid()
    guidance: Guidance = NoGuidance()
    steps: PositiveInt = 10
    """Steps of the walk; most solvers evaluate the network once a step."""
    count: PositiveInt = 64
    """How many samples."""
    seed: int = 0
    batch: PositiveInt = 16
    """Samples per network call."""
    labels: tuple[int, ...] = ()
    """Classes to draw, in turn; all classes in turn if not given."""
    null_label: int | None = None
    """The label that stands for no class, for classifier-free guidance."""
    out: Path = Path("samples")
    """Where images, grid.png and record.json go."""
    tensors: bool = False
    """Also keep the float32 samples, as safetensors per batch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the network; the state is always float32."""
    device: Annotated[str, Field(min_length=1)] = "auto"
    """auto: a GPU where there is one."""


def run(config: SampleRun) -> dict[str, Any]:
    """Draws what is missing and returns the record that it wrote."""
    with world(config.device) as here:
        wish = Wish(
            config.guidance,
            config.labels,
            config.null_label,
            getattr(torch, config.dtype),
            here.device,
        )
        subject = load_subject(config.model, wish)
        grid = build_grid(config, subject, here.device)
        record = start_record(config, subject, grid)
        if here.rank == 0:
            claim_folder(config.out, record)
        here.barrier()
        started, drawn = time.perf_counter(), draw_missing(config, subject, grid, here)
        here.barrier()
        seconds = time.perf_counter() - started
        if here.rank == 0:
            finish(config, subject, record, here.total(drawn), seconds)
        else:
            here.total(drawn)
    return record


# ---------------------------------------------------------------- the walk


def build_grid(config: SampleRun, subject: Subject, device: torch.device) -> Tensor:
    """The noise levels of the run; a searched grid is found here, the same on every process."""
    try:
        if isinstance(config.grid, SearchedGrid):
            return _search(config, config.grid, subject, device)
        return config.grid.build(subject.scaling, config.steps)
    except ValueError as error:
        raise UserError(f"there is no such grid: {error}") from error


def _search(
    config: SampleRun, grid: SearchedGrid, subject: Subject, device: torch.device
) -> Tensor:
    fine = grid.build(subject.scaling, grid.fine - 1)
    noise = starting_noise(subject.shape, range(grid.samples), seed=config.seed + 1).to(device)
    count = config.steps + 1
    found = search_grid(
        subject.denoiser,
        float(fine[0]) * noise,
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
            share = len(batch) / config.steps
            states = draw_batch(
                config, subject, grid, batch, here.device, lambda _, share=share: advance(share)
            )
            save_batch(config, subject, batch, states)
    return total


def missing_batches(config: SampleRun, subject: Subject, here: World) -> Iterator[list[int]]:
    """Whole batches, so that a resumed batch has the shape, and the bits, of the first try."""
    for number, first in enumerate(range(0, config.count, config.batch)):
        batch = list(range(first, min(first + config.batch, config.count)))
        mine = number % here.size == here.rank
        if mine and not all(f.is_file() for f in batch_files(config, subject, batch)):
            yield batch


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
    return config.solver.build()(
        subject.denoiser,
        float(grid[0]) * noise,
        grid,
        subject.condition(indices, device),
        generator=KeyedNoise(indices, seed=config.seed),
        callback=callback,
    )


def save_batch(config: SampleRun, subject: Subject, batch: list[int], states: Tensor) -> None:
    """Writes images, and the tensors where asked for; each file appears whole."""
    if subject.toy is None:
        images = states if subject.codec is None else subject.codec.decode(states)
        for index, image in zip(batch, images, strict=True):
            pictures.save_png(image, image_file(config, index))
    if config.tensors or subject.toy is not None:
        from safetensors.torch import save_file

        target = config.out / "tensors" / f"{batch[0]:06d}.safetensors"
        partial = target.with_suffix(".partial")
        save_file({"samples": states.contiguous().cpu()}, partial)
        partial.replace(target)


# ---------------------------------------------------------------- the record


def start_record(config: SampleRun, subject: Subject, grid: Tensor) -> dict[str, Any]:
    """Everything that decides what the samples are."""
    run = config.model_dump(mode="json", exclude={"out", "device"})
    return {
        "run": run,
        "sigmas": grid.tolist(),
        "weights": subject.fingerprint,
        "stillhouse": __version__,
        "torch": torch.__version__,
    }


def claim_folder(out: Path, record: dict[str, Any]) -> None:
    """Starts the output folder, or makes sure that it belongs to this very run."""
    path = out / RECORD
    for part in ("images", "tensors"):
        (out / part).mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        path.write_text(json.dumps(record, indent=2))
        return
    old = json.loads(path.read_text())
    changed = _differences(old.get("run", {}), record["run"])
    for key in ("sigmas", "weights"):
        if not changed and old.get(key) != record[key]:
            changed.append(key)
    if changed:
        raise UserError(
            f"{out} holds samples of another run ({', '.join(changed)} differ). Choose another "
            "--out, or remove it."
        )


def _differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> list[str]:
    """Dotted names whose values differ. More samples of the same run are no difference."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        name, a, b = f"{path}{key}", old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differences(a, b, f"{name}.")
        elif a != b and name != "count":
            found.append(f"{name}: {a} -> {b}")
    return found


def finish(
    config: SampleRun, subject: Subject, record: dict[str, Any], drawn: int, seconds: float
) -> None:
    """The picture, and the record with what was measured."""
    if subject.toy is None:
        shown = [image_file(config, i) for i in range(min(config.count, 64))]
        pictures.image_grid(shown, config.out / "grid.png")
    else:
        draw_trajectories(config, subject, torch.tensor(record["sigmas"], dtype=torch.float64))
    record |= {
        "evaluations_per_sample": count_evaluations(config, record["sigmas"]),
        "drawn_now": drawn,
        "seconds": round(seconds, 3),
        "samples_per_second": round(drawn / seconds, 3) if drawn else None,
    }
    (config.out / RECORD).write_text(json.dumps(record, indent=2))


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
    states = [float(grid[0]) * starting_noise((2,), indices, seed=config.seed)]
    draw_batch(config, subject, grid, indices, device, lambda p: states.append(p.x))
    data = subject.toy.sample(3000, torch.Generator().manual_seed(0))
    title = f"{config.model}, {config.solver.kind}, {config.steps} steps"
    pictures.trajectories(torch.stack(states), grid, data, title, config.out / "trajectories.png")


__all__ = ["SampleRun", "run"]
