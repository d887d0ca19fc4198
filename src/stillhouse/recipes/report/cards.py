"""`stillhouse export`: a run's model as a folder to hand on, with a card that says what it is.

The grid on the card is drawn from the very file that is handed on, so it shows that file's quality.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveInt

from stillhouse.config import Config
from stillhouse.engine.trackers import LOG, read_log
from stillhouse.errors import UserError
from stillhouse.files import write_whole
from stillhouse.pipelines import (
    load_codec,
    load_denoiser,
    read_facts,
    save_codec,
    save_denoiser,
)
from stillhouse.recipes import pictures
from stillhouse.recipes.parts import Guidance, NoGuidance
from stillhouse.recipes.sampling import SampleRun, draw_batch
from stillhouse.recipes.subjects import Wish, load_subject
from stillhouse.recipes.train.folders import RECORD, without_places


class ExportRun(Config):
    """What to hand on."""

    run: Path = Path()
    """The folder of a training run."""
    out: Path = Path("exported")
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the weights in the file."""
    command: str = ""
    """The command that trained it, for the card."""
    data: str = ""
    """What it was trained on, and under which licence, for the card."""
    licence: str = ""
    """The model's licence, as the hub names it (mit, apache-2.0)."""
    note: str = ""
    """A paragraph for the card."""
    name: str = ""
    """The card's title; the folder's name if not given."""
    count: PositiveInt = 100
    """Samples on the card's grid."""
    steps: PositiveInt = 20
    prompt: tuple[str, ...] = ()
    """What the grid shows, in turn, of a model that takes text."""
    control: tuple[str, ...] = ()
    """How it is framed, as name=value, where the model takes that."""
    prompt_encoder: str = ""
    """Folder or hub id of the model's text encoder, if it is not where the model says."""
    guidance: Guidance = NoGuidance()
    """Of the grid."""


def export(config: ExportRun) -> Path:
    """Writes weights, configs, grid, curves and card; returns the card."""
    source = config.run / "model"
    if not (config.run / RECORD).is_file() or not source.is_dir():
        raise UserError(f"{config.run} is no training run that has saved a model yet")
    if not (source / "config.json").is_file():
        raise UserError(
            f"{source} is a fine-tuned pipeline, or adapters for one: diffusers opens it as it is"
        )
    facts = without_places(read_facts(source))
    network: Any = load_denoiser(source).network
    here = forget_place(network)
    if network.told.text and not config.prompt:
        raise UserError("the model draws what it is told: give --prompt 'a red apple' for its grid")
    scheduler = json.loads((source / "scheduler_config.json").read_text())
    dtype = getattr(torch, config.dtype)
    save_denoiser(config.out, network, network.state_dict(), scheduler, facts=facts, dtype=dtype)
    codec = load_codec(source, dtype=dtype)
    if codec is not None:
        save_codec(config.out, codec)
    log = read_log(config.run / LOG)
    draw_grid(config, sampling_steps(config, facts), config.prompt_encoder or here)
    draw_curves(log, config.out / "curves.png")
    write_whole(config.out / "curves.json", json.dumps(curves(log), indent=1).encode())
    card = config.out / "README.md"
    write_whole(card, spell_card(config, facts, log, network).encode())
    return card


def forget_place(network: Any) -> str:
    """Where the text encoder is here, if in a folder; others know it by its name and digest."""
    text = network.told.text
    if text is None or not Path(text.encoder).is_absolute():
        return ""
    named = replace(text, encoder=Path(text.encoder).name)
    network.conditioning.parts = replace(network.told, text=named)
    return text.encoder


# ---------------------------------------------------------------- pictures


def sampling_steps(config: ExportRun, facts: dict[str, Any]) -> int:
    """A consistency model lands in one step."""
    return 1 if "consistency" in facts["config"]["objective"]["kind"] else config.steps


def draw_grid(config: ExportRun, steps: int, encoder: str) -> None:
    """Samples 0, 1, ... of seed 0, as `stillhouse sample` draws; a class or prompt per column."""
    wish = Wish(
        config.guidance,
        (),
        None,
        torch.float32,
        torch.device("cpu"),
        config.prompt,
        config.control,
        encoder,
    )
    subject = load_subject(str(config.out), wish)
    run = SampleRun(model=str(config.out), steps=steps, count=config.count)
    grid = run.grid.build(subject.scaling, steps)  # type: ignore[union-attr]
    samples = draw_batch(run, subject, grid, list(range(config.count)), wish.device)
    target = config.out / "grid.png"
    if subject.toy is not None:
        backdrop = subject.toy.sample(2000, torch.Generator().manual_seed(0))
        return pictures.save_points(samples, backdrop, target)
    kinds = len(subject.labels or config.prompt)
    columns = kinds if 1 < kinds <= 16 else None
    images = subject.decode(samples)
    return pictures.save_tiles([pictures.to_pil(s) for s in images], target, columns=columns)


