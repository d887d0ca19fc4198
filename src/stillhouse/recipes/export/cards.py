"""The card of a model: what it is, how it was made, how good it is, how to open it, its limits."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stillhouse.errors import UserError
from stillhouse.recipes.claims import without_places
from stillhouse.recipes.export.scripts import SHOWN, onnx_script, torch_script
from stillhouse.recipes.judge.verdicts import describe, said
from stillhouse.recipes.parts import NoGuidance
from stillhouse.recipes.pictures import can_plot
from stillhouse.recipes.subjects import Subject

if TYPE_CHECKING:
    from stillhouse.recipes.export.exporting import ExportRun

EVALUATIONS = ("evaluation.json", "evaluation/evaluation.json")  # where a run may have one
LIBRARIES = {"diffusers": "diffusers", "onnx": "onnx", "torch-export": "pytorch"}


@dataclass(frozen=True)
class Card:
    """All that is known."""

    config: "ExportRun"
    settings: Mapping[str, Any]  # of the run; nothing where that is not known
    facts: Mapping[str, Any]  # what the weights say of it
    log: Sequence[Mapping[str, Any]]
    network: Any
    subject: Subject
    graph: Mapping[str, Any]  # what a caller of the graph must know; nothing where there is none
    evaluation: Mapping[str, Any] | None

    @property
    def student(self) -> bool:
        return self.subject.walk is not None


def read_evaluation(run: Path, asked: Path | None) -> dict[str, Any] | None:
    """What `stillhouse evaluate` has measured."""
    found = [asked] if asked else [run / name for name in EVALUATIONS if (run / name).is_file()]
    if not found:
        return None
    try:
        record = json.loads(found[0].read_text("utf-8"))
        _ = record["settings"][0]["values"], record["reference"]["name"], record["detector"]["name"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{found[0]} is no evaluation.json of stillhouse evaluate ({type(error).__name__}): "
            "name another as --evaluation"
        ) from error
    return without_places(record)


def spell_card(card: Card, steps: int) -> str:
    """The whole text; `steps` are those of its grid."""
    config = card.config
    parts = [
        f"---\n{metadata(card)}\n---",
        f"# {config.name or config.out.name}",
        "![Samples](grid.png)",
        f"*{config.count} samples of seed 0 {_source(card)}, {steps} evaluations each "
        f"({_walked(card)}), {'; '.join(_shown(card))}; not chosen.*",
        *([config.note] if config.note else []),
        _table(["", ""], {**_made(card), **_told(card.network), **_data(card)}.items()),
        *([f"Trained by\n\n```bash\n{config.command}\n```"] if config.command else []),
        *_measured(card),
        *_curves(card),
        *_opening(card, steps),
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _limits(card)),
    ]
    return "\n\n".join(parts) + "\n"


def metadata(card: Card) -> str:
    """What the hub reads, as YAML."""
    from huggingface_hub import ModelCardData

    config = card.config
    tags = ["stillhouse", "diffusion", *(["distillation"] if card.student else [])]
    text = "text" in card.network.condition_shapes
    pixels = len(card.subject.shape) == 3
    kind = "text-to-image" if text else "unconditional-image-generation"
    data = ModelCardData(
        license=config.licence or None,
        library_name=LIBRARIES[config.format[0]],
        tags=[*tags, *(name for name in config.format if name != "diffusers")],
        pipeline_tag=kind if pixels else None,
        datasets=list(config.datasets) or None,
    )
    return data.to_yaml()


# ---------------------------------------------------------------- what it is


def _made(card: Card) -> dict[str, str]:
    """Rows on the network and its run."""
    run, facts, network = card.settings, card.facts, card.network
    count = sum(p.numel() for p in network.parameters())
    kinds = _precision(card)
    average = facts.get("average") or "not averaged"
    rows = {
        "network": f"{type(network.model).__name__}, {count / 1e6:.2f}M parameters",
        "weights": f"{kinds}, {average}" if facts else kinds,
    }
    for name, key in (("process", "process"), ("objective", "objective"), ("method", "method")):
        rows |= {name: _words(run[key])} if key in run else {}
    rows |= {"optimiser": _words(run["optim"])} if "optim" in run else {}
    if "images" in facts and "batch" in run:
        seen = "walks seen" if card.student else "images seen"
        rows[seen] = f"{facts['images']:,}, in batches of {run['batch']}"
    held_out = [line["validation/loss"] for line in card.log if "validation/loss" in line]
    if "objective" in run:
        rows["held-out loss"] = f"{held_out[-1]:.4f}" if held_out else "not measured"
    return rows | ({"seed": str(run["seed"])} if "seed" in run else {})


def _precision(card: Card) -> str:
    """Of the weights in all files."""
    usual = {name: "bfloat16" if name == "diffusers" else "float32" for name in LIBRARIES}
    asked = card.config.dtype
    found = {usual[name] if asked == "auto" else asked: None for name in card.config.format}
    decodes = card.graph and card.subject.codec is not None
    decoder = " (graphs of the decoder: float32)" if decodes and "float32" not in found else ""
    return ", ".join(found) + decoder


def _told(network: Any) -> dict[str, str]:
    """Rows on what the model is told."""
    rows, told = {}, network.told
    if network.null_label is not None:
        rows["label for no class"] = str(network.null_label)
    if told.text:
        text = told.text
        rows["text encoder"] = f"{text.encoder}, {text.length} tokens, {text.padding} padding"
    if told.layout.names:
        rows["control"] = ", ".join(told.layout.names)
    return rows


def _data(card: Card) -> dict[str, str]:
    config = card.config
    named = config.data or ", ".join(config.datasets)
    return ({"data": named} if named else {}) | (
        {"licence": config.licence} if config.licence else {}
    )


def _source(card: Card) -> str:
    """Whose samples they are."""
    return "from this very file" if "diffusers" in card.config.format else "of this model"


def _walked(card: Card) -> str:
    return "as it was taught" if card.student else "`dpmpp-3m`"


def _shown(card: Card) -> Iterator[str]:
    """What the grid's samples were told."""
    config = card.config
    if card.subject.labels:
        yield "one class per column"
    if config.prompt:
        yield f"one prompt per column: {', '.join(config.prompt)}"
    if config.control:
        yield ", ".join(config.control)
    guided = not isinstance(config.guidance, NoGuidance)
    yield f"guidance {_words(config.guidance.model_dump())}" if guided else "without guidance"


