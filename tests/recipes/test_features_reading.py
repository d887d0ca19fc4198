"""How models read pictures: by config alone or with weights, told prompts, at any size; `Features`.

What they should give is made by hand here: from diffusers' parts, closed forms and single prompts.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from recipes import looking
from recipes.looking import features, save_model
from small_models import build_network, network_config, part
from tunable import FAMILIES, pipeline, save_whole

from stillhouse.errors import UserError
from stillhouse.features.catalogue import catalogue
from stillhouse.features.extractor import Extractor
from stillhouse.features.selection import published
from stillhouse.features.store import StoredFeatures
from stillhouse.pipelines import load, load_codec, load_denoiser
from stillhouse.pipelines.families import family_of
from stillhouse.pipelines.prompts import PromptEncoder, spoken
from stillhouse.process import Condition, keyed_normal
from stillhouse.recipes.features import Features, reading
from stillhouse.recipes.features.reading import FeatureModel, Reading, chosen_parts, read_outline

CPU = torch.device("cpu")
EARLY = "up-level0-repeat1-res-out"
TALL, WIDE = 32, 48  # pixels
WORDS = ("a red x", "blue")
picture = partial(looking.picture, width=50, height=40)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Small whole pipelines, each saved once."""
    folder, made = tmp_path_factory.mktemp("whole"), dict[str, Path]()

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_whole(folder / family, family)
        return made[family]

    return get


@pytest.fixture(scope="module")
def unet(tmp_path_factory) -> Path:
    """A network of pixels."""
    return save_model(tmp_path_factory.mktemp("unet") / "model")


