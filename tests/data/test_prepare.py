"""Preparing shards: the units, the rows, the shards, and what kills leave of them."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import loaded
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data import preparing
from data.pictures import write_folder, write_shards
from data.preparing import SIDE, SmallCodec, SmallText, job, picture, stored, write_mixed

from stillhouse.data import (
    Columns,
    DataConfig,
    Folder,
    ImageConfig,
    Parquet,
    Prepared,
    Tars,
    prepare,
)
from stillhouse.data.crops import Layout
from stillhouse.data.faults import Fault
from stillhouse.data.loaded import Words
from stillhouse.data.prepare import Form, Rules, Unit
from stillhouse.data.prepare import worker as working
from stillhouse.data.prepare.duplicates import Hasher, find_duplicates, hash_of
from stillhouse.data.prepare.moments import ChannelMoments
from stillhouse.data.prepare.samples import Failed, Sample, ahead
from stillhouse.data.prepare.shard import ShardFile, digest_of
from stillhouse.data.prepare.units import END, divide, read_patiently, usual_size
from stillhouse.data.prepare.worker import Worker
from stillhouse.data.rows import Row, Style
from stillhouse.engine.storage import Folder as Storage
from stillhouse.errors import UserError

NONE: frozenset[int] = frozenset()


def make_all(work, size=16, drop=None):
    """A whole job in this process."""
    plan = prepare.make_plan(work, size)
    worker = Worker(work)
    for unit in plan.missing:
        worker.do(unit, (drop or {}).get(unit.number, NONE))
    return prepare.conclude(work, plan, {})


def table(out):
    files = sorted(Path(out).glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def failures(out):
    return [json.loads(line) for line in (Path(out) / "failures.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- units


@pytest.mark.parametrize("groups", [[8] * 9, [100], [5, 30, 1, 1, 40, 3], [16, 16, 17], [1]])
@pytest.mark.parametrize("size", [1, 7, 16, 200])
def test_units_hold_every_row_once_and_no_more_rows_than_asked_for(groups, size):
    pieces = list(divide(groups, size))
    assert pieces[0][0] == 0
    assert pieces[-1][1] == sum(groups)
    assert all(before[1] == after[0] for before, after in pairwise(pieces))
    assert all(0 < stop - start <= size for start, stop in pieces)


def test_row_groups_that_fit_are_not_divided():
    ends = np.cumsum([0, 8, 8, 8, 20, 8]).tolist()
    pieces = list(divide([8, 8, 8, 20, 8], 20))
    assert {bound for piece in pieces for bound in piece} <= {*ends}
    assert pieces == [(0, 16), (16, 24), (24, 44), (44, 52)]


def test_a_larger_row_group_is_divided_evenly():
    assert list(divide([1024], 1000)) == [(0, 512), (512, 1024)]


def test_small_data_is_cut_so_that_many_can_work():
    assert [usual_size(rows) for rows in (10, 3200, 10**9)] == [16, 50, 1000]


@pytest.mark.parametrize("group", [7, 1000])
def test_rows_of_parquet_units_are_those_of_the_source(group, tmp_path):
    glob = write_shards(tmp_path, "parquet", [50, 3, 40])
    for file in tmp_path.iterdir():
        pq.write_table(pq.read_table(file), file, row_group_size=group)
    columns = Columns(label="label", text="caption")
    rows = prepare.open_rows(Parquet(files=(glob,)), columns)
    units, faults = rows.cut(16)
    found = [entry for unit in units for entry in rows.read(unit, unit.start)]
    source = Parquet(files=(glob,)).open_shards(columns)
    wanted = [row for shard in range(3) for row in source.rows(shard)]
    assert [entry.row for entry in found] == wanted
    assert found[51].name == "shard-001.parquet/1"
    assert not faults
    middle = units[1]._replace(start=10, stop=14)
    assert [entry.row for entry in rows.read(middle, 12)] == wanted[12:14]


def test_a_tar_is_one_unit_and_a_folder_is_cut_by_images(tmp_path):
    glob = write_shards(tmp_path / "tars", "tars", [30, 5])
    rows = prepare.open_rows(Tars(files=(glob,)), Columns(image="png"))
    assert rows.cut(10).units == [Unit(0, 0, 0, END), Unit(1, 1, 0, END)]
    assert len([*rows.read(Unit(0, 0, 0, END), 0)]) == 30
    write_folder(tmp_path / "folder", 25)
    images = prepare.open_rows(Folder(path=str(tmp_path / "folder")), Columns())
    units = images.cut(10).units
    assert [(unit.start, unit.stop) for unit in units] == [(0, 8), (8, 16), (16, 25)]
    entries = [entry for unit in units for entry in images.read(unit, unit.start)]
    assert [entry.row.id for entry in entries] == list(range(25))
    assert entries[5].name == "b/000001.png"
    assert images.images.columns.label == "label"


def test_columns_are_found_by_their_usual_names(tmp_path):
    glob = write_shards(tmp_path / "tars", "tars", [4])
    found = prepare.open_rows(Tars(files=(glob,)), Columns()).images.columns
    assert (found.image, found.label, found.text) == ("png", "cls", "txt")
    glob = write_shards(tmp_path / "parquet", "parquet", [4])
    found = prepare.open_rows(Parquet(files=(glob,)), Columns()).images.columns
    assert (found.image, found.label, found.text) == ("image", "label", "caption")
    with pytest.raises(UserError, match="there is no column 'photo'"):
        prepare.open_rows(Parquet(files=(glob,)), Columns(image="photo"))


def write_samples(file, samples):
    """A tar of samples by their suffixes."""
    import io
    import tarfile

    with tarfile.open(file, "w") as tar:
        for number, members in enumerate(samples):
            for suffix, data in members.items():
                info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def test_every_sample_of_a_tar_has_its_image_under_its_own_suffix(tmp_path):
    images = [
        {"png": b"0"},
        {"JPG": b"1", "txt": b"one"},
        {"webp": b"2", "png": b"3"},
        {"cls": b"4"},
    ]
    write_samples(tmp_path / "a.tar", images)
    source, unit = Tars(files=(str(tmp_path / "a.tar"),)), Unit(0, 0, 0, END)
    rows = prepare.open_rows(source, Columns())
    found = [entry.row for entry in rows.read(unit, 0)]
    assert [row.image for row in found] == [b"0", b"1", b"3", None]
    assert [row.text for row in found] == [None, b"one", None, None]
    assert rows.images.columns.text == "txt"  # which the first sample does not have
    named = prepare.open_rows(source, Columns(image="webp"))
    assert [entry.row.image for entry in named.read(unit, 0)] == [None, None, b"2", None]


def test_columns_of_tars_are_looked_for_in_the_first_samples_alone(tmp_path):
    write_samples(tmp_path / "a.tar", [{"png": b""}] * 60)
    write_samples(tmp_path / "b.tar", [{"png": b""}] * 39 + [{"txt": b""}, {"cls": b"1"}])
    found = prepare.open_rows(Tars(files=(str(tmp_path),)), Columns()).images.columns
    assert (found.label, found.text) == ("", "txt")


def test_captions_beside_images_are_those_that_training_reads(tmp_path):
    write_folder(tmp_path, 5)
    for image in tmp_path.rglob("*.png"):
        image.with_suffix(".txt").write_text(f"picture {image.stem}")
    source = Folder(path=str(tmp_path))
    wanted = source.open_indexed(Columns(text="text")).captions().texts
    for columns, captions in [(Columns(), True), (Columns(text="said"), False)]:
        rows = prepare.open_rows(source, columns, captions)
        units = rows.cut(0).units
        texts = [entry.row.text for unit in units for entry in rows.read(unit, unit.start)]
        assert tuple(texts) == wanted
        assert rows.images.columns.text == (columns.text or "text")
    assert wanted[3] == "picture 000003"
    assert prepare.open_rows(source, Columns()).images.columns.text == ""
    (tmp_path / "a" / "000000.txt").unlink()
    prepare.open_rows(source, Columns())
    with pytest.raises(UserError, match="1 of 5 images have no caption beside them"):
        prepare.open_rows(source, Columns(), captions=True)


def test_a_missing_column_is_named_by_the_flag_of_this_command(tmp_path):
    write_folder(tmp_path / "folder", 3)
    sources = [
        Folder(path=str(tmp_path / "folder")),
        Tars(files=(write_shards(tmp_path / "tars", "tars", [2]),)),
        Parquet(files=(write_shards(tmp_path / "parquet", "parquet", [2]),)),
    ]
    for source in sources:
        with pytest.raises(UserError, match=r"Name it as --columns\.text"):
            prepare.open_rows(source, Columns(text="said"))


# ---------------------------------------------------------------- what a folder holds


def test_a_stray_file_does_not_decide_how_a_folder_is_read(tmp_path):
    def found(columns=None):
        return prepare.source_in(str(tmp_path), columns or Columns())

    write_folder(tmp_path, 12)
    metadata = {"url": ["there"], "caption": ["a"], "key": ["000000000"], "status": ["success"]}
    pq.write_table(pa.table(metadata), tmp_path / "00000.parquet")  # img2dataset's files
    assert isinstance(found(), Folder)
    assert len(prepare.open_rows(found(), Columns()).images) == 12
    with pytest.raises(UserError, match=r"\.parquet files \(1\) and image files \(12\)"):
        found(Columns(image="url"))

    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    write_shards(deep, "tars", [2, 2])
    (tmp_path / ".trash").mkdir()
    write_shards(tmp_path / ".trash", "tars", [2])
    told = r"\.tar files \(2\) and image files \(12\).*/\*\*/\*\.tar', or move them"
    with pytest.raises(UserError, match=told):
        found()
    for image in tmp_path.rglob("*.png"):
        image.unlink()
    assert isinstance(found(), Tars)
    shutil.rmtree(tmp_path / "a")
    assert isinstance(found(), Parquet)  # which says that it has no images


def test_parquet_files_of_images_beside_images_are_refused(tmp_path):
    write_folder(tmp_path, 3)
    write_mixed(tmp_path, [3])
    with pytest.raises(UserError, match=r"\.parquet files \(1\) and image files \(3\)"):
        prepare.source_in(str(tmp_path), Columns())
    assert isinstance(prepare.source_in(str(tmp_path), Columns(image="photo")), Folder)


# ---------------------------------------------------------------- damage


def test_a_file_that_breaks_off_gives_the_rows_before_and_a_fault(tmp_path):
    write_shards(tmp_path, "tars", [12])
    file = tmp_path / "shard-000.tar"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    rows = prepare.open_rows(Tars(files=(str(file),)), Columns())
    *entries, fault = read_patiently(rows, Unit(0, 0, 0, END))
    assert 0 < len(entries) < 12
    assert isinstance(fault, Fault)
    assert fault.where == f"{file} from row {len(entries)} on"


def test_unreadable_and_empty_files_are_told_and_the_others_prepared(tmp_path):
    write_mixed(tmp_path / "data", [20, 20, 20])
    damaged, empty = (tmp_path / "data" / f"part-00{n}.parquet" for n in (1, 2))
    damaged.write_bytes(damaged.read_bytes()[:-6])
    pq.write_table(pq.read_table(empty).slice(0, 0), empty)
    index = make_all(job(str(tmp_path / "data" / "*.parquet"), tmp_path / "out"))
    told = {
        Path(failure["where"]).name: failure["reason"] for failure in failures(tmp_path / "out")
    }
    assert told.keys() == {damaged.name, empty.name}
    assert told[empty.name] == "no rows"
    assert index["counts"]["rows"] == 20
    assert index["counts"]["failed"] == 2


class Flaky:
    """Rows that a network loses so many times."""

    def __init__(self, losses):
        self.losses, self.asked = dict(losses), []

    def where(self, unit):
        return "the bucket"

    def read(self, unit, start):
        self.asked.append(start)
        for at in range(start, unit.stop):
            if self.losses.get(at):
                self.losses[at] -= 1
                raise ConnectionResetError("gone")
            yield at


def test_a_failing_network_is_tried_again_from_where_it_failed(monkeypatch):
    monkeypatch.setattr("stillhouse.data.prepare.units.PAUSE", 0)
    flaky = Flaky({3: 4, 5: 5})
    assert list(read_patiently(flaky, Unit(0, 0, 0, 6))) == list(range(6))
    assert flaky.asked == [0, *[3] * 4, *[5] * 5]
    with pytest.raises(UserError, match="the bucket cannot be read after 6 tries"):
        list(read_patiently(Flaky({3: 6}), Unit(0, 0, 0, 6)))


# ---------------------------------------------------------------- reading ahead


@pytest.mark.parametrize("threads", [1, 4])
def test_work_ahead_keeps_the_order_and_passes_faults_on(threads):
    fault = Fault("there", "broken")

    def slow(item, number):
        time.sleep(0.002 * (item % 3))
        return item, number

    items = iter([0, 1, fault, 2, 3, 4])
    found = list(ahead(items, slow, threads, 2))
    assert found == [(0, 0), (1, 1), fault, (2, 2), (3, 3), (4, 4)]


def test_work_ahead_stays_within_its_depth_and_ends_with_its_reader():
    taken = []

    def items():
        for number in range(1000):
            taken.append(number)
            yield number

    before = threading.active_count()
    found = ahead(items(), lambda item, _: item, 2, 5)
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.2)
    assert len(taken) <= 3 + 5 + 2
    found.close()
    assert threading.active_count() == before


def test_what_goes_wrong_ahead_is_raised_where_it_is_used():
    def broken():
        yield 1
        raise UserError("no permission")

    found = ahead(broken(), lambda item, _: item, 1, 4)
    assert next(found) == 1
    with pytest.raises(UserError, match="no permission"):
        next(found)


# ---------------------------------------------------------------- which images


def entry(number=1, size=(40, 60), image=None, label=2):
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (size[1], size[0])).save(buffer, "png")
    row = Row(image or buffer.getvalue(), label, b"text", number, f"row {number}")
    return prepare.units.Entry(f"file/{number}", row)


RULES = Rules(ImageConfig(size=16), min_size=40, max_aspect=1.5)


def test_images_that_are_small_or_long_are_left_out_at_the_bound_not_before():
    assert isinstance(RULES.look(entry(size=(40, 60))), Sample)
    assert RULES.look(entry(size=(39, 50))) == "small"
    assert RULES.look(entry(size=(61, 40))) == "aspect"
    assert isinstance(Rules(ImageConfig(size=16)).look(entry(size=(2, 500))), Sample)


def test_a_corrupt_image_is_told_as_such_even_where_it_is_a_duplicate():
    assert RULES.look(entry(image=b"no"), True) == Failed(
        "file/1", "row 1", "not an image in a known format"
    )
    assert RULES.look(entry(size=(2, 2)), True) == "duplicate"


def test_a_row_without_a_label_is_kept_and_one_with_a_wrong_label_is_not():
    assert RULES.look(entry(label=None)).label is None
    assert "not a whole number" in RULES.look(entry(label="cat")).reason


# ---------------------------------------------------------------- a row of a shard


SAMPLE = Sample("a/1", "row 1", 7, np.zeros(1, np.uint8), Layout.whole((8, 8)), 2, "hi", ("x",))
COLUMNS = Columns(label="class", text="said", styles=(Style(column="look", values=("x", "y")),))


def test_the_digest_is_over_everything_in_the_row():
    form = Form(COLUMNS, text_dtype="float32")
    latent, words = np.ones((2, 1, 1), np.float32), Words(np.ones((1, 2)), np.ones(2))
    row = form.record(SAMPLE, latent, words)
    assert row.keys() == {*form.schema().names}
    for name, value in row.items():
        if name != "digest":
            other = value + b"1" if isinstance(value, bytes) else f"{value}1"
            assert digest_of({**row, name: other}) != row["digest"], name
    assert (row["class"], row["said"], row["look"]) == (2, "hi", "x")


def test_a_column_of_the_source_cannot_take_the_name_of_one_of_ours():
    with pytest.raises(UserError, match="'height' of their own"):
        Form(Columns(text="height"))


def test_numbers_that_half_precision_does_not_hold_are_a_failure():
    latent = np.full((1, 1, 1), 1e5, np.float32)
    Form(Columns()).record(SAMPLE._replace(styles=()), latent, None)
    with pytest.raises(OverflowError, match="not finite in float16"):
        Form(Columns(), dtype="float16").record(SAMPLE._replace(styles=()), latent, None)


def test_a_long_shard_is_written_row_group_by_row_group(tmp_path):
    form, latent = Form(Columns()), np.ones((1, 1, 1), np.float32)
    shard = ShardFile(tmp_path / "shard.parquet", form.schema())
    for first in range(0, 300, 50):
        samples = [SAMPLE._replace(id=first + n, styles=()) for n in range(50)]
        shard.add([form.record(sample, latent, None) for sample in samples])
    shard.close()
    found = pq.ParquetFile(tmp_path / "shard.parquet")
    groups = [found.metadata.row_group(g).num_rows for g in range(found.num_row_groups)]
    assert groups == [128, 128, 44]
    assert found.read()["id"].to_pylist() == list(range(300))


def test_moments_of_parts_add_up_to_those_of_all():
    latents = np.random.default_rng(0).normal(3, 2, (10, 4, 5, 6)).astype(np.float32)
    parts = [ChannelMoments.of(part) for part in np.split(latents, [1, 4])]
    total = ChannelMoments.from_json(json.loads(json.dumps((parts[0] + parts[1]).to_json())))
    total += parts[2]
    wide = latents.astype(np.float64)
    np.testing.assert_allclose(total.mean, wide.mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(total.std, wide.std((0, 2, 3)), rtol=1e-13)


# ---------------------------------------------------------------- shards


@pytest.fixture
def files(tmp_path):
    return write_mixed(tmp_path / "data", [40, 30], broken={3, 44})


def test_latents_are_those_of_the_images_that_training_would_see(files, tmp_path):
    """The oracle is the loader of training: same source, same crop, its own way of reading."""
    work = job(files, tmp_path / "out", rules=Rules(ImageConfig(size=SIDE)))
    make_all(work)
    columns = Columns(label="label", text="caption")
    data = DataConfig(source=Parquet(files=(files,)), columns=columns, image=ImageConfig(size=SIDE))
    seen = next(iter(data.build(batch=70, seed=0, stop=70)))
    row_of = {text: row for row, text in enumerate(seen.text)}
    encode = SmallCodec()("cpu")
    rows = table(tmp_path / "out")
    assert [row["caption"] for row in rows] == [
        f"picture {n}" for n in range(70) if n not in (3, 44)
    ]
    for row in rows:
        at = row_of[row["caption"]]
        shape = [row[f"latent_{side}"] for side in ("channels", "height", "width")]
        latent = torch.frombuffer(bytearray(row["latent"]), dtype=torch.float32).view(shape)
        torch.testing.assert_close(latent, encode(seen.batch.data[at : at + 1])[0])
        told = [row["height"], row["width"]], [row["crop_top"], row["crop_left"]]
        assert told == (seen.frame.source[at].tolist(), seen.frame.crop[at].tolist())
        assert row["label"] == seen.batch.condition.label[at]


def test_texts_are_stored_without_padding(files, tmp_path):
    make_all(job(files, tmp_path / "out"))
    for row in table(tmp_path / "out"):
        wanted = SmallText()("cpu")([row["caption"]])[0]
        tokens = np.frombuffer(row["tokens"], np.float16).reshape(row["token_count"], -1)
        np.testing.assert_array_equal(tokens, wanted.tokens.astype(np.float16))
        np.testing.assert_array_equal(
            np.frombuffer(row["pooled"], np.float16), wanted.pooled.astype(np.float16)
        )


def test_every_row_is_kept_filtered_or_failed_and_the_index_counts_it(files, tmp_path):
    index = make_all(job(files, tmp_path / "out"))
    rows, sizes = table(tmp_path / "out"), [picture(n).shape[:2] for n in range(70)]
    good = [size for n, size in enumerate(sizes) if n not in (3, 44)]
    small = sum(min(size) < 30 for size in good)
    aspect = sum(min(size) >= 30 and max(size) > 2 * min(size) for size in good)
    assert small > 0
    assert aspect > 0
    assert index["counts"] == {
        "rows": 70,
        "kept": len(rows),
        "failed": 2,
        "filtered": {"aspect": aspect, "small": small},
    }
    assert len(rows) == 70 - 2 - small - aspect
    assert sum(index["rows"]) == len(rows)
    enlarged = [row for row in rows if min(row["height"], row["width"]) < SIDE]
    assert index["enlarged"] == len(enlarged) > 0
    assert {failure["name"] for failure in failures(tmp_path / "out")} == {
        "part-000.parquet/3",
        "part-001.parquet/4",
    }
    latents = np.stack([np.frombuffer(row["latent"], np.float32).reshape(4, -1) for row in rows])
    wide = latents.astype(np.float64)
    np.testing.assert_allclose(index["latent"]["mean"], wide.mean((0, 2)), rtol=1e-9)
    np.testing.assert_allclose(index["latent"]["std"], wide.std((0, 2)), rtol=1e-9)


def test_datasets_streams_the_shards_in_the_order_of_the_source(files, tmp_path):
    import datasets

    make_all(job(files, tmp_path / "out"))
    glob = str(tmp_path / "out" / "*.parquet")
    found = datasets.load_dataset("parquet", data_files=glob, streaming=True, split="train")
    assert found.features["label"].names == list("abc")
    streamed = list(found)
    assert streamed == table(tmp_path / "out")
    numbers = [int(row["caption"].split()[1]) for row in streamed]
    assert numbers == sorted(numbers)


def test_latents_that_are_not_finite_are_told_and_left_out(files, tmp_path):
    def encoder(device):
        return lambda images: torch.where(images.mean((1, 2, 3)) > 0, 1.0, torch.nan).view(
            -1, 1, 1, 1
        )

    index = make_all(job(files, tmp_path / "out", codec=encoder))
    assert index["failures"]["reasons"]["its encoding is not finite in float"] > 0
    assert index["latent"]["mean"] == [1.0]
    assert index["counts"]["kept"] > 0


# ---------------------------------------------------------------- going on


def test_a_second_run_makes_only_what_is_missing(files, tmp_path):
    work, out = job(files, tmp_path / "out"), tmp_path / "out"
    first = make_all(work)
    rows = table(out)
    (out / "shard-000002.parquet").unlink()
    (out / "units" / "shard-000004.json").unlink()
    (out / ".shard-000003.parquet.0.partial").write_bytes(b"half")
    (out / "index.json").unlink()
    times = {file: file.stat().st_mtime_ns for file in out.glob("*.parquet")}
    plan = prepare.make_plan(work, 16)
    assert [unit.number for unit in plan.missing] == [2, 4]
    assert make_all(work) == first
    assert table(out) == rows
    changed = {file.stem for file, then in times.items() if file.stat().st_mtime_ns != then}
    assert changed == {"shard-000004"}
    assert not list(out.glob(".*"))


def test_a_unit_that_another_worker_has_finished_is_left_alone(files, tmp_path):
    work = job(files, tmp_path / "out")
    unit = prepare.make_plan(work, 16).units[0]
    first = Worker(work).do(unit, NONE)
    shard = tmp_path / "out" / f"{unit.name}.parquet"
    then = shard.stat().st_mtime_ns
    assert Worker(work).do(unit, NONE) == first
    assert shard.stat().st_mtime_ns == then


def test_a_unit_without_any_image_left_has_no_shard_and_is_finished(tmp_path):
    files = write_mixed(tmp_path / "data", [8, 8], broken=range(8))
    work = job(files, tmp_path / "out", rules=Rules(ImageConfig(size=SIDE)))
    index = make_all(work)
    assert [file.name for file in (tmp_path / "out").glob("*.parquet")] == ["shard-000001.parquet"]
    assert index["rows"] == [0, 8]
    assert not prepare.make_plan(work, 16).missing


def test_where_no_image_is_kept_there_is_no_index_and_the_reasons_are_told(files, tmp_path):
    work = job(files, tmp_path / "out", rules=Rules(ImageConfig(size=SIDE), min_size=999))
    told = r"none of 70 images was kept: 68 small, 2 failed \(.*\). Look at --min-size.*failures"
    with pytest.raises(UserError, match=told):
        make_all(work)
    assert len(failures(tmp_path / "out")) == 2
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert left == {"failures.jsonl"}  # other settings may use the folder


def test_an_index_without_latents_cannot_be_trained_on(tmp_path):
    index = {"config": {}, "text": None, "latent": {"shape": None}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"holds no latents.*prepare it again"):
        _ = Prepared(path=str(tmp_path)).index


def test_a_shard_of_another_size_than_it_was_written_is_made_again(files, tmp_path):
    work = job(files, tmp_path / "out")
    first = make_all(work)
    shard = tmp_path / "out" / "shard-000001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert [unit.number for unit in prepare.make_plan(work, 16).missing] == [1]
    assert make_all(work) == first
    assert shard.read_bytes() == whole


def test_a_shard_that_changes_before_the_end_is_refused(files, tmp_path):
    work = job(files, tmp_path / "out")
    make_all(work)
    plan = prepare.make_plan(work, 16)
    shard = tmp_path / "out" / "shard-000001.parquet"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"shard-000001.parquet.*remove it"):
        prepare.conclude(work, plan, {})


def test_a_unit_that_ends_its_worker_each_time_is_given_up(files, tmp_path):
    work = job(files, tmp_path / "out", codec=lambda device: lambda images: 1 / 0)
    unit = prepare.make_plan(work, 16).units[1]
    worker = Worker(work)
    for _ in range(working.MOST_TRIES):
        with pytest.raises(ZeroDivisionError):
            worker.do(unit, NONE)
    with pytest.raises(UserError, match="4 workers have died over rows 16 to 31"):
        worker.do(unit, NONE)


# ---------------------------------------------------------------- duplicates


def test_of_equal_files_the_first_stays_wherever_they_are(tmp_path):
    repeated = {5: 2, 33: 2, 60: 59, 61: 59, 44: 3}
    files = write_mixed(tmp_path / "data", [40, 30], broken={3}, repeated=repeated)
    work, out = job(files, tmp_path / "out", rules=Rules(ImageConfig(size=SIDE))), tmp_path / "out"
    plan = prepare.make_plan(work, 16)
    hasher = Hasher(work)
    for unit in reversed(plan.units):
        hasher.do(unit, NONE)
    assert stored(44, {3}, repeated) == stored(3, {3})  # a corrupt one, twice
    for turn in (5, 1000):
        drop = find_duplicates(Storage.at(out) / "hashes", plan.units, turn)
        assert drop == {0: {5}, 2: {1}, 3: {4}, 4: {4, 5}}
    index = make_all(work, drop=drop)
    numbers = [int(row["caption"].split()[1]) for row in table(out)]
    assert numbers == [n for n in range(70) if n not in (5, 33, 60, 61, 3, 44)]
    assert index["counts"]["filtered"] == {"duplicate": 4}
    assert [failure["name"] for failure in failures(out)] == [
        "part-000.parquet/3",
        "part-001.parquet/4",
    ]
    assert not (out / "hashes").exists()


def test_a_copy_that_cannot_be_used_does_not_count_as_the_first():
    assert hash_of(entry(label="cat").row) != hash_of(entry(label=2).row)
    assert hash_of(entry(number=1, label=2).row) == hash_of(entry(number=5, label=None).row)
    assert hash_of(entry(size=(8, 8)).row) != hash_of(entry(size=(8, 9)).row)


# ---------------------------------------------------------------- kills

BROKEN = frozenset({11, 12, 130, 219, 239})
REPEATED = {50: 20, 200: 20, 201: 130}


@pytest.fixture
def short():
    """A folder for Ray, whose sockets need a short path."""
    with tempfile.TemporaryDirectory(
        prefix="prep-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        yield folder


class Run:
    """`data/preparing.py` in a process of its own."""

    def __init__(self, files, out, pids, short, *, workers, delay=0.0, **environment):
        pids.mkdir(exist_ok=True)
        self.out, self.pids, self.known = out, pids, {*pids.iterdir()}
        paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        own = {"RAY_TMPDIR": short, "RAY_worker_niceness": "0", "PYTHONPATH": paths}
        words = [preparing.__file__, files, str(out), str(delay), str(pids), str(workers)]
        self.process = subprocess.Popen(
            loaded.command(*words, loaded.ray_python()),
            env=loaded.environment(**own, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def summaries(self):
        return {file.name for file in (self.out / "units").glob("shard-*.json")}

    def workers(self):
        """Process ids of those who have loaded the codec."""
        return {int(file.name) for file in {*self.pids.iterdir()} - self.known}

    def wait(self, until, seconds=600):
        deadline = time.monotonic() + seconds
        while not until():
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self):
        """The units that it has made."""
        said, _ = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, said
        fates = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        return {f"shard-{fate['unit']:06d}.json" for fate in fates}


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_same(out, calm):
    """To the last bit of the last file, and nothing twice."""
    rows = table(out)
    digests = sorted(row["digest"] for row in rows)
    assert digests == sorted(row["digest"] for row in table(calm))
    assert all(digest_of(row) == row["digest"] for row in rows)
    assert len({row["name"] for row in rows}) == len(rows) > 150
    assert {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()} == {
        file.name: file.read_bytes() for file in calm.iterdir() if file.is_file()
    }


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_driver_lose_nothing_and_double_nothing(tmp_path, short):
    files = write_mixed(tmp_path / "data", [100, 60, 80], BROKEN, REPEATED)
    calm, out, pids = tmp_path / "calm", tmp_path / "out", tmp_path / "pids"
    preparing.alone(files, calm)

    run = Run(files, out, pids, short, workers=1, delay=0.15)
    run.wait(lambda: len(run.summaries()) >= 2)
    first = run.workers()
    os.kill(*first, signal.SIGKILL)
    run.wait(lambda: run.workers() - first)  # another one takes its place
    then = len(run.summaries())
    run.wait(lambda: len(run.summaries()) >= then + 2)
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 60
    while any(map(alive, run.workers())):  # they go with their driver
        assert time.monotonic() < deadline
        time.sleep(0.1)

    made = {file: file.stat().st_mtime_ns for file in out.glob("*.parquet")}
    done = run.summaries()
    every = {file.name for file in (calm / "units").iterdir()}
    assert 4 <= len(done) < len(every)
    assert not (out / "index.json").exists()
    assert Run(files, out, pids, short, workers=2).end() == every - done
    kept = {file for file in made if f"{file.stem}.json" in done}
    assert all(file.stat().st_mtime_ns == made[file] for file in kept)
    assert_same(out, calm)
    lost = {0: (11, 12), 1: (30,), 2: (41, 59, 79)}
    assert {failure["name"] for failure in failures(out)} == {
        f"part-00{file}.parquet/{row}" for file, rows in lost.items() for row in rows
    }
    assert all(failure["reason"] for failure in failures(out))


@pytest.mark.slow
def test_a_cluster_that_loses_a_machine_ends_with_the_same(tmp_path, short, monkeypatch):
    """Two nodes of a real cluster, of which one is taken away; the command is the same."""
    pytest.importorskip("ray", reason="pip install 'stillhouse[scale]' to test a cluster")
    monkeypatch.setenv("RAY_TMPDIR", short)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "500")  # five refusals, and a node is dead
    from ray.cluster_utils import Cluster

    files = write_mixed(tmp_path / "data", [100, 60, 80], BROKEN, REPEATED)
    preparing.alone(files, tmp_path / "calm")
    options = {"include_dashboard": False, "object_store_memory": 1 << 27}
    with loaded.ray_workers():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **options})
    try:
        with loaded.ray_workers():
            second = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
        pids = tmp_path / "pids"
        run = Run(
            files, tmp_path / "out", pids, short, workers=2, delay=0.3, RAY_ADDRESS=cluster.address
        )
        run.wait(lambda: len(run.workers()) == 2 and len(run.summaries()) >= 1)
        both = run.workers()
        cluster.remove_node(second, allow_graceful=False)
        run.wait(lambda: not all(map(alive, both)))
        assert len(run.summaries()) < len(list((tmp_path / "calm" / "units").iterdir()))
        run.end()
    finally:
        cluster.shutdown()
    assert_same(tmp_path / "out", tmp_path / "calm")


def test_ray_that_does_not_start_or_answer_is_refused_with_what_to_do(monkeypatch):
    """On a busy machine Ray gives up after half a minute, with a bare `Exception`."""
    ray = pytest.importorskip("ray", reason="pip install 'stillhouse[scale]' to test Ray")

    def late(**_):
        raise Exception("The current node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", late)
    with (
        pytest.raises(UserError, match=r"Ray cannot .*timed out.*busy, try again later"),
        prepare.cluster(),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"cluster at head:6379 cannot .*Check --ray"),
        prepare.cluster("head:6379"),
    ):
        pass


# ---------------------------------------------------------------- object storage


@pytest.fixture
def bucket(monkeypatch):
    pytest.importorskip("moto.server", reason="pip install 'moto[server]' to test object storage")
    s3fs = pytest.importorskip("s3fs", reason="pip install 's3fs' to test object storage")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    fs.mkdir("prepared")
    yield fs
    s3fs.S3FileSystem.clear_instance_cache()  # it would look for this server in later tests
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_from_and_to_an_object_store_it_is_the_same(bucket, files, tmp_path):
    bucket.put(str(tmp_path / "data"), "prepared/source", recursive=True)
    make_all(job(files, tmp_path / "out"))
    work = job("s3://prepared/source/*.parquet", "s3://prepared/out")
    make_all(work)
    bucket.get("prepared/out", str(tmp_path / "copy"), recursive=True)
    there = {file.name: file.read_bytes() for file in (tmp_path / "copy").glob("*.parquet")}
    assert there == {file.name: file.read_bytes() for file in (tmp_path / "out").glob("*.parquet")}
    assert len(there) == 5
    bucket.rm("prepared/out/units/shard-000001.json")
    bucket.invalidate_cache()
    assert [unit.number for unit in prepare.make_plan(work, 16).missing] == [1]
