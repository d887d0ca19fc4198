"""What students are told while they are distilled: classes, prompts, nothing."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from recipes.students import CLASSES, EDM, HERE, WEIGHTS, bare, column_of, distilling
from safetensors.torch import load_file

from stillhouse.cli.distill import next_steps
from stillhouse.errors import UserError
from stillhouse.recipes.distill.distilling import digest, run
from stillhouse.recipes.distill.students import load_source
from stillhouse.recipes.distill.told import find_labels, find_prompts
from stillhouse.recipes.parts import ClassifierFree
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.recipes.train.folders import check_origins


def test_a_share_that_hears_nothing_needs_a_nothing(tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    with pytest.raises(UserError, match="give --null-label, or leave --drop out"):
        run(distilling(teacher, tmp_path / "run", drop=0.5))


def test_other_prompts_of_the_same_name_are_another_run(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("red\nblue\n")
    before = digest(find_prompts(str(file), ""))
    file.write_text("red\ngreen\n")
    after = digest(find_prompts(str(file), ""))
    assert before != after
    check_origins(tmp_path, {"prompts": after})  # where nothing is known
    (tmp_path / "run.json").write_text(json.dumps({"config": {}, "prompts": before}))
    with pytest.raises(UserError, match="distilled on other prompts"):
        check_origins(tmp_path, {"prompts": after})


def classes_moved(teacher, student):
    """Whose embeddings have not kept their bits."""
    before, after = (load_file(folder / WEIGHTS) for folder in (teacher, student))
    moved = (before["class_embedding.weight"] != after["class_embedding.weight"]).any(1)
    return moved.nonzero().flatten().tolist()


def test_labels_are_those_that_were_asked_for(tmp_path):
    """A class that is not drawn is not learnt: its embedding keeps its bits."""
    teacher = bare(tmp_path / "teacher", EDM, num_class_embeds=8)
    config = distilling(teacher, tmp_path / "run", labels=(2, 3))
    run(config)
    model = tmp_path / "run/model"
    assert classes_moved(teacher, model) == [2, 3]
    card = (model / "README.md").read_text()
    assert "some of its teacher's classes alone: `--labels 2 3`." in card
    assert next_steps(config) == [f"stillhouse sample {model} --labels 2 3 --out DIR"]
    for name, nothing in {"all": {}, "null": {"null_label": 7, "drop": 0.5}}.items():
        run(distilling(teacher, tmp_path / name, **nothing))  # the label of no class is no class
        assert "--labels" not in (tmp_path / name / "model/README.md").read_text()


def test_some_are_told_nothing_so_that_the_student_can_be_guided(tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, num_class_embeds=8)
    config = distilling(teacher, tmp_path / "run", labels=(2, 3), null_label=7, drop=0.5)
    run(config)
    assert classes_moved(teacher, tmp_path / "run/model") == [2, 3, 7]
    drawn = []
    for weight in (1.0, 4.0):
        how = {"guidance": ClassifierFree(weight=weight), "null_label": 7, "labels": (2, 3)}
        out = tmp_path / f"drawn{weight}"
        model = str(tmp_path / "run/model")
        sample(SampleRun(model=model, count=2, out=out, tensors=True, **how))
        drawn.append(load_file(out / "tensors/000000.safetensors")["samples"])
    assert not torch.allclose(*drawn)


def test_a_student_that_was_always_told_is_not_guided(tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    run(distilling(teacher, tmp_path / "run"))
    how = {"guidance": ClassifierFree(weight=4.0), "null_label": 7, "labels": (2, 3)}
    with pytest.raises(UserError, match=r"leave --guidance out, or distil it with --drop 0\.1"):
        sample(SampleRun(model=str(tmp_path / "run"), out=tmp_path / "drawn", **how))
    # Of one that is older than this record nothing is known.
    file = tmp_path / "run/model/few_steps.json"
    facts = {k: v for k, v in json.loads(file.read_text()).items() if k != "drop"}
    file.write_text(json.dumps(facts))
    sample(SampleRun(model=str(tmp_path / "run"), count=1, out=tmp_path / "drawn", **how))


def test_prompts_are_those_of_a_column_each_once(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    rows = [
        {"file_name": f"{i}.png", "words": f"a {'red' if i % 2 else 'blue'} one"} for i in range(4)
    ]
    (data / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    for row in rows:
        Image.new("RGB", (8, 8)).save(data / row["file_name"])
    assert find_prompts(str(data), "words") == ("a blue one", "a red one")


def classes_in(folder, counts):
    """So many images of each class, which are sub-folders."""
    for label, count in enumerate(counts):
        (folder / f"class{label}").mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8)).save(folder / f"class{label}/{i}.png")
    return str(folder)


def test_classes_are_dealt_as_often_as_a_data_set_has_them(tmp_path):
    found = find_labels(classes_in(tmp_path / "data", [30, 10, 80]), "", (0, 1, 2))
    assert [found.count(label) for label in range(3)] == [30, 10, 80]
    for stretch in (found[:12], found[40:52], found[-24:]):  # few walks are of all kinds
        wanted = [len(stretch) * share for share in (3 / 12, 1 / 12, 8 / 12)]
        assert [stretch.count(label) for label in range(3)] == pytest.approx(wanted, abs=1)


def test_a_column_of_classes_needs_no_images(tmp_path):
    file = column_of(tmp_path / "objects.parquet", category=[4, 2, 4], rare=[True, False, False])
    assert sorted(find_labels(file, "category", tuple(range(8)))) == [2, 4, 4]
    found = find_labels(file, "rare", (0, 1))
    assert sorted(found) == [0, 0, 1]
    assert {type(label) for label in found} == {int}  # what is true or false is no label


def test_a_student_hears_the_classes_of_a_data_set_alone(tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    data = column_of(tmp_path / "objects.parquet", label=[2, 5])
    run(distilling(teacher, tmp_path / "run", labels_of=data))
    assert classes_moved(teacher, tmp_path / "run/model") == [2, 5]


def test_other_classes_of_the_same_name_are_another_run(tmp_path):
    teacher, data = bare(tmp_path / "teacher", EDM, **CLASSES), tmp_path / "data"
    config = distilling(teacher, tmp_path / "run", labels_of=classes_in(data, [1] * 8))
    run(config)
    Image.new("RGB", (8, 8)).save(data / "class1/more.png")
    with pytest.raises(UserError, match="distilled on other classes"):
        run(config)


def test_a_comparison_is_told_what_the_student_was_told(tmp_path):
    """Of a data set that has gone by then."""
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    file = column_of(tmp_path / "objects.parquet", label=[2, 5])
    config = distilling(teacher, tmp_path / "run", labels_of=file)
    source = load_source(config, HERE)
    Path(file).unlink()
    assert load_source(config, HERE, source).subject.labels == source.subject.labels == (2, 5)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"labels": (1,)}, "leave one of them out"),
        ({"label_column": "category"}, "no column 'category'"),
        ({"label_column": "image"}, "which is no class of the teacher"),
        ({"labels_of": "nowhere"}, "nowhere is no data set"),
        ({"labels_of": "", "label_column": "label"}, "name one"),
        ({}, "has 2 classes and the teacher 8"),
    ],
)
def test_classes_that_cannot_be_dealt_are_refused(how, said, tmp_path):
    teacher = bare(tmp_path / "teacher", EDM, **CLASSES)
    data = classes_in(tmp_path / "data", [1, 1])
    with pytest.raises(UserError, match=said):
        run(distilling(teacher, tmp_path / "run", **{"labels_of": data, **how}))


def test_the_label_of_no_class_is_none_to_deal(tmp_path):
    file = column_of(tmp_path / "objects.parquet", label=[0, 7])
    with pytest.raises(UserError, match="holds 7, which is no class"):
        find_labels(file, "", tuple(range(7)))


def test_files_of_classes_that_cannot_be_read_are_told(tmp_path):
    column_of(tmp_path / "data/0.parquet", label=[0, 1])
    (tmp_path / "data/1.parquet").write_bytes(b"half of it")
    with pytest.raises(UserError, match=r"1\.parquet.*Repair or remove it"):
        find_labels(str(tmp_path / "data"), "", (0, 1))


def test_a_model_without_classes_takes_none_of_a_data_set(tmp_path):
    data = column_of(tmp_path / "objects.parquet", label=[0])
    with pytest.raises(UserError, match="knows no classes: leave --labels-of out"):
        run(distilling(bare(tmp_path / "teacher", EDM), tmp_path / "run", labels_of=data))
