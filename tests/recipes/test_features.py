"""`stillhouse features`: every command on small models and hand-made data whose answer is known."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import loaded
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from recipes.looking import features, picture, save_model
from small_models import build_network, network_config
from tunable import save_whole

from stillhouse.data import CentreCrop, ImageConfig, Squash, to_float
from stillhouse.data.annotated import read_pets, spread
from stillhouse.features.catalogue import catalogue
from stillhouse.features.extractor import Extractor
from stillhouse.features.properties import Images, score
from stillhouse.features.segmentation import Ensemble, labelled_pixels, pixel_features
from stillhouse.features.selection import candidates, keep_by_rule
from stillhouse.features.store import StoredFeatures
from stillhouse.pipelines import load_denoiser
from stillhouse.recipes.features import tasks
from stillhouse.recipes.features.reading import FeatureModel, Reading
from stillhouse.recipes.features.selecting import as_seen, dealt, rule_reason

SIDE = 8
EARLY = "up-level0-repeat1-res-out"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("features") / "model")


def encoded(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        picture(number).save(folder / f"photo-{number}.png")
    return folder


def refused(capsys, *words):
    with pytest.raises(SystemExit):
        features(*words)
    return capsys.readouterr().err


# ---------------------------------------------------------------- info, extract


def test_info_lists_what_a_model_has(model, capsys):
    features("info", model)
    told = capsys.readouterr().out
    known = catalogue(load_denoiser(model).network.model)
    kept = keep_by_rule(known, candidates(known))
    assert f"{len(known)} activations" in told
    rows = told.splitlines()[2:]
    assert [row[2:].split()[0] for row in rows] == list(known)
    assert [row[2:].split()[0] for row in rows if row.startswith("*")] == kept
    assert re.search(rf"{EARLY} +16 x 4 x 4 +up_blocks.0.resnets.1\n", told)
    features("info", model, "--match", "mid-*")
    assert all(row[2:].startswith("mid-") for row in capsys.readouterr().out.splitlines()[2:])


def pixels_of(number):
    config = ImageConfig(size=SIDE, crop=Squash())
    return to_float(torch.from_numpy(config.apply(picture(number), 0, 0)[0].copy()))


def test_extraction_is_the_extractor_s(model, photos, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["extract", model, "--images", photos, "--selection", EARLY, "--sigma", "0.4"]
    words += ["--out", out, "--shard", 4, "--batch", 2]
    features(*words)
    stored = StoredFeatures(out)
    assert stored.ids == [f"photo-{number}.png" for number in range(6)]
    extractor = Extractor(load_denoiser(model), [EARLY], sigma=0.4)
    x = torch.stack([pixels_of(4), pixels_of(5)])
    expected = extractor.extract(x, key=[4, 5])[EARLY]
    torch.testing.assert_close(stored.of("photo-5.png")[EARLY], expected[1].half())
    assert stored.facts.parts[0].sigma == 0.4
    assert stored.facts.parts[0].digest.startswith("sha256:")
    features("info", out)
    assert "6 images of" in capsys.readouterr().out
    before = {file.name: file.stat().st_mtime_ns for file in out.glob("shard-*")}
    features(*words)
    assert {file.name: file.stat().st_mtime_ns for file in out.glob("shard-*")} == before
    assert "holds other features" in refused(capsys, *words, "--seed", 1)
    assert "holds other features" in refused(capsys, *words, "--dtype", "bfloat16")


def test_several_models_and_levels_go_together(model, photos, tmp_path):
    """Part by part, they are what each gives alone."""
    other = save_model(tmp_path / "other", seed=3)
    late = "up-level1-repeat0-res-out"
    for place, name in ((model, EARLY), (other, late)):
        out = tmp_path / f"{Path(place).name}.json"
        features("select", place, "--selection", name, "--rules", "false", "--out", out)
    both = f"{tmp_path / 'model.json'},{tmp_path / 'other.json'}"
    common = ["--images", photos, "--count", 3]
    features("extract", "--selection", both, *common, "--out", tmp_path / "both")
    features("extract", other, "--selection", late, *common, "--out", tmp_path / "alone")
    stored, alone = StoredFeatures(tmp_path / "both"), StoredFeatures(tmp_path / "alone")
    assert list(stored.shapes) == [f"0:{EARLY}", f"1:{late}"]
    assert torch.equal(stored[2][f"1:{late}"], alone[2][late])
    levels = ["--sigma", "0.1", "2.0"]
    features("extract", other, "--selection", late, *levels, *common, "--out", tmp_path / "two")
    level = ["--sigma", "2.0"]
    features("extract", other, "--selection", late, *level, *common, "--out", tmp_path / "one")
    two, one = StoredFeatures(tmp_path / "two"), StoredFeatures(tmp_path / "one")
    assert [part.sigma for part in two.facts.parts] == [0.1, 2.0]
    assert torch.equal(two[1][f"1:{late}"], one[1][late])
    assert not torch.equal(two[1][f"0:{late}"], one[1][late])


# ---------------------------------------------------------------- select


def test_a_selection_by_rules_then_scores(model, photos, tmp_path, capsys):
    known = catalogue(load_denoiser(model).network.model)
    kept = keep_by_rule(known, candidates(known))
    file = tmp_path / "rules.json"
    features("select", model, "--out", file)
    assert json.loads(file.read_text())["parts"][0]["ids"] == kept
    features("select", model, "--out", file, "--images", photos, "--share", 0.3)
    found = json.loads(file.read_text())
    ids = found["parts"][0]["ids"]
    assert set(ids) < set(kept)
    assert {known[n].scale for n in ids} == {known[n].scale for n in kept}
    assert all("eta_hi" in found["why"][n] for n in ids)
    assert "use it as --selection" in capsys.readouterr().out
    assert "end in .json" in refused(capsys, "select", model, "--out", tmp_path / "x.txt")


def pets_folder(folder, count=8):
    """Bright pets on dark ground: the mask can be told from a pixel's own colour."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        rows = {"image": [], "trimap": []}
        for _ in range(count):
            mask = np.zeros((SIDE, SIDE), bool)
            top, left = generator.integers(0, 4, 2)
            mask[top : top + 4, left : left + 4] = True
            pixels = np.where(mask[..., None], 200, 40) + generator.integers(-9, 9, (SIDE, SIDE, 3))
            trimap = np.where(mask, 1, 2).astype(np.uint8)
            trimap[0, 0] = 3
            for name, content in (("image", pixels.astype(np.uint8)), ("trimap", trimap)):
                content = encoded(Image.fromarray(content))
                rows[name].append({"bytes": content, "path": None})
        pq.write_table(pa.table(rows), folder / f"{split}.parquet")
    return folder


