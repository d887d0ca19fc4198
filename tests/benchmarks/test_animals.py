"""What activations are worth, of features whose worth is known; and the whole, very small."""

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from metrics.shared import SHARED, weights_folder

from stillhouse.data.annotated import Masks, Pair, Side, read_birds, read_pets
from stillhouse.features.locality import places

ROOT = Path(__file__).parents[2]
SIDE = 64


@pytest.fixture(scope="module")
def tasks():
    """As a benchmark that is run finds its neighbours."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import activations

    yield activations
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def animals(tasks):
    import animals

    return animals


@pytest.fixture
def pairs() -> list[Pair]:
    """Points of the target lie where those of the source do, 16 px further right."""
    generator = torch.Generator().manual_seed(0)

    def pair(number: int) -> Pair:
        points = torch.randint(0, SIDE - 16, (6, 2), generator=generator).double()
        moved = points + torch.tensor([16.0, 0.0])
        box = (0.0, 0.0, SIDE - 1.0, SIDE - 1.0)
        sides = [Side(f"{number}{n}", (SIDE, SIDE), box, p) for n, p in enumerate((points, moved))]
        return Pair(sides[0], sides[1], "bird")

    return [pair(number) for number in range(20)]


def shifted_places(names, seed):
    """Features that tell a place: in target images (their names end in 1), of 16 px further left.

    `noise` knows nothing, `constant` cannot, and `row` and `column` are half of it each.
    """
    where = places(SIDE, SIDE, torch.device("cpu")).T.view(2, SIDE, SIDE) / SIDE
    angles = []
    for name in names:
        shift = torch.tensor([0.0, 16 / SIDE if name.endswith("1") else 0.0]).view(2, 1, 1)
        angles.append((where - shift) * 1.5)
    angle = torch.stack(angles)
    row, column = (torch.stack([a.cos(), a.sin()], 1) for a in angle.unbind(1))
    noise = torch.randn(len(names), 8, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    return {"row": row, "column": column, "noise": noise, "constant": torch.ones_like(noise)}


def test_coordinates_find_every_point_and_constants_find_what_chance_does(tasks, pairs):
    arms = {"both": ["row", "column"], "nothing": ["constant"]}
    found = tasks.matched(shifted_places, pairs, arms, 0)
    assert tasks.pck(pairs, found["both"]) == (1.0, 1.0)
    assert tasks.pck(pairs, found["row"])[0] < 0.5
    assert tasks.pck(pairs, found["column"])[0] < 0.5
    assert tasks.pck(pairs, found["noise"])[0] < 0.15  # a disc of radius 6.3 is 3% of the image
    assert found["nothing"][0].unique(dim=0).shape == (1, 2)  # the same for every point
    assert tasks.pck(pairs, [pair.source.points for pair in pairs])[0] == 0.0


def test_the_greedy_choice_is_the_two_that_belong_together(tasks, pairs):
    chosen = tasks.greedy(shifted_places, pairs, ["constant", "noise", "row", "column"], 0)
    assert set(chosen) == {"row", "column"}  # neither fills up with what does not help


def test_draws_have_other_species_and_no_pair_without_points(tasks, pairs):
    pairs = [pair._replace(category=str(n % 4)) for n, pair in enumerate(pairs)]
    none = pairs[0].source._replace(points=torch.zeros(0, 2, dtype=torch.float64))
    pairs = [pairs[0]._replace(source=none), *pairs]
    drawn = [tasks.drawn_pairs(pairs, 6, draw, 2) for draw in (0, 1)]
    found = [[pair.category for pair in some] for some in drawn]
    assert found == [["0"] * 3 + ["2"] * 3, ["1"] * 3 + ["3"] * 3]
    assert all(len(pair.source.points) for some in drawn for pair in some)


@pytest.fixture
def masks() -> Masks:
    """The left half is an animal."""
    mask = torch.zeros(SIDE, SIDE, dtype=torch.int64)
    mask[:, : SIDE // 2] = 1
    mask[:, SIDE // 2] = 255
    return Masks(2, [str(n) for n in range(30)], lambda n: None, lambda n: mask)  # type: ignore[arg-type]


def test_pixels_are_told_by_their_place_and_not_by_their_row(tasks, masks, monkeypatch):
    monkeypatch.setattr(tasks, "PIXELS", 60)

    def see(names, seed):
        return shifted_places([f"{name}0" for name in names], seed)

    train = tasks.pixels_of(see, masks, range(18), 0)
    test = tasks.pixels_of(see, masks, range(18, 26), 0)
    assert len(train.labels) == 18 * 60
    assert set(train.labels.tolist()) == {0, 1}  # the border is not there
    assert tasks.mean_iou(train, test, ["column"], 0) > 0.97
    assert tasks.mean_iou(train, test, ["row", "noise"], 0) < 0.5
    assert tasks.probed(train, ["row", "noise", "column", "constant"])[0] == "column"


# ---------------------------------------------------------------- networks and real images


@pytest.fixture
def few(animals, tasks, monkeypatch):
    """The experiment with a handful of everything."""
    monkeypatch.setenv("STILLHOUSE_WEIGHTS", str(weights_folder()))
    small = {"LEVELS": (0.1, 0.4), "TRIAL": 2, "PAIRS": 3, "TRAIN": 3, "TEST": 2, "SCORED": 2}
    for name, value in small.items():
        monkeypatch.setattr(animals, name, value)
    for name, value in {"PIXELS": 20, "MEMBERS": 2, "STEPS": 3, "BATCH": 8}.items():
        monkeypatch.setattr(tasks, name, value)
    return animals


STRUCTURES = {
    "unet": "--network backbone --network.name unet --network.size tiny",
    "dit": "--network dit --network.depth 3 --network.heads 2 --network.head-width 8",
}


def train_a_little(name: str, folder: Path, run: Path) -> None:
    """A network of the experiment's structure, of 16 pixels, told the only class."""
    from stillhouse.cli import main

    words = f"train images --data.source.path {folder} --data.image.size 16 --classes 1"
    words += f" --data.columns.label label --process flow --objective flow {STRUCTURES[name]}"
    words += f" --images 4 --batch 4 --preview.count 1 --out {run}"
    main(words.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "dit"])
