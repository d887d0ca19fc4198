"""DINOv2 and CLIP are transformers' own, from safetensors that fit, and nothing else is run."""

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from metrics.shared import planted
from metrics.tiny import pictures, write_models
from torch.nn import functional as F

from stillhouse.errors import UserError
from stillhouse.metrics.detectors import (
    ClipConfig,
    Dinov2Config,
    _fix_positions,
)
from stillhouse.metrics.preprocessing import CLIP, IMAGENET, Preprocessing


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def test_dinov2_is_transformers_on_the_same_pixels(folders):
    from transformers import Dinov2Model

    model = Dinov2Model.from_pretrained(folders["dinov2"]).eval()
    images = pictures(3)
    with torch.no_grad():
        pixels = Preprocessing(224, "bicubic", *IMAGENET)(images)
        wanted = model(pixels).last_hidden_state[:, 0]
    found = Dinov2Config(model=str(folders["dinov2"])).build()(images).features
    torch.testing.assert_close(found, wanted)


def keys(places, count, a=-0.75):
    """Weights of `count` points at some places between them: Keys' cubic, the ends repeated."""
    weights = torch.zeros(len(places), count)
    for row, place in enumerate(places.tolist()):
        for point in range(math.floor(place) - 1, math.floor(place) + 3):
            t = abs(place - point)
            near = (a + 2) * t**3 - (a + 3) * t**2 + 1
            far = a * (t**3 - 5 * t**2 + 8 * t - 4)
            weights[row, min(max(point, 0), count - 1)] += near if t <= 1 else far
    return weights


def test_dinov2_of_another_size_has_the_published_positions(folders):
    """Position i of 16 is read at (i + 1/2) / s - 1/2 of 37, s = 16.1 / 37 as published.

    With transformers' own 16 / 37 it would be up to 0.23 further on.
    """
    first, grid = torch.randn(1, 1, 2), torch.randn(37, 37, 2, generator=torch.manual_seed(0))
    embeddings = SimpleNamespace(position_embeddings=torch.cat([first, grid.view(1, -1, 2)], 1))
    _fix_positions(embeddings, 16)
    found_first, rest = embeddings.position_embeddings.split([1, 256], 1)
    found, middles = rest.reshape(16, 16, 2), torch.arange(16, dtype=torch.float64) + 0.5
    published, plain = keys(middles * 37 / 16.1 - 0.5, 37), keys(middles * 37 / 16 - 0.5, 37)
    wanted = torch.einsum("ih,jw,hwd->ijd", published, published, grid)
    assert torch.equal(found_first, first)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (found - torch.einsum("ih,jw,hwd->ijd", plain, plain, grid)).abs().max() > 0.1

    detector = Dinov2Config(model=str(folders["dinov2-518"])).build()
    assert detector(pictures(2)).features.shape == (2, 32)


def test_clip_is_transformers_on_the_same_pixels(folders):
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(folders["clip"]).eval()
    images = pictures(3)
    with torch.no_grad():
        pixels = Preprocessing(48, "bicubic", *CLIP, crop=True)(images)
        wanted = model.get_image_features(pixel_values=pixels).pooler_output
    found = ClipConfig(model=str(folders["clip"])).build()(images).features
    torch.testing.assert_close(found, wanted / wanted.norm(dim=1, keepdim=True))


def test_clip_encodes_text_as_transformers_does(folders):
    from transformers import CLIPModel, CLIPTokenizer

    detector = ClipConfig(model=str(folders["clip"])).build()
    texts = ["a cat", "dogs", "a very long sentence about nothing"]
    model = CLIPModel.from_pretrained(folders["clip"]).eval()
    tokenizer = CLIPTokenizer.from_pretrained(folders["clip"])
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=12, return_tensors="pt")
    with torch.no_grad():
        wanted = model.get_text_features(**tokens).pooler_output
    found = detector.encode_text(texts)
    torch.testing.assert_close(found, F.normalize(wanted))
    torch.testing.assert_close(torch.cat([detector.encode_text([t]) for t in texts]), found)
    many = detector.encode_text(texts * 50)
    torch.testing.assert_close(many, found.repeat(50, 1))
    assert (found[0] - found[1]).norm() > 1e-3
    with pytest.raises(ValueError, match="no texts"):
        detector.encode_text([])


