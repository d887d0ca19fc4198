"""`stillhouse demo` as a visitor meets it: the reference models, served, in a real browser.

Nothing but this machine is asked: the server's connections are watched, and so are the browser's.
"""

import json
import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli.visitor import BROWSER, Served, Visitor, visitor
from PIL import Image

ROOT = Path(__file__).parents[2]
MODELS = [str(ROOT / "reference" / name) for name in ("emoji", "emoji-student")]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    started = Served(tmp_path_factory.mktemp("served"), *MODELS)
    yield started
    started.end()


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Visitor]:
    if BROWSER is None:
        told = "no chromium: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(told)
    with visitor(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def guest(browser, served) -> Visitor:
    """Before a fresh page."""
    browser.visit(served.url)
    browser.wait("document.readyState === 'complete' && document.querySelector('#draw-button')")
    return browser


def pictures(guest: Visitor, panel: str) -> list[int]:
    """The widths of a panel's pictures, as the browser has decoded them."""
    code = f"[...document.querySelectorAll('#{panel} img')].map(i => i.complete && i.naturalWidth)"
    return guest.evaluate(code)


def counted(panel: str) -> str:
    """The pictures that the browser is done with."""
    return f"[...document.querySelectorAll('#{panel} img')].filter(i => i.complete).length"


def give(guest: Visitor, file: Path) -> None:
    """A file in place of the one before."""
    guest.open_tab("Features")
    guest.evaluate("document.querySelector('#upload button[aria-label=Clear]')?.click()")
    guest.wait("document.querySelector('#upload input[type=file]')")
    guest.upload("#upload input[type=file]", file)


def test_a_prompt_gives_pictures_of_both_with_their_times(guest):
    guest.open_tab("Draw")
    guest.write("#prompt :is(input, textarea)", "red apple")
    guest.click("#draw-button")
    guest.wait(f"{counted('teacher-panel')} === 4 && {counted('student-panel')} === 4")
    assert pictures(guest, "teacher-panel") == [64] * 4
    assert pictures(guest, "student-panel") == [64] * 4
    teacher, student = guest.text("#teacher-panel"), guest.text("#student-panel")
    assert re.search(r"\d+\.\d\d s for 4 pictures\n", teacher)
    assert "20 evaluations, dpmpp-3m, guidance 3: 40 calls of the network" in teacher
    assert re.search(r"\d+\.\d\d s for 4 pictures, [\d.]+ times as fast", student)
    assert "5 evaluations, sfd-v" in student


def test_the_slider_of_a_student_offers_what_it_knows(guest):
    guest.open_tab("Draw")
    ends = "(s => [s.min, s.max].join())(document.querySelector('#evaluations-1 [type=range]'))"
    assert guest.evaluate(ends) == "2,5"
    guest.write("#prompt :is(input, textarea)", "house")
    guest.write("#evaluations-1 input[type=number]", "2")
    guest.evaluate("document.activeElement.blur()")
    guest.click("#draw-button")
    guest.wait("document.querySelector('#student-panel').innerText.includes('2 evaluations')")


def test_a_picture_is_seen_by_its_features(guest, tmp_path):
    Image.radial_gradient("L").convert("RGB").save(tmp_path / "photo.jpg")
    give(guest, tmp_path / "photo.jpg")
    guest.wait(f"{counted('features-panel')} === 2")
    assert pictures(guest, "features-panel") == [64, 8]
    assert "up-level1-repeat1-res-out at sigma 0.2, 8 x 8 cells" in guest.text("#features-panel")
    guest.write("#sigma input[type=number]", "0.5")
    guest.click("#look-button")
    guest.wait("document.querySelector('#features-panel').innerText.includes('at sigma 0.5,')")
    assert guest.text("#note").strip() == ""


def test_a_wrong_file_is_answered_in_a_sentence(guest, tmp_path):
    (tmp_path / "notes.txt").write_text("no picture")
    give(guest, tmp_path / "notes.txt")
    guest.wait("document.querySelector('#note .note')")
    assert guest.text("#note").strip() == (
        "the file is no PNG, JPEG or WebP picture: give one of these"
    )
    assert pictures(guest, "features-panel") == []


def test_a_file_that_is_too_large_is_answered_in_a_sentence(guest, served, tmp_path):
    (tmp_path / "large.png").write_bytes(bytes(8 * 2**20 + 1))
    give(guest, tmp_path / "large.png")
    guest.wait("document.querySelector('[data-testid=toast-body]')")
    assert "exceed the maximum allowed size of 8.0 Mb" in guest.text("[data-testid=toast-body]")
    # Nor is it kept where a browser does not look at its size.
    files = {"files": (tmp_path / "large.png").open("rb")}
    assert httpx.post(f"{served.url}/gradio_api/upload", files=files).status_code == 413


def test_nothing_is_asked_of_others(guest, served):
    asked = [url for url in guest.requests() if not url.startswith(("data:", "blob:"))]
    assert len(asked) > 5
    assert {url for url in asked if not url.startswith(served.url)} == set()
    guest.evaluate("void fetch('http://127.0.0.2:9/').catch(error => { window.refused = true })")
    guest.wait("window.refused")
    refusals = [event for event in guest.complaints() if "Content Security Policy" in str(event)]
    assert refusals, "the page's policy lets requests out"
    assert "foreign:" not in served.log.read_text()


# ---------------------------------------------------------------- without a browser


def uploaded(url: str, file: Path) -> Path:
    """Where the demo keeps a file that it is given."""
    with file.open("rb") as content:
        (path,) = httpx.post(f"{url}/gradio_api/upload", files={"files": content}).json()
    return Path(path)


def named(path: str | Path) -> dict[str, Any]:
    """A file as gradio's pages name it."""
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}}