def test_a_probe_finds_the_activation_that_tells_labels(model, tmp_path):
    """And never opens the images that its choice will be judged by: here they are gone."""
    data = pets_folder(tmp_path / "pets")
    (data / "test.parquet").unlink()
    file = tmp_path / "probed.json"
    pool = "mid-repeat0-res-out,unet-after-conv-in,down-level1-repeat0-res-increment"
    words = ["--selection", pool, "--rules", "false", "--data", data, "--sigma", 0]
    features("select", model, *words, "--most", 1, "--out", file)
    found = json.loads(file.read_text())
    assert found["parts"][0]["ids"] == ["unet-after-conv-in"]
    accuracy = float(found["why"]["unet-after-conv-in"].split()[-1])
    assert accuracy > 0.98


def test_images_are_spread_and_none_judges_what_it_taught():
    assert list(spread(10, 4)) == [0, 2, 5, 7]
    assert list(spread(3, 4)) == list(spread(3)) == [0, 1, 2]
    assert [list(part) for part in dealt(100, 3, 2)] == [[0, 20, 40], [60, 80]]
    for total, train, held in ((2, 1, 9), (2, 9, 1), (8, 20, 20), (41, 20, 20)):
        one, two = map(set, dealt(total, train, held))
        assert one
        assert two
        assert not one & two
        assert len(one | two) == min(total, train + held)


