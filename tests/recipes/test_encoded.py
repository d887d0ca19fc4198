"""What fine-tuning encodes once, where captions are read from, and which pipelines it refuses."""

import json
import shutil
import tarfile
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from tunable import HERE, SIDE, prepared, tuning, write_images

from stillhouse.couplings.configs import AssignmentConfig
from stillhouse.data import Columns, RandomCrop, Tars, cached
from stillhouse.engine.trackers import read_log
from stillhouse.errors import UserError
from stillhouse.pipelines.families import whole_folder
from stillhouse.recipes import encoded
from stillhouse.recipes.latents import build_codec
from stillhouse.recipes.prompting import pipeline_speech
from stillhouse.recipes.telling import NoText
from stillhouse.recipes.train.training import TrainRun, run
from stillhouse.recipes.train.tuning import fitted
from stillhouse.recipes.train.watching import Validation

LATENT = SIDE // 2
pytestmark = pytest.mark.usefixtures("cache")


def test_latents_from_the_cache_are_those_encoded_on_the_way(models, images, tmp_path):
    config = tuning(models["sd15"], images, tmp_path / "run", batch=12)
    flip = config.data.image.model_copy(update={"flip": True})
    config = config.model_copy(update={"data": config.data.model_copy(update={"image": flip})})
    _, batch, cached = prepared(config)
    learner, fresh, direct = prepared(config.model_copy(update={"encode_once": False}))
    assert batch.data.shape == (12, 4, LATENT, LATENT)
    assert fresh.data.shape == (12, 3, SIDE, SIDE)
    torch.testing.assert_close(cached.data, direct.data, rtol=0, atol=1e-6)
    torch.testing.assert_close(cached.noise, direct.noise)
    torch.testing.assert_close(cached.condition.text, direct.condition.text)
    plain = learner.codec.encode(fresh.data.flip(-1))
    assert (plain - direct.data).abs().amax((1, 2, 3)).min() > 1e-3  # mirrored ones differ


def test_held_out_images_are_encoded_once_too(models, images, tmp_path):
    source = tuning(models["sd15"], images, tmp_path).data.source
    validation = Validation(every=16, images=8, source=source)
    losses = []
    for once in (True, False):
        changes = {"validation": validation, "encode_once": once}
        config = tuning(models["sd15"], images, tmp_path / f"once-{once}", **changes)
        run(config)
        lines = read_log(config.out / "log.jsonl")
        losses += [line["validation/loss"] for line in lines if "validation/loss" in line]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_second_start_encodes_nothing(models, images, tmp_path, cache, monkeypatch):
    config = tuning(models["sd15"], images, tmp_path / "run")
    run(config)
    files = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    assert len(files) == 3 + 4  # two of latents, three of captions, a manifest of each

    def fail(*args, **kwargs):
        raise AssertionError("something was encoded")

    monkeypatch.setattr(encoded, "PromptEncoder", fail)
    monkeypatch.setattr("stillhouse.models.codecs.Codec.encode", fail)
    again = {"out": tmp_path / "again", "coupling": AssignmentConfig()}
    run(config.model_copy(update=again))
    assert files == {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


def test_another_encoder_codec_or_image_is_encoded_anew(models, images, tmp_path, cache):
    config = tuning(models["sd15"], images, tmp_path / "run")
    prepared(config)
    assert len(list(cache.iterdir())) == 2
    model = shutil.copytree(models["sd15"], tmp_path / "other")
    shutil.copytree(models["sdxl"] / "vae", model / "vae", dirs_exist_ok=True)
    vae = json.loads((model / "vae/config.json").read_text()) | {"scaling_factor": 0.5}
    (model / "vae/config.json").write_text(json.dumps(vae))
    prepared(config.model_copy(update={"model": str(model)}))
    assert len(list(cache.iterdir())) == 3
    tokenizer = model / "tokenizer" / "tokenizer_config.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    prepared(config.model_copy(update={"model": str(model)}))
    assert len(list(cache.iterdir())) == 4
    more = shutil.copytree(images, tmp_path / "more")
    (more / "00.png").write_bytes((images / "01.png").read_bytes())
    prepared(tuning(model, more, tmp_path / "run"))
    assert len(list(cache.iterdir())) == 5


def test_an_image_that_cannot_be_read_is_passed_over_in_the_cache_too(models, images, tmp_path):
    broken = shutil.copytree(images, tmp_path / "broken")
    (broken / "03.png").write_bytes(b"\x89PNG nothing")
    _, batch, _ = prepared(tuning(models["sd15"], broken, tmp_path / "run", batch=12))
    assert sorted(batch.ids.tolist()) == [0, 1, 2, 4, 4, 5, 6, 7, 8, 9, 10, 11]


def test_latents_are_kept_when_captions_change(models, tmp_path, cache):
    images = write_images(tmp_path / "images", metadata=False)
    config = tuning(models["sd15"], images, tmp_path / "run")
    prepared(config)
    (images / "05.txt").write_text("a caption that is new\n")
    prepared(config)
    names = sorted(path.name.split("-")[0] for path in cache.iterdir())
    assert names == ["captions", "captions", "latents"]


def test_large_images_are_encoded_a_few_at_a_time():
    for side, most in ((32, 64), (512, 16), (1024, 4), (4096, 1)):
        found = list(cached.chunks(range(5, 105), (3, side, side)))
        assert [row for some in found for row in some] == list(range(5, 105))
        assert len(found[0]) == most
        assert max(map(len, found)) == most


def test_held_out_images_may_come_from_tars(models, images, tmp_path):
    """Tars are streamed by default, but what is held out never is."""
    with tarfile.open(tmp_path / "held-out.tar", "w") as tar:
        for image in sorted(images.glob("*.png")):
            tar.add(image, image.name)
    config = fitted(tuning(models["sd15"], images, tmp_path / "run"))
    codec = build_codec(config, HERE.device)
    source = Tars(files=(str(tmp_path / "held-out.tar"),))
    data = config.data.model_copy(update={"source": source, "columns": Columns(image="png")})
    held_out = Validation(images=12, source=source).build(data, 4, HERE)
    shown = config.model_copy(update={"data": data})
    batch = next(iter(encoded.read_once(shown, HERE, held_out, codec))).batch
    assert batch.data.shape == (4, 4, LATENT, LATENT)
    streamed = data.build(batch=4, seed=0)
    with pytest.raises(UserError, match="only an indexed source can be encoded once"):
        encoded.read_once(shown, HERE, streamed, codec)


# ---------------------------------------------------------------- captions


def test_captions_may_stand_beside_the_images(models, images, tmp_path):
    beside = write_images(tmp_path / "beside", metadata=False)
    _, _, first = prepared(tuning(models["sd15"], images, tmp_path / "run"))
    _, _, second = prepared(tuning(models["sd15"], beside, tmp_path / "run"))
    assert torch.equal(first.condition.text, second.condition.text)
    (beside / "05.txt").unlink()
    with pytest.raises(UserError, match=r"1 of 12 images have no caption .*05\.png"):
        prepared(tuning(models["sd15"], beside, tmp_path / "run"))


@pytest.mark.parametrize("family", ["sd15", "sd3"])
def test_a_pipeline_may_be_told_nothing(models, family):
    speech = pipeline_speech(models[family], (4, LATENT, LATENT), [""], torch.device("cpu"))
    assert torch.equal(speech.condition([0]).text, speech.null().text)


# ---------------------------------------------------------------- what is refused


def without(model: Path, target: Path, *names: str) -> Path:
    shutil.copytree(model, target)
    for name in names:
        found = target / name
        shutil.rmtree(found) if found.is_dir() else found.unlink()
    return target


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        (("vae",), "has no vae"),
        (("text_encoder",), "has no text_encoder"),
        (("tokenizer/tokenizer.json",), "has none of"),
        (("model_index.json",), "is no diffusers pipeline"),
        (("unet/diffusion_pytorch_model.safetensors",), "Pickled weights are not loaded"),
        (("text_encoder/model.safetensors",), "Pickled weights are not loaded"),
    ],
)
def test_half_a_pipeline_is_refused(models, images, tmp_path, lost, told):
    model = without(models["sd15"], tmp_path / "model", *lost)
    for name in lost:
        if name.endswith(".safetensors"):
            (model / name).with_suffix(".bin").write_bytes(b"a pickle")
    with pytest.raises(UserError, match=told):
        prepared(tuning(model, images, tmp_path / "run"))


