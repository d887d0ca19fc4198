"""The demo without a browser: what it draws, what it reads, what it refuses, where it listens."""

import asyncio
import io
import os
import signal
import socket
import struct
import sys
import zlib
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from stillhouse.cli.demo import main
from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError
from stillhouse.pipelines import prompts
from stillhouse.recipes.demo import looking, page, serving
from stillhouse.recipes.demo.drawing import (
    Model,
    Wanted,
    draw,
    first_guidance,
    load_models,
    wanted,
    warm,
)
from stillhouse.recipes.demo.looking import look, open_upload, usual_activation
from stillhouse.recipes.features.atlas import component_pictures
from stillhouse.recipes.features.reading import Reading, load_model
from stillhouse.recipes.parts import ClassifierFree, Euler, Heun
from stillhouse.recipes.sampling import SampleRun, read_record, run

REFERENCE = Path(__file__).parents[2] / "reference"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def emoji() -> tuple[Model, Model]:
    """A teacher and its student, told by prompts."""
    names = (str(REFERENCE / "emoji"), str(REFERENCE / "emoji-student"))
    teacher, student = load_models(*names, Reading(), CPU)
    assert student is not None
    return teacher, student


@pytest.fixture(scope="module")
def fashion() -> Model:
    """A model of classes, in grey."""
    return Model(str(REFERENCE / "fashion"), Reading(), CPU)


def pixels(images: list[Any]) -> np.ndarray:
    return np.stack([np.asarray(image.convert("RGB")) for image in images])


def sampled(out: Path, **settings: Any) -> np.ndarray:
    """What `stillhouse sample` leaves."""
    run(SampleRun(out=out, device="cpu", **settings))
    return pixels([Image.open(file) for file in sorted((out / "images").glob("*.png"))])


# ---------------------------------------------------------------- drawing


def test_the_teacher_draws_what_sample_draws(emoji, tmp_path):
    wish = Wanted(
        prompt="red apple", control=("style=twemoji",), seed=3, count=2, solver="heun", steps=2,
        guidance=3,
    )  # fmt: skip
    drawn = draw(emoji[0], wish)
    expected = sampled(
        tmp_path, model=emoji[0].name, prompt=("red apple",), control=("style=twemoji",), seed=3,
        count=2, solver=Heun(), steps=2, guidance=ClassifierFree(weight=3),
    )  # fmt: skip
    assert np.array_equal(pixels(drawn.images), expected)
    counted = read_record(tmp_path)["evaluations_per_sample"]
    assert (drawn.evaluations, drawn.calls) == (counted, 2 * counted)  # guidance asks twice
    assert drawn.seconds > 0


@pytest.mark.parametrize(("asked", "evaluations"), [(3, 3), (None, 5)])
def test_the_student_draws_what_sample_draws(emoji, asked, evaluations, tmp_path):
    """The teacher's solver, steps and guidance are not for it."""
    wish = Wanted(prompt="house", evaluations=asked, solver="heun", steps=9, guidance=7)
    drawn = draw(emoji[1], wish)
    expected = sampled(tmp_path, model=emoji[1].name, prompt=("house",), count=1, steps=evaluations)
    assert np.array_equal(pixels(drawn.images), expected)
    assert (drawn.evaluations, drawn.calls) == (evaluations, evaluations)


@pytest.mark.parametrize("labels", [(), (7,)])
def test_classes_are_drawn_as_sample_draws_them(fashion, labels, tmp_path):
    label = labels[0] if labels else None
    drawn = draw(fashion, Wanted(label=label, count=2, steps=2, solver="euler", guidance=2))
    expected = sampled(
        tmp_path, model=fashion.name, labels=labels, count=2, steps=2, solver=Euler(),
        guidance=ClassifierFree(weight=2),
    )  # fmt: skip
    assert np.array_equal(pixels(drawn.images), expected)


