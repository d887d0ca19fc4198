"""`stillhouse export`: cards, scripts that draw without torch, and what goes to the hub."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_models import (
    build_network,
    network_config,
    relative_error,
    save_scheduler,
    small_autoencoder,
)
from torch import nn

from stillhouse.cli import main
from stillhouse.distill.walks import FewSteps
from stillhouse.errors import UserError
from stillhouse.models import Codec, DiffusersNetwork
from stillhouse.models.conditioning import Parts, conditioned
from stillhouse.models.plane import PlaneNetwork
from stillhouse.pipelines import (
    load_codec,
    load_denoiser,
    read_walk,
    save_codec,
    save_denoiser,
    save_walk,
)
from stillhouse.process import EDM
from stillhouse.recipes.export import exporting
from stillhouse.recipes.export.cards import Card, spell_card
from stillhouse.recipes.export.drawing import draw_grid
from stillhouse.recipes.export.exporting import ExportRun, export
from stillhouse.recipes.parts import ClassifierFree, Euler
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.recipes.subjects import Subject

EDM_SCHEDULER = {"_class_name": "EDMEulerScheduler", "sigma_data": 0.7, "sigma_max": 20.0}
FACTS = {"config": {"data": {"toy": "moons"}}, "null_label": 2}


def save_plane(
    folder: Path, walk: FewSteps | None = None, scheduler: dict[str, Any] = EDM_SCHEDULER
) -> Path:
    """A network of the plane with two classes and none; a student where a walk is given."""
    torch.manual_seed(0)
    model = PlaneNetwork(width=16, depth=1, num_class_embeds=3)
    for weight in model.parameters():
        if not weight.any():
            nn.init.normal_(weight, std=0.3)
    told = conditioned(model, Parts(steps=True)) if walk is not None and walk.told else None
    for weight in () if told is None else told.parameters():
        nn.init.normal_(weight, std=0.3)
    network = DiffusersNetwork(model, 2, told)
    save_denoiser(folder, network, network.state_dict(), scheduler, facts=FACTS)
    if walk is not None:
        save_walk(folder, walk)
    return folder


def exported(source: Path, out: Path, **options: Any) -> str:
    return export(ExportRun(run=source, out=out, **{"count": 6, "steps": 5, **options})).read_text()


# ---------------------------------------------------------------- scripts


def script_of(card: str) -> str:
    """The one that draws with onnxruntime."""
    found = [
        code for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "onnxr" in code
    ]
    assert len(found) == 1
    return found[0]


def run_script(card: str, folder: Path) -> torch.Tensor:
    """Without torch, and without us."""
    code = script_of(card) + "\nimport sys\nassert not {'torch', 'stillhouse'} & {*sys.modules}\n"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.from_numpy(np.load(folder / "samples.npy"))


def sampled(source: Path, out: Path, **options: Any) -> torch.Tensor:
    sample(SampleRun(model=str(source), out=out, count=6, tensors=True, **options))
    return load_file(out / "tensors" / "000000.safetensors")["samples"]


POLYNOMIAL = FewSteps((2, 3), sigma_max=20.0, afs=True)
STUDENTS: dict[str, FewSteps | None] = {
    "teacher": None,
    "analytical first step": POLYNOMIAL,
    "told its steps": replace(POLYNOMIAL, told=True),
    "renoising": FewSteps((3,), method="consistency", step="renoise", afs=False, sigma_max=20.0),
    "one step": FewSteps((1,), method="emd", grid="single", afs=False, sigma_max=5.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDENTS)
def test_the_script_on_the_card_draws_our_samples(name, tmp_path):
    """Measured: 1e-7 to 1e-6 of the largest value."""
    walk = STUDENTS[name]
    source = save_plane(tmp_path / "model", walk)
    card = exported(source, tmp_path / "out", format=("onnx",))
    options: dict[str, Any] = {"solver": {"kind": "euler"}, "steps": 5} if walk is None else {}
    ours = sampled(source, tmp_path / "drawn", **options)
    assert relative_error(run_script(card, tmp_path / "out"), ours) < 1e-4


@pytest.mark.slow
def test_latents_are_decoded_without_torch(tmp_path):
    """A DiT of latents: its script draws the images of `stillhouse sample --solver euler`."""
    from PIL import Image

    model = build_network({**network_config("dit-xl-2", reduced=True), "num_layers": 1})
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1) if not weight.any() else None
    model.save_pretrained(tmp_path / "model")
    save_scheduler(tmp_path / "model", {"_class_name": "DDIMScheduler", "clip_sample": False})
    small_autoencoder(4).save_pretrained(tmp_path / "model" / "vae")
    card = exported(tmp_path / "model", tmp_path / "out", format=("onnx", "torch-export"))
    words = ["--solver", "euler", "--steps", "5", "--count", "6", "--out", str(tmp_path / "drawn")]
    main(["sample", str(tmp_path / "model"), *words])
    run_script(card, tmp_path / "out")
    strip = np.asarray(Image.open(tmp_path / "out" / "samples.ppm")).astype(int)
    ours = [np.asarray(Image.open(tmp_path / f"drawn/images/{i:06d}.png")) for i in range(6)]
    assert strip.shape == np.concatenate(ours, 1).shape
    assert np.abs(strip - np.concatenate(ours, 1)).max() <= 1
    names = {"denoiser.onnx", "decoder.onnx", "denoiser.pt2", "decoder.pt2", "README.md"}
    assert {p.name for p in (tmp_path / "out").iterdir()} - {"samples.npy", "samples.ppm"} == {
        *names,
        "grid.png",
    }
    check_nothing_of_this_machine(tmp_path / "out", tmp_path)
    extra = {"stillhouse": ""}
    torch.export.load(tmp_path / "out" / "decoder.pt2", extra_files=extra)
    facts = json.loads(extra["stillhouse"])
    assert facts["contract"].startswith("decode(latents)")
    assert [each["name"] for each in facts["inputs"]] == ["latents"]
    assert facts["shape"] == [3, *strip.shape[:1] * 2]
    assert "walks" not in facts


# ---------------------------------------------------------------- files


ALL = ("diffusers", "onnx", "torch-export")
STRANGERS = ("denoiser.onnx.bak", "denoiser.pt2.old", "notes.txt")


@dataclass(frozen=True)
class Pushed:
    """An export in every format into a folder that is not empty."""

    root: Path
    out: Path
    files: list[str]  # that went to the hub


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Pushed:
    root = tmp_path_factory.mktemp("everything")
    source, out, files = save_plane(root / "model"), root / "out", []
    out.mkdir()
    for name in (*STRANGERS, "denoiser.onnx.data"):
        (out / name).write_text("mine")
    measured = {**EVALUATION, "reference": {"name": str(root / "alice" / "faces"), "count": 100}}
    (source / "evaluation.json").write_text(json.dumps(measured))

    def push(folder: Path, names: list[str], repo: str, *, private: bool) -> str:
        files.extend(names)
        return repo

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(exporting, "push", push)
        exported(source, out, format=ALL, push_to="me/moons")
    return Pushed(root, out, files)


def test_what_lies_beside_a_graph_is_not_pushed(everything):
    assert everything.files == [
        "README.md",
        "config.json",
        "denoiser.onnx",
        "denoiser.pt2",
        "diffusion_pytorch_model.safetensors",
        "grid.png",
        "scheduler_config.json",
    ]
    assert {p.name for p in everything.out.iterdir()} == {*everything.files, *STRANGERS}


def test_weights_beside_a_graph_are_pushed_with_it(tmp_path, monkeypatch):
    def save_onnx(graph: Any, program: Any, file: Path, facts: Any) -> None:
        file.write_text("graph")
        (file.parent / f"{file.name}.data").write_text("weights")

    monkeypatch.setattr(exporting.graphs, "save_onnx", save_onnx)
    target, nothing = tmp_path / "denoiser.onnx", cast("Any", None)
    found = exporting.save_graph("onnx", nothing, nothing, target, {})
    assert found == ["denoiser.onnx", "denoiser.onnx.data"]


def check_nothing_of_this_machine(folder: Path, place: Path) -> None:
    """No path of it, nor any line of code."""
    ours = str(Path(exporting.__file__).parents[3])
    told = [word.encode() for word in (str(place), ours, sys.prefix, "site-packages", 'File "')]
    for file in folder.rglob("*"):
        contents = [file.read_bytes()] if file.is_file() else []
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        for word in told:
            assert not any(word in content for content in contents), (file.name, word)


def test_no_file_tells_of_the_machine_that_exported_it(everything):
    check_nothing_of_this_machine(everything.out, everything.root)
    assert "100 of alice/faces, by Inception" in (everything.out / "README.md").read_text()


@pytest.mark.parametrize("format", ["diffusers", "torch-export"])
@pytest.mark.parametrize("way", ["itself", "a link", "its run"])
def test_a_model_is_not_written_over_by_itself(way, format, tmp_path):
    source = save_plane(tmp_path / "run" / "model")
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "link").symlink_to(source)
    run, out = {
        "itself": (source, source / ".." / "model"),
        "a link": (source, tmp_path / "link"),
        "its run": (tmp_path / "run", source),
    }[way]
    before = {file: file.read_bytes() for file in sorted(source.iterdir())}
    with pytest.raises(UserError, match="is the model's own folder: choose another --out"):
        exported(run, out, format=(format,))
    assert {file: file.read_bytes() for file in sorted(source.iterdir())} == before


@pytest.mark.parametrize("name", ALL)
def test_a_number_of_steps_that_cannot_be_is_refused_before_anything_is_written(name, tmp_path):
    scheduler = {"_class_name": "DDIMScheduler", "clip_sample": False}
    source = save_plane(tmp_path / "model", scheduler=scheduler)
    with pytest.raises(UserError, match=r"there is no such grid: .* choose other --steps"):
        exported(source, tmp_path / "out", format=(name,), steps=5000)
    assert not (tmp_path / "out").exists()


def test_a_student_is_not_guided_twice(tmp_path):
    walk = replace(POLYNOMIAL, guidance={"kind": "cfg", "weight": 3.0})
    source, guidance = save_plane(tmp_path / "model", walk), ClassifierFree(weight=3.0)
    with pytest.raises(UserError, match="has learnt its teacher's guidance: leave --guidance out"):
        exported(source, tmp_path / "out", guidance=guidance)
    assert not (tmp_path / "out").exists()


def test_an_autoencoder_of_another_model_does_not_stay(tmp_path):
    out = tmp_path / "out"
    save_codec(out, Codec(small_autoencoder(4)))
    (out / "vae" / "notes.txt").write_text("mine")
    assert load_codec(out) is not None
    exported(save_plane(tmp_path / "model"), out)
    assert load_codec(out) is None
    assert [file.name for file in (out / "vae").iterdir()] == ["notes.txt"]


def test_a_grid_is_drawn_and_decoded_in_batches(tmp_path):
    from PIL import Image

    seen: dict[str, list[int]] = {"denoised": [], "decoded": []}

    def denoise(x: torch.Tensor, sigma: torch.Tensor, cond: Any = None) -> torch.Tensor:
        seen["denoised"].append(len(x))
        return 0.5 * x

    def decode(latents: torch.Tensor) -> torch.Tensor:
        seen["decoded"].append(len(latents))
        return latents

    codec = cast("Any", SimpleNamespace(decode=decode))
    subject = Subject(denoise, EDM(), (3, 8, 8), {}, codec=codec)
    pictures = []
    for batch in (16, 37):
        run = SampleRun(model="m", solver=Euler(), steps=2, count=37, batch=batch)
        draw_grid(subject, run, tmp_path / f"{batch}.png", 0)
        pictures.append(np.asarray(Image.open(tmp_path / f"{batch}.png")))
    assert seen == {"denoised": [16, 16, 16, 16, 5, 5, 37, 37], "decoded": [16, 16, 5, 37]}
    assert np.array_equal(*pictures)


# ---------------------------------------------------------------- cards


EVALUATION = {
    "model": "model",
    "count": 50,
    "seeds": 2,
    "detector": {"name": "Inception"},
    "reference": {"name": "cifar10", "count": 100},
    "settings": [{"solver": "euler", "steps": 5, "evaluations": 5, "values": {"FID": [3.0, 5.0]}}],
    "floor": {"FID": 1.25},
    "warnings": ["50 samples are few"],
}


def test_a_card_says_what_the_model_is_and_the_hub_reads_it(tmp_path):
    from huggingface_hub import ModelCard

    source = save_plane(tmp_path / "model")
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    options = {"licence": "apache-2.0", "datasets": ("owner/moons",), "limits": "Two moons only."}
    options |= {"command": "stillhouse train toy-moons", "evaluation": tmp_path / "evaluation.json"}
    card = exported(source, tmp_path / "out", **options)
    found = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert found == {
        "license": "apache-2.0",
        "library_name": "diffusers",
        "tags": ["stillhouse", "diffusion"],
        "datasets": ["owner/moons"],
    }
    for words in (
        "| euler, 5 steps | 4 ± 1.4 |",
        "| real / real | 1.25 |",
        "50 samples against 100 of cifar10, by Inception, 2 seed(s)",
        "- 50 samples are few",
        "- Two moons only.",
        "```bash\nstillhouse train toy-moons\n```",
        "| label for no class | 2 |",
        "| licence | apache-2.0 |",
        "PlaneNetwork, 0.0",
    ):
        assert words in card, words
    assert str(tmp_path) not in card


def card_of(graph: dict[str, Any], **options: Any) -> str:
    """Of a model of latents, spelled without any export."""
    network = DiffusersNetwork(PlaneNetwork(width=16, depth=1))
    codec = Codec(small_autoencoder(4))
    subject = Subject(lambda x, sigma, cond=None: x, EDM(), (4, 8, 6), {}, codec=codec)
    config = ExportRun(out=Path("out"), **options)
    return spell_card(Card(config, {}, {}, [], network, subject, graph, None), 5)


GRAPH: dict[str, Any] = {"inputs": [], "largest_batch_of_pt2": None}


@pytest.mark.parametrize(
    ("formats", "dtype", "said"),
    [
        (("torch-export",), "bfloat16", "bfloat16 (graphs of the decoder: float32)"),
        (("torch-export",), "auto", "float32"),
        (("diffusers", "torch-export"), "auto", "bfloat16, float32"),
        (("diffusers",), "bfloat16", "bfloat16"),
    ],
)
def test_a_card_says_the_precision_of_every_file(formats, dtype, said):
    graph = GRAPH if "torch-export" in formats else {}
    assert f"| weights | {said} |\n" in card_of(graph, format=formats, dtype=dtype)


def test_a_card_speaks_of_graphs_where_there_are_some():
    assert "- It was made for 8 x 6 latents; graphs take no other size.\n" in card_of(
        GRAPH, format=("torch-export",)
    )
    card = card_of({})
    assert "- It was made for 8 x 6 latents.\n" in card
    assert "raphs" not in card


def test_whatever_a_cell_holds_a_table_stays_one():
    card = card_of({}, data="moons | suns,\nby hand")
    assert "\n| data | moons \\| suns, by hand |\n" in card


def test_an_evaluation_in_the_runs_folder_is_found_and_nonsense_is_refused(tmp_path):
    source = save_plane(tmp_path / "model")
    assert "have not been measured" in exported(source, tmp_path / "out")
    (source / "evaluation.json").write_text(json.dumps(EVALUATION))
    assert "| euler, 5 steps | 4 ± 1.4 |" in exported(source, tmp_path / "out")
    (source / "evaluation.json").write_text('{"settings": []}')
    with pytest.raises(UserError, match=r"no evaluation\.json of stillhouse evaluate"):
        exported(source, tmp_path / "out")


def test_a_student_keeps_its_walks(tmp_path):
    source = save_plane(tmp_path / "model", POLYNOMIAL)
    card = exported(source, tmp_path / "out", dtype="float32")
    assert read_walk(tmp_path / "out") == POLYNOMIAL
    assert "tags:\n- stillhouse\n- diffusion\n- distillation\n" in card
    assert "It takes 2, 3 evaluations and no other number." in card
    assert ", 3 evaluations each (as it was taught)" in card
    first, second = (load_denoiser(p).network.state_dict() for p in (source, tmp_path / "out"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    exported(save_plane(tmp_path / "other"), tmp_path / "out")  # another model in its place
    assert read_walk(tmp_path / "out") is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run": Path("nowhere")}, "neither a training run that has saved a model yet nor"),
        ({"push_to": "no-owner"}, "named OWNER/NAME"),
        ({"format": ("onnx",), "dtype": "bfloat16"}, "--dtype float32"),
        ({"format": ()}, "one or several of diffusers, onnx, torch-export"),
    ],
)
def test_what_cannot_be_exported_is_said_before_anything_is_written(options, said, tmp_path):
    source = save_plane(tmp_path / "model")
    with pytest.raises(UserError, match=said):
        export(ExportRun(**{"run": source, "out": tmp_path / "out", **options}))
    assert not (tmp_path / "out").exists()


def test_onnx_that_is_not_installed_is_named_with_the_line_to_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    source = save_plane(tmp_path / "model")
    with pytest.raises(UserError, match=r"pip install -e '\.\[onnx\]'"):
        exported(source, tmp_path / "out", format=("onnx",))


# ---------------------------------------------------------------- the hub


class Hub(BaseHTTPRequestHandler):
    """The endpoints of the hub that creating a repository and a commit go through."""

    seen: list[dict[str, Any]]  # what was asked, in order
    refuses: bool

    def answer(self, body: bytes) -> dict[str, Any]:
        here, path = f"http://{self.headers['Host']}", self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            return {"url": f"{here}/{name}", "name": name, "id": "1"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            kept = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return {"files": [{"path": file["path"], **kept} for file in files]}
        if "/commit/" in path:
            url = f"{here}/me/moons/commit/1234"
            return {"success": True, "commitOid": "1234", "commitUrl": url, "hookOutput": ""}
        return {"id": "me/moons", "sha": "1234", "siblings": [], "private": True}

    def do_POST(self) -> None:
        length = self.headers["Content-Length"]
        body = self.rfile.read(int(length)) if length else self.chunks()
        type(self).seen.append(
            {"path": self.path, "who": self.headers["Authorization"], "body": body}
        )
        code = 403 if self.refuses else 200
        text = json.dumps({"error": "no"} if self.refuses else self.answer(body)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST

    def chunks(self) -> bytes:
        found = b""
        if self.headers["Transfer-Encoding"] != "chunked":
            return found
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub():
    handler = type("OneHub", (Hub,), {"seen": [], "refuses": False})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


TOKEN = "hf_do_not_tell_anybody"


def pushed(source: Path, out: Path, endpoint: str, **environment: str) -> Any:
    """The command, in a process of its own: huggingface_hub reads its settings when imported."""
    words = ["export", str(source), "--out", str(out), "--count", "4", "--steps", "2"]
    words += ["--push-to", "me/moons", "--private"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    home = {"HF_ENDPOINT": endpoint, "HF_HOME": str(out.parent / "home")}
    command = [sys.executable, "-m", "stillhouse", *words]
    settings = {**kept, **home, "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=settings)


def committed(handler: Any) -> dict[str, bytes]:
    """Contents by path, of the one commit."""
    (commit,) = [one for one in handler.seen if "/commit/" in one["path"]]
    lines = [json.loads(line) for line in commit["body"].splitlines()]
    assert {line["key"] for line in lines} <= {"header", "file"}  # nothing else, deleted or large
    files = [line["value"] for line in lines if line["key"] == "file"]
    return {file["path"]: base64.b64decode(file["content"]) for file in files}


@pytest.mark.slow
def test_the_exported_files_and_no_others_go_to_the_hub(tmp_path, hub):
    """Against a server on this machine that speaks the hub's endpoints; no real hub is asked."""
    handler, endpoint = hub
    out = tmp_path / "out"
    strangers = ("checkpoints/images-1/weights.distcp", ".secret", "optimiser.safetensors")
    for name in strangers:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    done = pushed(save_plane(tmp_path / "model"), out, endpoint, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr[-2000:]
    files = committed(handler)
    assert sorted(files) == [
        "README.md",
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "grid.png",
        "scheduler_config.json",
    ]
    assert all((out / name).read_bytes() == content for name, content in files.items())
    create = next(one for one in handler.seen if one["path"] == "/api/repos/create")
    assert json.loads(create["body"])["name"] == "moons"
    assert "private" in json.dumps(json.loads(create["body"]))
    assert {one["who"] for one in handler.seen} == {f"Bearer {TOKEN}"}
    everything = done.stdout + done.stderr + (out / "README.md").read_text()
    assert TOKEN not in everything
    said = done.stdout.index("gets 5 files"), done.stdout.index(f"see {endpoint}/me/moons")
    assert said[0] < said[1]
    assert all(f"  {name}\n" in done.stdout for name in files)


@pytest.mark.slow
def test_a_refusal_is_one_sentence_and_the_folder_stays(tmp_path, hub):
    handler, endpoint = hub
    handler.refuses = True
    done = pushed(save_plane(tmp_path / "model"), tmp_path / "out", endpoint, HF_TOKEN=TOKEN)
    assert done.returncode == 1
    assert re.search(
        r"me/moons could not be pushed \(.*\); .*out is written, and stays", done.stderr
    )
    assert "Traceback" not in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("offline", "said"), [(True, "HF_HUB_OFFLINE is set"), (False, "run `hf auth login`")]
)
def test_without_a_hub_or_a_token_the_folder_stays(offline, said, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    source = save_plane(tmp_path / "model")
    with pytest.raises(UserError, match=said) as error:
        exported(source, tmp_path / "out", push_to="me/moons")
    assert "is written, and stays" in str(error.value)
    assert (tmp_path / "out" / "README.md").is_file()
