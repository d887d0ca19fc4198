"""`stillhouse report`: the page as files, and as a real browser shows it."""

import base64
import io
import json
import math
import os
import random
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stillhouse.cli.report import main
from stillhouse.errors import UserError
from stillhouse.recipes.report import report as reporting
from stillhouse.recipes.report.report import report

EDGES = [0.002 * (80 / 0.002) ** (k / 12) for k in range(13)]
EVIL = "</script><script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"


# ---------------------------------------------------------------- a run


def png(seed: int, noise: float = 0.5) -> bytes:
    """A grid of blobs under noise."""
    random_numbers = np.random.default_rng(seed)
    wave = np.sin(np.arange(8 * 34) / 34 * math.pi) ** 2
    picture = np.stack([np.outer(wave, wave) * c for c in (0.9, 0.6, 0.3)], -1)
    picture = (1 - noise) * picture + noise * random_numbers.random(picture.shape)
    content = io.BytesIO()
    Image.fromarray((255 * picture).astype(np.uint8)).save(content, format="PNG")
    return content.getvalue()


def levels(progress: float, dice: random.Random) -> dict[str, Any]:
    centres = [math.sqrt(a * b) for a, b in pairwise(EDGES)]
    losses = [
        (0.05 + 0.9 / (1 + 40 * progress) + 0.3 * math.log10(c / 0.5) ** 2 / (1 + 3 * progress))
        * math.exp(dice.gauss(0, 0.06))
        for c in centres
    ]
    return {"edges": EDGES, "loss": [None if dice.random() < 0.05 else loss for loss in losses]}


def numbers(progress: float, networks: tuple[str, ...], dice: random.Random) -> dict[str, Any]:
    line: dict[str, Any] = {
        "images_per_second": 410 + dice.gauss(0, 12) - (190 if 0.5 < progress < 0.55 else 0),
        "data_wait": min(1, abs(dice.gauss(0.03, 0.02)) + (0.45 if 0.5 < progress < 0.55 else 0)),
        "memory_gb": 3.2 + 0.4 * (progress > 0.1),
        "levels": levels(progress, dice),
        "coupling/distance": 40.1 + dice.gauss(0, 0.2) - 3 * progress,
        "coupling/seconds": 0.012 + abs(dice.gauss(0, 0.001)),
    }
    for i, name in enumerate(networks):
        fall = 0.06 * (i + 1) + 0.9 * math.exp(-60 * progress) + 0.12 * math.exp(-4 * progress)
        line[f"{name}/loss"] = fall * math.exp(dice.gauss(0, 0.09))
        line[f"{name}/gradient_norm"] = (0.3 + 4 * math.exp(-30 * progress)) * math.exp(
            dice.gauss(0, 0.3)
        )
        line[f"{name}/lr"] = (
            2e-4 / (i + 1) * min(1, progress * 20) * (0.5 + 0.5 * math.cos(3 * progress))
        )
    return line


def evaluation(progress: float, first: bool) -> dict[str, Any]:
    line = {
        "evaluation/FD-MobileNetV2": 40 + 500 / (1 + 9 * progress),
        "evaluation/KD-MobileNetV2": 0.4 / (1 + 9 * progress) - 0.001,
        "evaluation/count": 1024,
    }
    about = {
        "reference": "fashion:test",
        "reference_count": 10_000,
        "count": 1024,
        "drawing": "dpmpp-3m, 10 steps, seed 0",
        "floor": {"FD-MobileNetV2": 38.5, "KD-MobileNetV2": -0.0002},
        "floor_count": 1024,
        "notes": ["features are MobileNetV2's: these distances are not FID or KID"],
    }
    return line | ({"evaluation/about": about} if first else {})


