"""README and docs run as written."""

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import loaded
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.pictures import write_shards
from metrics.shared import SHARED, weights_folder
from understanding import understood

from stillhouse.cli import main
from stillhouse.data.prepare.cluster import cluster
from stillhouse.metrics.networks import FOLDER

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


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


def give_first_run(page: Path, folder: Path) -> None:
    """The model of the first tutorial, for pages that go on with it and do not train it."""
    text = page.read_text()
    if "runs/first/model" not in text or "--out runs/first " in text:
        return
    import diffusers

    network = diffusers.UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=16,
    )
    network.save_pretrained(folder / "runs/first/model")
    diffusers.DDIMScheduler(clip_sample=False).save_pretrained(folder / "runs/first/model")


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_runs_in_order(page, model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    give_first_run(page, tmp_path)
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
    write_shards(tmp_path / "laion", "tars", [12, 12])


@pytest.fixture(scope="module")
def small_data(tmp_path_factory) -> Path:
    """The first rows of the data sets known by name, of which all captions are encoded."""
    folder = tmp_path_factory.mktemp("data")
    for file in (SHARED / "data").glob("*/*.parquet"):
        rows = next(pq.ParquetFile(file).iter_batches(ROWS))
        copy = folder / file.relative_to(SHARED / "data")
        copy.parent.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_batches([rows]), copy)
    return folder


@pytest.fixture
def detectors(small_data, tmp_path, monkeypatch) -> None:
    """Where the pages' data sets and detectors are here."""
    monkeypatch.setenv("STILLHOUSE_DATA", str(small_data))
    monkeypatch.setenv(FOLDER, str(SHARED / "weights"))
    monkeypatch.setenv("STILLHOUSE_CACHE", str(tmp_path / "cache"))


ROWS = 100  # of a data set
# An evaluation of few images, by a detector that needs no download. Of two, the last flag counts.
FEW = ["--count", "8", "--reference-count", "8", "--seeds", "1"]
SMALL = ["--detector", "resnet56-cifar10"]
# A distillation of two batches, whose walks are not compared.
BRIEF = ["--images", "8", "--batch", "4", "--comparison.count", "0", "--preview.count", "2"]
# A training: two batches or so, whose preview is seen by nobody.
QUICK = ["--images", "32"]
STAGES = ["--stages", '[{"size": 16, "images": 32}, {"size": 32, "images": 32}]']
UNSEEN = ["--preview.count", "4", "--preview.steps", "2", "--validation.images", "32"]
SLIM = ["--network.channels", "16", "32", "--network.attention", "1"]
WATCHED = ["--evaluation.count", "32", "--evaluation.steps", "2"]


def shortened(words: list[str], model: Path) -> list[str]:
    """The same at its smallest; of what it says twice, the last counts."""
    words, name = [*words], words[0]
    if name in ("sample", "evaluate") and str(model) in words and "--count" not in words:
        words += ["--count", "4"]
    if name == "prepare":
        words += ["--workers", "1", "--resolution", "64"]
    if name == "evaluate":
        words += FEW + ([] if "--detector" in words else SMALL)
    if name == "distill":
        words += BRIEF
    if name == "export":
        words += ["--count", "4", "--steps", "2"]
    if name == "train":
        words += [] if "--scale" in words else ["--scale", "tiny"]
        words += (STAGES if "progressive" in words[1] else QUICK) + UNSEEN
    if words[:2] == ["train", "images"] and not {"--network", "--network.channels"} & {*words}:
        words += SLIM
    if "--evaluation" in words:
        words += WATCHED
    if "--network.size" in words:
        words += ["--network.size", "tiny"]
    return words


@pytest.fixture
def one_cluster() -> Iterator[Callable[[], object]]:
    """Starts one for all that a page prepares, when it is asked for: each would start its own."""
    with ExitStack() as stack:

        def start() -> None:
            with loaded.ray_workers():
                stack.enter_context(cluster(workers=1))

        yield cache(start)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=name_of)
def test_commands_run_in_order(
    page, model, pictures, detectors, one_cluster, monkeypatch, tmp_path
):
    """As written, but short: few samples, and every training at its tiny scale."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reference").symlink_to(ROOT / "reference")
    give_first_run(page, tmp_path)
    for number, command in enumerate(commands(page)):
        if command.startswith("stillhouse prepare"):
            one_cluster()
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
        needs = {"--evaluation", "--codec"} & {*words} or words[1].endswith("-latent")
        if words[0] == "evaluate" or needs:
            weights_folder()  # or skip
        if (short := shortened(words, model)) != words:
            understood(words, monkeypatch)  # of what is said twice, nobody would see the first
        words = short
        main(words)
        if "--dry-run" in words or words[0] == "plan" or words[:2] == ["features", "info"]:
            continue
        folder = Path(words[1] if words[0] == "report" else words[words.index("--out") + 1])
        left = {"sample": "record.json", "train": "model", "report": "report.html"}
        left |= {"export": "README.md", "evaluate": "evaluation.json", "prepare": "index.json"}
        left |= {"distill": "model"}
        left |= {"sample": "correction.png"} if "--correct" in words else {}
        left |= {"features": "" if words[1] == "atlas" else "index.json"}
        # What a run in stages leaves is that of its last stage.
        last = [folder, *sorted(folder.glob("*px"), key=lambda p: int(p.name[:-2]))][-1]
        last = next(folder.glob("*-steps"), last)  # of two that halve the steps
        assert (last / left[words[0]]).exists(), command


@pytest.mark.usefixtures("pictures", "detectors")
@pytest.mark.parametrize("page", [p for p in PAGES if run_files(p)], ids=name_of)
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


# ---------------------------------------------------------------- what the tool is said to print


@cache
def messages() -> list[re.Pattern[str]]:
    """Every sentence in the source, with anything in the place of its values."""
    found = []
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    re.escape(str(p.value)) if isinstance(p, ast.Constant) else ".*"
                    for p in node.values
                ]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [re.sub(r"\\{.*?\\}", ".*", re.escape(node.value))]  # for str.format
            else:
                continue
            if len("".join(part for part in parts if part != ".*")) > 12:
                found.append(re.compile("".join(parts)))
    return found


def quoted(page: Path) -> list[str]:
    """Lines that a page says are printed: of blocks, and of the first column of `it says`."""
    text = page.read_text()
    blocks = re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
    table = re.search(r"\| it says .*?\n\n", text, flags=re.DOTALL)
    said = re.findall(r"^\| `(.*?)` \|", table[0], flags=re.MULTILINE) if table else []
    return [line for block in blocks for line in block.splitlines()] + said


OTHERS = ("torch.OutOfMemoryError",)  # what is not printed by us


@pytest.mark.parametrize(
    "page", [ROOT / "docs/troubleshooting.md", ROOT / "docs/tutorials/few-steps.md"], ids=name_of
)
def test_quoted_messages_are_those_of_the_source(page):
    known, lines = messages(), quoted(page)
    assert lines
    for line in lines:
        said = re.sub(r"^stillhouse [a-z ]+: ", "", line)
        if not said.startswith(OTHERS):
            assert any(pattern.fullmatch(said) for pattern in known), said