# ---------------------------------------------------------------- how good it is


def _measured(card: Card) -> list[str]:
    """The table of an evaluation, with all that its numbers must not be read without."""
    record = card.evaluation
    if record is None:
        return ["Its samples have not been measured: `stillhouse evaluate` does."]
    names = list(record["settings"][0]["values"])
    rows = [
        [describe(row), *(said(row["values"][name]) for name in names)]
        for row in record["settings"]
    ]
    floor = record.get("floor") or {}
    if floor:
        rows.append(["real / real", *(f"{floor[n]:.4g}" if n in floor else "" for n in names)])
    reference = record["reference"]
    about = (
        f"*{record['count']} samples against {reference['count']} of {reference['name']}, by "
        f"{record['detector']['name']}, {record['seeds']} seed(s).*"
    )
    notes = "\n".join(f"- {note}" for note in record.get("warnings", []))
    return ["## Metrics", _table(["", *names], rows), about, *([notes] if notes else [])]


def _curves(card: Card) -> list[str]:
    if not any("denoiser/loss" in line for line in card.log) or not can_plot():
        return []
    held_out = any("validation/loss" in line for line in card.log)
    return [
        "![Curves](curves.png)",
        f"*Left: loss over images seen. Right: {'held-out' if held_out else 'training'} loss per "
        "noise level as training went on. The numbers are in `curves.json`; the whole config of "
        "the run is in the metadata of the weights.*",
    ]


