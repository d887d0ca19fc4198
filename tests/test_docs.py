"""README and docs run as written."""

import re
import shlex
from pathlib import Path

import pytest

from stillhouse.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    return re.findall(r"^    (stillhouse .*)$", page.read_text(), flags=re.MULTILINE)


@pytest.fixture
def model(tmp_path) -> Path:
    """A small class-conditional checkpoint for the places where a page says MODEL."""
    import diffusers

    network = diffusers.DiTTransformer2DModel(
        num_layers=1, num_attention_heads=2, attention_head_dim=8, in_channels=3, sample_size=8
    )
    network.save_pretrained(tmp_path / "model" / "transformer")
    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    scheduler.save_pretrained(tmp_path / "model" / "scheduler")
    index = '{"_class_name": "DiTPipeline"}'
    (tmp_path / "model" / "model_index.json").write_text(index)
    return tmp_path / "model"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_runs_in_order(page, model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in snippets(page):
        code = code.replace('"path/or/hub-id"', repr(str(model)))
        exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize(
    ("page", "command"),
    [(page, command) for page in PAGES for command in commands(page)],
    ids=lambda value: getattr(value, "name", value),
)
def test_commands_run(page, command, model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("MODEL", str(model)).replace("DIR", "out"))[1:]
    if str(model) in words and "--count" not in words:
        words += ["--count", "4"]
    main(words)
    assert list(tmp_path.rglob("record.json"))


def test_every_link_and_picture_is_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
        for script in re.findall(r"`((?:docs|benchmarks|tests)/[\w/.]+)`", page.read_text()):
            assert (ROOT / script).exists(), f"{page.name}: {script}"


def test_no_page_holds_a_placeholder():
    for page in PAGES:
        assert "@@" not in page.read_text(), page.name