def test_a_gate_by_labels(model, tmp_path):
    """Locality as it is scored directly, of the masks as the network sees their pictures."""
    data, file = pets_folder(tmp_path / "pets"), tmp_path / "local.json"
    pool = ["up-level1-repeat0-res-out", "up-level1-repeat1-res-out"]
    words = ["--selection", ",".join(pool), "--by", "locality", "--sigma", 0.3, "--share", 1]
    words += ["--rules", "false", "--most", 2, "--count", 4, "--batch", 3, "--out", file]
    features("select", model, *words, "--data", data)
    masks = read_pets(data, "train").some([0, 2, 4, 6])
    pixels = [torch.from_numpy(np.array(masks.open(n))).movedim(2, 0) for n in range(4)]
    x, labels = to_float(torch.stack(pixels)), torch.stack([masks.mask(n) for n in range(4)])
    images = Images(x, range(4), labels=torch.where(labels == 255, -1, labels))
    direct = score(Extractor(load_denoiser(model), pool, sigma=0.3), [images])
    why = json.loads(file.read_text())["why"]
    assert why
    for name, reason in why.items():
        assert f"locality {direct[name].locality:.3f}" in reason


@pytest.mark.parametrize(
    ("crop", "columns"), [(CentreCrop(), [2, 3, 4, 5]), (Squash(), [1, 3, 5, 7])]
)
def test_masks_are_cropped_as_their_pictures_are(crop, columns):
    """4 x 8 pixels, of which 4 x 4 are seen; one of them is not labelled."""
    mask = torch.arange(8).repeat(4, 1)
    mask[3, 5] = 255
    model = SimpleNamespace(image=(ImageConfig(size=4, crop=crop), (4, 4)))
    seen = as_seen(model, mask)
    assert seen[:3].tolist() == [columns] * 3
    assert seen[3].tolist() == [-1 if column == 5 else column for column in columns]


def test_a_score_that_cannot_be_measured_is_not_gone_by(model, photos, tmp_path, capsys):
    """A place cannot be told from one image, which is fitted to another."""
    words = ["select", model, "--images", photos, "--out", tmp_path / "x.json", "--by", "position"]
    assert "position cannot be measured" in refused(capsys, *words, "--count", 1)
    features(*words, "--count", 2)


# ---------------------------------------------------------------- tasks


def spair_folder(folder):
    """Each target is its source, made larger and not square: points move with it."""
    (folder / "images").mkdir(parents=True)
    entries = []
    for number in range(3):
        small = picture(number, SIDE, SIDE)
        small.resize((40, 40), Image.Resampling.NEAREST).save(folder / f"images/a{number}.png")
        small.resize((80, 48), Image.Resampling.NEAREST).save(folder / f"images/b{number}.png")
        cells = [(1, 2), (6, 3), (4, 6)]
        entries.append(
            {
                "src_imname": f"a{number}.png",
                "trg_imname": f"b{number}.png",
                "category": "cat",
                "src_imsize": [40, 40, 3],
                "trg_imsize": [80, 48, 3],
                "src_bndbox": [0, 0, 40, 40],
                "trg_bndbox": [0, 0, 80, 48],
                "kps_ids": ["0", "1", "2"],
                "src_kps": [[5 * x + 2, 5 * y + 2] for x, y in cells],
                "trg_kps": [[10 * x + 5, 6 * y + 3] for x, y in cells],
            }
        )
    (folder / "pairs.json").write_text(json.dumps(entries))
    return folder


def test_correspondence_of_an_image_with_itself_at_another_size(model, tmp_path, capsys):
    data, out = spair_folder(tmp_path / "cats"), tmp_path / "out"
    words = ["--data", data, "--selection", "unet-after-conv-in", "--sigma", 0, "--out", out]
    features("evaluate", model, *words)
    record = json.loads((out / "record.json").read_text())
    results = record["results"]
    assert (results["pairs"], results["points"]) == (3, 9)
    assert results["pck"]["0.1"]["box"] == {"per_point": 1.0, "per_image": 1.0}
    assert results["same_place"]["0.05"]["image"]["per_point"] == 1.0
    assert results["by_category"]["cat"] == results["pck"]["0.1"]
    drawn = np.array(Image.open(out / "pictures.png"))
    assert (drawn == [0x1A, 0x98, 0x50]).all(-1).any()  # right
    assert not (drawn == [0xD7, 0x30, 0x27]).all(-1).any()  # wrong
    assert "PCK@0.1: box 100.0%" in capsys.readouterr().out
    # Pairs that show other things are not found.
    entries = json.loads((data / "pairs.json").read_text())
    for entry in entries:
        entry["trg_imname"] = "b2.png" if entry["src_imname"] == "a0.png" else "b0.png"
    (data / "pairs.json").write_text(json.dumps(entries))
    features("evaluate", model, *words[:-1], tmp_path / "other", "--window", 3)
    other = json.loads((tmp_path / "other" / "record.json").read_text())["results"]
    assert other["pck"]["0.05"]["box"]["per_point"] < 0.7
    assert other["same_place"] == results["same_place"]


