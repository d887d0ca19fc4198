"""What SECURITY.md promises: files of others are data, wherever they are read.

Pickles that are planted in a run, a model and a data set are in `resilience/test_pickles.py`; the
report's page is opened in a browser by `recipes/test_report.py`.
"""

import ast
import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models.test_text import write_bert
from PIL import Image
from resilience.test_pickles import as_torch
from small_models import save_bare, small_autoencoder, small_unet

from stillhouse.cli import main
from stillhouse.cli.parse import load_yaml_or_json
from stillhouse.data import Columns, Folder, Prepared, Tars
from stillhouse.errors import UserError
from stillhouse.features.store import StoredFeatures
from stillhouse.metrics.networks import load_weights
from stillhouse.metrics.references import load_reference
from stillhouse.models.adapters import load_adapters
from stillhouse.models.text import TextEncoder
from stillhouse.pipelines import load_codec, load_denoiser
from stillhouse.pipelines.prompts import parts_of
from stillhouse.recipes.report.report import report
from stillhouse.recipes.train.training import TrainRun

SOURCE = Path(__file__).parents[1] / "src" / "stillhouse"
WEIGHTS = "diffusion_pytorch_model.safetensors"
MARKUP = "<img src=x onerror=alert(1)>"


def refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as refused:
        work()
    return str(refused.value)


# ---------------------------------------------------------------- the source

RUNS_CODE = {"eval", "exec", "compile", "__import__", "breakpoint"}
UNPICKLES = {"pickle.load", "pickle.loads", "joblib.load", "dill.load", "dill.loads"}
STARTS_SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
UNSAFE_YAML = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}
FORBIDDEN = RUNS_CODE | UNPICKLES | STARTS_SHELLS | UNSAFE_YAML
# Keywords that must be given, and those that must have this very value where they are.
REQUIRED = {"torch.load": ("weights_only", True)}
FIXED = {
    "shell": False,
    "allow_pickle": False,
    "trust_remote_code": False,
    "weights_only": True,
    "use_safetensors": True,
}


def faults(code: str) -> Iterator[str]:
    """Calls that could run what a file says."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        name, where = ast.unparse(node.func), f"line {node.lineno}"
        given = {word.arg: word.value for word in node.keywords}
        if name in FORBIDDEN:
            yield f"{where}: {name}"
        needed = REQUIRED.get(name)
        if needed and needed[0] not in given:
            yield f"{where}: {name} without {needed[0]}"
        for word, wanted in FIXED.items():
            value = given.get(word)
            if value is not None and getattr(value, "value", None) is not wanted:
                yield f"{where}: {name} with {word}={ast.unparse(value)}"


def test_no_call_runs_what_a_file_says():
    found = {
        str(file.relative_to(SOURCE)): list(faults(file.read_text()))
        for file in SOURCE.rglob("*.py")
    }
    assert len(found) > 200
    assert {file: what for file, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "import pickle; pickle.loads(b'')",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
        "subprocess.run(words, shell=True)",
        "yaml.load(text, Loader=Loader)",
        "Model.from_pretrained(folder, trust_remote_code=True)",
        "Model.from_pretrained(folder, trust_remote_code=config.trust)",
        "Model.from_pretrained(folder, use_safetensors=None)",
    ],
)
def test_the_search_finds_what_it_looks_for(code):
    assert list(faults(code))
    assert not list(faults("np.load(f); torch.load(f, weights_only=True); yaml.safe_load(t)"))


def test_pickle_is_imported_only_to_be_restricted():
    """By the reader of a checkpoint's description, and for the name of an error."""
    users = {
        str(file.relative_to(SOURCE)): ast.unparse(node)
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "pickle" in ast.unparse(node)
        and ast.unparse(node) != "from pickle import UnpicklingError"
    }
    assert users == {"engine/contents.py": "import pickle"}


# ---------------------------------------------------------------- weights


@pytest.fixture
def mark(tmp_path) -> Path:
    """It is made if anything that is planted runs."""
    return tmp_path / "mark"


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    write_bert(folder)
    return folder / "bert"


def pickled_model(folder: Path, gadget: bytes) -> None:
    save_bare(folder)
    (folder / WEIGHTS).rename(folder / "diffusion_pytorch_model.bin")
    (folder / "diffusion_pytorch_model.bin").write_bytes(gadget)
    load_denoiser(folder)


def pickled_codec(folder: Path, gadget: bytes) -> None:
    small_autoencoder(4).save_pretrained(folder)
    (folder / WEIGHTS).unlink()
    (folder / "diffusion_pytorch_model.bin").write_bytes(gadget)
    load_codec(folder)


