"""`stillhouse prepare` from its command line: real codecs, real captions, real refusals."""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from data.pictures import write_folder, write_shards
from data.preparing import write_mixed
from metrics.shared import weights_folder
from models.test_text import write_bert
from recipes.test_telling import write_data

from stillhouse.cli import main
from stillhouse.data import Columns, DataConfig, Folder, ImageConfig, Parquet, Tars
from stillhouse.data.prepare import Pool, make_plan
from stillhouse.data.prepare.worker import Worker
from stillhouse.errors import UserError
from stillhouse.models.text import TextEncoder
from stillhouse.pipelines import load_codec
from stillhouse.recipes import known_data
from stillhouse.recipes.preparing import (
    PrepareRun,
    Task,
    find_pool,
    find_source,
    run,
    tell_enlarged,
)

SIDE = 16


@pytest.fixture(scope="module")
def codec() -> str:
    return str(weights_folder() / "taesd")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    write_bert(folder)
    return str(folder / "bert")


@pytest.fixture
def config(tmp_path, codec) -> PrepareRun:
    files = write_shards(tmp_path / "data", "parquet", [20, 20])
    return PrepareRun(source=files, out=str(tmp_path / "out"), codec=codec, resolution=SIDE)


@pytest.fixture
def short_paths(monkeypatch):
    """Ray's sockets need a short one."""
    monkeypatch.setenv("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory(
        prefix="prep-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def rows(out) -> list[dict]:
    return [row for file in sorted(Path(out).glob("*.parquet")) for row in read(file)]


def read(file):
    return pq.read_table(file).to_pylist()


@pytest.mark.slow
def test_latents_and_captions_are_those_of_the_encoders(
    codec, encoder, short_paths, tmp_path, capsys, monkeypatch
):
    files = write_data(tmp_path / "data")
    out = tmp_path / "out"
    words = ["prepare", files, "--out", str(out), "--codec", codec, "--text", encoder]
    words += ["--resolution", str(SIDE), "--workers", "1", "--text-length", "8"]
    main(words)
    assert "40 latents (4 x 2 x 2) of 40 images" in capsys.readouterr().out

    columns = Columns(text="caption")
    data = DataConfig(source=Parquet(files=(files,)), columns=columns, image=ImageConfig(size=SIDE))
    seen = next(iter(data.build(batch=40, seed=0, stop=40)))
    latents = load_codec(codec).encode(seen.batch.data)
    told = TextEncoder(encoder, length=8).encode(seen.text)
    place = {text: row for row, text in enumerate(seen.text)}
    found = rows(out)
    assert len(found) == len(place) == 40
    for row in found:
        at = place[row["caption"]]
        latent = np.frombuffer(row["latent"], np.float32).reshape(4, 2, 2)
        torch.testing.assert_close(torch.tensor(latent), latents[at], rtol=0, atol=1e-5)
        tokens = np.frombuffer(row["tokens"], np.float32).reshape(row["token_count"], -1)
        mask = told.text_mask[at]
        torch.testing.assert_close(torch.tensor(tokens), told.text[at][mask], rtol=0, atol=1e-5)
        pooled = torch.tensor(np.frombuffer(row["pooled"], np.float32))
        torch.testing.assert_close(pooled, told.pooled[at], rtol=0, atol=1e-5)

    index = json.loads((out / "index.json").read_text())
    assert index["codec"]["digest"] == load_codec(codec).digest
    assert index["text"]["digest"] == TextEncoder(encoder, length=8).digest
    assert index["latent"]["shape"] == [4, 2, 2]
    assert index["columns"]["text"] == "caption"
    check_null(out, encoder, index)

    # The same again has nothing to do, and says the same without starting anything.
    monkeypatch.setattr("stillhouse.data.prepare.cluster", None)
    times = {file: file.stat().st_mtime_ns for file in out.glob("*.parquet")}
    main(words)
    assert "40 latents" in capsys.readouterr().out
    assert all(file.stat().st_mtime_ns == then for file, then in times.items())


def check_null(out, encoder, index):
    from safetensors.numpy import load_file

    null, wanted = load_file(out / index["text"]["null"]), TextEncoder(encoder, length=8).null
    np.testing.assert_allclose(null["tokens"], wanted.text[wanted.text_mask], atol=1e-6)
    np.testing.assert_allclose(null["pooled"], wanted.pooled[0], atol=1e-6)
    widths = index["text"]["width"], index["text"]["pooled_width"]
    assert widths == (null["tokens"].shape[1], len(null["pooled"]))


def test_a_codec_has_one_digest_whatever_it_computes_in(config):
    """So that what was encoded in bfloat16 can be trained on with the codec as it is."""
    codecs = [
        Task(config.model_copy(update={"precision": precision})).codec
        for precision in ("float32", "bfloat16")
    ]
    assert codecs[0].digest == codecs[1].digest == load_codec(config.codec).digest
    images = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 2 - 1
    exact, rough = (codec("cpu")(images) for codec in codecs)
    assert 0 < (rough - exact).norm() / exact.norm() < 0.05


# ---------------------------------------------------------------- the folder is one run's


def begun(task: Task) -> None:
    """As if a unit had been made."""
    units = Path(task.config.out) / "units"
    units.mkdir()
    (units / "shard-000000.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"resolution": 24}, "resolution: 16 -> 24"),
        ({"flip": True}, "flip: False -> True"),
        ({"min_size": 9}, "min_size: 0 -> 9"),
        ({"precision": "bfloat16"}, "precision: float32 -> bfloat16"),
    ],
)
def test_another_run_in_the_same_folder_is_refused_once_it_has_begun(config, change, told):
    with Task(config).claimed():
        pass
    other = Task(config.model_copy(update=change))
    with other.claimed():  # nothing is there that it could spoil
        pass
    with Task(config).claimed():
        begun(other)
    with pytest.raises(UserError, match=f"shards of another run.*{told}"), other.claimed():
        pass