@pytest.mark.parametrize("task", ["few-labels", "segmentation"])
def test_segmentation_of_what_colours_tell(model, tmp_path, task):
    data, out = pets_folder(tmp_path / "pets"), tmp_path / "out"
    words = ["--task", task, "--data", data, "--selection", "unet-after-conv-in", "--sigma", 0]
    features("evaluate", model, *words, "--steps", 150, "--members", 3, "--out", out)
    results = json.loads((out / "record.json").read_text())["results"]
    assert (results["train_images"], results["test_images"]) == (8, 8)
    assert results["mean_iou"] > 0.95
    assert (out / "pictures.png").is_file()


def test_some_images_of_a_data_set_are_spread_over_it(model, tmp_path, capsys):
    """With their own masks, or they could not be told."""
    data, out = pets_folder(tmp_path / "pets"), tmp_path / "out"
    words = ["--task", "segmentation", "--data", data, "--selection", "unet-after-conv-in"]
    words += ["--sigma", 0, "--train-count", 4, "--count", 3, "--steps", 150, "--pictures", 0]
    features("evaluate", model, *words, "--out", out)
    assert StoredFeatures(out / "features" / "train").ids == ["0", "2", "4", "6"]
    assert StoredFeatures(out / "features" / "test").ids == ["0", "2", "5"]
    assert json.loads((out / "record.json").read_text())["results"]["mean_iou"] > 0.95
    assert not (out / "pictures.png").exists()
    assert f"see {out / 'record.json'}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("most", "steps", "rows", "taken"),
    [(10**6, 0, 8 * 60, 1000), (80, 0, 8 * 10, 1000), (3, 7, 8, 7), (10**6, 0, 8 * 60, 18)],
)
def test_a_head_learns_from_no_more_pixels_than_memory_holds(
    model, tmp_path, monkeypatch, most, steps, rows, taken
):
    """Rows as each image gives them; many are gone through ten times, 256 at a time."""
    if taken == 18:  # 10 x 480 / 256
        monkeypatch.setattr(tasks, "STEPS", 1)
    data, out = pets_folder(tmp_path / "pets"), tmp_path / "out"
    names, given = ["unet-after-conv-in", "mid-repeat0-res-out"], {}

    def fit(make, rows, labels, classes, **options):
        given.update(options, rows=rows, labels=labels)
        return Ensemble([make(rows.shape[1], classes)], rows.mean(0), rows.std(0) + 1)

    monkeypatch.setattr(tasks, "fit", fit)
    words = ["--task", "segmentation", "--data", data, "--selection", ",".join(names)]
    words += ["--pixels", 60, "--most-pixels", most, "--steps", steps, "--out", out]
    features("evaluate", model, *words)
    assert (len(given["rows"]), given["steps"], given["batch"]) == (rows, taken, 256)
    masks, stored = read_pets(data, "train"), StoredFeatures(out / "features" / "train")
    each, number = rows // 8, 5
    pixels, labels = labelled_pixels(masks.mask(number), each, key=number)
    maps = [value.float() for value in stored[number].values()]
    place = slice(number * each, (number + 1) * each)
    assert torch.equal(given["rows"][place], pixel_features(maps, pixels, (SIDE, SIDE)).half())
    assert torch.equal(given["labels"][place], labels)