def squashed(image: Any, height: int, width: int) -> torch.Tensor:
    small = image.resize((width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(small)).movedim(-1, 0) / 127.5 - 1


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(5):
        picture(number).save(folder / f"{number}.png")
    return folder


def extracted(out: Path, *words: Any) -> StoredFeatures:
    features("extract", *words, "--out", out)
    return StoredFeatures(out)


def level(family: str, time: int) -> float:
    """Of a timestep, by the definition of each process."""
    if family == "sd3":
        return time / (1000 - time)
    config = part(family, "scheduler")
    power = {"linear": 1, "scaled_linear": 2}[config["beta_schedule"]]
    ends = (config["beta_start"] ** (1 / power), config["beta_end"] ** (1 / power))
    abar = np.prod(1 - np.linspace(*ends, 1000)[: time + 1] ** power)
    return float(((1 - abar) / abar) ** 0.5)


# ---------------------------------------------------------------- three lines


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_pictures_with_prompts(whole, family):
    """Every activation, of images that are not square, each with its own prompt."""
    folder, pictures = whole(family), [picture(0), picture(1)]
    denoiser = load_denoiser(folder)
    known = catalogue(denoiser.network.model)
    found = Features(folder, list(known), t=50, size=(TALL, WIDE)).extract(pictures, WORDS)

    x = load_codec(folder).encode(torch.stack([squashed(p, TALL, WIDE) for p in pictures]))
    said = PromptEncoder(folder).encode(WORDS)
    cond = Condition(text=said.text, **spoken(family_of(folder), said, (TALL, WIDE)))
    by_hand = Extractor(denoiser, list(known), sigma=level(family, 50))
    expected = by_hand.extract(x, cond, key=[0, 1])

    tokens = said.text.shape[1]
    assert list(found) == list(known)
    for name, value in found.items():
        assert value.shape == (2, *known[name].shape(TALL // 2, WIDE // 2, tokens)), name
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_features_are_what_diffusers_computes(whole):
    """The forward process, the encoders and the network are diffusers' own."""
    folder, pictures = whole("sd15"), [picture(0), picture(1)]
    found = Features(folder, ["mid-repeat1-res-out"], t=50).extract(pictures, WORDS, seed=3)
    pipe, seen = pipeline(folder), list[torch.Tensor]()
    pipe.unet.mid_block.resnets[1].register_forward_hook(lambda *given: seen.append(given[2]))
    side = 2 * pipe.unet.config.sample_size
    pixels = torch.stack([squashed(p, side, side) for p in pictures])
    with torch.no_grad():
        latents = pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor
        text, _ = pipe.encode_prompt(list(WORDS), CPU, 1, False)
        purpose = f"features/{level('sd15', 50):.6g}"
        noise = keyed_normal(latents.shape[1:], [0, 1], seed=3, purpose=purpose)
        times = torch.tensor([50, 50])
        noisy = diffusers.DDPMScheduler.from_config(part("sd15", "scheduler")).add_noise(
            latents, noise.float(), times
        )
        pipe.unet(noisy, times, text)
    torch.testing.assert_close(found["mid-repeat1-res-out"], seen[0], rtol=1e-3, atol=1e-4)


def test_features_do_not_depend_on_how_they_are_asked_for(whole):
    folder, pictures = whole("sd15"), [picture(n) for n in range(3)]
    ids = ["mid-repeat1-res-out", "up-level1-repeat1-vit-block0-cross-q"]
    eyes = Features(folder, ids)
    together = eyes.extract(pictures, ["red", "blue", "green"])
    eyes.batch = 2
    apart = eyes.extract(pictures, ["red", "blue", "green"])
    last = eyes.extract(pictures[2:], "green", key=[2])
    blue = eyes.extract(pictures, "blue")
    unsaid, empty = eyes.extract(pictures), eyes.extract(pictures, "")
    for name in ids:
        torch.testing.assert_close(apart[name], together[name], rtol=0, atol=1e-4)
        torch.testing.assert_close(last[name][0], together[name][2], rtol=0, atol=1e-4)
        torch.testing.assert_close(blue[name][1], together[name][1], rtol=0, atol=1e-4)
        assert not torch.allclose(blue[name][2], together[name][2], atol=1e-3)
        assert torch.equal(unsaid[name], empty[name])
    levels = Features(folder, ids[:1], t=[50, 200]).extract(pictures, "blue")[ids[0]]
    torch.testing.assert_close(levels[:, 0], blue[ids[0]], rtol=0, atol=1e-4)
    assert levels.shape[1] == 2


def test_mistakes_in_python_are_sentences(unet, whole):
    eyes = Features(unet, [EARLY])
    for wrong, sentence in (
        ({"prompts": "cat"}, "takes no prompts: leave them out"),
        ({"label": 3}, "has no class 3: leave it out"),
        ({"key": [1]}, "2 images have 1 keys: give one for each"),
    ):
        with pytest.raises(UserError, match=sentence):
            eyes.extract([picture(0), picture(1)], **wrong)
    with pytest.raises(UserError, match="3 images have 2 prompts: give one for all"):
        Features(whole("sd15"), ["unet-in"]).extract([picture(0)] * 3, WORDS)
    with pytest.raises(UserError, match="the closest is 'sd15'"):
        Features(unet, "sd-15")
    with pytest.raises(UserError, match="give either sigma or t"):
        Features(unet, [EARLY], t=50, sigma=0.2)


# ---------------------------------------------------------------- prompts


def test_prompts_are_dealt_in_turn(whole, photos, tmp_path):
    """Image i is told prompt i mod n, in whatever batch it is."""
    name = "up-level1-repeat0-vit-block0-cross-map"
    common = (whole("sd15"), "--images", photos, "--selection", name, "--batch", 3)
    both = extracted(tmp_path / "both", *common, "--prompt", *WORDS)
    alone = [extracted(tmp_path / word, *common, "--prompt", word) for word in WORDS]
    for number in range(5):
        assert torch.equal(both[number][name], alone[number % 2][number][name])
        assert not torch.equal(both[number][name], alone[1 - number % 2][number][name])
    assert both.facts.parts[0].condition == "prompt 'a red x', prompt 'blue' in turn"
    assert alone[0].facts.parts[0].condition == "prompt 'a red x'"


# ---------------------------------------------------------------- sizes


def test_pictures_need_not_be_square(unet, photos, tmp_path, capsys):
    words = (unet, "--images", photos, "--selection", EARLY, "--sigma", 0.4)
    stored = extracted(tmp_path / "wide", *words, "--size", 16, 24)
    x = torch.stack([squashed(picture(n), 16, 24) for n in range(5)])
    expected = Extractor(load_denoiser(unet), [EARLY], sigma=0.4).extract(x, key=range(5))[EARLY]
    assert stored.shapes[EARLY] == (16, 8, 12)
    assert stored.facts.reading == "24 x 16 rgb, squashed, lanczos"
    torch.testing.assert_close(stored[4][EARLY], expected[4].half())
    square = extracted(tmp_path / "square", *words, "--size", 16)
    assert square.shapes[EARLY] == (16, 8, 8)
    capsys.readouterr()
    features("info", unet, "--size", 16, 24, "--match", EARLY)
    assert "16 x 8 x 12" in capsys.readouterr().out


def test_a_network_of_squares_says_so(tmp_path):
    network = build_network(network_config("dit-xl-2", reduced=True))
    network.save_pretrained(tmp_path / "transformer")
    diffusers.DDIMScheduler().save_pretrained(tmp_path / "scheduler")
    (tmp_path / "model_index.json").write_text('{"_class_name": "DiTPipeline"}')
    with pytest.raises(UserError, match="takes square pictures only: give --size one side"):
        read_outline(Reading(model=str(tmp_path), size=(16, 24)))


@pytest.mark.parametrize(("family", "side"), [("sd3", 4), ("sd15", 2)])
def test_sides_are_whole_patches_of_whole_latents(whole, family, side):
    model = str(whole(family))
    for size in ((TALL + side // 2, WIDE), (TALL, WIDE + side // 2)):
        with pytest.raises(UserError, match=f"takes sides that are multiples of {side}: give"):
            read_outline(Reading(model=model, size=size))
    outline = read_outline(Reading(model=model, size=(TALL + side, WIDE)))
    assert outline.latent == (TALL // 2 + side // 2, WIDE // 2)


# ---------------------------------------------------------------- without weights


def said(capsys: Any, *words: Any) -> str:
    capsys.readouterr()
    features(*words)
    return capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_not_needed_to_know_activations_and_rules(whole, family, tmp_path, capsys):
    folder = shutil.copytree(whole(family), tmp_path / "model")
    loaded = FeatureModel(str(folder), Reading(), CPU)
    before = [said(capsys, "info", folder)]
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    shutil.rmtree(folder / "text_encoder")
    outline = read_outline(Reading(model=str(folder)))
    assert outline.known == loaded.known
    _, side, _ = loaded.subject.shape
    assert outline.reading == f"{2 * side} x {2 * side} rgb, squashed, lanczos"
    assert outline.latent == (side, side)
    assert [said(capsys, "info", folder)] == before
    file = tmp_path / "rules.json"
    features("select", folder, "--out", file)
    (chosen,) = json.loads(file.read_text())["parts"]
    usual = level(family, 50) if family != "sd3" else 0.2
    assert chosen["sigma"] == pytest.approx(usual, rel=1e-4)
    assert {*chosen["ids"]} < {*loaded.known}


def test_the_folder_of_a_network_and_of_a_run_will_do(whole, tmp_path, capsys):
    folder = whole("sd15")
    listed = said(capsys, "info", folder).splitlines()[1:]
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    shutil.copytree(folder, run / "model")
    assert said(capsys, "info", run).splitlines()[1:] == listed
    inner = said(capsys, "info", folder / "unet").splitlines()
    assert inner[0].endswith("latents")
    assert inner[1:] == listed


def test_of_the_hub_configs_alone_are_fetched(whole, monkeypatch, capsys):
    asked: list[list[str]] = []

    def fetch(hub_id: str, files: list[str]) -> Path:
        asked.append(files)
        return whole("sd15")

    monkeypatch.setattr(load, "fetch", fetch)
    assert said(capsys, "info", "owner/name").startswith("owner/name: ")
    assert asked == [["*.json"]]


def test_what_is_there_is_not_read_again(unet, photos, tmp_path, monkeypatch):
    """A model is loaded where a shard is missing, and only there."""
    words = (unet, "--images", photos, "--selection", EARLY, "--shard", 2)
    stored = extracted(tmp_path / "out", *words)
    read = FeatureModel(str(unet), Reading(), CPU).subject.fingerprints()
    assert stored.facts.parts[0].digest == ", ".join(read.values())

    def refuse(*_: Any) -> None:
        raise RuntimeError("loaded")

    monkeypatch.setattr(reading, "load_subject", refuse)
    assert len(extracted(tmp_path / "out", *words)) == 5
    (tmp_path / "out" / "shard-00001.safetensors").unlink()
    with pytest.raises(RuntimeError, match="loaded"):
        extracted(tmp_path / "out", *words)


# ---------------------------------------------------------------- selections


@pytest.mark.parametrize(
    ("name", "family", "time"), [("sd15", "sd15", 51), ("legacy-sdxl", "sdxl", 50)]
)
def test_a_published_selection_by_its_name(whole, photos, tmp_path, name, family, time):
    """Its activations, at the level of its timestep."""
    folder = shutil.copytree(whole(family), tmp_path / "model")
    shutil.rmtree(folder / "unet")
    build_network(network_config(family, reduced=True)).save_pretrained(folder / "unet")
    stored = extracted(
        tmp_path / "out", folder, "--images", photos, "--count", 1, "--selection", name
    )
    (facts,) = stored.facts.parts
    assert facts.ids == published(name).ids
    assert facts.sigma == pytest.approx(level(family, time), rel=2e-6)
    eyes = Features(folder, name)
    assert eyes.extractor.sigmas == [facts.sigma]
    found = eyes.extract([picture(0)])
    assert {*found} == {*stored.shapes}
    for key, value in found.items():
        torch.testing.assert_close(value[0].half(), stored[0][key], rtol=2e-3, atol=1e-3)


def test_parts_come_in_the_order_of_the_words():
    ids = published("sd15").ids
    found = chosen_parts(Reading(selection=("one,sd15", "two", "legacy-sdxl", "one")))
    assert [part.ids for part in found] == [
        ("one", "two", "one"),
        ids,
        published("legacy-sdxl").ids,
    ]
    last = chosen_parts(Reading(selection=("sd15", "one")))
    assert [part.ids for part in last] == [ids, ("one",)]
