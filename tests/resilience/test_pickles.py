"""A pickle that would run code, planted wherever a file is read: nothing of it is ever run.

What is planted leaves a mark if it is unpickled. Each place ends in a sentence, or the file is
passed over and the run goes on.
"""

import base64
import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from data.pictures import write_folder, write_shards
from resilience.runs import BATCH, small, write_data

from stillhouse.cli import main
from stillhouse.data import Columns, DataConfig, Folder, ImageConfig, Tars
from stillhouse.engine.contents import MANIFEST, FileRecord, read_manifest, spell_manifest
from stillhouse.engine.storage import Folder as Files
from stillhouse.errors import UserError
from stillhouse.recipes.train.averages import synthesize_model
from stillhouse.recipes.train.networks import Pretrained
from stillhouse.recipes.train.training import TrainRun, run

IMAGES = 4 * BATCH


class Gadget:
    """Unpickled without restriction, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def as_pickle(mark: Path) -> bytes:
    return pickle.dumps(Gadget(mark))


def as_torch(mark: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"conv_in.weight": Gadget(mark)}, buffer)
    return buffer.getvalue()


def as_numpy(mark: Path) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Gadget(mark)], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def as_yaml(mark: Path) -> bytes:
    return f"out: !!python/object/apply:os.mkdir [{mark}]\n".encode()


CARELESS: dict[Callable[[Path], bytes], Callable[[bytes], Any]] = {
    as_pickle: pickle.loads,
    as_torch: lambda data: torch.load(io.BytesIO(data), weights_only=False),
    as_numpy: lambda data: np.load(io.BytesIO(data), allow_pickle=True),
    as_yaml: lambda data: yaml.unsafe_load(data),
}


@pytest.mark.parametrize("form", CARELESS, ids=lambda form: form.__name__)
def test_what_is_planted_leaves_its_mark_where_nothing_stops_it(form, tmp_path):
    with suppress(yaml.YAMLError):
        CARELESS[form](form(tmp_path / "mark"))
    assert (tmp_path / "mark").is_dir()


# ---------------------------------------------------------------- the scene


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> TrainRun:
    """A run that has written all there is to write."""
    folder = tmp_path_factory.mktemp("pickles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
        every = {"checkpoint_every": IMAGES // 2, "snapshot_every": IMAGES // 2}
        config = small(folder / "run", write_data(folder, "indexed"), images=IMAGES, **every)
        run(config)
    return config


@dataclass
class Scene:
    """A copy of that run, and where the mark would be."""

    config: TrainRun
    folder: Path

    @property
    def out(self) -> Path:
        return self.config.out

    @property
    def mark(self) -> Path:
        return self.folder / "mark"

    @property
    def newest(self) -> Path:
        return self.out / "checkpoints" / f"images-{IMAGES:012d}"

    def train(self, **changes: Any) -> str:
        """Runs the command; returns the sentence it ends with, or nothing."""
        file = self.folder / "run.json"
        file.write_text(self.config.model_copy(update=changes).model_dump_json())
        return command("train", str(file))

    def fresh(self, **changes: Any) -> str:
        """A run from the beginning."""
        return self.train(out=self.folder / "fresh", **changes)


def command(*words: str) -> str:
    """What it says to stderr when it refuses; nothing when it goes through."""
    said, code = io.StringIO(), 0
    with redirect_stderr(said):
        try:
            main(list(words))
        except SystemExit as end:
            code = end.code
    if not code:
        return ""
    assert said.getvalue().startswith(f"stillhouse {words[0]}")
    return said.getvalue()


@pytest.fixture
def scene(finished, tmp_path, monkeypatch) -> Scene:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    shutil.copytree(finished.out, tmp_path / "run")
    return Scene(finished.model_copy(update={"out": tmp_path / "run"}), tmp_path)


Place = Callable[[Scene], str]


def check(place: Place, scene: Scene, words: str) -> None:
    """An empty sentence means that the file was passed over."""
    said = place(scene)
    assert words in said
    assert bool(said) == bool(words)
    assert not scene.mark.exists()


# ---------------------------------------------------------------- checkpoints


def agree(folder: Path, name: str, data: bytes) -> None:
    """Replaces a file and makes the manifest agree: checksums do not protect from malice."""
    (folder / name).write_bytes(data)
    there = Files.at(folder)
    names = read_manifest((folder / MANIFEST).read_bytes(), IMAGES).files
    records = {n: FileRecord(there.size(n), there.sha256(n)) for n in names}
    (folder / MANIFEST).write_bytes(spell_manifest(IMAGES, 1, records))


def file_of_a_checkpoint(name: str) -> Place:
    def plant(scene: Scene) -> str:
        agree(scene.newest, name, as_pickle(scene.mark))
        return scene.train(images=2 * IMAGES)

    return plant


def tensors_of_a_checkpoint(scene: Scene) -> str:
    """The description is genuine; where it says that a tensor lies, there lies a gadget."""
    data = as_torch(scene.mark)
    described = pickle.loads((scene.newest / ".metadata").read_bytes())
    for place in described.storage_data.values():
        place.offset, place.length = 0, len(data)
    agree(scene.newest, ".metadata", pickle.dumps(described))
    agree(scene.newest, "__0_0.distcp", data)
    return scene.train(images=2 * IMAGES)


def manifest(scene: Scene) -> str:
    shutil.rmtree(scene.out / "checkpoints" / f"images-{IMAGES // 2:012d}")
    (scene.newest / MANIFEST).write_bytes(as_pickle(scene.mark))
    return scene.train(images=2 * IMAGES)


def newest_checkpoint(scene: Scene) -> str:
    """Without the manifest's blessing: the one before is used."""
    for file in scene.newest.iterdir():
        file.write_bytes(as_pickle(scene.mark))
    with pytest.warns(UserWarning, match=f"the one at {IMAGES // 2} images is used"):
        return scene.train()


