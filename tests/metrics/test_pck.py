"""PCK by hand: thresholds, boxes that are not square, images against points."""

import json
import math

import pytest
import torch

from stillhouse.data.annotated import read_spair
from stillhouse.features.matching import match
from stillhouse.metrics.pck import KeypointScore, Pck, Share, are_right


def points(*pairs):
    return torch.tensor(pairs, dtype=torch.float64).view(-1, 2)


def score(found, true, alpha=0.1, box=(0, 0, 100, 100), size=(100, 100)):
    sums = KeypointScore(alpha)
    sums.update(found, true, box=box, size=size)
    return sums.result()


def test_points_that_were_found_exactly():
    true = points((3, 4), (50, 60), (99, 0))
    assert score(true.clone(), true) == Pck(Share(1, 1), Share(1, 1))
    assert score(true.clone(), true, alpha=0.0).box.per_point == 1


@pytest.mark.parametrize(("alpha", "reach"), [(0.1, 100), (0.29, 100), (0.07, 300), (0.1, 30)])
def test_a_point_on_the_threshold_is_right_and_one_beyond_is_not(alpha, reach):
    """Also where alpha * reach rounds to less: 0.29 * 100 < 29."""
    way = torch.tensor([0.6, 0.8], dtype=torch.float64) * round(alpha * reach)
    true = points((10, 10))
    assert are_right(true + way, true, alpha * reach).all()
    assert not are_right(true + way * (1 + 1e-6), true, alpha * reach).any()


def test_the_longer_side_of_a_target_that_is_not_square_counts():
    """A box of 40 x 80 in an image of 300 x 50: thresholds 8 and 30, in every direction."""
    box, size, true = (10, 5, 50, 85), (300, 50), points((20, 20))
    for way, by_box, by_image in (
        ((8, 0), 1, 1),
        ((0, 8), 1, 1),
        ((9, 0), 0, 1),
        ((0, 9), 0, 1),
        ((0, 30), 0, 1),
        ((31, 0), 0, 0),
    ):
        found = score(true + points(way), true, box=box, size=size)
        assert (found.box.per_point, found.image.per_point) == (by_box, by_image), way


def test_images_and_points_are_averaged_differently():
    """One pair has 1 of 1 right, the other 1 of 4: points 2/5, images (1 + 1/4) / 2."""
    sums, far = KeypointScore(), points((90, 90))
    kwargs = {"box": (0, 0, 100, 100), "size": (100, 100)}
    sums.update(points((0, 0)), points((0, 0)), **kwargs)
    sums.update(torch.zeros(4, 2), torch.cat([points((0, 0)), far, far, far]), **kwargs)
    assert sums.result().box == Share(0.4, 0.625)
    sums.update(points(), points(), **kwargs)  # a pair without points is none
    assert sums.result().box == Share(0.4, 0.625)


CELLS = [(1, 7), (6, 2), (3, 8), (8, 4)]  # (column, row) of 10 x 10, none at a border


def spair_pair():
    """One place of a 200 x 100 source and of an 80 x 160 target, whose box is 20 wide, 40 high."""
    return {
        "category": "cat",
        "src_imname": "a.png",
        "trg_imname": "b.png",
        "src_imsize": [200, 100, 3],
        "trg_imsize": [80, 160, 3],
        "src_bndbox": [0, 0, 200, 100],
        "trg_bndbox": [50, 10, 70, 50],
        "src_kps": [[20 * x + 9.5, 10 * y + 4.5] for x, y in CELLS],
        "trg_kps": [[8 * x + 3.5, 16 * y + 7.5] for x, y in CELLS],
    }


def read_matched_and_scored(entry, folder):
    """PCK of an image's features with themselves, from the annotation file on."""
    (folder / "pairs.json").write_text(json.dumps([entry]))
    (pair,) = read_spair(folder).pairs
    maps = [torch.randn(32, 10, 10, generator=torch.Generator().manual_seed(0))]
    found = match(maps, maps, pair.source.points, (pair.source.size, pair.target.size))
    return score(found, pair.target.points, box=pair.target.box, size=pair.target.size)


def test_coordinates_go_their_way_in_one_order(tmp_path):
    """A canary: reader, match and score agree on (x, y), on (width, height) and on corners."""
    found = read_matched_and_scored(spair_pair(), tmp_path)
    assert found == Pck(Share(1, 1), Share(1, 1))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("src_kps", (1, 0)),
        ("trg_kps", (1, 0)),
        ("src_imsize", (1, 0)),
        ("trg_imsize", (1, 0)),
        ("trg_bndbox", (0, 2, 1, 3)),  # x1, x2, y1, y2
    ],
)
def test_the_canary_dies_of_a_swap(name, order, tmp_path):
    entry = spair_pair()
    values = entry[name] if name.endswith("kps") else [entry[name]]
    swapped = [[one[n] for n in order] for one in values]
    entry[name] = swapped if name.endswith("kps") else swapped[0]
    found = read_matched_and_scored(entry, tmp_path)
    assert min(found.box.per_point, found.image.per_point) < 0.5


def test_parts_add_up_and_nothing_has_no_share():
    true = torch.rand(7, 2, generator=torch.Generator().manual_seed(0)) * 100
    found = true + 8 * torch.randn(7, 2, generator=torch.Generator().manual_seed(1))
    kwargs = {"box": (0, 0, 60, 90), "size": (120, 100)}
    one, two, whole = KeypointScore(), KeypointScore(), KeypointScore()
    for part, rows in ((one, slice(0, 2)), (two, slice(2, 7))):
        part.update(found[rows], true[rows], **kwargs)
        whole.update(found[rows], true[rows], **kwargs)
    assert (one + two).result() == whole.result()
    assert 0 < whole.result().box.per_point < 1
    assert math.isnan(KeypointScore().result().box.per_point)
    with pytest.raises(ValueError, match="do not add up"):
        one + KeypointScore(0.05)
    with pytest.raises(ValueError, match="both sides"):
        score(true, true[:3])