def curves(log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The numbers behind the picture: series over images, and the last losses per noise level."""
    names = ("denoiser/loss", "validation/loss", "denoiser/lr")
    series = {n: [[line["images"], line[n]] for line in log if n in line] for n in names}
    levels = {
        n: [line[n] for line in log if n in line][-1:] for n in ("levels", "validation/levels")
    }
    return {**series, **{name: found[0] for name, found in levels.items() if found}}


def draw_curves(log: Sequence[dict[str, Any]], target: Path) -> None:
    """Loss over images, and held-out loss per noise level from early to late."""
    plt = pictures.pyplot()
    found = curves(log)
    figure, (loss, levels) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, label, look in (
        ("denoiser/loss", "training", {"lw": 0.8, "color": "#7f8c9b"}),
        (
            "validation/loss",
            "held out, averaged weights",
            {"marker": "o", "ms": 3, "color": "#1d5b8f"},
        ),
    ):
        if found[name]:
            loss.plot(*zip(*found[name], strict=True), label=label, **look)
    top = 2 * min((value for _, value in found["denoiser/loss"]), default=1.0)
    loss.set(xlabel="images", ylabel="loss", ylim=(None, top))
    loss.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k")
    loss.legend(fontsize=8)
    key = "validation/levels" if "validation/levels" in found else "levels"
    lines = [line for line in log if key in line]
    chosen = sorted({round(i * (len(lines) - 1) / 4) for i in range(5)}) if lines else []
    for i, line in enumerate(lines[k] for k in chosen):
        edges = line[key]["edges"]
        middles = [(a * b) ** 0.5 for a, b in pairwise(edges)]
        values = [float("nan") if v is None else v for v in line[key]["loss"]]
        shade = plt.cm.viridis(0.9 - 0.8 * i / max(1, len(chosen) - 1))
        levels.plot(middles, values, color=shade, lw=1.2, label=f"{line['images']:,}")
    levels.set(xscale="log", xlabel="noise level σ", ylabel="loss")
    levels.legend(title="images", fontsize=7, title_fontsize=7)
    figure.savefig(target, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------- words


def spell_card(
    config: ExportRun, facts: dict[str, Any], log: Sequence[dict[str, Any]], network: Any
) -> str:
    run = facts["config"]
    count = sum(p.numel() for p in network.parameters())
    held_out = [line["validation/loss"] for line in log if "validation/loss" in line]
    rows = {
        "network": f"{type(network.model).__name__}, {count / 1e6:.2f}M parameters",
        "weights": f"{config.dtype}, {facts['average'] or 'not averaged'}",
        "process": _words(run["process"]),
        "objective": _words(run["objective"]),
        "optimiser": _words(run["optim"]),
        "images seen": f"{facts['images']:,}, in batches of {run['batch']}",
        "held-out loss": f"{held_out[-1]:.4f}" if held_out else "not measured",
        **_told(network),
        "seed": str(run["seed"]),
        **({"data": config.data} if config.data else {}),
    }
    head = ["---", "library_name: diffusers", "tags: [stillhouse, diffusion]"]
    head += [f"license: {config.licence}"] if config.licence else []
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    parts = [
        "\n".join([*head, "---"]),
        f"# {config.name or config.out.name}",
        "![Samples](grid.png)",
        f"*{config.count} samples of seed 0 from this very file, {sampling_steps(config, facts)} "
        f"evaluations each (`dpmpp-3m`), {'; '.join(_shown(config, run))}; not chosen.*",
        *([config.note] if config.note else []),
        "\n".join(table),
        *([f"Trained by\n\n```bash\n{config.command}\n```"] if config.command else []),
        "![Curves](curves.png)",
        f"*Left: loss over images seen. Right: {'held-out' if held_out else 'training'} loss per "
        "noise level as training went on. "
        "The numbers are in `curves.json`; the whole config of the run is in the metadata of the "
        "weights.*",
        "```python\nfrom stillhouse import load_denoiser\n\n"
        f'denoiser = load_denoiser("{config.out}")  # denoiser(x, sigma, cond) -> x0\n```',
    ]
    return "\n\n".join(parts) + "\n"


def _told(network: Any) -> dict[str, str]:
    """What the model is told: rows of the table."""
    rows, told = {}, network.told
    if network.null_label is not None:
        rows["label for no class"] = str(network.null_label)
    if told.text:
        text = told.text
        rows["text encoder"] = f"{text.encoder}, {text.length} tokens, {text.padding} padding"
    if told.layout.names:
        rows["control"] = ", ".join(told.layout.names)
    return rows


def _shown(config: ExportRun, run: dict[str, Any]) -> Iterator[str]:
    """What the grid's samples were told."""
    if run["classes"]:
        yield "one class per column"
    if config.prompt:
        yield f"one prompt per column: {', '.join(config.prompt)}"
    if config.control:
        yield ", ".join(config.control)
    guided = not isinstance(config.guidance, NoGuidance)
    yield f"guidance {_words(config.guidance.model_dump())}" if guided else "without guidance"


def _words(part: dict[str, Any]) -> str:
    """A part of a config in a line."""
    inner = {k: v["kind"] if isinstance(v, dict) else v for k, v in part.items() if k != "kind"}
    return f"{part['kind']} ({', '.join(f'{k} {v}' for k, v in inner.items())})"
