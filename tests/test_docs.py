"""README and docs run as written."""

import re
import shlex
from pathlib import Path

import pytest
from metrics.shared import SHARED, weights_folder

from stillhouse.cli import main
from stillhouse.metrics.networks import FOLDER

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[str]:
    return re.findall(r"^    (stillhouse .*)$", page.read_text(), flags=re.MULTILINE)


def run_files(page: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.DOTALL)


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


@pytest.fixture
def pictures(tmp_path) -> None:
    """The folders that the pages speak of."""
    from PIL import Image

    for folder in ("photos", "captioned", "animals/cat", "animals/dog"):
        (tmp_path / folder).mkdir(parents=True)
        for i in range(12):
            colour = (20 * i, 255 - 20 * i, 7 * i)
            Image.new("RGB", (40 + i, 50), colour).save(tmp_path / folder / f"{i}.png")
    lines = [f'{{"file_name": "{i}.png", "caption": "picture {i}"}}\n' for i in range(12)]
    (tmp_path / "captioned" / "metadata.jsonl").write_text("".join(lines))


@pytest.fixture
def detectors(tmp_path, monkeypatch) -> None:
    """Where the pages' data sets and detectors are here."""
    monkeypatch.setenv("STILLHOUSE_DATA", str(SHARED / "data"))
    monkeypatch.setenv(FOLDER, str(SHARED / "weights"))
    monkeypatch.setenv("STILLHOUSE_CACHE", str(tmp_path / "cache"))


# An evaluation of few images, by a detector that needs no download. Of two, the last flag counts.
FEW = ["--count", "8", "--reference-count", "8", "--seeds", "1"]
SMALL = ["--detector", "resnet56-cifar10"]
# A distillation of two batches, whose walks are not compared.
BRIEF = ["--images", "8", "--batch", "4", "--comparison.count", "0", "--preview.count", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: p.name)
def test_commands_run_in_order(page, model, pictures, detectors, monkeypatch, tmp_path):
    """As written, but short: few samples, and every training at its tiny scale."""
    monkeypatch.chdir(tmp_path)
    for number, command in enumerate(commands(page)):
        out = f"out-{number}"
        places = {
            "MODEL": model,
            "DIR": out,
            "CODEC": SHARED / "weights/taesd",
            "ENCODER": "minilm",
        }
        for name, place in places.items():
            command = command.replace(name, str(place))
        words = shlex.split(command)[1:]
        if words[0] == "sample" and "--out" not in words:
            words += ["--out", out]
        if words[0] in ("sample", "evaluate") and str(model) in words and "--count" not in words:
            words += ["--count", "4"]
        if words[0] == "evaluate" or {"--evaluation", "--codec"} & {*words}:
            weights_folder()  # or skip
        if words[0] == "prepare":
            words += ["--workers", "1"]
        if words[0] == "evaluate":
            words += FEW + ([] if "--detector" in words else SMALL)
        if words[0] == "distill":
            words += BRIEF
        if words[0] == "train" and "--scale" not in words:
            words += ["--scale", "tiny"]
        if "--evaluation" in words:
            words += ["--evaluation.count", "32"]
        main(words)
        if "--dry-run" in words or words[0] == "plan":
            continue
        folder = Path(words[1] if words[0] == "report" else words[words.index("--out") + 1])
        left = {"sample": "record.json", "train": "model", "report": "report.html"}
        left |= {"export": "README.md", "evaluate": "evaluation.json", "prepare": "index.json"}
        left |= {"distill": "model"}
        left |= {"sample": "correction.png"} if "--correct" in words else {}
        # What a run in stages leaves is that of its last stage.
        last = [folder, *sorted(folder.glob("*px"), key=lambda p: int(p.name[:-2]))][-1]
        assert (last / left[words[0]]).exists(), command


@pytest.mark.usefixtures("pictures", "detectors")
@pytest.mark.parametrize("page", [p for p in PAGES if run_files(p)], ids=lambda p: p.name)
def test_run_files_can_be_run(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for text in run_files(page):
        (tmp_path / "run.yaml").write_text(text)
        main(["train", "run.yaml", "--dry-run"])
        assert "parameters" in capsys.readouterr().out


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