def test_a_wish_leaves_nothing_behind(emoji):
    wishes = [Wanted(prompt=word, steps=1) for word in ("red apple", "blue car", "red apple")]
    first, other, again = (pixels(draw(emoji[0], wish).images) for wish in wishes)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_encoders_of_a_pipeline_are_read_once(models, monkeypatch, tmp_path):
    model = Model(str(models["sd15"]), Reading(), CPU)
    warm(model)
    for name in ("_text_half", "_tokenizer"):
        monkeypatch.setattr(prompts, name, lambda *_: pytest.fail("an encoder was read again"))
    wish = Wanted(prompt="red", solver="euler", steps=2, seed=1, guidance=4)
    drawn = draw(model, wish)
    seen = look(model, photo(), usual_activation(model), 0.2, "blue")
    monkeypatch.undo()
    expected = sampled(
        tmp_path, model=model.name, prompt=("red",), count=1, steps=2, seed=1, solver=Euler(),
        guidance=ClassifierFree(weight=4),
    )  # fmt: skip
    assert np.array_equal(pixels(drawn.images), expected)
    expected = atlas_picture(model.name, usual_activation(model), 0.2, prompt=("blue",))
    assert np.array_equal(pixels([seen.components]), expected)


def test_the_page_begins_with_the_guidance_that_the_student_was_taught(emoji):
    assert first_guidance(emoji[1], None) == 3
    assert first_guidance(emoji[1], 5) == 5
    assert first_guidance(None, None) == 1


@pytest.mark.parametrize(
    ("taught", "first"),
    [
        ({"kind": "classifier-free", "weight": 4}, 4),
        ({"kind": "two-term", "weight": 4, "control": 2}, 1),
        ({"kind": "autoguidance", "weight": 4, "model": "other"}, 1),
        (None, 1),
    ],
)
def test_only_classifier_free_weights_are_taken_over(emoji, taught, first):
    student = walking(emoji[1], evaluations=(1,), guidance=taught)
    assert first_guidance(student, None) == first


def test_a_weight_that_no_press_would_take_is_refused_at_the_start():
    assert wanted(guidance=serving.DemoRun(guidance=100).guidance).guidance == 100
    with pytest.raises(ValidationError, match="less than or equal to 100"):
        serving.DemoRun(guidance=100.5)


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"prompt": " "}, "write what to draw"),
        ({"prompt": "x", "evaluations": 9}, "not trained for 9 evaluations"),
        ({"prompt": "x", "control": ("style=mine",)}, "style=mine"),
        ({"prompt": "x", "label": 3}, "no class 3: it knows none"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(emoji, wish, sentence):
    with pytest.raises(UserError, match=sentence):
        draw(emoji[1], wanted(**wish))


@pytest.mark.parametrize(
    "value",
    [
        {"count": 17}, {"count": 0}, {"steps": 101}, {"seed": -1}, {"prompt": "x" * 1001},
        {"solver": "magic"}, {"guidance": float("nan")}, {"steps": None},
    ],
)  # fmt: skip
def test_values_are_bounded(value):
    with pytest.raises(UserError, match=f"^{next(iter(value))} cannot be used: "):
        wanted(**value)


def test_a_student_is_shown_beside_its_own_teacher(emoji):
    teacher, student = emoji
    with pytest.raises(UserError, match="take other prompts"):
        load_models(str(REFERENCE / "fashion"), student.name, Reading(), CPU)
    with pytest.raises(UserError, match="is no few-step student"):
        load_models(teacher.name, teacher.name, Reading(), CPU)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "name a model of images"),
        ("toy:moons", "name a model of images"),
        ("./nowhere", "neither a directory nor a hub id"),
    ],
)
def test_a_model_that_is_none_is_a_sentence(name, sentence):
    with pytest.raises(UserError, match=sentence):
        Model(name, Reading(), CPU)


# ---------------------------------------------------------------- features


