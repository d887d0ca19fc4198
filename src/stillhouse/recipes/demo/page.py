"""The demo's page: a thin layer of gradio over `drawing.py` and `looking.py`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, get_args

from stillhouse.errors import UserError
from stillhouse.recipes.demo.drawing import (
    LETTERS,
    PICTURES,
    STEPS,
    Model,
    Picture,
    Wanted,
    draw,
    wanted,
)
from stillhouse.recipes.demo.looking import (
    FORMATS,
    MEGABYTES,
    SIGMA,
    Seen,
    look,
    open_upload,
    usual_activation,
)
from stillhouse.recipes.demo.style import NOTHING
from stillhouse.recipes.parts import SolverName
from stillhouse.recipes.pictures import data_uri, png_of

ANY = -1  # of classes: all in turn, or none
IN_TURN = "in turn"
# The models work one wish at a time, whoever asks.
ALONE: dict[str, Any] = {
    "concurrency_id": "models",
    "concurrency_limit": 1,
    "api_visibility": "private",
}


def build(models: Sequence[Model], guidance: float) -> Any:
    """The page of a model, or of a teacher and its student."""
    import gradio as gr

    title = " and ".join(model.title for model in models)
    # Uploads are forgotten after an hour.
    page = _page_class()(title=title, analytics_enabled=False, delete_cache=(600, 3600))
    with page:
        _html(_header(title, models), elem_id="head")
        note = _html("", elem_id="note")
        with gr.Tabs():
            with gr.Tab("Draw", id="draw"):
                _drawing(models, guidance, note)
            with gr.Tab("Features", id="features"):
                _features(models[0], note)
    return page.queue(default_concurrency_limit=1, max_size=32)


def _page_class() -> Any:
    import gradio as gr
    from gradio.utils import get_upload_folder

    class Page(gr.Blocks):
        """Whose controls take no file but an upload.

        By itself gradio downloads a file that is named by an address, and reads any of this
        machine's where it is mounted, for whatever control it is named.
        """

        async def preprocess_data(
            self, block_fn: Any, inputs: list[Any], *others: Any, **options: Any
        ) -> Any:
            uploads = Path(get_upload_folder())
            if not all(is_upload(path, uploads) for path in named_files(inputs)):
                raise gr.Error("this file was not uploaded: give it again", print_exception=False)
            return await super().preprocess_data(block_fn, inputs, *others, **options)

    return Page


def named_files(value: Any) -> list[Any]:
    """The paths of all files in what a browser sent."""
    if isinstance(value, dict):
        return [*([value["path"]] if "path" in value else []), *named_files([*value.values()])]
    return [path for part in value for path in named_files(part)] if isinstance(value, list) else []


def is_upload(path: Any, uploads: Path) -> bool:
    """Whether it is a file in the folder of uploads; an address is none."""
    if not isinstance(path, str) or not Path(path).is_absolute():
        return False
    return Path(path).resolve().is_relative_to(uploads.resolve())


def theme() -> Any:
    """Fonts of the visitor's own system: nothing is fetched."""
    import gradio as gr

    return gr.themes.Base(
        primary_hue="blue",
        neutral_hue="slate",
        font=["system-ui", "-apple-system", "Segoe UI", "sans-serif"],
        font_mono=["ui-monospace", "monospace"],
    )


def _roles(models: Sequence[Model]) -> list[str]:
    return ["Teacher", "Student"] if len(models) > 1 else ["Model"]


def _header(title: str, models: Sequence[Model]) -> str:
    height, width = models[0].size
    network: Any = models[0].reader.denoiser.network
    size = sum(weight.numel() for weight in network.parameters()) / 1e6
    facts = f"{size:.3g} million parameters, {width} x {height} pixels, on {models[0].device}"
    return f"<h1>{escape(title)}</h1><p class='quiet'>{escape(facts)}</p>"


def _html(content: str, **place: Any) -> Any:
    """Text in the page's own style, not in gradio's."""
    import gradio as gr

    return gr.HTML(content, apply_default_css=False, **place)


def _note(sentence: str) -> str:
    return f"<p class='note' role='alert'>{escape(sentence)}</p>" if sentence else ""


# ---------------------------------------------------------------- drawing


def _drawing(models: Sequence[Model], guidance: float, note: Any) -> None:
    import gradio as gr

    with gr.Row():
        with gr.Column(scale=2, min_width=330):
            controls = _wish(models[0])
            button = gr.Button("Draw", variant="primary", elem_id="draw-button")
            for number, (model, role) in enumerate(zip(models, _roles(models), strict=True)):
                controls |= _walk(model, role, number, guidance)
        panels = []
        for model, role in zip(models, _roles(models), strict=True):
            with gr.Column(scale=3, min_width=280):
                panels.append(_html(panel(model, role), elem_id=f"{role.lower()}-panel"))
    triggers = [button.click]
    if "prompt" in controls:
        triggers.append(controls["prompt"].submit)
    gr.on(
        triggers,
        drawer(models, tuple(controls)),
        [*controls.values()],
        [note, *panels],
        show_progress_on=panels,
        **ALONE,
    )