@pytest.mark.slow
def test_two_processes_judge_as_one_does(model, tmp_path):
    data = pets_folder(tmp_path / "pets", count=5)
    words = ["evaluate", model, "--task", "segmentation", "--data", data, "--selection", EARLY]
    words += ["--steps", 20, "--device", "cpu", "--out"]
    features(*words, tmp_path / "one")
    script, both = tmp_path / "evaluate.py", ["features", *words, tmp_path / "two"]
    script.write_text(f"from stillhouse.cli import main\nmain({[*map(str, both)]!r})\n")
    done = loaded.run(str(script), processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("mean IoU") == 1
    one, two = (json.loads((tmp_path / n / "record.json").read_text()) for n in ("one", "two"))
    assert one == two
    assert 0 < one["results"]["mean_iou"] < 1


# ---------------------------------------------------------------- atlas


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.images, self.classes, self.tags = [], [], [], {}, set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.add(tag)
        if tag == "article":
            self.ids.append(found["id"])
            self.classes[found["id"]] = found["class"]
        if tag == "a":
            self.links.append(found["href"])
        if tag == "img":
            self.images.append(found["src"])


def test_the_atlas_shows_every_activation_and_needs_nothing_else(model, photos, tmp_path):
    out = tmp_path / "atlas.html"
    features("atlas", model, "--images", photos, "--shown", 2, "--out", out)
    text = out.read_text()
    page, known = Page(text), catalogue(load_denoiser(model).network.model)
    pool = candidates(known)
    kept = keep_by_rule(known, pool)
    assert page.ids == pool
    assert page.links == [f"#{name}" for name in pool]
    assert [name for name, verdict in page.classes.items() if verdict == "kept"] == kept
    assert len(page.images) == 2 + 2 * len(pool)
    assert all(source.startswith("data:image/png;base64,") for source in page.images)
    assert "script" not in page.tags
    assert "http://" not in text
    assert "https://" not in text
    assert text.count("an increment: high-frequency noise") == sum(
        2 for name in pool if known[name].is_increment
    )  # in the drawing and on the card
    features("atlas", model, "--images", photos, "--all", "--out", out)
    assert Page(out.read_text()).ids == list(known)


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3"])
def test_the_reasons_agree_with_the_rules(name):
    with torch.device("meta"):
        known = catalogue(build_network(network_config(name)))
    found = {n: rule_reason(activation, known) for n, activation in known.items()}
    assert [n for n, (kept, _) in found.items() if kept] == keep_by_rule(known, list(known))
    expected = {
        "sd3": {"block3-out": "neither of self-attention nor an increment"},
        "sd15": {
            "down-level0-repeat0-res-out": "on the way down: diffusion noise",
            "mid-vit-out": "in the middle: diffusion noise",
            "up-level1-repeat0-vit-block0-self-q": "self-attention follows the place",
            "up-level3-repeat0-vit-block0-self-k": "late keys: locality keeps noise out",
            "up-level3-repeat2-vit-out": "late on the way up: diffusion noise",
            "up-level1-repeat2-res-out": "early enough on the way up",
        },
    }
    for activation, why in expected.get(name, {}).items():
        assert found[activation][1] == why


# ---------------------------------------------------------------- mistakes


def test_a_pipeline_of_text_is_told_nothing_where_nothing_is_said(tmp_path):
    """The first command of the README has no prompt."""
    folder = str(save_whole(tmp_path / "sd15", "sd15"))
    unsaid, empty, other = (
        FeatureModel(folder, Reading(), torch.device("cpu"), prompt).condition(2)
        for prompt in ((), ("",), ("red",))
    )
    assert torch.equal(unsaid.text, empty.text)
    assert not torch.equal(unsaid.text, other.text)


def test_mistakes_are_sentences(model, photos, tmp_path, capsys):
    assert "the closest is 'atlas'" in refused(capsys, "atlass")
    assert "name activations as --selection" in refused(
        capsys, "extract", model, "--images", photos
    )
    words = ["extract", model, "--selection", EARLY]
    assert "cannot be read" in refused(capsys, *words, "--images", tmp_path / "none")
    assert "close ones are" in refused(
        capsys, "extract", model, "--selection", "up-level0-res", "--images", photos
    )
    assert "name a model" in refused(capsys, "atlas", "--images", photos)
    task = ["evaluate", model, "--selection", EARLY]
    assert "there is no folder" in refused(capsys, *task, "--data", "nothing")
    assert "no known format" in refused(capsys, *task, "--data", photos)
    data = pets_folder(tmp_path / "pets")
    assert "has no keypoints" in refused(capsys, *task, "--data", data)
    (data / "train.parquet").unlink()
    words = ["--task", "segmentation", "--data", data]
    told = refused(capsys, *task, *words)
    assert "no train*.parquet: check the folder" in told
    assert "--split" not in told  # there is no such option
    (tmp_path / "bad.json").write_text("{}")
    bad = ["extract", model, "--images", photos, "--selection", tmp_path / "bad.json"]
    assert "holds no selection" in refused(capsys, *bad)
    features("--help")
    assert "atlas" in capsys.readouterr().out