def photo() -> Any:
    """Something with shapes in it, of another size than the model's."""
    rows = np.mgrid[0:50, 0:70]
    waves = np.sin(rows[0] / 5) * np.cos(rows[1] / 9)
    colours = np.stack([waves, waves**2, rows[0] / 50], -1)
    return Image.fromarray((127 + 120 * colours).clip(0, 255).astype(np.uint8))


def atlas_picture(name: str, activation: str, sigma: float, **told: Any) -> np.ndarray:
    """What `stillhouse features atlas` shows of the photo."""
    model = load_model(Reading(model=name, **told), CPU)
    (png,) = component_pictures(model, [activation], sigma, [photo()], 0)[activation]
    return pixels([Image.open(io.BytesIO(png))])


@pytest.mark.parametrize("prompt", ["", "green heart"])
def test_features_are_those_of_the_atlas(emoji, prompt):
    activation = "up-level0-repeat1-vit-block0-out"
    seen = look(emoji[0], photo(), activation, 0.5, prompt)
    expected = atlas_picture(emoji[0].name, activation, 0.5, prompt=(prompt,))
    assert np.array_equal(pixels([seen.components]), expected)
    assert seen.components.size == (4, 4)
    assert seen.picture.size == (64, 64)


@pytest.mark.parametrize("label", [None, 4])
def test_features_of_a_model_of_classes(fashion, label):
    activation = usual_activation(fashion)
    seen = look(fashion, photo(), activation, 0.2, label=label)
    expected = atlas_picture(fashion.name, activation, 0.2, label=label)
    assert np.array_equal(pixels([seen.components]), expected)


def test_what_cannot_be_looked_at_is_a_sentence(emoji):
    with pytest.raises(UserError, match="no activation 'up-level9'; close ones are"):
        look(emoji[0], photo(), "up-level9", 0.2)
    with pytest.raises(UserError, match="from 0 to 5"):
        look(emoji[0], photo(), usual_activation(emoji[0]), 80.0)
    with pytest.raises(UserError, match="1001 letters: write at most 1000"):
        look(emoji[0], photo(), usual_activation(emoji[0]), 0.2, "x" * 1001)


# ---------------------------------------------------------------- uploads