def _wish(model: Model) -> dict[str, Any]:
    """What is drawn: the same for both models."""
    import gradio as gr

    found: dict[str, Any] = {}
    with gr.Group():
        if model.takes_text:
            found["prompt"] = gr.Textbox(
                label="Prompt", placeholder="red apple", max_length=LETTERS, elem_id="prompt"
            )
        if model.labels:
            found["label"] = gr.Dropdown(_classes(model, "all, in turn"), label="Class")
        for name, words in model.styles.items():
            found[f"control {name}"] = gr.Dropdown(
                [IN_TURN, *words], value=IN_TURN, label=name.capitalize()
            )
        with gr.Row():
            found["seed"] = gr.Number(
                0, label="Seed", precision=0, minimum=0, min_width=90, elem_id="seed"
            )
            found["count"] = gr.Number(
                4, label="Pictures", precision=0, minimum=1, maximum=PICTURES, min_width=90
            )
    return found


def _walk(model: Model, role: str, number: int, guidance: float) -> dict[str, Any]:
    """How a model is walked: freely, or a student as it was taught to be."""
    import gradio as gr

    found: dict[str, Any] = {}
    walk = model.walk
    with gr.Group():
        _html(f"<h2>{role}</h2>", padding=True)
        if walk is None:
            found["solver"] = gr.Dropdown(
                [*get_args(SolverName)], value=Wanted().solver, label="Solver"
            )
            found["steps"] = gr.Slider(1, STEPS, Wanted().steps, step=1, label="Steps")
            if model.is_guidable:
                top = max(10.0, guidance)
                found["guidance"] = gr.Slider(
                    1, top, guidance, step=0.5, label="Guidance (1: none)"
                )
            return found
        known = sorted(walk.evaluations)
        place: dict[str, Any] = {"label": "Evaluations", "elem_id": f"evaluations-{number}"}
        if len(known) == 1:
            counted = "1 evaluation" if known == [1] else f"{known[0]} evaluations"
            _html(f"<p class='quiet'>{counted}, as it was taught</p>", padding=True)
        elif walk.told and known == [*range(known[0], known[-1] + 1)]:
            slider = gr.Slider(known[0], known[-1], known[-1], step=1, **place)
            found[f"evaluations {number}"] = slider
        else:
            found[f"evaluations {number}"] = gr.Radio(known, value=known[-1], **place)
    return found


def _classes(model: Model, other: str) -> list[tuple[str, int]]:
    return [(other, ANY), *((str(label), label) for label in model.labels)]


def drawer(models: Sequence[Model], names: Sequence[str]) -> Callable[..., Iterator[list[str]]]:
    """What the button does: a note and the panels, anew after each model, the quicker one first."""
    roles = _roles(models)

    def press(*values: Any) -> Iterator[list[str]]:
        found: dict[int, Picture] = {}
        wishes: list[Wanted] = []

        def shown(sentence: str = "") -> list[str]:
            panels = [
                panel(
                    model, role, wishes[n] if n in found else None, found.get(n), _ratio(n, found)
                )
                for n, (model, role) in enumerate(zip(models, roles, strict=True))
            ]
            return [_note(sentence), *panels]

        try:
            wishes += [read_wish(names, values, number) for number in range(len(models))]
            for number in reversed(range(len(models))):
                found[number] = draw(models[number], wishes[number])
                yield shown()
        except UserError as error:
            yield shown(str(error))

    return press


def _ratio(number: int, found: Mapping[int, Picture]) -> float | None:
    """How much faster the student is."""
    return found[0].seconds / found[1].seconds if number and len(found) > 1 else None


def read_wish(names: Sequence[str], values: Sequence[Any], number: int) -> Wanted:
    """The wish of model `number` from the values of the page's controls."""
    given = dict(zip(names, values, strict=True))
    control = tuple(
        f"{name.removeprefix('control ')}={value}"
        for name, value in given.items()
        if name.startswith("control ") and value != IN_TURN
    )
    usual = {name: value for name, value in given.items() if name in Wanted.model_fields}
    label = None if usual.get("label", ANY) == ANY else usual["label"]
    own = {"control": control, "label": label, "evaluations": given.get(f"evaluations {number}")}
    return wanted(**usual | own)