CHECKPOINTS = {
    "description": (file_of_a_checkpoint(".metadata"), "asks for posix.mkdir"),
    "tensors": (tensors_of_a_checkpoint, "holds more than tensors; nothing of it was run"),
    "values": (file_of_a_checkpoint("values.json"), "values.json is not JSON"),
    "rank": (file_of_a_checkpoint("values-00000.json"), "values-00000.json is not JSON"),
    "manifest": (manifest, "its manifest.json is damaged"),
    "all of it": (newest_checkpoint, ""),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_in_a_checkpoint(name, scene):
    place, words = CHECKPOINTS[name]
    check(place, scene, words)


# ---------------------------------------------------------------- the run's folder


def record(scene: Scene) -> str:
    (scene.out / "run.json").write_bytes(as_pickle(scene.mark))
    return scene.train(images=2 * IMAGES)


def log(scene: Scene) -> str:
    (scene.out / "log.jsonl").write_bytes(as_pickle(scene.mark) + b"\n")
    with pytest.warns(UserWarning, match="line 1 is damaged, left out"):
        return scene.train(images=2 * IMAGES)


def run_file(suffix: str, form: Callable[[Path], bytes]) -> Place:
    def plant(scene: Scene) -> str:
        file = scene.folder / f"wish{suffix}"
        file.write_bytes(form(scene.mark))
        return command("train", str(file))

    return plant


def page_of(name: str) -> Place:
    def plant(scene: Scene) -> str:
        (scene.out / name).write_bytes(as_pickle(scene.mark))
        return command("report", str(scene.out))

    return plant


RUNS = {
    "record": (record, "run.json cannot be read"),
    "log": (log, ""),
    "run file": (run_file(".json", as_pickle), "wish.json cannot be read"),
    "yaml": (run_file(".yaml", as_yaml), "wish.yaml cannot be read"),
    "pickled yaml": (run_file(".yaml", as_pickle), "wish.yaml cannot be read"),
    "report, record": (page_of("run.json"), "is not the folder of a training run"),
    "report, log": (page_of("log.jsonl"), "has no lines yet"),
}


@pytest.mark.parametrize("name", RUNS)
def test_in_the_folder_of_a_run(name, scene):
    place, words = RUNS[name]
    check(place, scene, words)


# ---------------------------------------------------------------- models

WEIGHTS = "diffusion_pytorch_model.safetensors"


def start_from(scene: Scene) -> str:
    return scene.fresh(network=Pretrained(path=str(scene.out / "model")))


def pickled_weights_alone(scene: Scene) -> str:
    (scene.out / "model" / WEIGHTS).unlink()
    (scene.out / "model" / "diffusion_pytorch_model.bin").write_bytes(as_torch(scene.mark))
    return start_from(scene)


def pickled_weights_beside(scene: Scene) -> str:
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin", "scheduler.pkl"):
        (scene.out / "model" / name).write_bytes(as_torch(scene.mark))
    return start_from(scene)


def file_of_a_model(name: str, form: Callable[[Path], bytes]) -> Place:
    def plant(scene: Scene) -> str:
        (scene.out / "model" / name).write_bytes(form(scene.mark))
        return start_from(scene)

    return plant


def index_of_shards(shard: str) -> Place:
    def plant(scene: Scene) -> str:
        (scene.out / "model" / shard).write_bytes(as_torch(scene.mark))
        index = {"metadata": {}, "weight_map": {"conv_in.weight": shard}}
        (scene.out / "model" / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
        return start_from(scene)

    return plant


def sampled(scene: Scene) -> str:
    (scene.out / "model" / WEIGHTS).write_bytes(as_torch(scene.mark))
    return command("sample", str(scene.out / "model"), "--out", str(scene.folder / "samples"))


def snapshot(scene: Scene) -> str:
    file = max((scene.out / "averages").iterdir())
    file.write_bytes(as_pickle(scene.mark))
    with pytest.raises(UserError) as refusal:
        synthesize_model(scene.out, sigma_rel=0.1)
    return str(refusal.value)


MODELS = {
    "bin alone": (pickled_weights_alone, "Pickled weights are not loaded"),
    "bin beside": (pickled_weights_beside, ""),
    "weights": (file_of_a_model(WEIGHTS, as_pickle), "in "),
    "torch weights": (file_of_a_model(WEIGHTS, as_torch), "in "),
    "index": (index_of_shards("shard.bin"), "names shard.bin among its shards"),
    "index upwards": (index_of_shards("../shard.safetensors"), "names ../shard.safetensors among"),
    "config": (file_of_a_model("config.json", as_pickle), "config.json cannot be read"),
    "scheduler": (
        file_of_a_model("scheduler_config.json", as_pickle),
        "scheduler_config.json cannot be read",
    ),
    "sample": (sampled, "in "),
    "snapshot": (snapshot, "is no snapshot of an average"),
}


@pytest.mark.parametrize("name", MODELS)
def test_in_a_model(name, scene):
    place, words = MODELS[name]
    check(place, scene, words)


# ---------------------------------------------------------------- data


def column_of_images(scene: Scene) -> str:
    """Every fifth image is a pickle; another is shown in its place."""
    data = write_data(scene.folder / "data", "indexed")
    for file in Path(data.source.files[0]).parent.iterdir():
        table = pq.read_table(file)
        images = table["image"].to_pylist()
        for image in images[::5]:
            image["bytes"] = as_pickle(scene.mark)
        column = pa.array(images, table.schema.field("image").type)
        pq.write_table(table.set_column(0, table.schema.field(0), column), file)
    return scene.fresh(data=data)


def parquet_file(scene: Scene) -> str:
    data = write_data(scene.folder / "data", "indexed")
    folder = Path(data.source.files[0]).parent
    (folder / "zzz.parquet").write_bytes(as_pickle(scene.mark))
    return scene.fresh(data=data)


def extension_type(scene: Scene) -> str:
    """Arrow once unpickled the types that a file named (CVE-2023-47248)."""
    data = write_data(scene.folder / "data", "indexed")
    facts = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": as_pickle(scene.mark),
    }
    for file in Path(data.source.files[0]).parent.iterdir():
        table = pq.read_table(file)
        field = table.schema.field("caption").with_metadata(facts)
        pq.write_table(table.set_column(2, field, table["caption"]), file)
        stored = pq.ParquetFile(file).metadata.metadata[b"ARROW:schema"]
        assert facts[b"ARROW:extension:metadata"] in base64.b64decode(stored)
    return scene.fresh(data=data)


def members_of_a_tar(*suffixes: str, streaming: bool) -> Place:
    """Beside the images, and instead of some of them."""
    forms = {"pyd": as_pickle, "pickle": as_pickle, "pth": as_torch, "npy": as_numpy}

    def plant(scene: Scene) -> str:
        folder = scene.folder / "tars"
        glob = write_shards(folder, "tars", [20, 20])
        for file in folder.iterdir():
            with tarfile.open(file, "a") as tar:
                for i in range(5):
                    for suffix in suffixes:
                        add(tar, f"x{i}.{suffix}", forms[suffix](scene.mark))
                    add(tar, f"x{i}.png", as_pickle(scene.mark))
                    add(tar, f"x{i}.cls", b"0")
                    add(tar, f"x{i}.txt", b"")
        source = Tars(files=(glob,), streaming=streaming)
        columns = Columns(image="png", label="cls")
        return scene.fresh(data=DataConfig(source=source, columns=columns, image=PIXELS))

    return plant


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def folder_of_images(scene: Scene) -> str:
    folder = scene.folder / "pictures"
    write_folder(folder, 20)
    for place in folder.iterdir():
        (place / "zzz.png").write_bytes(as_pickle(scene.mark))
        (place / "zzz.pkl").write_bytes(as_pickle(scene.mark))
    data = DataConfig(source=Folder(path=str(folder)), columns=Columns(label="label"), image=PIXELS)
    return scene.fresh(data=data)


PIXELS = ImageConfig(size=8)
DATA = {
    "image column": (column_of_images, ""),
    "parquet file": (parquet_file, ""),
    "extension type": (extension_type, ""),
    "streamed tar": (members_of_a_tar("pyd", "pickle", "pth", "npy", streaming=True), ""),
    "indexed tar": (members_of_a_tar("pyd", "pickle", streaming=False), ""),
    "indexed pth": (members_of_a_tar("pth", streaming=False), "Weights only load failed"),
    "indexed npy": (members_of_a_tar("npy", streaming=False), "Object arrays cannot be loaded"),
    "folder": (folder_of_images, ""),
}


@pytest.mark.parametrize("name", DATA)
def test_in_the_data(name, scene):
    place, words = DATA[name]
    check(place, scene, words)