def looked_at(url: str, file: Any, words: Any = "") -> str:
    """What the features tab is answered, as JSON."""
    config = httpx.get(f"{url}/config").json()
    (place,) = (c["id"] for c in config["components"] if c["props"].get("elem_id") == "upload")
    (look,) = (d for d in config["dependencies"] if place in d["inputs"])
    session, activation = uuid.uuid4().hex, "up-level1-repeat1-res-out"
    wish = {"fn_index": look["id"], "session_hash": session, "trigger_id": place}
    wish["data"] = [file, activation, 0.2, words]
    httpx.post(f"{url}/gradio_api/queue/join", json=wish).raise_for_status()
    asked = f"{url}/gradio_api/queue/data?session_hash={session}"
    with httpx.stream("GET", asked, timeout=60) as answer:
        for line in answer.iter_lines():
            if "process_completed" in line:
                return json.dumps(json.loads(line.removeprefix("data:"))["output"])
    pytest.fail("the demo did not answer")


@pytest.fixture
def photo(tmp_path) -> Path:
    Image.radial_gradient("L").convert("RGB").save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.parametrize(
    "path",
    ["file=https://foreign.example/a.png", "file/https://foreign.example/a.png",
     "file=https:%2F%2Fforeign.example/a.png", "proxy=https://foreign.hf.space/a.png"],
)  # fmt: skip
def test_no_address_is_fetched(served, path):
    status = httpx.get(f"{served.url}/gradio_api/{path}", timeout=60).status_code
    assert "foreign:" not in served.log.read_text()
    assert status == 400


def test_no_file_of_this_machine_is_given_out(served, photo):
    kept = uploaded(served.url, photo)
    for path, status in ((kept, 200), (photo, 403), (ROOT / "pyproject.toml", 403)):
        assert httpx.get(f"{served.url}/gradio_api/file={path}").status_code == status


@pytest.mark.parametrize("other", ["address", "local file"])
@pytest.mark.parametrize("control", ["picture", "words"])
def test_no_control_takes_a_file_that_was_not_uploaded(served, photo, other, control):
    given = named("https://foreign.example/a.png" if other == "address" else photo)
    if control == "picture":
        answer = looked_at(served.url, given)
    else:
        answer = looked_at(served.url, named(uploaded(served.url, photo)), given)
    assert "foreign:" not in served.log.read_text()
    assert "this file was not uploaded" in answer
    assert "<img" not in answer
    assert "Traceback" not in served.log.read_text()


def test_an_upload_that_was_forgotten_is_asked_for_again(served, photo):
    kept = uploaded(served.url, photo)
    assert "<img" in looked_at(served.url, named(kept))
    kept.unlink()
    assert "give it again" in looked_at(served.url, named(kept))


def test_other_pages_are_not_answered(served, photo):
    with photo.open("rb") as content:
        answer = httpx.post(
            f"{served.url}/gradio_api/upload",
            files={"files": content},
            headers={"Origin": "http://evil.example"},
        )
    assert answer.status_code == 400


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_told_to_and_forgets_uploads(kind, photo, tmp_path):
    (tmp_path / "served").mkdir()
    served = Served(tmp_path / "served", str(ROOT / "reference" / "fashion"), fresh=False)
    try:
        file = uploaded(served.url, photo)
        assert file.is_file()
        assert file.is_relative_to(served.temporary)
    finally:
        ended = served.end(kind)
    assert ended == 0
    assert not any(served.temporary.glob("stillhouse-demo-*"))
    assert "Traceback" not in served.log.read_text()