def make_run(
    folder: Path, *, networks: tuple[str, ...] = ("denoiser",), total: int = 300_000
) -> Path:
    """Two thirds of a run of about 300 lines, with restarts, skips, faults and a torn end."""
    dice = random.Random(0)
    (folder / "samples").mkdir(parents=True)
    start = {"started": "2026-03-01T09:30:12+00:00", "world": 2, "device": "cpu"}
    lines: list[dict[str, Any]] = [{"images": 0, "session": start}]
    images = 0
    for step in range(1, 241):
        images, progress = 832 * step, step / 240
        lines.append({"images": images, **numbers(progress, networks, dice)})
        if step % 80 == 0:
            lines.append({"images": images, "checkpoint": images})
        if step % 12 == 0:
            loss = 0.08 + 0.9 * math.exp(-60 * progress) + 0.12 * math.exp(-3 * progress)
            line = {"validation/loss": loss, "validation/levels": levels(progress, dice)}
            lines.append({"images": images, **line})
        if step % 20 == 0:
            name = f"samples/images-{images:012d}.png"
            (folder / name).write_bytes(png(step, 0.85 * (1 - progress)))
            lines.append({"images": images, "samples": name})
        if step % 60 == 0:
            metrics = {"fid": 180 / (1 + 4 * progress), "kid": 0.2 / (1 + 9 * progress)}
            lines.append({"images": images, "metrics": metrics})
            lines.append({"images": images, **evaluation(progress, first=step == 60)})
        if step in (90, 170):
            lines.append({"images": images, "session": {**start, "world": 1}})
        if step in (30, 31, 200):
            skip = {"skipped": networks[0], "loss": None, "gradient_norm": None}
            lines.append({"images": images, **skip, "ids": list(range(step, step + 40))})
    lines.append(
        {"images": images, "faults": 2, "fault_examples": ["a.jpg: truncated", "b.jpg: empty"]}
    )
    lines.append(
        {"images": images, "message": "the checkpoint at 99840 images is passed over: torn"}
    )
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"images": 200000, "denoi'
    (folder / "log.jsonl").write_text(text)
    (folder / "run.json").write_text(json.dumps(facts(total)))
    return folder


def facts(total: int) -> dict[str, Any]:
    return {
        "config": {
            "images": total,
            "loader": {"batch": 64, "seed": 0, "workers": None},
            "objective": {"kind": "denoising", "weighting": {"kind": "edm", "sigma_data": 0.5}},
            "data": {"source": {"kind": "folder", "path": "pictures"}, "sizes": [32, 32]},
            "note": EVIL,
        },
        "network": {"parameters": 1_900_000, "layers": 12},
        "versions": {"torch": "2.13.0", "stillhouse": "0.1.0"},
    }


def write_run(folder: Path, lines: list[Any], about: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps(about or {}))
    return folder


def page(folder: Path) -> str:
    return report(folder).read_text("utf-8")


def readouts(text: str) -> dict[str, dict[str, Any]]:
    """Every chart's data by its title; of a pair the linear one."""
    found = re.findall(r'<figcaption>(.*?)</figcaption>.*?data-chart="([^"]+)"', text, re.DOTALL)
    data = [(title, json.loads(content.replace("&quot;", '"'))) for title, content in found]
    return dict(reversed(data))


# ---------------------------------------------------------------- the file


def test_every_number_of_the_log_has_its_chart(tmp_path):
    text = page(make_run(tmp_path / "run"))
    assert {*readouts(text)} == {
        "denoiser loss", "validation loss", "training", "validation", "learning rate",
        "gradient norm", "images per second", "share of time waiting for data", "memory, GB",
        "distance", "seconds", "fid", "kid", "FD-MobileNetV2", "KD-MobileNetV2",
    }  # fmt: skip
    assert "at 199,680 of 300,000 images" in text
    assert "1.9M" in text


def test_numbers_of_a_distillation_are_told_in_words(tmp_path):
    lines = [{"images": 64 * i, "timestamps5/step1": 0.1 / i} for i in range(1, 4)]
    text = page(write_run(tmp_path / "run", lines))
    assert ">Timestamps 5<" in text
    assert "step 1" in readouts(text)


def test_charts_hold_the_log_s_values(tmp_path):
    folder = make_run(tmp_path / "run")
    lines = [json.loads(text) for text in (folder / "log.jsonl").read_text().splitlines()[:-1]]
    drawn = readouts(page(folder))["denoiser loss"]["series"]
    logged = [(n["images"], n["denoiser/loss"]) for n in lines if "denoiser/loss" in n]
    each = next(s for s in drawn if s["name"] == "each line")
    assert each["points"] == [[x, pytest.approx(y, rel=1e-4)] for x, y in logged]