def test_clip_and_its_images_and_texts_are_as_in_clips_own_forward(folders):
    """The cosine of the two is what CLIP itself makes its logits of."""
    detector = ClipConfig(model=str(folders["clip"])).build()
    images, texts = pictures(2), ["one", "two"]
    tokens = detector.tokenizer(texts, padding=True, return_tensors="pt")
    pixels = Preprocessing(48, "bicubic", *CLIP, crop=True)(images)
    with torch.no_grad():
        found = detector.model(pixel_values=pixels, **tokens)
    cosine = detector(images).features @ detector.encode_text(texts).T
    scale = detector.model.logit_scale.exp()
    torch.testing.assert_close(found.logits_per_image, cosine * scale)


def copied(folder, into, *, without=()):
    into.mkdir()
    for path in folder.iterdir():
        if path.name not in without:
            (into / path.name).write_bytes(path.read_bytes())
    return into


def test_texts_need_a_tokenizer_and_images_do_not(folders, tmp_path):
    bare = copied(folders["clip"], tmp_path / "bare")
    for path in bare.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    detector = ClipConfig(model=str(bare)).build()
    assert detector(pictures(1)).features.shape == (1, 16)
    with pytest.raises(UserError, match="no tokenizer"):  # transformers makes an empty one up
        detector.encode_text(["a"])
    (bare / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer .* cannot be read"):
        detector.encode_text(["a"])


def test_shards_are_one_model(folders, tmp_path):
    from transformers import Dinov2Model

    model = Dinov2Model.from_pretrained(folders["dinov2"])
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    files = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 1
    detector = Dinov2Config(model=str(tmp_path / "shards")).build()
    content = b"".join(path.read_bytes() for path in files)
    assert detector.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
    whole = Dinov2Config(model=str(folders["dinov2"])).build()
    assert torch.equal(detector(pictures(2)).features, whole(pictures(2)).features)

    index = tmp_path / "shards" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(files[0].name, "../planted.bin"))
    with pytest.raises(UserError, match=r"names \.\./planted\.bin"):
        Dinov2Config(model=str(tmp_path / "shards")).build()


def test_pickled_models_are_not_loaded(folders, tmp_path):
    folder = copied(folders["dinov2"], tmp_path / "pickled", without=("model.safetensors",))
    (folder / "pytorch_model.bin").write_bytes(planted(tmp_path / "mark"))
    with pytest.raises(UserError, match=r"no model\.safetensors.*save_pretrained"):
        Dinov2Config(model=str(folder)).build()
    assert not (tmp_path / "mark").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "mark").exists()


def test_code_beside_a_model_is_not_run(folders, tmp_path):
    folder = copied(folders["dinov2"], tmp_path / "code")
    (folder / "modeling.py").write_text(f"import os; os.mkdir({str(tmp_path / 'mark')!r})")
    content = json.loads((folder / "config.json").read_text())
    content["auto_map"] = {"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config"}
    (folder / "config.json").write_text(json.dumps(content))
    assert Dinov2Config(model=str(folder)).build().dims == 32
    assert not (tmp_path / "mark").exists()


def test_models_that_do_not_fit_are_refused(folders, tmp_path):
    with pytest.raises(UserError, match="holds a model of type clip; dinov2 is needed"):
        Dinov2Config(model=str(folders["clip"])).build()
    deeper = copied(folders["dinov2"], tmp_path / "deeper")
    content = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps(content | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"do not fit its config: \d+ tensors missing"):
        Dinov2Config(model=str(deeper)).build()
    half = copied(folders["dinov2"], tmp_path / "half")
    weights = half / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="could not be loaded"):
        Dinov2Config(model=str(half)).build()
    (half / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        Dinov2Config(model=str(half)).build()


def test_a_model_that_cannot_be_fetched(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=r"facebook/dinov2-large.*no network.*--detector\.model"):
        Dinov2Config().build()


def test_old_models_are_taken_as_the_hubs_robot_has_converted_them(folders, tmp_path, monkeypatch):
    """openai's CLIP is a pickle on its main branch."""
    main = copied(folders["clip"], tmp_path / "main", without=("model.safetensors",))
    asked = []

    def fetch(name, *, revision="main", allow_patterns):
        assert not any("bin" in pattern or pattern.endswith("*") for pattern in allow_patterns)
        asked.append(revision)
        return str({"main": main, "refs/pr/8": folders["clip"]}[revision])

    def offers(name, *, author):
        assert author == "SFconvertbot"
        yield SimpleNamespace(num=3, is_pull_request=False)
        yield SimpleNamespace(num=8, is_pull_request=True)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("huggingface_hub.get_repo_discussions", offers)
    assert ClipConfig(model="openai/clip").build().dims == 16
    assert asked == ["main", "refs/pr/8"]
    monkeypatch.setattr("huggingface_hub.get_repo_discussions", lambda *_, **__: iter(()))
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        ClipConfig(model="openai/clip").build()