def test_what_does_not_fit_is_refused(models, images, tmp_path):
    usual = tuning(models["sd3"], images, tmp_path / "run")
    larger = usual.data.image.model_copy(update={"size": 64})
    random = usual.data.image.model_copy(update={"crop": RandomCrop()})
    for changes, told in [
        ({"model": ""}, "name the pipeline"),
        ({"model": "nowhere"}, "no diffusers pipeline"),
        ({"text": NoText()}, "draws what it is told"),
        ({"image": larger}, "--data.image.size 32"),
        ({"image": random}, "--encode-once false"),
        ({"network": TrainRun().network}, "stillhouse train finetune"),
        ({"init_from": "x"}, "leave --init-from out"),
    ]:
        changes = dict(changes)
        if "image" in changes:
            image = changes.pop("image")
            changes["data"] = usual.data.model_copy(update={"image": image})
        with pytest.raises(UserError, match=told):
            prepared(usual.model_copy(update=changes))


def test_images_without_any_caption_are_refused(models, images, tmp_path):
    bare = without(images, tmp_path / "bare", "metadata.jsonl")
    with pytest.raises(UserError, match="there is no column 'text'"):
        prepared(tuning(models["sd15"], bare, tmp_path / "run"))
    rows = [json.loads(line) for line in (images / "metadata.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"text": ""}) + "\n" for row in rows]
    (bare / "metadata.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match="no image has a caption"):
        prepared(tuning(models["sd15"], bare, tmp_path / "run"))


def test_captions_that_are_too_long_are_told_of(models, images, tmp_path):
    learner, *_ = prepared(tuning(models["sd15"], images, tmp_path / "run"))
    assert learner.texts.note == ""
    texts = replace(learner.texts, table=replace(learner.texts.table, longest=99))
    assert "more than 12 tokens are cut; one has 99" in texts.note


def test_from_the_hub_come_encoders_and_tokenizers_but_no_pickles(monkeypatch):
    asked = {}

    def download(name, allow_patterns, ignore_patterns):
        asked["allowed"], asked["ignored"] = allow_patterns, ignore_patterns
        return "/nowhere"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    whole_folder("someone/something")

    def fetched(file: str) -> bool:
        kept = any(fnmatch(file, pattern) for pattern in asked["allowed"])
        return kept and not any(fnmatch(file, pattern) for pattern in asked["ignored"])

    for file in ("model_index.json", "text_encoder/model.safetensors", "tokenizer/merges.txt"):
        assert fetched(file)
    assert fetched("text_encoder_3/model-00001-of-00002.safetensors")
    assert fetched("tokenizer_3/spiece.model")
    for file in ("text_encoder/pytorch_model.bin", "unet/code.py", "safety_checker/model.bin"):
        assert not fetched(file)
