"""All sources give the same rows, and say in a sentence what is wrong."""

import io
import json
import os
import shutil
import tarfile

import pytest
from data.pictures import numbers, pixels, png, write_folder, write_shards
from pydantic import TypeAdapter, ValidationError

from stillhouse.data import Columns, DataConfig, Folder, ImageConfig, Parquet, Source, Tars
from stillhouse.data.named import check_named
from stillhouse.errors import UserError

COUNT = 23
NAMES = {
    "parquet": Columns(label="label", text="caption"),
    "tars": Columns(image="png", label="cls", text="txt"),
    "folder": Columns(label="label"),
}


def config_for(kind, folder, streaming=False, columns=None, **options):
    columns = columns or NAMES[kind]
    if kind == "folder":
        write_folder(folder, COUNT)
        source = Folder(path=str(folder))
    else:
        files = (write_shards(folder, kind, [10, 9, 4]),)
        source = (Parquet if kind == "parquet" else Tars)(files=files, streaming=streaming)
    return DataConfig(source=source, columns=columns, image=ImageConfig(size=8), **options)


ALL = [("parquet", False), ("tars", False), ("folder", False), ("parquet", True), ("tars", True)]


@pytest.mark.parametrize(("kind", "streaming"), ALL)
def test_one_epoch_is_every_image_once(kind, streaming, tmp_path):
    config = config_for(kind, tmp_path / "data", streaming, buffer=5)
    loader = iter(config.build(batch=1, seed=3))
    items = [next(loader) for _ in range(COUNT)]
    seen = [numbers(item.batch)[0] for item in items]
    assert sorted(seen) == list(range(COUNT))
    assert seen != list(range(COUNT))
    assert [int(item.batch.condition.label) for item in items] == [n % 5 for n in seen]
    assert [int(item.batch.key) for item in items] == list(range(COUNT))
    assert len({int(item.batch.ids) for item in items}) == COUNT
    if config.columns.text:
        assert [item.text for item in items] == [(f"picture {n}",) for n in seen]
    if kind == "parquet":
        assert config.build(batch=1, seed=3).classes == tuple("abcde")


@pytest.mark.parametrize(("kind", "streaming"), ALL)
def test_a_missing_column_is_named_with_those_that_exist(kind, streaming, tmp_path):
    config = config_for(kind, tmp_path / "data", streaming, Columns(image="picture"))
    with pytest.raises(UserError, match=r"no column 'picture' for the image .* are: .*--data.col"):
        config.build(batch=1, seed=0)