def test_an_evaluation_is_a_curve_above_what_real_images_get(tmp_path):
    text = page(make_run(tmp_path / "run"))
    value, floor = readouts(text)["FD-MobileNetV2"]["series"]
    assert value["points"] == [
        [images, pytest.approx(40 + 500 / (1 + 9 * images / 199_680), rel=1e-3)]
        for images in (49_920, 99_840, 149_760, 199_680)
    ]
    assert (floor["name"], floor["points"]) == ("real / real", [[0, 38.5], [199_680, 38.5]])
    assert "these distances are not FID or KID" in text
    assert "1024 samples (dpmpp-3m, 10 steps, seed 0) against 10000 images of fashion:test" in text
    assert "<dd>real / real 38.5</dd>" in text
    assert "count" not in readouts(text)


def test_a_count_that_changed_is_told(tmp_path):
    lines = [{"images": n, "evaluation/FID": 9.0, "evaluation/count": 64 * n} for n in (1, 2)]
    text = page(write_run(tmp_path, lines))
    (line,) = readouts(text)["FID"]["series"]  # no floor was logged
    assert line["points"] == [[1, 9.0], [2, 9.0]]
    assert "The number of samples has changed (64, 128)" in text


def test_a_finished_run_says_so(tmp_path):
    lines = [{"images": 500, "net/loss": 1.0}, {"images": 1000, "net/loss": 0.5}]
    text = page(write_run(tmp_path, lines, {"config": {"images": 1000}}))
    assert "finished at 1,000 images" in text
    assert "progressbar" not in text


def test_training_time_is_the_sum_of_the_laps(tmp_path):
    lines = [
        {"images": 0, "session": {"world": 1}},
        {"images": 36_000, "images_per_second": 10.0},
        {"images": 72_000, "images_per_second": 5.0},
    ]
    assert "3 h 0 min" in page(write_run(tmp_path, lines))


def test_of_images_gone_over_again_the_later_try_counts(tmp_path):
    lines = [{"images": 100 * i, "net/loss": 1.0} for i in range(1, 5)]
    lines += [{"images": 200, "session": {}}, {"images": 300, "net/loss": 2.0}]
    (line,) = readouts(page(write_run(tmp_path, lines)))["net loss"]["series"]
    assert line["points"] == [[100, 1.0], [200, 1.0], [300, 2.0]]


def test_noise_levels_are_means_at_the_middle_of_their_edges(tmp_path):
    lines = [
        {"images": 10, "levels": {"edges": [0, 1, 4, 16], "loss": [0.5, 0.25, None]}},
        {"images": 20, "levels": {"edges": [0, 1, 4, 16], "loss": [0.4, 0.2, 0.1]}},
        {"images": 5, "levels": {"edges": [1, 2], "loss": "broken"}},
    ]
    series = readouts(page(write_run(tmp_path, lines)))["training"]["series"]
    assert [(s["name"], s["look"], s["points"]) for s in series] == [
        ("10 images", "m0", [[1, 0.5], [2, 0.25]]),
        ("20 images", "m5", [[1, 0.4], [2, 0.2], [8, 0.1]]),
    ]


def test_broken_lines_and_values_are_passed_over(tmp_path):
    folder = write_run(tmp_path, [{"images": 1, "net/loss": 0.5}])
    broken = [
        "[1]", "17", "{}", '{"images": "many"}', "\x00\xff", '{"images": 2, "net/loss": NaN}',
        '{"images": 3, "net/loss": 1e999, "a": true, "levels": 3, "samples": 4, "metrics": [1]}',
        '{"images": 4, "skipped": null, "ids": 5, "session": "now", "faults": "all"}',
        '{"images": 5, "message": "half \\ud800", "levels": {"edges": [], "loss": []}}',
        f'{{"images": 6, "net/loss": {10**400}}}', '{"images": 7, "torn',
    ]  # fmt: skip
    with (folder / "log.jsonl").open("a", encoding="latin-1") as log:
        log.write("\n".join(broken))
    text = page(folder)
    (line,) = readouts(text)["net loss"]["series"]
    assert line["points"] == [[1, 0.5]]
    assert "cannot be read: 6" in text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(EVIL),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(
    ["a/loss", "a/lr", "a/gradient_norm", "validation/loss", "images_per_second", "memory_gb", "b",
     "levels", "validation/levels", "samples", "skipped", "ids", "session", "message", "faults",
     "fault_examples", "metrics", "checkpoint", "c/d", "evaluation/a", "evaluation/about",
     "evaluation/count"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(keys, values), min_size=1, max_size=6),
    st.lists(st.integers(0, 10**12), min_size=6, max_size=6),
    st.dictionaries(st.sampled_from(["config", "network", "versions", "more"]), values),
)
def test_any_values_make_a_page(tmp_path_factory, lines, images, about):
    told = [{"images": n, **line} for n, line in zip(images, lines, strict=False)]
    text = page(write_run(tmp_path_factory.mktemp("run"), told, about))
    assert text.count("<script") == text.count("</script") == 1
    assert "<img" not in text