# ---------------------------------------------------------------- how it is opened


def _opening(card: Card, steps: int) -> list[str]:
    """A paragraph and a script for every format."""
    config, parts = card.config, ["## How to open it"]
    place = config.push_to or config.out.name
    if "diffusers" in config.format:
        asked = " --prompt 'a red apple'" if config.prompt else ""
        parts += [
            f"```python\nfrom stillhouse import load_denoiser\n\n"
            f'denoiser = load_denoiser("{place}")  # denoiser(x, sigma, cond) -> x0\n```',
            f"```bash\nstillhouse sample {place}{asked}\n```",
        ]
    if card.graph:
        inputs = card.graph["inputs"]
        rows = [
            [f"`{i['name']}`", i["dtype"], ", ".join(map(str, i["shape"])), i["meaning"]]
            for i in inputs
        ]
        parts += [
            "The graphs are `denoise(x, sigma, ...) -> x0`, where x = x0 + sigma * noise: scaling, "
            "time and prediction are inside. The batch may be of any size. Levels to walk, by "
            "their number, are in the file's metadata.",
            _table(["input", "type", "shape", "meaning"], rows),
        ]
    latents = card.subject.codec is not None
    if "onnx" in config.format:
        count = min(SHOWN, config.count)
        script = onnx_script(card.graph, steps, decoder=latents, count=count)
        parts += [
            "`denoiser.onnx`, with onnxruntime and numpy alone, from this folder; the samples are "
            f"those of {_same(card)}:",
            f"```python\n{script}\n```",
        ]
    if "torch-export" in config.format:
        parts += [
            "`denoiser.pt2`, with torch alone:",
            f"```python\n{torch_script(card.graph, steps)}\n```",
        ]
    return parts


def _same(card: Card) -> str:
    return "`stillhouse sample`" if card.student else "`stillhouse sample --solver euler`"


def _limits(card: Card) -> Iterator[str]:
    config, network = card.config, card.network
    if config.limits:
        yield config.limits
    if card.subject.walk is not None:
        counts = ", ".join(map(str, sorted(card.subject.walk.evaluations)))
        yield f"It takes {counts} evaluations and no other number."
    if len(card.subject.shape) == 3:
        _, height, width = card.subject.shape
        what = "latents" if card.subject.codec is not None else "pixels"
        other = "; graphs take no other size" if card.graph else ""
        yield f"It was made for {height} x {width} {what}{other}."
    if card.graph and "text" in network.condition_shapes:
        yield (
            "Graphs take tokens, not prompts: `told.npz` holds those of the first samples above."
        )
    if card.graph and not card.student and (card.subject.null is not None):
        yield (
            "Graphs are not guided. Guidance by weight w is x0 = nothing + w (told - nothing), of "
            "two calls, one of which is told nothing."
        )
    if "torch-export" in config.format and card.graph["largest_batch_of_pt2"]:
        yield f"`denoiser.pt2` takes at most {card.graph['largest_batch_of_pt2']} samples at once."
    if card.evaluation is None:
        yield "How near its samples are to its data has not been measured."
    yield "It draws what its data shows, and what its data lacks it does not know."


# ---------------------------------------------------------------- forms


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join([_row(names), "|---" * len(names) + "|", *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    """A line, whatever the cells hold."""
    whole = (" ".join(["", *cell.split(), ""]).replace("|", "\\|") for cell in cells)
    return f"|{'|'.join(whole)}|"


def _words(part: Mapping[str, Any]) -> str:
    """A part of a config in a line."""
    inner = {k: v["kind"] if isinstance(v, dict) else v for k, v in part.items() if k != "kind"}
    shown = ", ".join(f"{k} {v}" for k, v in inner.items())
    return f"{part['kind']} ({shown})" if shown else str(part["kind"])