def test_labels_must_be_numbers(tmp_path):
    config = config_for("parquet", tmp_path / "data", columns=Columns(label="caption"))
    with pytest.raises(UserError, match=r"'caption' .* holds string; labels are whole numbers"):
        config.build(batch=1, seed=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_files_that_are_not_there(streaming, tmp_path):
    config = DataConfig(source=Tars(files=(str(tmp_path / "*.tar"),), streaming=streaming))
    with pytest.raises(UserError, match="no files match"):
        config.build(batch=1, seed=0)
    with pytest.raises(UserError, match="names no files"):
        DataConfig().build(batch=1, seed=0)
    with pytest.raises(UserError, match="no folder 'nowhere'"):
        DataConfig(source=Folder(path="nowhere")).build(batch=1, seed=0)


def test_files_folders_and_globs_name_the_same(tmp_path):
    glob = write_shards(tmp_path / "data", "tars", [2, 2])
    one_by_one = tuple(str(path) for path in (tmp_path / "data").iterdir())
    found = [Tars(files=files).shards() for files in [(glob,), one_by_one, (str(tmp_path),)]]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 2


def test_streamed_ids_survive_a_move(tmp_path):
    config = config_for("tars", tmp_path / "here", streaming=True)
    before = next(iter(config.build(batch=8, seed=0))).batch
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = config.model_copy(
        update={"source": Tars(files=(str(tmp_path / "there"),), streaming=True)}
    )
    after = next(iter(moved.build(batch=8, seed=0))).batch
    assert before.ids.tolist() == after.ids.tolist()
    assert numbers(before) == numbers(after)


def test_fields_of_a_json_column(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i in range(6):
            note = json.dumps({"caption": f"number {i}", "class": i}).encode()
            for suffix, data in {"png": png(pixels(i)), "json": note}.items():
                info = tarfile.TarInfo(f"{i}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    columns = Columns(image="png", label="json.class", text="json.caption")
    source = Tars(files=(str(tmp_path / "a.tar"),))
    config = DataConfig(source=source, columns=columns, image=ImageConfig(size=8), buffer=4)
    item = next(iter(config.build(batch=6, seed=0)))
    assert item.batch.condition.label.tolist() == numbers(item.batch)
    assert item.text == tuple(f"number {n}" for n in numbers(item.batch))


def test_plain_bytes_and_pixel_arrays(tmp_path):
    import datasets

    rows = {"raw": [png(pixels(i)) for i in range(4)], "array": [pixels(i) for i in range(4)]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "a.parquet")
    for column in rows:
        config = DataConfig(
            source=Parquet(files=(str(tmp_path / "a.parquet"),)),
            columns=Columns(image=column),
            image=ImageConfig(size=8),
        )
        assert sorted(numbers(next(iter(config.build(batch=4, seed=0))).batch)) == [0, 1, 2, 3]


def test_configs_are_strict_and_tagged():
    adapter = TypeAdapter(Source)
    assert isinstance(adapter.validate_python({"kind": "tars", "files": ["a"]}), Tars)
    with pytest.raises(ValidationError):
        adapter.validate_python({"kind": "parquet", "file": "a"})
    config = DataConfig(source=Tars(files=("a",), storage={"anon": True}))
    assert DataConfig.model_validate_json(config.model_dump_json()) == config


def test_a_store_that_cannot_be_reached_is_named(monkeypatch):
    """The client's own stack trace would say everything but what to do."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    source = Parquet(files=("hf://datasets/owner/name/train-*.parquet",))
    with pytest.raises(UserError, match=r"cannot be reached.*--data\.source\.files"):
        source.shards()


# ---------------------------------------------------------------- captions beside images


def captioned(folder, captions: list[bytes]) -> Folder:
    folder.mkdir()
    for i, caption in enumerate(captions):
        (folder / f"{i}.png").write_bytes(png(pixels(i)))
        (folder / f"{i}.txt").write_bytes(caption)
    return Folder(path=str(folder))


def test_a_byte_order_mark_is_no_part_of_a_caption(tmp_path):
    source = captioned(tmp_path / "data", [b"\xef\xbb\xbfone\r\n", "zw\u00f6lf".encode()])
    assert source.open_indexed(Columns(text="text")).captions().texts == ("one", "zw\u00f6lf")


def test_a_caption_that_is_not_utf8_is_named(tmp_path):
    source = captioned(tmp_path / "data", [b"one", "zw\u00f6lf".encode("latin-1")])
    with pytest.raises(UserError, match=r"1\.txt is not text in UTF-8 .*save it"):
        source.open_indexed(Columns(text="text"))


def test_images_are_told_apart_from_their_captions(tmp_path):
    source, folder = captioned(tmp_path / "data", [b"one", b"two"]), tmp_path / "data"

    def found() -> tuple[str, str]:
        images = source.open_indexed(Columns(text="text"))
        return source.fingerprint(), source.images_fingerprint(images)

    files, images = found()
    (folder / "1.txt").write_bytes(b"another")
    files_after, images_after = found()
    assert files_after != files
    assert images_after == images
    (folder / "1.png").write_bytes(png(pixels(7, 9)))
    assert found()[1] != images


def test_images_in_another_order_are_other_images(tmp_path):
    source, folder = captioned(tmp_path / "data", [b"", b""]), tmp_path / "data"
    prints = set()
    for order in ((0, 1), (1, 0)):
        lines = [json.dumps({"file_name": f"{i}.png", "text": "a"}) + "\n" for i in order]
        (folder / "metadata.jsonl").write_text("".join(lines))
        images = source.open_indexed(Columns(text="text"))
        prints.add(source.images_fingerprint(images))
    assert len(prints) == 2


@pytest.mark.parametrize("place", [".", "a"])
def test_an_image_that_metadata_names_and_nobody_has_is_told(place, tmp_path):
    write_folder(tmp_path / "data", 5)
    folder = tmp_path / "data" / place
    names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*.png"))]
    names.append(names[0].replace("000000", "none"))  # where images are, below the metadata
    lines = [json.dumps({"file_name": name}) + "\n" for name in names]
    (folder / "metadata.jsonl").write_text("".join(lines))
    said = rf"a/none\.png, which is not there \(1 of {len(lines)} images\): add what is missing"
    with pytest.raises(UserError, match=said):
        Folder(path=str(tmp_path / "data")).open_indexed(Columns())


def test_images_that_a_folder_lists_itself_are_not_looked_for_again(tmp_path, monkeypatch):
    """Where there are millions, that takes minutes."""
    write_folder(tmp_path / "data", 5)
    looked, exists = list[str](), os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: looked.append(str(path)) or exists(path))
    check_named(map(str, (tmp_path / "data").rglob("*.png")), str(tmp_path / "data"))
    assert not looked
