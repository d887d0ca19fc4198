"""`stillhouse demo` as a visitor meets it: the reference models, served, in a real browser.

Nothing but this machine is asked: the server's connections are watched, and so are the browser's.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

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
def guest(served, tmp_path_factory) -> Iterator[Visitor]:
    if BROWSER is None:
        told = "no chromium: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(told)
    with visitor(tmp_path_factory.mktemp("browser")) as started:
        started.visit(served.url)
        started.wait("document.querySelector('#draw-button')")
        yield started


def pictures(guest: Visitor, panel: str) -> list[int]:
    """The widths of a panel's pictures, as the browser has decoded them."""
    code = f"[...document.querySelectorAll('#{panel} img')].map(i => i.complete && i.naturalWidth)"
    return guest.evaluate(code)


def counted(panel: str) -> str:
    return f"document.querySelectorAll('#{panel} img').length"


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
    guest.click("#look-button")
    guest.wait("!document.querySelector('#note .note')")


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
    guest.visit(served.url)
    guest.wait("document.querySelector('#draw-button')")
    asked = [url for url in guest.requests() if not url.startswith(("data:", "blob:"))]
    assert len(asked) > 5
    assert {url for url in asked if not url.startswith(served.url)} == set()
    guest.evaluate("void fetch('http://127.0.0.2:9/').catch(error => { window.refused = true })")
    guest.wait("window.refused")
    refusals = [event for event in guest.complaints() if "Content Security Policy" in str(event)]
    assert refusals, "the page's policy lets requests out"
    assert "foreign:" not in served.log.read_text()


def test_it_ends_at_ctrl_c_and_forgets_uploads(guest, served):
    """The last test: the server is gone afterwards."""
    assert any(served.temporary.glob("stillhouse-demo-*/*"))
    assert served.end() == 0
    assert not any(served.temporary.glob("stillhouse-demo-*"))
    assert "Traceback" not in served.log.read_text()