def pickled_adapters(folder: Path, gadget: bytes) -> None:
    folder.mkdir()
    described = {"peft_type": "LORA", "r": 2, "target_modules": "to_q"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    (folder / "adapter_model.bin").write_bytes(gadget)
    load_adapters(small_unet(), folder)


def pickled_adapters_of_that_name(folder: Path, gadget: bytes) -> None:
    folder.mkdir()
    described = {"peft_type": "LORA", "r": 2, "target_modules": "to_q"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors"):
        (folder / name).write_bytes(gadget)
    load_adapters(small_unet(), folder)


def pickled_reference(folder: Path, gadget: bytes) -> None:
    folder.mkdir()
    (folder / "statistics.safetensors").write_bytes(gadget)
    load_reference(folder / "statistics.safetensors")


def pickled_detector(folder: Path, gadget: bytes) -> None:
    folder.mkdir()
    (folder / "network.pt").write_bytes(gadget)
    load_weights(torch.nn.Linear(2, 2), folder / "network.pt")


def pickled_features(folder: Path, gadget: bytes) -> None:
    folder.mkdir()
    part = {"model": "m", "digest": "d", "ids": ["a"], "sigma": 1.0}
    facts = {"parts": [part], "source": "s", "fingerprint": "f", "reading": "r", "count": 1}
    index = {"facts": facts, "shapes": {"a": [1, 1, 1]}, "ids": ["../../x"]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "shard-00000.safetensors").write_bytes(gadget)
    StoredFeatures(folder)[0]


PICKLED = {
    "model": (pickled_model, "Pickled weights are not loaded"),
    "codec": (pickled_codec, "Pickled weights are not loaded"),
    "adapters": (pickled_adapters, "do not fit this network"),
    "adapters by their name": (pickled_adapters_of_that_name, "do not fit this network"),
    "reference": (pickled_reference, "does not hold the statistics of a reference"),
    "detector": (pickled_detector, "cannot be read as safetensors"),
    "features": (pickled_features, "shard-00000.safetensors cannot be read"),
}


@pytest.mark.parametrize("what", PICKLED)
def test_weights_are_read_from_safetensors_alone(what, tmp_path, mark):
    work, words = PICKLED[what]
    assert words in refusal(lambda: work(tmp_path / "place", as_torch(mark)))
    assert not mark.exists()


def test_a_text_encoder_is_read_from_safetensors_alone(bert, tmp_path, mark):
    place = shutil.copytree(bert, tmp_path / "bert")
    (place / "model.safetensors").unlink()
    (place / "pytorch_model.bin").write_bytes(as_torch(mark))
    assert "Pickled weights are not loaded" in refusal(lambda: TextEncoder(str(place)))
    assert not mark.exists()


# ---------------------------------------------------------------- code that comes with a model


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def plant_module(folder: Path, mark: Path) -> None:
    """A module that leaves its mark when it is imported, under every name that is asked for."""
    for name in ("custom", "modeling_custom", "tokenization_custom", "pipeline", "evil"):
        (folder / f"{name}.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")


def test_code_beside_a_text_encoder_is_never_run(bert, tmp_path, mark):
    place = shutil.copytree(bert, tmp_path / "bert")
    plant_module(place, mark)
    names = ("AutoModel", "AutoConfig", "AutoModelForCausalLM")
    rewrite(place / "config.json", auto_map=dict.fromkeys(names, "custom.Custom"))
    tokenizer = {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}
    rewrite(place / "tokenizer_config.json", auto_map=tokenizer, tokenizer_class="Custom")
    with suppress(UserError):  # refused, or read without the code: both are well
        TextEncoder(str(place)).encode(["a cab"])
    assert not mark.exists()


def test_attention_from_the_hub_is_refused(bert, tmp_path):
    place = shutil.copytree(bert, tmp_path / "bert")
    rewrite(place / "config.json", attn_implementation="somebody/kernel")
    assert "asks for code of the hub (somebody/kernel)" in refusal(lambda: TextEncoder(str(place)))


@pytest.mark.parametrize(
    "name", ["evil.Model", ["evil", "Model"], "os", "Popen", "../evil"], ids=str
)
def test_a_model_names_no_class_but_those_that_are_known(name, tmp_path, mark, monkeypatch):
    save_bare(tmp_path / "model")
    plant_module(tmp_path / "model", mark)
    monkeypatch.syspath_prepend(str(tmp_path / "model"))
    rewrite(tmp_path / "model" / "config.json", _class_name=name, auto_map={"AutoModel": "evil.X"})
    assert "supported: " in refusal(lambda: load_denoiser(tmp_path / "model"))
    assert not mark.exists()


@pytest.mark.parametrize(
    "part", [["os", "system"], ["evil", "Model"], ["..evil", "CLIPTextModel2"]]
)
def test_a_pipeline_names_no_class_but_those_that_are_known(part, tmp_path, mark, monkeypatch):
    small_autoencoder(4).save_pretrained(tmp_path / "vae")
    plant_module(tmp_path, mark)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("tokenizer", "text_encoder"):
        (tmp_path / name).mkdir()
    index = {"_class_name": "StableDiffusionPipeline", "tokenizer": ["x", "CLIPTokenizer"]}
    (tmp_path / "model_index.json").write_text(json.dumps({**index, "text_encoder": part}))
    assert "no text_encoder that can be used" in refusal(lambda: parts_of(tmp_path))
    assert not mark.exists()


def test_a_pipeline_of_a_class_of_its_own_is_refused(tmp_path, mark):
    plant_module(tmp_path, mark)
    index = {"_class_name": ["pipeline", "Custom"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert "pipelines that can be fine-tuned are" in refusal(lambda: parts_of(tmp_path))
    assert not mark.exists()


def test_a_student_s_file_is_data(tmp_path, mark, capsys):
    save_bare(tmp_path / "model")
    plant_module(tmp_path, mark)
    code = f"__import__('os').mkdir({str(mark)!r})"
    planted = {"evaluations": [2], "grid": "../evil", "method": code}
    (tmp_path / "model" / "few_steps.json").write_text(json.dumps(planted))
    with pytest.raises(SystemExit):
        main(["sample", str(tmp_path / "model"), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert "few_steps.json does not say how a student is walked (ValueError: '../evil' is " in said
    assert "Traceback" not in said
    assert not mark.exists()


# ---------------------------------------------------------------- run files


@pytest.mark.parametrize(
    "text",
    [
        "out: !!python/object/apply:os.mkdir [MARK]",
        "out: !!python/object/new:os.mkdir [MARK]",
        "out: !!python/name:os.system",
        "!!python/module:os",
        "network: {kind: unet, _target_: os.mkdir, path: MARK}",
        "network: {kind: os.mkdir}",
    ],
)
def test_a_run_file_runs_nothing(text, tmp_path, mark):
    file = tmp_path / "run.yaml"
    file.write_text(text.replace("MARK", str(mark)))
    said = refusal(lambda: load_yaml_or_json(file, TrainRun()))
    assert said.count("\n") == 0
    assert not mark.exists()


# ---------------------------------------------------------------- paths in archives and indexes


def picture(number: int = 0) -> bytes:
    pixels = np.full((8, 8, 3), number, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, escape: Path) -> None:
    """Good samples, and members that would leave the folder if they were unpacked."""
    with tarfile.open(path, "w") as tar:
        for name in ("good", "../up", str(escape), "a/../../b", "zgood"):
            info = tarfile.TarInfo(f"{name}.png")
            info.size = len(picture())
            tar.addfile(info, io.BytesIO(picture()))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo(f"link{kind.decode()}.png")
            link.type, link.linkname = kind, str(escape.with_name("secret.png"))
            tar.addfile(link)


@pytest.mark.parametrize("streaming", [True, False])
def test_members_of_a_tar_stay_within_it(streaming, tmp_path, monkeypatch):
    """Nothing is unpacked, and a link gives nothing of what it points at."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    place = tmp_path / "deep" / "data"
    place.mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(picture(200))
    write_tar(place / "x.tar", tmp_path / "escaped")
    before = {*tmp_path.rglob("*.png")}
    source = Tars(files=(str(place / "x.tar"),), streaming=streaming)
    columns = Columns(image="png")
    if streaming:
        rows = [row.image for row in source.open_shards(columns).rows(0)]
    else:
        images = source.open_indexed(columns)
        rows = [row.image for row in images.rows(range(len(images)))]
    contents = [row["bytes"] if isinstance(row, dict) else row for row in rows]
    assert picture() in contents
    assert picture(200) not in contents
    assert {*tmp_path.rglob("*.png")} == before


@pytest.mark.parametrize("name", ["../secret.png", "a/../../secret.png", "ABSOLUTE"])
def test_metadata_names_no_image_outside_its_folder(name, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "secret.png").write_bytes(picture(200))
    place = tmp_path / "images"
    (place / "a").mkdir(parents=True)
    (place / "good.png").write_bytes(picture())
    name = name.replace("ABSOLUTE", str(tmp_path / "secret.png"))
    rows = [{"file_name": "good.png", "text": "x"}, {"file_name": name, "text": "y"}]
    (place / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = Folder(path=str(place)).open_indexed
    assert "escape the dataset directory" in refusal(lambda: work(Columns(text="text")))


@pytest.mark.parametrize("name", ["../secret.safetensors", "ABSOLUTE"])
def test_an_index_of_latents_names_no_file_outside_its_folder(name, tmp_path):
    from safetensors.torch import save_file

    secret = tmp_path / "secret.safetensors"
    save_file({"tokens": torch.ones(1, 2), "pooled": torch.ones(2)}, secret)
    place = tmp_path / "shards"
    place.mkdir()
    text = {"null": name.replace("ABSOLUTE", f"../{tmp_path.name}/{secret.name}"), "length": 2}
    config = {"dtype": "float16", "text_dtype": "float16", "text": "x"}
    index = {"config": config, "text": text, "latent": {"shape": [4, 2, 2]}}
    (place / "index.json").write_text(json.dumps({**index, "codec": {"digest": "d"}}))
    assert "is not in its folder" in refusal(Prepared(path=str(place)).null)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/elsewhere/model.safetensors", "x.bin"])
def test_an_index_of_weights_names_no_file_outside_its_folder(shard, bert, tmp_path, mark):
    save_bare(tmp_path / "model")
    named = json.dumps({"metadata": {}, "weight_map": {"conv_in.weight": shard}})
    (tmp_path / "model" / f"{WEIGHTS}.index.json").write_text(named)
    assert f"names {shard} among" in refusal(lambda: load_denoiser(tmp_path / "model"))
    place = shutil.copytree(bert, tmp_path / "bert")
    (place / "model.safetensors").rename(place / "model-00001-of-00001.safetensors")
    (place / "model.safetensors.index.json").write_text(named)
    assert "none of the folder's shards" in refusal(lambda: TextEncoder(str(place)))


# ---------------------------------------------------------------- pages


class Tags(HTMLParser):
    """Elements that a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def check_page(page: Path) -> None:
    """What was named is shown as text; nothing but the page's own script may run."""
    text = page.read_text(encoding="utf-8")
    tags = Tags(text).found
    assert MARKUP not in text
    assert "&lt;img src=x onerror" in text
    assert not [a for _, a in tags if any(name.startswith("on") for name in a)]
    sources = [a["src"] or "" for _, a in tags if "src" in a]
    assert all(source.startswith("data:image/") for source in sources)
    policy = next(a for t, a in tags if t == "meta" and "content-security-policy" in str(a).lower())
    assert "default-src 'none'" in str(policy["content"])
    assert "unsafe-eval" not in str(policy["content"])


def test_a_report_shows_names_as_text(tmp_path):
    run = tmp_path / MARKUP
    run.mkdir()
    config = {"note": MARKUP, MARKUP: 1, "data": {"path": MARKUP}}
    (run / "run.json").write_text(json.dumps({"config": config, "versions": {MARKUP: MARKUP}}))
    lines = [
        {"images": 8, "seconds": 1.0, "denoiser/loss": 0.5, f"{MARKUP}/loss": 0.5},
        {"images": 16, "seconds": 2.0, "denoiser/loss": 0.4, "message": MARKUP, "samples": MARKUP},
    ]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_page(report(run, tmp_path / "report.html"))


def test_an_atlas_shows_names_as_text(tmp_path):
    model = tmp_path / MARKUP
    save_bare(model)
    photos = tmp_path / f"photos {MARKUP}"
    photos.mkdir()
    (photos / f"{MARKUP}.png").write_bytes(picture())
    out = tmp_path / "atlas.html"
    words = ["--images", str(photos), "--count", "1", "--device", "cpu", "--out", str(out)]
    main(["features", "atlas", str(model), *words])
    check_page(out)


# ---------------------------------------------------------------- servers


def test_the_demo_alone_listens():
    """A server is made in one place; tests/recipes/test_demo.py has where that listens."""
    makers = ("create_server", "HTTPServer", ".bind(", "uvicorn.run", ".launch(", "0.0.0.0")
    users = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if any(word in file.read_text() for word in makers)
    }
    assert users == {"recipes/demo/serving.py"}
