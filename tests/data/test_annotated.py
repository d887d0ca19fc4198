"""Readers of annotated images: hand-made files in each format, and the real ones beside."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from stillhouse.data.annotated import (
    CITYSCAPES,
    IGNORE,
    read_ade20k,
    read_birds,
    read_cityscapes,
    read_pets,
    read_spair,
)
from stillhouse.errors import UserError


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(file, "PNG")
    return file.getvalue()


def photo(width, height, colour=(9, 8, 7)):
    return png(np.full((height, width, 3), colour))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# ---------------------------------------------------------------- keypoints

ENTRY = {
    "src_imname": "a.jpg",
    "trg_imname": "b.jpg",
    "category": "cat",
    "src_imsize": [30, 20, 3],
    "trg_imsize": [10, 40, 3],
    "src_bndbox": [1, 2, 29, 19],
    "trg_bndbox": [0, 5, 9, 35],
    "kps_ids": ["1", "4"],
    "src_kps": [[3, 4], [20, 10]],
    "trg_kps": [[1, 30], [8, 6]],
}


def spair_folder(folder, layout, entry=ENTRY):
    if layout == "published":
        write(folder / "PairAnnotation/test/00000-a-b:cat.json", json.dumps(entry).encode())
        write(folder / "PairAnnotation/trn/1.json", b"{}")
        images = folder / "JPEGImages/cat"
    else:
        write(folder / "pairs.json", json.dumps([entry]).encode())
        images = folder / "images"
    write(images / "a.jpg", photo(30, 20))
    write(images / "b.jpg", photo(10, 40))
    return folder


@pytest.mark.parametrize("layout", ["published", "single"])
def test_spair(tmp_path, layout):
    found = read_spair(spair_folder(tmp_path, layout))
    (pair,) = found.pairs
    assert pair.category == "cat"
    assert (pair.source.size, pair.target.size) == ((30, 20), (10, 40))
    assert pair.source.box == (1, 2, 29, 19)
    assert pair.target.points.tolist() == [[1, 30], [8, 6]]
    assert [found.open(name).size for name in found.names] == [(30, 20), (10, 40)]
    assert found.names == [pair.source.image, pair.target.image]


def test_what_is_wrong_with_spair_is_told(tmp_path):
    with pytest.raises(UserError, match=r"neither pairs.json nor PairAnnotation/test"):
        read_spair(tmp_path)
    bare = {name: value for name, value in ENTRY.items() if name != "trg_kps"}
    with pytest.raises(UserError, match="KeyError: 'trg_kps'"):
        read_spair(spair_folder(tmp_path / "a", "single", bare))
    with pytest.raises(UserError, match="have not as many points"):
        read_spair(spair_folder(tmp_path / "b", "single", {**ENTRY, "trg_kps": [[1, 2]]}))
    write(tmp_path / "b" / "pairs.json", b"[")
    with pytest.raises(UserError, match="as JSON"):
        read_spair(tmp_path / "b")
    found = read_spair(spair_folder(tmp_path / "c", "single"))
    (tmp_path / "c" / "images" / "a.jpg").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"a\.jpg cannot be used"):
        found.open("a.jpg")


def birds_file(folder, species, visible):
    rows = {
        "image": [{"bytes": photo(8 + i, 6), "path": None} for i in range(len(species))],
        "label": species,
        "keypoints": [[[i + k, 2 * k] for k in range(3)] for i in range(len(species))],
        "visible": visible,
        "box": [[0.0, 1.0, 5.0, 6.0]] * len(species),
    }
    pq.write_table(pa.table(rows), folder / "test.parquet")


def test_birds_of_one_species_with_what_is_visible_in_both(tmp_path):
    birds_file(tmp_path, [7, 3, 7, 7], [[1, 1, 1], [1, 1, 1], [0, 1, 1], [1, 1, 0]])
    found = read_birds(tmp_path)
    names = [(p.source.image, p.target.image, p.category) for p in found.pairs]
    assert names == [("0", "2", "7"), ("2", "3", "7")]  # the only 3 has no partner
    first, second = found.pairs
    assert first.source.points.tolist() == [[1, 2], [2, 4]]
    assert first.target.points.tolist() == [[3, 2], [4, 4]]
    assert second.target.points.tolist() == [[4, 2]]
    assert first.target.size == (10, 6)
    assert first.target.box == (0, 1, 5, 6)
    assert found.open("2").size == (10, 6)


# ---------------------------------------------------------------- masks


def test_pets(tmp_path):
    trimap = [[1, 2, 3], [2, 1, 1]]
    rows = {
        name: [{"bytes": content, "path": None}]
        for name, content in (("image", photo(3, 2)), ("trimap", png(trimap)))
    }
    pq.write_table(pa.table(rows), tmp_path / "test-0.parquet")
    found = read_pets(tmp_path)
    assert found.classes == 2
    assert found.mask(0).tolist() == [[1, 0, IGNORE], [0, 1, 1]]
    assert found.open(0).size == (3, 2)
    with pytest.raises(UserError, match=r"no train\*\.parquet"):
        read_pets(tmp_path, "train")
    with pytest.raises(UserError, match="no column 'keypoints'"):
        read_birds(tmp_path)


def test_ade20k(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / f"images/validation/{name}.jpg", photo(2, 2))
        write(tmp_path / f"annotations/validation/{name}.png", png([[0, 1], [150, 151]]))
    found = read_ade20k(tmp_path)
    assert (found.classes, list(found.names)) == (150, ["a", "b"])
    assert found.mask(1).tolist() == [[IGNORE, 0], [149, IGNORE]]
    (tmp_path / "annotations/validation/b.png").unlink()
    with pytest.raises(UserError, match=r"1 of 2 images have no labels.*b\.png"):
        read_ade20k(tmp_path)
    write(tmp_path / "annotations/validation/b.png", photo(2, 2))
    with pytest.raises(UserError, match="one channel"):
        read_ade20k(tmp_path).mask(1)


def test_cityscapes(tmp_path):
    write(tmp_path / "leftImg8bit/val/bonn/bonn_1_leftImg8bit.png", photo(4, 1))
    write(tmp_path / "gtFine/val/bonn/bonn_1_gtFine_labelIds.png", png([[7, 33, 0, 10]]))
    write(tmp_path / "gtFine/val/bonn/bonn_1_gtFine_color.png", photo(4, 1))
    found = read_cityscapes(tmp_path)
    assert found.classes == len(CITYSCAPES) == 19
    assert found.mask(0).tolist() == [[0, 18, IGNORE, IGNORE]]
    assert list(found.names) == ["bonn/bonn_1_leftImg8bit"]
    with pytest.raises(UserError, match="check the folder"):
        read_cityscapes(tmp_path, "train")


# ---------------------------------------------------------------- the real ones


def shared(name):
    root = os.environ.get("STILLHOUSE_DATA")
    folder = Path(root, name) if root else Path(__file__).parents[3] / "shared" / "data" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not on this machine")
    return folder


def test_the_real_cats():
    """600 pairs of 25 photos with 6,198 matches; sizes are (width, height), points lie inside."""
    found = read_spair(shared("spair_cat"))
    assert (len(found.pairs), len(found.names)) == (600, 25)
    assert sum(len(pair.source.points) for pair in found.pairs) == 6198
    for pair in found.pairs[::97]:
        for side in pair[:2]:
            assert found.open(side.image).size == side.size
            assert (side.points <= torch.tensor(side.size)).all()


def test_the_real_pets():
    found = read_pets(shared("pets"))
    assert len(found.names) == 3669
    masks = torch.stack([found.mask(n) for n in range(20)])
    assert masks.unique().tolist() == [0, 1, IGNORE]
    # Pets are in the middle of their photos, background at the corners.
    assert (masks[:, 28:36, 28:36] == 1).float().mean() > (masks[:, :8, :8] == 1).float().mean()


@pytest.mark.slow
def test_the_real_birds():
    found = read_birds(shared("birds"))
    assert (len(found.pairs), len(found.names)) == (5594, 5794)
    assert all(pair.source.size == (64, 64) for pair in found.pairs)
