"""`stillhouse export`: a model as a folder to hand on, with a card that says what it is.

| format | files | opened by |
|---|---|---|
| diffusers | config.json, .safetensors, scheduler_config.json | diffusers, `load_denoiser` |
| onnx | denoiser.onnx, decoder.onnx of latents | onnxruntime |
| torch-export | denoiser.pt2, decoder.pt2 of latents | torch alone |

The graphs of the last two are `denoise(x, sigma, ...) -> x0`, whatever the network (`graphs.py`).
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import PositiveInt

from stillhouse.config import Config
from stillhouse.distill.walks import FewSteps
from stillhouse.engine.trackers import LOG, read_log
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.pipelines import (
    checkpoint_files,
    load_codec,
    load_denoiser,
    read_facts,
    save_codec,
    save_denoiser,
)
from stillhouse.pipelines.few_steps import FILE, read_walk, save_walk
from stillhouse.pipelines.load import CONDITIONING, read_json
from stillhouse.process import NetworkDenoiser
from stillhouse.recipes.claims import make_folder, without_places
from stillhouse.recipes.export import cards, drawing, graphs, scripts
from stillhouse.recipes.export.pushing import check_name, push
from stillhouse.recipes.parts import Guidance, NoGuidance
from stillhouse.recipes.pictures import can_plot
from stillhouse.recipes.sampling import SampleRun, build_grid, walked
from stillhouse.recipes.subjects import Subject, Wish, load_subject
from stillhouse.recipes.train.folders import RECORD

Format = Literal["diffusers", "onnx", "torch-export"]
ENDINGS = {"onnx": "onnx", "torch-export": "pt2"}
CODEC = ("vae/config.json", "vae/diffusion_pytorch_model.safetensors")


class ExportRun(Config):
    """What to hand on."""

    run: Path = Path()
    """The folder of a run (stillhouse train, stillhouse distill), or of a diffusers model."""
    format: tuple[Format, ...] = ("diffusers",)
    """One or several, in one folder: --format diffusers onnx."""
    out: Path = Path("exported")
    """The folder to write."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights. auto: bfloat16 in a diffusers folder, float32 in graphs."""
    push_to: str = ""
    """OWNER/NAME of a repository of the hub that gets the folder; none if not given."""
    private: bool = False
    """Whether that repository, where it is new, is for its owner's eyes only."""
    command: str = ""
    """The command that trained it, for the card."""
    data: str = ""
    """What it was trained on, and under which licence, for the card."""
    datasets: tuple[str, ...] = ()
    """The same as names of the hub, where the data is there."""
    licence: str = ""
    """The model's licence, as the hub names it (mit, apache-2.0)."""
    note: str = ""
    """A paragraph for the card."""
    limits: str = ""
    """A sentence for the card on what the model cannot do, beside those that hold for all."""
    evaluation: Path | None = None
    """An evaluation.json of `stillhouse evaluate`; that in the run's folder if not given."""
    name: str = ""
    """The card's title; the folder's name if not given."""
    count: PositiveInt = 100
    """Samples on the card's grid."""
    steps: PositiveInt = 20
    """Of that grid; a student takes as many as it knows."""
    prompt: tuple[str, ...] = ()
    """What the grid shows, in turn, of a model that takes text."""
    control: tuple[str, ...] = ()
    """How it is framed, as name=value, where the model takes that."""
    prompt_encoder: str = ""
    """Folder or hub id of the model's text encoder, if it is not where the model says."""
    guidance: Guidance = NoGuidance()
    """Of the grid."""

    def precision(self, usual: str) -> torch.dtype:
        return getattr(torch, usual if self.dtype == "auto" else self.dtype)


@dataclass(frozen=True)
class Original:
    """What is handed on."""

    folder: Path  # of the model
    facts: dict[str, Any]  # what its weights say of their run
    log: list[dict[str, Any]]
    walk: FewSteps | None

    @property
    def settings(self) -> dict[str, Any]:
        """The config of the run; nothing where it is not known."""
        return self.facts.get("config", {})

    def steps(self, asked: int) -> int:
        """Of the grid on the card. A consistency model lands in one step."""
        if self.walk is not None:
            return asked if asked in self.walk.evaluations else max(self.walk.evaluations)
        objective = self.settings.get("objective", {})
        return 1 if "consistency" in objective.get("kind", "") else asked