def test_what_comes_from_files_is_text(tmp_path):
    """In names, values, messages, ids and the folder's own name."""
    folder = tmp_path / "<b onclick=alert(1)>"
    lines = [
        {"images": 1, f"{EVIL}/loss": 1.0, f"x/{EVIL}": 1.0, EVIL: 2.0, "metrics": {EVIL: 1.0}},
        {"images": 1, "session": {"world": EVIL, "device": EVIL, "started": EVIL}},
        {"images": 1, "session": {"world": EVIL}},
        {
            "images": 1,
            f"evaluation/{EVIL}": 1.0,
            "evaluation/about": {"notes": [EVIL], "count": EVIL},
        },
        {"images": 1, "skipped": EVIL, "loss": EVIL, "ids": [EVIL]},
        {"images": 1, "message": EVIL, "faults": EVIL, "fault_examples": [EVIL], "samples": EVIL},
    ]
    text = page(write_run(folder, lines, {EVIL: {EVIL: EVIL}, "network": {"kind": EVIL}}))
    assert "window.hurt" in text
    assert text.count("<script") == text.count("</script") == 1
    assert "<img" not in text
    assert "<b " not in text


@pytest.mark.parametrize(
    "how", ["../secret.png", "absolute", "own absolute", "link", "not a png", "missing"]
)
def test_pictures_outside_the_run_are_refused(tmp_path, how):
    folder, secret = tmp_path / "run", tmp_path / "secret.png"
    (folder / "samples").mkdir(parents=True)
    secret.write_bytes(png(1))
    (folder / "samples/own.png").write_bytes(png(2))
    (folder / "samples/link.png").symlink_to(secret)
    (folder / "samples/text.png").write_text("key = 17, and some more words than a header has")
    name = {
        "absolute": str(secret),
        "own absolute": str(folder / "samples/own.png"),
        "link": "samples/link.png",
        "not a png": "samples/text.png",
    }
    write_run(folder, [{"images": 1, "samples": name.get(how, how)}])
    text = page(folder)
    assert "data:image" not in text
    assert "is no PNG in the run&#x27;s folder" in text


def test_grids_are_chosen_evenly_with_both_ends(tmp_path):
    (tmp_path / "samples").mkdir()
    lines, picture = [], png(0)
    for i in range(100):
        (tmp_path / f"samples/{i}.png").write_bytes(picture)
        lines.append({"images": i, "samples": f"samples/{i}.png"})
    shown = re.findall(r'data-told="after (\d+) images"', page(write_run(tmp_path, lines)))
    places = [int(n) for n in shown]
    assert len(places) == 40
    assert (places[0], places[-1]) == (0, 99)
    assert {b - a for a, b in pairwise(places)} <= {2, 3}