def test_what_another_try_has_left_is_not_taken_for_this_ones(config, tmp_path):
    """Hashes of other images would drop some that are there once."""
    with Task(config).claimed():
        pass
    left = [
        tmp_path / "out" / "hashes" / "shard-000000.blake2b",
        tmp_path / "out/shard-000009.parquet",
    ]
    left[0].parent.mkdir()
    for file in left:
        file.touch()
    with Task(config.model_copy(update={"workers": 2})).claimed():
        assert all(file.exists() for file in left)
    write_shards(tmp_path / "data", "parquet", [20, 21])
    with Task(config).claimed():
        assert not any(file.exists() for file in left)


def test_finished_shards_are_not_removed_even_where_their_units_are_not_known(config, tmp_path):
    with Task(config).claimed():
        (tmp_path / "out" / "index.json").write_text("{}")
    other = Task(config.model_copy(update={"flip": True}))
    with pytest.raises(UserError, match="shards of another run"), other.claimed():
        pass


def test_the_machine_may_change_and_the_images_may_not(config, tmp_path):
    with Task(config).claimed():
        begun(Task(config))
    with Task(config.model_copy(update={"workers": 3, "readers": 2})).claimed():
        pass
    write_shards(tmp_path / "data", "parquet", [20, 21])
    with pytest.raises(UserError, match="the images changed"), Task(config).claimed():
        pass


def test_two_runs_at_once_in_a_folder_are_refused(config):
    with (
        Task(config).claimed(),
        pytest.raises(UserError, match="another run is using"),
        Task(config).claimed(),
    ):
        pass


def test_a_folder_with_files_of_another_kind_is_refused(config, tmp_path):
    write_shards(tmp_path / "out", "parquet", [3])
    with pytest.raises(UserError, match="files of another kind"), Task(config).claimed():
        pass


def test_the_folder_of_a_training_run_is_refused(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"config": {}, "versions": {}}')
    with pytest.raises(UserError, match=r"run\.json is of another kind"), Task(config).claimed():
        pass