def export(config: ExportRun) -> Path:
    """Writes the formats, the pictures and the card, and pushes them if asked; returns the card."""
    check_name(config.push_to)
    check_formats(config)
    original = open_original(config.run)
    if "diffusers" in config.format:
        check_bare(original.folder)
    check_elsewhere(config.out, original.folder)
    denoiser = load_denoiser(original.folder)
    network: Any = denoiser.network
    if network.told.text and not config.prompt:
        raise UserError("the model draws what it is told: give --prompt 'a red apple' for its grid")
    evaluation = cards.read_evaluation(config.run, config.evaluation)
    run = check_walk(sample_run(config, original), denoiser, original.walk)
    here = forget_place(network)
    make_folder(config.out)
    files = write_folder(config, original, network) if "diffusers" in config.format else []
    subject, steps = open_subject(config, original, here), run.step_count
    facts, made = write_graphs(config, original, subject, steps)
    files += made + draw(config, original, subject, run)
    card = cards.Card(
        config, original.settings, original.facts, original.log, network, subject, facts, evaluation
    )
    write_whole(config.out / "README.md", cards.spell_card(card, steps).encode())
    if config.push_to:
        files = sorted([*files, "README.md"])
        print(f"see {push(config.out, files, config.push_to, private=config.private)}")
    return config.out / "README.md"


def check_formats(config: ExportRun) -> None:
    if not config.format:
        raise UserError("--format is one or several of diffusers, onnx, torch-export")
    if "onnx" in config.format:
        graphs.check_onnx()
        if config.dtype == "bfloat16":
            raise UserError("onnxruntime has no bfloat16 on a CPU: give --dtype float32 for onnx")


def open_original(run: Path) -> Original:
    """A run's model, or a model's own folder."""
    is_run = (run / RECORD).is_file()
    folder = run / "model" if is_run else run
    whole = (folder / "model_index.json").is_file()
    if is_run and folder.is_dir() and not whole and not (folder / "config.json").is_file():
        raise UserError(f"{folder} is adapters for a pipeline: diffusers opens it as it is")
    if not whole and not (folder / "config.json").is_file():
        raise UserError(
            f"{run} is neither a training run that has saved a model yet nor a diffusers folder: "
            "name the --out of a `stillhouse train` or `distill`, or a folder with a config.json"
        )
    network = checkpoint_files(folder)["network"][0].parent
    log = read_log(run / LOG) if (run / LOG).is_file() else []
    return Original(folder, without_places(read_facts(network)), log, read_walk(folder))


def check_bare(source: Path) -> None:
    """What is a pipeline already needs no other folder."""
    if not (source / "config.json").is_file():
        raise UserError(
            f"{source} is a whole pipeline: diffusers opens it as it is, and `hf upload OWNER/NAME "
            f"{source}` pushes it. --format onnx or torch-export makes graphs of its network"
        )


def check_elsewhere(out: Path, source: Path) -> None:
    """A model is not written over by itself in fewer bits, nor its card by that of graphs."""
    if out.is_dir() and out.samefile(source):
        raise UserError(f"{out} is the model's own folder: choose another --out")


def check_walk(run: SampleRun, denoiser: NetworkDenoiser, walk: FewSteps | None) -> SampleRun:
    """The run as its model walks it, or a sentence why it does not."""
    network: Any = denoiser.network
    subject = Subject(denoiser, denoiser.scaling, network.data_shape, {}, walk=walk)
    run = walked(run, subject)
    build_grid(run, subject, drawing.CPU)
    return run


def sample_run(config: ExportRun, original: Original) -> SampleRun:
    """What is drawn for the card."""
    return SampleRun(
        model=str(original.folder),
        steps=original.steps(config.steps),
        count=config.count,
        guidance=config.guidance,
    )


def forget_place(network: Any) -> str:
    """Where the text encoder is here, if in a folder; others know it by its name and digest."""
    text = network.told.text
    if text is None or not Path(text.encoder).is_absolute():
        return ""
    named = replace(text, encoder=Path(text.encoder).name)
    network.conditioning.parts = replace(network.told, text=named)
    return text.encoder


# ---------------------------------------------------------------- files