def test_large_grids_are_fewer(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run")
    sizes = sum(file.stat().st_size for file in (folder / "samples").iterdir())
    monkeypatch.setattr(reporting, "GRID_BYTES", sizes // 2)
    text = page(folder)
    assert 2 <= text.count("<img") <= 7
    assert 'data-told="after 16,640 images"' in text
    assert 'data-told="after 199,680 images"' in text


@pytest.mark.slow
def test_a_long_log_makes_a_page_of_a_few_megabytes(tmp_path):
    dice = random.Random(0)
    rows = [numbers(i / 200, ("student", "score"), dice) for i in range(200)]
    plain = [{key: row[key] for key in row if key != "levels"} for row in rows]
    texts = [json.dumps(row)[1:] for row in plain]
    texts[0] = json.dumps(rows[100])[1:]
    write_run(tmp_path, [])
    log = "\n".join(f'{{"images": {64 * i}, {texts[i % 200]}' for i in range(100_000))
    (tmp_path / "log.jsonl").write_text(log)
    assert report(tmp_path).stat().st_size < 3_000_000


def test_no_address_in_the_page(tmp_path):
    text = page(make_run(tmp_path / "run"))
    assert not re.search(r"https?:|//[a-z]", text.partition("<body>")[0])
    assert {*re.findall(r'(?:src|href)="([^"]{1,5})', text)} <= {
        "data:",
        *(f"#at-{i}" for i in range(20)),
    }
    assert "url(" not in text
    assert "@import" not in text


# ---------------------------------------------------------------- the command


def test_the_command_prints_where_the_page_is(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [{"images": 1, "net/loss": 0.5}])
    main([str(folder)])
    main([str(folder), "--out", str(tmp_path / "pages/one.html")])
    paths = capsys.readouterr().out.split()
    assert paths == [str(folder / "report.html"), str(tmp_path / "pages/one.html")]
    assert Path(paths[0]).read_bytes() == Path(paths[1]).read_bytes()


@pytest.mark.parametrize("missing", ["run.json", "log.jsonl", "folder"])
def test_a_folder_without_a_run_is_a_sentence(tmp_path, missing):
    folder = write_run(tmp_path / "run", [{"images": 1}])
    (shutil.rmtree if missing == "folder" else Path.unlink)(folder / missing.replace("folder", ""))
    with pytest.raises(UserError, match=r"give the one that holds its run\.json and log\.jsonl"):
        report(folder)


def test_an_empty_log_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="try again once training has begun to log"):
        report(write_run(tmp_path, []))


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    folder = write_run(tmp_path / "run", [{"images": 1}])
    with pytest.raises(UserError, match="choose another --out"):
        report(folder, folder / "log.jsonl" / "page.html")


# ---------------------------------------------------------------- the browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        told = "no chromium: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(told)
    started = Browser(program, tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    return report(make_run(tmp_path_factory.mktemp("runs") / "cifar10-dit"))


SHOWN = "[...document.querySelectorAll('.samples img')].filter(i => i.checkVisibility())"


def shown(browser: Browser) -> list[str]:
    """The pictures on the page, by their texts."""
    return browser.evaluate(f"{SHOWN}.map(i => i.naturalWidth > 200 && i.alt)")


def test_the_page_is_quiet_and_asks_for_nothing(browser, drawn):
    browser.open(drawn)
    browser.evaluate("scrollTo(0, document.body.scrollHeight)")
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [drawn.as_uri()]
    assert browser.evaluate("window.hurt === undefined && document.scripts.length === 1")
    assert browser.evaluate("document.querySelector('.facts').textContent.includes('window.hurt')")


def test_a_script_that_slipped_in_would_not_run(browser, drawn, tmp_path):
    """The policy is a second lock: here the first one is forced."""
    forced = tmp_path / "forced.html"
    forced.write_text(drawn.read_text().replace("<main>", f"<main>{EVIL}"))
    browser.open(forced)
    assert browser.evaluate("document.scripts.length") == 2
    assert browser.evaluate("window.hurt === undefined")
    assert browser.complaints()


def test_the_slider_steps_through_the_samples(browser, drawn):
    browser.open(drawn)
    assert shown(browser) == ["Samples after 199,680 images"]
    browser.press("ArrowLeft")
    assert shown(browser) == ["Samples after 183,040 images"]
    browser.evaluate("document.querySelector('#moment').focus()")
    browser.press("ArrowLeft")
    assert shown(browser) == ["Samples after 166,400 images"]
    assert (
        browser.evaluate("document.querySelector('.samples output').textContent")
        == "after 166,400 images"
    )
    file = drawn.parent / "samples/images-000000166400.png"
    source = browser.evaluate(f"{SHOWN}[0].src")
    assert base64.b64decode(source.partition(",")[2]) == file.read_bytes()


def test_without_scripts_the_last_samples_are_there(browser, drawn):
    browser.open(drawn, scripts=False)
    assert shown(browser) == ["Samples after 199,680 images"]
    assert not browser.evaluate("document.querySelector('#moment').checkVisibility()")


def test_the_readout_tells_the_nearest_point(browser, drawn):
    browser.open(drawn)
    chart = "document.querySelector('svg[aria-label^=distance]')"
    browser.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
    box = json.loads(browser.evaluate(f"JSON.stringify({chart}.getBoundingClientRect())"))
    browser.point(box["left"] + 0.25 * box["width"], box["top"] + 80)
    told = browser.evaluate("document.querySelector('.tip').innerText").split("\n")
    each, smoothed = readouts(drawn.read_text())["distance"]["series"]
    x, y = min(each["points"], key=lambda point: abs(point[0] - 0.25 * 199_680))
    mean = next(b for a, b in smoothed["points"] if a == x)
    assert told == [f"{x:,} images", "each line", f"{y:.4g}", "smoothed", f"{mean:.4g}"]
    browser.point(0, 0)
    assert browser.evaluate("document.querySelector('.tip')") is None


def test_the_readout_follows_the_keys(browser, drawn):
    browser.open(drawn)
    browser.evaluate("document.querySelector('svg[aria-label^=\"images per second\"]').focus()")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        browser.press(key)
    assert "198,848 images" in browser.evaluate("document.querySelector('.tip').innerText")
    assert shown(browser) == ["Samples after 199,680 images"]


def test_the_tick_box_changes_the_axis(browser, drawn):
    browser.open(drawn)
    seen = "[...document.querySelectorAll('#log ~ * svg[role]')].find(s => s.checkVisibility())"
    ticks = f"[...{seen}.querySelectorAll('[text-anchor=end]')].map(t => t.textContent)"
    assert browser.evaluate(ticks) == ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]
    browser.evaluate("document.querySelector('#log').click()")
    assert browser.evaluate(ticks) == ["0", "0.5", "1.0", "1.5"]


OVERLAPS = """(() => {
  const bad = [];
  for (const svg of document.querySelectorAll("svg[data-chart]")) {
    if (!svg.checkVisibility()) continue;
    const texts = [...svg.querySelectorAll("text")];
    const boxes = texts.map(text => text.getBoundingClientRect());
    boxes.forEach((a, i) => {
      if (a.left < 0 || a.right > innerWidth) bad.push(`clipped: ${texts[i].textContent}`);
      boxes.slice(0, i).forEach((b, j) => {
        if (a.left < b.right && b.left < a.right && a.top + 1 < b.bottom && b.top + 1 < a.bottom)
          bad.push(`${svg.ariaLabel}: ${texts[i].textContent} on ${texts[j].textContent}`);
      });
    });
  }
  if (document.documentElement.scrollWidth > innerWidth) bad.push("wider than the window");
  return bad;
})()"""


@pytest.mark.parametrize("width", [360, 400, 700, 1200, 1900])
@pytest.mark.parametrize("networks", [("denoiser",), ("student", "score")])
def test_no_words_overlap_or_are_cut(browser, tmp_path, width, networks):
    browser.open(report(make_run(tmp_path / "run", networks=networks)), width=width)
    assert browser.evaluate("document.querySelectorAll('svg[data-chart]').length") >= 13
    assert browser.evaluate(OVERLAPS) == []


def test_dark_and_light_differ_and_words_stay_readable(browser, drawn):
    """Contrast of the quiet words at least 4.5 to 1, as WCAG asks of text."""
    for dark in (False, True):
        browser.open(drawn, dark=dark)
        ink, paper = browser.evaluate(
            "[getComputedStyle(document.querySelector('.note')).color,"
            "getComputedStyle(document.body).backgroundColor]"
        )
        assert (luminance(paper) < 0.5) == dark
        low, high = sorted((luminance(ink), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def luminance(colour: str) -> float:
    parts = [int(n) / 255 for n in re.findall(r"\d+", colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