def test_a_torn_record_is_told_with_what_to_do(config, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"run": ')
    with pytest.raises(UserError, match=r"read .*remove that file"), Task(config).claimed():
        pass


# ---------------------------------------------------------------- what cannot be done


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"source": ""}, "stillhouse prepare SOURCE --codec DIR"),
        ({"codec": ""}, "stillhouse prepare SOURCE --codec DIR"),
        ({"max_aspect": 0.5}, "1 or more"),
        ({"source": "nowhere"}, "neither a folder nor a data set"),
        ({"resolution": 20}, "multiples of 8"),
        ({"columns": Columns(text="said")}, "no column 'said'.*Name it as --columns.text"),
        ({"tile": 8}, "--tile 8 is too small: .* at least 16 pixels"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(config, change, told):
    with pytest.raises(UserError, match=told):
        run(config.model_copy(update=change))


def test_captions_that_are_not_there_cannot_be_encoded(config, tmp_path):
    write_folder(tmp_path / "photos", 4)
    other = {"source": str(tmp_path / "photos"), "text": "minilm"}
    with pytest.raises(UserError, match="no captions to encode"):
        run(config.model_copy(update=other))


def test_shards_do_not_go_among_the_images(config, tmp_path):
    write_folder(tmp_path / "photos", 4)
    other = {"source": str(tmp_path / "photos"), "out": str(tmp_path / "photos" / "latents")}
    with pytest.raises(UserError, match="among the images"):
        run(config.model_copy(update=other))


def test_a_pipeline_of_pixels_has_no_codec(config, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="has no autoencoder"):
        run(config.model_copy(update={"codec": str(tmp_path / "model")}))


def test_without_ray_the_line_to_run_is_told(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[scale\]'"):
        run(config)


def test_workers_on_other_machines_fetch_a_codec_of_the_hub_themselves(config, codec, monkeypatch):
    """Where it was put on the first machine means nothing on the others."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: codec)
    task = Task(config.model_copy(update={"codec": "someone/something"}))
    assert task.codec.name == "someone/something"
    assert task.codec.digest == Task(config).codec.digest


def test_a_worker_with_another_codec_refuses(config):
    factory = Task(config).codec
    with pytest.raises(UserError, match="is another one here"):
        replace(factory, digest="sha256:0")("cpu")
    images = torch.rand(2, 3, SIDE, SIDE) * 2 - 1
    assert torch.equal(factory("cpu")(images), load_codec(config.codec).encode(images))


# ---------------------------------------------------------------- sources and machines


def test_a_source_is_known_by_its_name_or_by_what_it_holds(tmp_path):
    write_shards(tmp_path / "tars", "tars", [3])
    (tmp_path / "tars" / "00000.parquet").touch()  # img2dataset's metadata
    write_mixed(tmp_path / "parquet", [3])
    write_folder(tmp_path / "photos", 3)
    kinds = {"tars": Tars, "parquet": Parquet, "photos": Folder}
    for name, kind in kinds.items():
        assert isinstance(find_source(str(tmp_path / name), Columns())[0], kind), name
    assert isinstance(find_source("s3://bucket/*.tar", Columns())[0], Tars)
    source, columns = find_source("cifar10:test", Columns())
    assert "test" in source.files[0]
    assert columns.label == "label"


def test_columns_that_are_named_count_in_a_data_set_too():
    _, columns = find_source("emoji", Columns(text="name"))
    assert columns == known_data.columns("emoji").model_copy(update={"text": "name"})
    assert columns.styles


def test_a_folder_with_the_name_of_a_data_set_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "pets", 3)
    told = r"write \./pets for the folder, pets:train for the data set"
    with pytest.raises(UserError, match=told):
        find_source("pets", Columns())
    assert isinstance(find_source("./pets", Columns())[0], Folder)
    assert isinstance(find_source("pets:train", Columns())[0], Parquet)


def test_captions_in_files_beside_the_images_are_encoded(config, encoder, tmp_path):
    write_folder(tmp_path / "photos", 4)
    for image in (tmp_path / "photos").rglob("*.png"):
        image.with_suffix(".txt").write_text("a picture")
    change = {"source": str(tmp_path / "photos"), "text": encoder}
    assert Task(config.model_copy(update=change)).columns.text == "text"


def test_images_that_were_enlarged_are_told(config, capsys):
    """Theirs is a side of 8."""
    task = Task(config)
    with task.claimed():
        worker = Worker(task.job)
        for unit in make_plan(task.job).missing:
            worker.do(unit, frozenset())
    run(config)
    assert "40 of 40 images were enlarged to 16 pixels" in capsys.readouterr().out
    tell_enlarged({"enlarged": 0, "counts": {"kept": 40}}, 16)
    assert not capsys.readouterr().out


def test_a_worker_for_each_core_or_gpu_and_no_more_than_there_are(config):
    def pool(resources, **change):
        return find_pool(config.model_copy(update=change), resources)

    assert pool({"CPU": 4.0}) == Pool(4, 1, 0)
    assert pool({"CPU": 4.0}, workers=2, readers=3) == Pool(2, 1, 0)
    assert pool({"CPU": 16.0, "GPU": 2.0}, readers=8) == Pool(2, 8, 1)
    assert pool({"CPU": 16.0, "GPU": 2.0}, device="cpu") == Pool(16, 1, 0)
    for resources, change in [
        ({"CPU": 4.0}, {"workers": 5}),
        ({"CPU": 4.0, "GPU": 2.0}, {"readers": 3}),
        ({"CPU": 4.0, "GPU": 2.0}, {"workers": 3}),
        ({"CPU": 4.0}, {"device": "cuda"}),
    ]:
        with pytest.raises(UserError):
            pool(resources, **change)