def test_a_network_is_judged_from_scores_to_figure(name, few, tmp_path, monkeypatch):
    monkeypatch.setattr(few, "birds", cache(lambda split: read_birds(tmp_path / "birds", split)))
    monkeypatch.setattr(few, "pets", cache(lambda split: read_pets(tmp_path / "pets", split)))
    for data in ("birds", "pets"):
        few_rows(data, tmp_path / data)
    monkeypatch.setenv("STILLHOUSE_DATA", str(tmp_path))
    few.write_animals(name, tmp_path)
    train_a_little(name, tmp_path / "animals", tmp_path / name)
    picture = few.judged(tmp_path / name)
    record = few.summary(name, tmp_path / name)
    assert picture.exists()
    assert record["parameters"] > 0
    assert not [line for line in record["commands"] if str(tmp_path) in line]
    check_record(record, has_ways=name == "unet")
    check_page({name: record, f"{name}-random": record}, tmp_path, monkeypatch)


def few_rows(data: str, folder: Path) -> None:
    """The first of each split: of the birds, those of two species, one for each draw."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    folder.mkdir()
    for split in ("train", "test"):
        table = pq.read_table(next((SHARED / "data" / data).glob(f"{split}*.parquet")))
        if data == "birds":
            table = table.filter(pc.field("label") < 2)
        pq.write_table(table.slice(0, 24), folder / f"{split}.parquet")


def check_record(record, *, has_ways: bool) -> None:
    assert record["sigma"] == float(max(record["levels"], key=record["levels"].get))
    assert ("asymmetry" in record) == has_ways
    for row in record["activations"].values():
        assert [len(row[key]) for key in ("pck", "accuracy", "scores")] == [4, 4, 2]
    ids, arms = list(record["activations"]), record["arms"]
    for arm in arms.values():
        assert [len(arm[key]) for key in ("pck", "iou")] == [4, 4]
    for draw in range(2):
        kept = {name: arm["ids"][draw] for name, arm in arms.items() if "ids" in arm}
        assert kept["all"] == ids
        assert set(kept["rules+gate"]) < set(kept["rules"]) < set(ids)
        assert set(kept["gate-quarter"]) < set(kept["gate"]) < set(ids)
        for task in ("birds", "pets"):
            for chosen in arms["selected"][f"ids on {task}"][2 * draw : 2 * draw + 2]:
                assert set(chosen) <= set(kept["rules+gate"])
    legacy = ["up-level0-upsampler-out", "up-level1-repeat1-res-out"]
    assert arms["legacy"]["ids"][0] == (legacy if has_ways else ["block1-out"])


def check_page(found, folder: Path, monkeypatch) -> None:
    """The figure, and a page whose tables say what was measured and no more."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "figures"))
    spec = importlib.util.spec_from_file_location("figure", ROOT / "docs/figures/animals.py")
    assert spec is not None
    assert spec.loader is not None
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    for where in ("RESULTS", "HERE"):
        (folder / where).mkdir()
        monkeypatch.setattr(figure, where, folder / where)
    page = folder / "features.md"
    page.write_text(f"before {figure.BEGIN} old {figure.END} after")
    monkeypatch.setattr(figure, "PAGE", page)
    figure.main()
    assert figure.NOTHING in page.read_text()
    for name, record in found.items():
        (folder / "RESULTS" / f"{name}.json").write_text(json.dumps(record))
    figure.main()
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after")
    assert "old" not in text
    record = next(iter(found.values()))
    numbers = [100 * shares[0] for shares in record["arms"]["all"]["pck"]]
    line = next(line for line in text.splitlines() if "| all activations |" in line)
    assert f"| {fmean(numbers):.1f} ± {stdev(numbers):.1f} |" in line
    assert (folder / "HERE" / "animals.png").stat().st_size > 10_000
