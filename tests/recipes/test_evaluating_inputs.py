"""Bad input of `stillhouse evaluate`: a sentence that says what to do, never a wrong number."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from metrics.shared import weights_folder
from PIL import Image
from safetensors.torch import load_file, save_file

from stillhouse.cli import main
from stillhouse.metrics.networks import FOLDER
from stillhouse.metrics.references import load_reference
from stillhouse.recipes import claims
from stillhouse.recipes.claims import locked
from stillhouse.recipes.judge import referring
from stillhouse.recipes.judge.evaluating import Bench

RESNET = "resnet56_cifar10.safetensors"
FASHION = Path(__file__).parents[2] / "reference" / "fashion"
TOOLS = ("--detector", "resnet56-cifar10", "--metrics", "fid,kid", "--device", "cpu")


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    """Everything below one folder, which is also where commands are given."""
    monkeypatch.setenv(FOLDER, str(weights_folder()))
    monkeypatch.setenv("STILLHOUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write("good", 12)
    write("real", 16, seed=1)


def write(folder: str, count: int, *, size=(32, 32), start: int = 0, seed: int = 0) -> Path:
    """Coarse pictures in PNG files."""
    Path(folder).mkdir(exist_ok=True)
    draw = np.random.default_rng(seed)
    for number in range(start, start + count):
        coarse = Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(f"{folder}/{number:03}.png")
    return Path(folder)


def evaluate(model: str, *words: object, reference: str = "real", count: int = 12) -> dict:
    """What a command has measured."""
    given = ["--reference", reference, "--count", str(count), *TOOLS, *map(str, words)]
    main(["evaluate", model, *given])
    out = given[given.index("--out") + 1] if "--out" in given else "evaluation"
    return json.loads(Path(out, "evaluation.json").read_text())


@pytest.fixture
def refusal(capsys) -> Callable[..., str]:
    """The sentence that a command ends with."""

    def told(model: str, *words: object, **chosen) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            evaluate(model, *words, **chosen)
        assert ended.value.code == 1
        error = capsys.readouterr().err
        assert error.startswith("stillhouse evaluate: ")
        assert error.count("\n") == 1
        assert "Traceback" not in error
        assert not Path("evaluation/evaluation.json").exists()
        return error

    return told


def reference_file() -> Path:
    """What an evaluation has left in the cache."""
    return next(Path("cache").glob("real-*.safetensors"))


def values(record: dict) -> dict:
    return record["settings"][0]["values"]


# ---------------------------------------------------------------- images


@pytest.mark.parametrize("number", ["000", "005"])
@pytest.mark.parametrize("damage", ["cut", "no image"])
def test_a_corrupt_image_is_named(refusal, number, damage):
    file = Path(f"good/{number}.png")
    file.write_bytes(file.read_bytes()[:200] if damage == "cut" else b"not an image")
    told = refusal("good")
    assert f"good/{number}.png" in told
    assert "Repair or remove it" in told
    assert f"good/{number}.png" in refusal("real", reference="good")


def test_mixed_sizes_are_refused_until_a_size_is_given(refusal):
    write("good", 4, size=(40, 40), start=12)
    assert "several sizes (32 x 32 and 40 x 40)" in refusal("good", count=16)
    assert "--size" in refusal("real", reference="good")
    assert values(evaluate("good", "--size", 32, count=16))["FD-ResNet56"][0] > 0


def test_images_that_are_not_square_are_refused_until_a_size_is_given(refusal):
    write("wide", 12, size=(40, 32))
    told = refusal("wide")
    assert "40 x 32" in told
    assert "--size" in told
    assert values(evaluate("wide", "--size", 32))["FD-ResNet56"][0] > 0


def test_other_sizes_than_the_references_are_refused(refusal):
    """A detector would see the resizing, not the images."""
    write("large", 12, size=(48, 48))
    assert "images of 48 pixels, the reference of 32: give --size" in refusal("large")
    evaluate("large", "--size", 32)


def test_grey_and_transparent_images_are_what_they_look_like():
    """Files of all kinds, and RGB files of what a person sees, measure the same."""
    Path("all").mkdir()
    Path("rgb").mkdir()
    for number, file in enumerate(sorted(Path("good").iterdir())):
        image = Image.open(file).convert(("L", "RGBA", "RGB", "P", "LA")[number % 5])
        seen = image.convert("RGB")
        if "A" in image.mode:
            alpha = Image.linear_gradient("L").resize(image.size)
            image.putalpha(alpha)
            white = Image.new("RGBA", image.size, "white")
            seen = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
        image.save(f"all/{file.name}")
        seen.save(f"rgb/{file.name}")
    found = [evaluate(folder, "--out", f"out-{folder}") for folder in ("all", "rgb")]
    assert values(found[0]) == values(found[1])
    kept = [json.loads(f.read_text())["content"] for f in Path().glob("out-*/results/*.json")]
    assert kept[0] == kept[1]


# ---------------------------------------------------------------- too few, or none


def test_an_empty_folder_is_refused(refusal):
    Path("empty").mkdir()
    assert "empty holds no images" in refusal("empty")
    assert "check the path" in refusal("good", reference="empty")
    Path("empty/notes.txt").write_text("no image")
    assert "holds no images" in refusal("empty")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "cifar10:tset", "good/000.png"])
def test_what_is_not_there_is_refused(refusal, name):
    sentence = "is neither a folder nor a data set: name a folder of images"
    if name.count("/") == 1 and not name.startswith("."):  # could be a hub id
        sentence = "000.png"
    assert sentence in refusal(name)
    assert sentence in refusal("good", reference=name)


def test_one_image_is_refused(refusal):
    write("one", 1)
    sentence = "two are the least"
    assert sentence in refusal("one")
    assert sentence in refusal("good", reference="one")
    assert "a count of 2 is the least" in refusal("good", count=1)
    assert "a count of 2 is the least" in refusal("good", "--reference-count", 1)


def test_two_images_are_measured_and_warned_of():
    record = evaluate("good", count=2)
    assert all(np.isfinite(v).all() for v in values(record).values())
    assert "2 samples for 64 dimensions" in record["warnings"][0]


def test_fewer_images_than_asked_for_are_refused(refusal):
    assert "good holds 12 images, not 13: give --count 12 or fewer" in refusal("good", count=13)
    assert "--reference-count" in refusal("good", "--reference-count", 17)


def test_seeds_that_would_see_the_same_images_are_refused(refusal):
    assert "Give --seeds 1, or a smaller --count" in refusal("good", "--seeds", 2)


# ---------------------------------------------------------------- detectors and metrics


def weights(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> tuple[str, str]:
    found = load_file(weights_folder() / RESNET)
    change(found)
    save_file(found, file)
    return "--detector.weights", file


def test_weights_that_are_no_numbers_are_refused(refusal):
    flags = weights("nan.safetensors", lambda found: found["conv1.weight"].fill_(float("nan")))
    told = refusal("good", *flags)
    assert "nan.safetensors" in told
    assert "not finite (first: conv1.weight)" in told


def test_features_that_are_no_numbers_are_refused(refusal):
    """Finite weights that overflow."""
    flags = weights("huge.safetensors", lambda found: found["bn1.weight"].mul_(1e38))
    told = refusal("good", *flags)
    assert "features that are not finite" in told
    assert "choose another --detector" in told


def test_missing_weights_are_named(refusal, monkeypatch):
    assert "there are no weights at none.safetensors" in refusal(
        "good", "--detector.weights", "none.safetensors"
    )
    monkeypatch.delenv(FOLDER)
    assert f"the environment variable {FOLDER}" in refusal("good")


@pytest.mark.parametrize(
    ("metric", "words", "sentence"),
    [
        ("is", ("--detector", "mobilenet-v2"), "`is` needs Inception or ResNet56"),
        ("is", ("--count", "9"), "raise the count"),
        ("prdc", ("--count", "5"), "more than 5 images, and the samples have 5: raise the count"),
        ("fid-infinity", (), "an extrapolation needs 30 samples or more and there are 12"),
        ("clip-score", (), "clip-score needs --detector clip and captions: see --columns.text"),
        ("retrieval", (), "(--columns.text) and --text-encoder"),
    ],
)
def test_a_metric_that_cannot_be_is_refused_before_anything_is_drawn(
    refusal, monkeypatch, metric, words, sentence
):
    monkeypatch.setattr(
        "stillhouse.recipes.judge.evaluating.collect", lambda *_: pytest.fail("drawn")
    )
    assert sentence in refusal("good", "--metrics", metric, *words)


def test_too_small_a_reference_is_told(refusal):
    write("few", 5)
    assert "the reference has 5" in refusal("good", "--metrics", "prdc", reference="few")


# ---------------------------------------------------------------- models


def test_points_are_no_images(refusal):
    assert "name a model that draws images" in refusal("toy:moons")
    assert "name a model that draws images" in refusal("good", reference="toy:moons")


def test_a_model_without_weights_is_refused(refusal):
    shutil.copytree(FASHION, "model", ignore=shutil.ignore_patterns("*.safetensors"))
    assert "has no diffusion_pytorch_model.safetensors" in refusal("model")
    Path("run").mkdir()
    Path("run/run.json").write_text("{}")
    assert "run holds no model yet: wait for its first checkpoint" in refusal("run")


def test_a_model_as_reference_must_draw_as_large_images(refusal):
    words = ("--steps", 1, "--reference-count", 4)
    assert "the reference of 28: give --size" in refusal("good", *words, reference=str(FASHION))


def test_a_model_as_reference_is_cached_with_its_settings():
    words = ("--steps", 1, "--reference-count", 4, "--size", 28)
    record = evaluate("good", *words, reference=str(FASHION))
    assert "guidance" not in record["reference"]["reading"]
    guided = ("--guidance", "classifier-free", "--guidance.weight", 3, "--out", "guided")
    other = evaluate("good", *words, *guided, reference=str(FASHION))
    assert "guidance: weight: 3.0" in other["reference"]["reading"]
    assert other["reference"]["content"] != record["reference"]["content"]


# ---------------------------------------------------------------- statistics of references


def test_statistics_of_another_detector_or_size_are_refused(refusal):
    evaluate("good", "--out", "first")
    file = str(reference_file())
    told = refusal("good", "--detector", "mobilenet-v2", reference=file)
    assert "name 'ResNet56', now 'MobileNetV2'" in told
    assert "Name the data itself as --reference" in told
    assert "size in pixels is 32, now 28" in refusal("good", "--size", 28, reference=file)
    write("large", 12, size=(48, 48))
    assert "give --size" in refusal("large", reference=file)
    assert values(evaluate("good", reference=file)) == values(evaluate("good", "--out", "first"))


@pytest.mark.parametrize("left", [0, 100, 5000, -1])
def test_truncated_statistics_are_refused(refusal, left):
    evaluate("good", "--out", "first")
    content = reference_file().read_bytes()
    Path("cut.safetensors").write_bytes(content[:left])
    told = refusal("good", reference="cut.safetensors")
    assert "cut.safetensors does not hold the statistics of a reference" in told
    assert "Name the data itself as --reference" in told
    reference_file().write_bytes(content[:left])  # and the same in the cache
    assert "remove the file" in refusal("good")
    evaluate("good", "--refresh")


def test_other_files_are_no_statistics(refusal):
    told = refusal("good", reference=str(weights_folder() / RESNET))
    assert "does not hold the statistics of a reference" in told
    assert "does not hold" in refusal("good", reference="none.safetensors")


def test_a_changed_data_set_is_refused_until_refreshed(refusal):
    before = evaluate("good", "--out", "first")
    write("real", 4, start=14, seed=9)
    told = refusal("good")
    assert "the data's files have changed since; their number of images is 16, now 18" in told
    assert "--refresh" in told
    after = evaluate("good", "--refresh")
    assert after["reference"]["count"] == 18
    assert values(after) != values(before)


def test_results_against_another_reference_are_not_mixed(refusal):
    """More seeds after --refresh: the first was measured against what is no more."""
    evaluate("good", "--out", "first", count=8)
    write("real", 2, seed=9)
    told = refusal("good", "--out", "first", "--refresh", "--seeds", 2, count=8)
    assert "first holds another run (the reference has changed)" in told
    assert "Choose another --out, or remove it" in told


def stopped(monkeypatch, model: str, *words: object, after: int) -> None:
    """A command that is interrupted when the detector has seen so many batches."""
    from stillhouse.recipes.judge import extraction

    looked_at = extraction.looked_at

    def some(batches, detector):
        for number, found in enumerate(looked_at(batches, detector)):
            if number == after:
                raise KeyboardInterrupt
            yield found

    with monkeypatch.context() as patch:
        patch.setattr(extraction, "looked_at", some)
        with pytest.raises(SystemExit):
            evaluate(model, *words)


def test_what_a_stopped_reference_has_left_is_not_mixed_with_others(monkeypatch):
    stopped(monkeypatch, "good", "--batch", 4, after=2)
    left = list(Path("cache/parts").glob("*/*.f32"))
    assert [file.stat().st_size for file in left] == [2 * 4 * 74 * 4]
    write("real", 16, seed=9)  # other images of the same names
    evaluate("good", "--batch", 4)
    found = load_reference(reference_file())
    monkeypatch.setenv("STILLHOUSE_CACHE", "fresh")
    evaluate("good", "--batch", 4, "--out", "fresh-out")
    fresh = load_reference(next(Path("fresh").glob("real-*.safetensors")))
    assert torch.equal(found.features, fresh.features)
    assert found.facts.content == fresh.facts.content


def test_another_batch_size_goes_on_with_no_wrong_captions(monkeypatch):
    Path("prompts.txt").write_text("".join(f"picture {n}\n" for n in range(12)))
    words = ("--prompts", "prompts.txt")
    evaluate("good", *words, "--out", "whole")
    stopped(monkeypatch, "good", *words, "--batch", 5, after=2)
    seen, evidence = [], Bench.evidence

    def spy(self, found, *rest):
        seen.extend(found.texts)
        return evidence(self, found, *rest)

    monkeypatch.setattr(Bench, "evidence", spy)
    found = evaluate("good", *words, "--batch", 2)
    whole = json.loads(Path("whole/evaluation.json").read_text())
    assert values(found)["FD-ResNet56"] == pytest.approx(values(whole)["FD-ResNet56"], rel=1e-4)
    assert sorted(seen) == sorted(f"picture {n}" for n in range(12))


def test_a_reference_is_computed_by_one_run_at_a_time(refusal, monkeypatch):
    stopped(monkeypatch, "good", "--batch", 4, after=1)
    with locked(next(Path("cache/parts").iterdir())), monkeypatch.context() as patch:
        patch.setattr(referring, "PATIENCE", 0)
        told = refusal("good")
    assert "another run is using" in told
    assert "wait for it, or choose another --cache" in told
    evaluate("good")


@contextmanager
def another_run(monkeypatch, done: Callable[[], object]) -> Iterator[None]:
    """Is computing the reference, and ends when this one waits, after it has `done` this."""
    parts = next(Path("cache/parts").iterdir())
    began, awaited = Event(), Event()

    def work() -> None:
        with locked(parts):
            began.set()
            assert awaited.wait(60)
            done()

    def sleep(_: float) -> None:
        awaited.set()
        time.sleep(0.01)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    with ThreadPoolExecutor() as pool, monkeypatch.context() as patch:
        patch.setattr(claims, "time", clock)
        working = pool.submit(work)
        assert began.wait(60)
        yield
    working.result()


@pytest.mark.parametrize("words", [(), ("--refresh", "true")])
def test_a_reference_that_another_run_is_computing_is_waited_for(monkeypatch, capfd, words):
    evaluate("good", "--out", "whole")
    (made,) = Path("cache").glob("*.safetensors")
    content = made.read_bytes()
    made.unlink()
    stopped(monkeypatch, "good", "--batch", 4, "--out", "b", after=1)

    def finish() -> None:
        made.write_bytes(content)
        shutil.rmtree(next(Path("cache/parts").iterdir()))

    with another_run(monkeypatch, finish), monkeypatch.context() as patch:
        patch.setattr(referring, "collect", None)  # nothing is computed a second time
        found = evaluate("good", "--out", "b", *words)
    assert "waiting for another run that is using" in capfd.readouterr().err
    assert values(found) == values(json.loads(Path("whole/evaluation.json").read_text()))


def test_a_reference_that_another_run_left_unfinished_is_gone_on_with(monkeypatch):
    whole = evaluate("good", "--out", "whole")
    next(Path("cache").glob("*.safetensors")).unlink()
    stopped(monkeypatch, "good", "--batch", 4, "--out", "b", after=1)
    with another_run(monkeypatch, lambda: None):
        found = evaluate("good", "--out", "b")
    assert values(found) == values(whole)


# ---------------------------------------------------------------- places to write to


def test_an_unwritable_folder_is_refused(refusal, monkeypatch):
    Path("file").write_text("")
    told = refusal("good", "--out", "file")
    assert "cannot be written to" in told
    assert "choose another --out" in told
    monkeypatch.setenv("STILLHOUSE_CACHE", "file")
    assert "choose another --cache" in refusal("good")


def test_the_folder_of_another_run_is_refused(refusal):
    Path("run").mkdir()
    Path("run/run.json").write_text('{"recipe": "images"}')
    assert "Choose another --out" in refusal("good", "--out", "run")


def test_prompts_must_fit_the_images(refusal):
    Path("prompts.txt").write_text("one\ntwo\n")
    assert "12 images, but there are 2 prompts" in refusal("good", "--prompts", "prompts.txt")
    assert "cannot be read as a list of prompts" in refusal("good", "--prompts", "none.txt")
