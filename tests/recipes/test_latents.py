"""Networks that draw latents: encoded on the way, or read from prepared shards."""

import json

import numpy as np
import pytest
import torch
from metrics.shared import weights_folder
from models.test_text import write_bert
from PIL import Image
from recipes.test_telling import name, write_data
from recipes.test_training import final_tensors
from small_models import small_autoencoder

from stillhouse.data import Columns, ControlConfig, DataConfig, ImageConfig, Parquet, Prepared
from stillhouse.data import prepare as work
from stillhouse.data.prepare.worker import Worker
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.trackers import read_log
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models import Codec
from stillhouse.objectives.configs import FlowConfig
from stillhouse.pipelines import load_codec, load_denoiser
from stillhouse.recipes import pictures
from stillhouse.recipes.export.exporting import ExportRun, export
from stillhouse.recipes.plan.planning import describe
from stillhouse.recipes.preparing import PrepareRun, Task
from stillhouse.recipes.report.report import report
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.recipes.telling import CaptionText, StoredText
from stillhouse.recipes.train.networks import Backbone
from stillhouse.recipes.train.processes import RectifiedFlow
from stillhouse.recipes.train.training import TrainRun, build_learner, build_loader, run
from stillhouse.recipes.train.watching import Preview, Validation

HERE = World(0, 1, torch.device("cpu"))
SIDE, LENGTH = 32, 8
COLUMNS = Columns(text="caption")


@pytest.fixture(scope="module")
def codec(request, tmp_path_factory) -> str:
    """TAESD, which gives latents, or where a test asks for it one that gives a distribution."""
    if getattr(request, "param", "taesd") == "taesd":
        return str(weights_folder() / "taesd")
    folder = tmp_path_factory.mktemp("codec")
    small_autoencoder(latent_channels=4).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    write_bert(folder)
    return str(folder / "bert")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> str:
    return write_data(tmp_path_factory.mktemp("data") / "images")


@pytest.fixture(scope="module")
def shards(tmp_path_factory, codec, encoder, files) -> str:
    out = str(tmp_path_factory.mktemp("shards"))
    words = {"text": encoder, "text_length": LENGTH}
    prepare_here(PrepareRun(source=files, out=out, codec=codec, resolution=SIDE, **words))
    return out


def prepare_here(config: PrepareRun) -> None:
    """The job in this process."""
    task = Task(config)
    with task.claimed():
        plan = work.make_plan(task.job)
        worker = Worker(task.job)
        for unit in plan.missing:
            worker.do(unit, frozenset())
        work.conclude(task.job, plan, task.facts)


@pytest.fixture
def encoding(tmp_path, codec, encoder, files) -> TrainRun:
    """A run that encodes its images itself."""
    source = Parquet(files=(files,))
    return TrainRun(
        data=DataConfig(
            source=source,
            columns=COLUMNS,
            image=ImageConfig(size=SIDE),
            control=ControlConfig(detail=("height",)),
        ),
        codec=codec,
        text=CaptionText(encoder=encoder, length=LENGTH),
        network=Backbone(name="unet", size="tiny"),
        process=RectifiedFlow(),
        objective=FlowConfig(),
        images=64,
        batch=16,
        averages=(HalfLife(images=100),),
        log_every=16,
        checkpoint_every=64,
        preview=Preview(every=64, count=2, steps=2),
        validation=Validation(every=64, images=16, source=source),
        out=tmp_path / "encoding",
    )


@pytest.fixture
def reading(encoding, shards, tmp_path) -> TrainRun:
    """The same from prepared shards."""
    source = Prepared(path=shards)
    return encoding.model_copy(
        update={
            "data": encoding.data.model_copy(update={"source": source}),
            "text": StoredText(),
            "validation": encoding.validation.model_copy(update={"source": source}),
            "out": tmp_path / "reading",
        }
    )


def logged(config: TrainRun, key: str) -> list[float]:
    return [line[key] for line in read_log(config.out / "log.jsonl") if key in line]


@pytest.mark.parametrize("codec", ["taesd", "gaussian"], indirect=True)
def test_training_from_prepared_shards_equals_encoding_on_the_way(encoding, reading):
    run(encoding)
    run(reading)
    for key in ("denoiser/loss", "validation/loss"):
        assert logged(encoding, key)
        np.testing.assert_allclose(logged(reading, key), logged(encoding, key), rtol=0, atol=1e-5)
    first, second = (final_tensors(config.out, 64) for config in (encoding, reading))
    assert first.keys() == second.keys()
    for name_, value in first.items():
        torch.testing.assert_close(second[name_], value, rtol=0, atol=1e-5)


@pytest.fixture
def decoded(monkeypatch) -> list[torch.Tensor]:
    """All that a codec decodes in this test."""
    found, decode = [], Codec.decode

    def kept(self: Codec, latents: torch.Tensor) -> torch.Tensor:
        found.append(decode(self, latents))
        return found[-1]

    monkeypatch.setattr(Codec, "decode", kept)
    return found