def write_folder(config: ExportRun, original: Original, network: Any) -> list[str]:
    """The model as diffusers has it; the names of its files."""
    source = original.folder
    dtype = config.precision("bfloat16")
    scheduler = read_json(checkpoint_files(source)["scheduler"][0])
    facts = original.facts
    save_denoiser(config.out, network, network.state_dict(), scheduler, facts=facts, dtype=dtype)
    files = ["config.json", "scheduler_config.json", "diffusion_pytorch_model.safetensors"]
    if network.conditioning is not None:
        files += [f"{CONDITIONING}.json", f"{CONDITIONING}.safetensors"]
    codec = load_codec(source, dtype=dtype)
    if codec is not None:
        save_codec(config.out, codec)
        files += CODEC
    for name in [FILE] if codec is not None else [FILE, *CODEC]:
        (config.out / name).unlink(missing_ok=True)  # of another model that was here
    if original.walk is not None:
        save_walk(config.out, original.walk)
        files.append(FILE)
    return files


def open_subject(config: ExportRun, original: Original, encoder: str) -> Subject:
    """What is drawn for the card: the folder that was just written, where there is one."""
    wish = Wish(
        config.guidance,
        (),
        None,
        torch.float32,
        drawing.CPU,
        config.prompt,
        config.control,
        config.prompt_encoder or encoder,
    )
    folder = config.out if "diffusers" in config.format else original.folder
    return load_subject(str(folder), wish)


def write_graphs(
    config: ExportRun, original: Original, subject: Subject, steps: int
) -> tuple[dict[str, Any], list[str]]:
    """The denoiser, and the decoder of latents, in every format asked for; facts and file names."""
    formats = [name for name in ENDINGS if name in config.format]
    if not formats:
        return {}, []
    dtype = config.precision("float32")
    graph = graphs.Graph(load_denoiser(original.folder, dtype=dtype))
    facts = scripts.facts_of(graph, subject, steps)
    parts: dict[str, graphs.Graph | graphs.Decoder] = {"denoiser": graph}
    known = {"denoiser": facts}
    codec = load_codec(original.folder)
    if codec is not None:
        decoder = graphs.Decoder(codec, subject.shape)
        parts["decoder"], known["decoder"] = decoder, scripts.facts_of_decoder(decoder)
    files = []
    for part, traced in parts.items():
        program = graphs.trace(traced)
        known[part]["largest_batch_of_pt2"] = graphs.largest_batch(program)
        for name in formats:
            target = config.out / f"{part}.{ENDINGS[name]}"
            files += save_graph(name, traced, program, target, known[part])
    return facts, files + save_told(config, graph, subject)


def save_graph(
    name: str,
    traced: graphs.Graph | graphs.Decoder,
    program: torch.export.ExportedProgram,
    target: Path,
    facts: dict[str, Any],
) -> list[str]:
    """One graph in one format; the names of its files, and of no others."""
    if name == "torch-export":
        graphs.save_torch(program, target, facts)
        return [target.name]
    weights = target.with_name(f"{target.name}.data")  # where they are too many for one file
    weights.unlink(missing_ok=True)
    graphs.save_onnx(traced, program, target, facts)
    return [file.name for file in (target, weights) if file.is_file()]


def save_told(config: ExportRun, graph: graphs.Graph, subject: Subject) -> list[str]:
    """What the card's script tells the first samples, unless that is a class alone."""
    names = {each.name for each in graph.inputs} - {"x", "sigma", "steps"}
    if not names - {"label"}:
        return []
    cond = subject.condition(range(min(scripts.SHOWN, config.count)), drawing.CPU)
    said = {name: getattr(cond, name) for name in sorted(names)}
    arrays: dict[str, Any] = {k: v.numpy() for k, v in said.items() if v is not None}
    with (config.out / "told.npz").open("wb") as file:
        np.savez(file, **arrays)
    return ["told.npz"]


def draw(config: ExportRun, original: Original, subject: Subject, run: SampleRun) -> list[str]:
    """Samples, and the curves of a training."""
    kinds = len(subject.labels or config.prompt)
    drawing.draw_grid(subject, run, config.out / "grid.png", kinds)
    found = drawing.curves(original.log)
    if not found["denoiser/loss"]:
        return ["grid.png"]
    write_whole(config.out / "curves.json", json.dumps(found, indent=1).encode())
    if not can_plot():
        return ["grid.png", "curves.json"]
    drawing.draw_curves(original.log, config.out / "curves.png")
    return ["grid.png", "curves.json", "curves.png"]