def encoded(image: Any, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def claimed(width: int, height: int) -> bytes:
    """A PNG whose header claims this size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [
        chunk(b"IHDR", header),
        chunk(b"IDAT", zlib.compress(b"\0" * 100)),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_read(format, tmp_path):
    (tmp_path / "given").write_bytes(encoded(photo(), format))
    opened = open_upload(tmp_path / "given")
    assert (opened.mode, opened.size) == ("RGB", (70, 50))


def test_photographs_are_turned_upright(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    (tmp_path / "given").write_bytes(encoded(photo(), "JPEG", exif=turned))
    assert open_upload(tmp_path / "given").size == (50, 70)


BAD = {
    "text": (b"no picture at all", "no PNG, JPEG or WebP"),
    "empty": (b"", "no PNG, JPEG or WebP"),
    "gif": (encoded(photo(), "GIF"), "no PNG, JPEG or WebP"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "no PNG, JPEG or WebP"),
    "cut": (encoded(photo(), "PNG")[:-400], "is the file whole"),
    "heavy": (encoded(photo(), "PNG") + b"\0" * 8 * 2**20, "larger than 8 MB"),
    "wide": (claimed(4001, 4000), "4001 x 4000 pixels: make it smaller than 16 million"),
    "doubtful": (claimed(12000, 10000), "12000 x 10000 pixels"),
    "bomb": (claimed(60000, 60000), "far more than 16 million pixels"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.filterwarnings("error")
def test_other_files_are_refused(kind, tmp_path):
    content, sentence = BAD[kind]
    (tmp_path / "given").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        open_upload(tmp_path / "given")


@pytest.mark.parametrize("kind", ["heavy", "wide", "doubtful", "bomb", "gif"])
def test_what_is_refused_is_not_decoded(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(looking, "decode", lambda *_: pytest.fail("it was decoded"))
    (tmp_path / "given").write_bytes(BAD[kind][0])
    with pytest.raises(UserError):
        open_upload(tmp_path / "given")


# ---------------------------------------------------------------- the page


NAMES = ("prompt", "control style", "seed", "count", "solver", "steps", "guidance", "evaluations 1")


def test_the_button_fills_both_panels_the_student_first(emoji):
    press = page.drawer(emoji, NAMES)
    first, last = list(press("<b>cat", "in turn", 0, 2, "euler", 1, 1, 2))
    assert [part.count("<img") for part in first] == [0, 0, 2]
    assert [part.count("<img") for part in last] == [0, 2, 2]
    assert "<b>cat" not in last[1]
    assert "&lt;b&gt;cat, seed 0, number 1" in last[1]
    assert "1 evaluation, euler" in last[1]
    assert "2 evaluations, sfd-v" in last[2]
    assert "as fast" in last[2]
    assert "as fast" not in first[2] + last[1]


def test_a_mistake_on_the_page_is_a_sentence(emoji):
    (shown,) = page.drawer(emoji, NAMES)("", "in turn", 0, 2, "euler", 1, 1, 2)
    assert "role='alert'>write what to draw" in shown[0]
    (shown,) = page.drawer(emoji, NAMES)("x", "in turn", 0, 99, "euler", 1, 1, 2)
    assert "count cannot be used" in shown[0]


def test_a_wish_is_read_from_the_page(emoji):
    wish = page.read_wish(NAMES, ("cat", "noto", 5, 3, "heun", 7, 2.5, 4), 1)
    assert wish == Wanted(
        prompt="cat", control=("style=noto",), seed=5, count=3, solver="heun", steps=7,
        guidance=2.5, evaluations=4,
    )  # fmt: skip
    assert page.read_wish(NAMES, ("cat", "in turn", 5, 3, "heun", 7, 2.5, 4), 0).control == ()
    assert page.read_wish(("label", "count"), (page.ANY, 2), 0).label is None
    assert page.read_wish(("label", "count"), (0, 2), 0).label == 0


def test_a_picture_is_looked_at(emoji, tmp_path):
    photo().save(tmp_path / "photo.png")
    press, activation = page.looker(emoji[0]), usual_activation(emoji[0])
    note, shown = press(str(tmp_path / "photo.png"), activation, 0.2, "cat")
    assert (note, shown.count("<img")) == ("", 2)
    assert f"{activation} at sigma 0.2, 8 x 8 cells" in shown
    assert "give a picture first" in press(None, activation, 0.2, "")[0]
    (tmp_path / "notes").write_text("no picture")
    note, shown = press(str(tmp_path / "notes"), activation, 0.2, "")
    assert "no PNG, JPEG or WebP" in note
    assert "<img" not in shown
    assert "give it again" in press(str(tmp_path / "forgotten.png"), activation, 0.2, "")[0]


def walking(student: Model, **walk: Any) -> Model:
    """The student, had it been taught otherwise."""
    other = copy(student)
    other.reader = copy(student.reader)
    other.reader.subject = replace(student.subject, walk=FewSteps(**walk))
    return other


def controls(models: list[Model], guidance: float = 1.0) -> dict[str, Any]:
    """The page's parts by their labels."""
    built = page.build(models, guidance)
    return {block.label: block for block in built.blocks.values() if getattr(block, "label", None)}


def test_step_conditioned_students_have_a_slider_and_others_their_counts(emoji):
    teacher, student = emoji
    slider = controls([teacher, student])["Evaluations"]
    assert type(slider).__name__ == "Slider"
    assert (slider.minimum, slider.maximum, slider.value) == (2, 5, 5)
    for known in ((1, 2, 3), (1, 2, 4)):
        radio = controls([teacher, walking(student, evaluations=known)])["Evaluations"]
        assert type(radio).__name__ == "Radio"
        assert [value for _, value in radio.choices] == [*known]
    assert "Evaluations" not in controls([teacher, walking(student, evaluations=(1,))])


def test_the_page_offers_what_a_model_takes(emoji, fashion):
    told, classed = controls([emoji[0]], 4.0), controls([fashion])
    assert {"Prompt", "Style"} <= {*told}
    assert "Class" not in told
    assert told["Guidance (1: none)"].value == 4.0
    for words in ("Prompt", "It is told that it sees"):
        assert told[words].max_length == 1000
    assert "Class" in classed
    assert "Prompt" not in classed
    assert [value for _, value in classed["Class"].choices] == [page.ANY, *range(10)]
    assert {"Solver", "Steps"} & {*controls([emoji[1]])} == set()


def test_one_wish_at_a_time_and_none_through_a_public_interface(emoji):
    built = page.build(emoji, 3.0)
    calls = [call for call in built.fns.values() if call.fn is not None]
    assert len(calls) == 2
    assert {(call.concurrency_id, call.concurrency_limit) for call in calls} == {("models", 1)}
    assert {call.api_visibility for call in calls} == {"private"}


def test_files_are_found_wherever_they_are_named():
    inside = {"path": "/a", "url": "http://127.0.0.1/b", "meta": {"_type": "gradio.FileData"}}
    assert page.named_files(["c", 1, None, inside, {"d": [{"path": "e"}]}]) == ["/a", "e"]


def test_uploads_alone_are_uploads(tmp_path):
    (tmp_path / "uploads").mkdir()
    (tmp_path / "secret").touch()
    (tmp_path / "uploads" / "link").symlink_to(tmp_path / "secret")
    inside = tmp_path / "uploads" / "given.png"
    assert page.is_upload(str(inside), tmp_path / "uploads")
    others = [tmp_path / "secret", inside.parent / "../secret", inside.parent / "link"]
    for path in ("https://foreign.example/a.png", "given.png", None, *map(str, others)):
        assert not page.is_upload(path, tmp_path / "uploads")


# ---------------------------------------------------------------- serving


def answers(app: Any, host: str, **request: Any) -> list[dict[str, Any]]:
    """What is sent to a request by this name."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    kind, path = request.pop("type", "http"), request.pop("path", "/")
    headers = [(b"host", host.encode())]
    headers += [(name.replace("_", "-").encode(), word.encode()) for name, word in request.items()]
    asyncio.run(app({"type": kind, "path": path, "headers": headers}, None, send))
    return sent


def answer(app: Any, host: str, **request: Any) -> tuple[int, dict[str, str]]:
    """Its status and headers."""
    first, *_ = answers(app, host, **request)
    return first["status"], {name.decode(): value.decode() for name, value in first["headers"]}


async def hello(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"a", b"b"), (b"Access-Control-Allow-Origin", b"http://other.example")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7860", 200),
        ("localhost", 200),
        ("[::1]:7860", 200),
        ("evil.example:7860", 400),
        ("127.0.0.1.evil.example", 400),
        ("[", 400),
        ("", 400),
    ],
)
def test_a_local_demo_answers_to_its_own_names_alone(host, status):
    local = serving.Guarded(hello, serving.names_of("127.0.0.1"))
    assert answer(local, host)[0] == status
    assert answer(serving.Guarded(hello, serving.names_of("0.0.0.0")), host)[0] == 200


UPLOAD = "/gradio_api/upload"


@pytest.mark.parametrize("listening", ["127.0.0.1", "127.0.0.2", "::1", "0.0.0.0"])
@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"path": UPLOAD}, 200),
        ({"path": UPLOAD, "origin": "http://HERE:7860", "sec_fetch_site": "same-origin"}, 200),
        ({"path": UPLOAD, "origin": "http://evil.example"}, 400),
        ({"path": UPLOAD, "origin": "http://127.0.0.1.evil.example:7860"}, 400),
        ({"path": UPLOAD, "origin": "null"}, 400),
        ({"path": UPLOAD, "origin": ""}, 400),
        ({"path": UPLOAD, "sec_fetch_site": "cross-site"}, 400),
        ({"path": UPLOAD, "sec_fetch_site": "same-site"}, 400),
        ({"path": "/", "sec_fetch_site": "cross-site"}, 200),
        ({"path": "/", "sec_fetch_site": "cross-site", "origin": "http://evil.example"}, 400),
        ({"path": "/gradio_api/file=https://foreign.example/a"}, 400),
        ({"path": "/gradio_api/file/http://foreign.example/a"}, 400),
        ({"path": "/gradio_api/proxy=foreign.hf.space"}, 400),
        ({"path": "/gradio_api/file=/uploads/a.png"}, 200),
    ],
)
def test_a_demo_answers_to_its_own_page_alone(listening, asked, status):
    here = "[::1]" if listening == "::1" else listening
    request = {name: word.replace("HERE", here) for name, word in asked.items()}
    app = serving.Guarded(hello, serving.names_of(listening))
    assert answer(app, f"{here}:7860", **request)[0] == status
    first, *_ = answers(app, f"{here}:7860", type="websocket", **request)
    assert (first["type"] == "websocket.close") == (status == 400)


def test_no_other_origin_may_read_an_answer():
    app = serving.Guarded(hello, serving.names_of("127.0.0.2"))
    _, headers = answer(app, "127.0.0.2:7860", origin="http://127.0.0.2:9")
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_answers_carry_the_policy():
    _, headers = answer(serving.Guarded(hello, None), "x")
    assert headers["a"] == "b"
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "http" not in headers["content-security-policy"]


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("192.168.1.7", False), ("box.example", False),
    ],
)  # fmt: skip
def test_only_loopback_is_local(host, local):
    assert serving.is_local(host) is local


def test_it_listens_on_this_machine_alone_by_default():
    config = serving.DemoRun(port=0)
    with serving.listen(config.host, config.port) as place:
        assert place.getsockname()[0] == "127.0.0.1"
        assert serving.address(place) == f"http://127.0.0.1:{place.getsockname()[1]}"


def test_a_port_that_is_taken_is_a_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be listened on .*--port"):
            serving.listen("127.0.0.1", port)


@pytest.fixture
def unserved(monkeypatch) -> list[str]:
    """Addresses that would have been served, without models and without waiting."""
    places: list[str] = []
    for name in ("GRADIO_ANALYTICS_ENABLED", "HF_HUB_DISABLE_TELEMETRY", "GRADIO_TEMP_DIR"):
        monkeypatch.setenv(name, "True")
    monkeypatch.setattr(serving, "load_models", lambda *_: (None, None))
    monkeypatch.setattr(serving, "make_app", lambda *_: None)
    monkeypatch.setattr(serving, "serve", lambda _, place: places.append(serving.address(place)))
    return places


def test_sigterm_is_an_interrupt_while_it_runs():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), serving.interrupted_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_hosts_are_warned_of(unserved, capsys):
    main(["model", "--port", "0"])
    assert capsys.readouterr().err == ""
    main(["model", "--port", "0", "--host", "0.0.0.0"])
    told = capsys.readouterr()
    assert "everyone who can reach 0.0.0.0 can use this page" in told.err
    assert [place.rsplit(":", 1)[0] for place in unserved] == ["http://127.0.0.1", "http://0.0.0.0"]
    assert unserved[0] not in told.out
    assert unserved[1] in told.out


def test_without_gradio_there_is_the_line_to_run(unserved, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[demo\]'"):
        main(["model"])
    assert unserved == []


def test_telemetry_is_off_before_gradio_is_read(unserved, tmp_path):
    serving.import_gradio(tmp_path)
    from gradio.analytics import analytics_enabled

    assert not analytics_enabled()
    assert os.environ["GRADIO_TEMP_DIR"] == str(tmp_path)
    look = page.theme()
    assert (look._stylesheets, look._font_css) == ([], [])  # no font is fetched