def panel(
    model: Model,
    role: str,
    wish: Wanted | None = None,
    picture: Picture | None = None,
    ratio: float | None = None,
) -> str:
    """A model's pictures with their time, or an empty place for them."""
    head = f"<header><h2>{role}</h2><span class='quiet'>{escape(model.title)}</span></header>"
    if picture is None or wish is None:
        return f"<article class='panel'>{head}{NOTHING}</article>"
    columns = math.ceil(math.sqrt(len(picture.images)))
    said = wish.prompt if model.takes_text else "a sample"
    tiles = "".join(
        _img(image, f"{said}, seed {wish.seed}, number {number}")
        for number, image in enumerate(picture.images)
    )
    count = len(picture.images)
    pictures = "1 picture" if count == 1 else f"{count} pictures"
    faster = f", <b>{ratio:.3g} times</b> as fast" if ratio is not None else ""
    return (
        f"<article class='panel'>{head}<div class='tiles' style='--columns: {columns}'>{tiles}"
        f"</div><p class='time'><b>{picture.seconds:.2f} s</b> for {pictures}{faster}</p>"
        f"<p class='quiet'>{escape(_walked(model, wish, picture))}</p></article>"
    )


def _walked(model: Model, wish: Wanted, picture: Picture) -> str:
    times = "1 evaluation" if picture.evaluations == 1 else f"{picture.evaluations} evaluations"
    if model.walk is not None:
        return f"{times}, {model.walk.method}"
    guided = picture.calls > picture.evaluations
    words = [times, wish.solver]
    if guided:
        words.append(f"guidance {wish.guidance:g}: {picture.calls} calls of the network")
    return ", ".join(words)


def _img(image: Any, text: str) -> str:
    small = " class='small'" if max(image.size) < 256 else ""
    return f"<img{small} alt='{escape(text)}' src='{data_uri(png_of(image))}'>"


# ---------------------------------------------------------------- features


def _features(model: Model, note: Any) -> None:
    import gradio as gr

    with gr.Row():
        with gr.Column(scale=2, min_width=330):
            file = gr.File(
                label=f"Picture ({', '.join(FORMATS)}, up to {MEGABYTES} MB)",
                height=150,
                elem_id="upload",
            )
            with gr.Group():
                known = [*model.reader.known]
                activation = gr.Dropdown(
                    known,
                    value=usual_activation(model),
                    label=f"Activation ({len(known)} in the order of computation)",
                    elem_id="activation",
                )
                level = round(model.reader.sigma(), 2)
                sigma = gr.Slider(
                    0, SIGMA, level, step=0.01, label="Noise level (sigma)", elem_id="sigma"
                )
                told = _told(model)
            button = gr.Button("Look inside", variant="primary", elem_id="look-button")
        with gr.Column(scale=6, min_width=330):
            shown = _html(seen_panel(), elem_id="features-panel")
    gr.on(
        [file.upload, activation.input, sigma.release, button.click],
        looker(model),
        [file, activation, sigma, *told],
        [note, shown],
        show_progress_on=shown,
        trigger_mode="always_last",  # what was chosen while it looked is looked at next
        **ALONE,
    )


def _told(model: Model) -> list[Any]:
    """What the model is told that it sees."""
    import gradio as gr

    if model.takes_text:
        sees = gr.Textbox(
            label="It is told that it sees", placeholder="nothing", max_length=LETTERS
        )
        return [sees]
    if model.labels and model.subject.null is not None:
        return [gr.Dropdown(_classes(model, "no class"), label="It is told that it sees")]
    if model.labels:
        classes = [(str(label), label) for label in model.labels]
        return [gr.Dropdown(classes, label="It is told that it sees class")]
    return []


def looker(model: Model) -> Callable[..., tuple[str, str]]:
    """What the features tab does: a note and the panel."""

    def press(
        file: str | None, activation: str, sigma: float, told: str | int | None = None
    ) -> tuple[str, str]:
        if file is None:
            return _note("give a picture first"), seen_panel()
        prompt = told if isinstance(told, str) else ""
        label = told if isinstance(told, int) and told != ANY else None
        try:
            seen = look(model, open_upload(file), activation, sigma, prompt, label)
        except UserError as error:
            return _note(str(error)), seen_panel()
        return "", seen_panel(seen, activation)

    return press


def seen_panel(seen: Seen | None = None, activation: str = "") -> str:
    """The picture beside its features in colours."""
    if seen is None:
        return f"<article class='panel'>{NOTHING}</article>"
    across, down = seen.components.size
    what = f"{activation} at sigma {seen.sigma:g}, {across} x {down} cells"
    return (
        "<article class='panel'><div class='tiles' style='--columns: 2'>"
        f"<figure>{_img(seen.picture, 'the picture')}<figcaption>as the network takes it"
        f"</figcaption></figure><figure>{_img(seen.components, 'its features in colours')}"
        f"<figcaption>{escape(what)}</figcaption></figure></div>"
        "<p class='quiet'>The first three principal components of the features as red, green and "
        "blue: cells of one colour are alike to the network.</p></article>"
    )