def test_what_is_drawn_is_decoded_and_the_codec_goes_with_the_model(
    reading, tmp_path, codec, decoded
):
    run(reading)
    network = load_denoiser(reading.out / "model").network
    assert network.data_shape == (4, SIDE // 8, SIDE // 8)
    preview = reading.out / "samples" / "images-000000000064.png"
    pictures.save_tiles([pictures.to_pil(image) for image in decoded[-1]], tmp_path / "sheet.png")
    assert decoded[-1].shape == (2, 3, SIDE, SIDE)
    assert np.array_equal(Image.open(preview), Image.open(tmp_path / "sheet.png"))
    assert pictures.data_uri(preview.read_bytes()) in report(reading.out).read_text()
    saved, given = load_codec(reading.out / "model"), load_codec(codec)
    for ours, theirs in zip(saved.parameters(), given.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert "_name_or_path" not in json.loads((reading.out / "model/vae/config.json").read_text())
    wish = {"prompt": (name(3),), "count": 2, "steps": 2}
    sample(SampleRun(model=str(reading.out / "model"), out=tmp_path / "drawn", **wish))
    assert Image.open(tmp_path / "drawn" / "images" / "000000.png").size == (SIDE, SIDE)
    export(ExportRun(run=reading.out, out=tmp_path / "exported", **wish))
    assert load_codec(tmp_path / "exported", dtype=torch.bfloat16) is not None
    facts = (tmp_path / "exported" / "README.md").read_bytes()
    assert str(tmp_path).encode() not in facts.replace(str(tmp_path / "exported").encode(), b"")


def test_stored_captions_are_those_of_the_encoder(encoding, reading):
    batches = []
    for config in (encoding, reading):
        config = config.model_copy(update={"drop": 0.5})
        loader = build_loader(config, HERE, ())
        learner = build_learner(config, HERE, loader)
        batches.append(learner.prepare(next(iter(loader)).batch))
    first, second = batches
    torch.testing.assert_close(second.data, first.data, rtol=0, atol=1e-6)
    torch.testing.assert_close(second.condition.text, first.condition.text, rtol=0, atol=1e-5)
    told = (batch.condition.control for batch in (second, first))
    torch.testing.assert_close(*told, rtol=0, atol=0, equal_nan=True)
    assert second.condition.pooled is None


def test_half_precision_is_read_as_what_it_is(tmp_path, codec, files, shards):
    config = PrepareRun(source=files, out=str(tmp_path / "half"), codec=codec, resolution=SIDE)
    prepare_here(config.model_copy(update={"dtype": "float16"}))
    half, full = (
        next(iter(DataConfig(source=Prepared(path=path)).build(batch=16, seed=0))).batch.data
        for path in (config.out, shards)
    )
    assert half.dtype == torch.float32
    assert torch.equal(half, full.half().float())
    assert not torch.equal(half, full)


def test_captions_that_nobody_asked_for_are_not_read(reading):
    data = reading.data.model_copy(update={"columns": Columns()})
    batch = next(iter(data.build(batch=16, seed=0))).batch
    assert batch.condition.text is None


def test_a_dry_run_counts_the_network_of_latents(reading):
    shown = describe(reading, 1)
    network = build_learner(reading, HERE, build_loader(reading, HERE, ())).denoiser
    count = sum(p.numel() for p in network.parameters())
    assert f"{count / 1e6:.2f}M parameters" in shown


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"codec": ""}, "name the autoencoder whose latents"),
        ({"codec": "other"}, "not the codec that the shards were prepared with"),
        ({"codec": "none"}, "is none; name the autoencoder"),
        ({"flip": True}, "neither flipped nor sorted"),
        ({"columns": Columns(styles=())}, "--data.columns.text: --text is stored"),
        ({"path": "elsewhere"}, "holds no index.json"),
    ],
)
def test_what_does_not_fit_the_shards_is_refused(reading, tmp_path, change, told):
    (tmp_path / "none").mkdir()
    changes = dict(change)
    if changes.get("codec"):
        other = {"other": weights_folder() / "taesd3", "none": tmp_path / "none"}
        changes["codec"] = str(other[changes["codec"]])
    data = reading.data
    if changes.pop("flip", False):
        data = data.model_copy(update={"image": ImageConfig(size=SIDE, flip=True)})
    if "columns" in changes:
        data = data.model_copy(update={"columns": changes.pop("columns")})
    if "path" in changes:
        source = Prepared(path=str(tmp_path / changes.pop("path")))
        data = data.model_copy(update={"source": source})
    config = reading.model_copy(update=changes | {"data": data})
    with pytest.raises(UserError, match=told):
        build_learner(config, HERE, build_loader(config, HERE, ()))


def test_stored_captions_need_prepared_shards(encoding):
    config = encoding.model_copy(update={"text": StoredText()})
    with pytest.raises(UserError, match=r"give --data\.source prepared"):
        build_learner(config, HERE, build_loader(config, HERE, ()))
