"""What a new user gets wrong: each mistake ends in one sentence that says what to do next.

A row of the table is a mistake: its command, what the sentence says of it, and the next step that
it names. Commands are given in a folder that `place` has furnished.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy as np
import pytest
from metrics.shared import weights_folder
from PIL import Image
from small_models import small_autoencoder, small_unet

from stillhouse.cli import main
from stillhouse.metrics.networks import FOLDER
from stillhouse.recipes.train.catalogue import RECIPES

REFERENCE = Path(__file__).parents[2] / "reference"
WEIGHTS = "diffusion_pytorch_model.safetensors"
LONGEST = 700  # characters of a sentence: what fits on a screen at once

POINTS = "train toy-moons --scale tiny --device cpu"
PHOTOS = "train images --scale tiny --device cpu --out OUT --data.source.path"
LATENTS = "prepare photos --resolution 16 --codec"
FEATURES = "features extract unet --device cpu --out OUT --images photos"
EVALUATE = "evaluate photos --device cpu --detector resnet56-cifar10 --out OUT --count"
STUDENT = "sample emoji-student --prompt cat"
DRAW = "sample unet --steps 1 --count 2 --device cpu"
EARLY = "up-level0-repeat1-res-out"


class Mistake(NamedTuple):
    """What is typed, what the answer says of it, and the next step that it names."""

    words: str  # OUT: a folder that is not there yet
    says: str
    advises: str
    without: str = ""  # a package that is not installed


MISTAKES: dict[str, Mistake] = {
    # ------------------------------------------------------------ names and options
    "misspelt command": Mistake("trian", "no command 'trian'", "Did you mean train?"),
    "misspelt recipe": Mistake("train fashon-unet", "no recipe 'fashon-unet'", "mean fashion-unet"),
    "no such recipe": Mistake("train zzzz", "no recipe 'zzzz'", "Train a recipe (toy-moons"),
    "no such recipe to plan": Mistake("plan zzzz", "no recipe 'zzzz'", "a recipe (toy-moons"),
    "misspelt option": Mistake("sample unet --stpes 3", "--stpes is not a flag", "is --steps"),
    "misspelt option of a plan": Mistake(
        "plan cifar10-unet --gpu 4", "--gpu is not a flag", "closest is --gpus"
    ),
    "option of another kind": Mistake(
        "sample unet --grid.rho 5", "grid.kind is 'native'", "of polynomial"
    ),
    "unknown solver": Mistake(
        "sample unet --solver dpm-solver", "not one of euler, heun", "closest is 'dpm"
    ),
    "unknown metric": Mistake(f"{EVALUATE} 6 --metrics fidd", "got 'fidd'", "closest is 'fid'"),
    "unknown method": Mistake("distill unet --method progresive", "progresive", "'progressive'"),
    "unknown features command": Mistake("features extrct unet", "'extrct'", "closest is 'extract'"),
    "unknown scale": Mistake("train images --scale small", "'small'", "--scale is tiny or full"),
    "word for a number": Mistake("sample unet --count many", "count got 'many'", "read as INT"),
    "negative count": Mistake("sample unet --count -3", "count is -3", "should be greater than 0"),
    "batch of nothing": Mistake(f"{POINTS} --batch 0", "batch is 0", "should be greater than 0"),
    "stray word": Mistake("sample unet heun", "model got 'unet heun'", "put a flag before"),
    # ------------------------------------------------------------ run files
    "no run file": Mistake("train nowhere.yaml", "No such file", "check the path"),
    "no YAML": Mistake("train broken.yaml", "broken.yaml cannot be read", "mend it"),
    "wrong key": Mistake("train wrong.yaml", "the key optim.lrr is not one", "closest is 'lr'"),
    "list for a run": Mistake("train list.yaml", "not be [", "should map names to values"),
    "scale of a run file": Mistake("train wrong.yaml --scale tiny", "--scale", "leave it out"),
    "code in YAML": Mistake("train code.yaml", "code.yaml cannot be read", "plain values"),
    # ------------------------------------------------------------ devices and processes
    "no GPU": Mistake("sample unet --device cuda:7", "'cuda:7' cannot be used", "--device cpu"),
    "no GPU to train on": Mistake(
        "train toy-moons --scale tiny --device cuda:7", "cannot be used here", "--device cpu"
    ),
    "an option of train to plan": Mistake(
        "plan cifar10-unet --processes 8", "--processes is a flag of stillhouse train", "--gpus"
    ),
    "no such GPU to plan for": Mistake(
        "plan cifar10-unet --device h1000", "not one of h200, h100", "closest is 'h100'"
    ),
    "GPUs that do not divide the batch": Mistake(
        "plan cifar10-unet --gpus 7", "cannot be shared by 7 GPUs", "another --batch or --gpus"
    ),
    "processes that do not divide the batch": Mistake(
        f"{POINTS} --dry-run --processes 7", "cannot be shared by 7 processes", "--batch"
    ),
    "compiled convolutions on a CPU": Mistake(
        f"{PHOTOS} photos --network unet --spread.compile",
        "compiler fails",
        "leave --spread.compile",
    ),
    "offloading without shards": Mistake(
        f"{PHOTOS} photos --spread.offload", "a way of sharding", "--spread.sharding fsdp"
    ),
    "no processes": Mistake(f"{POINTS} --dry-run --processes 0", "not '0'", "number from 1 on"),
    # ------------------------------------------------------------ models
    "no model": Mistake("sample", "name what to sample", "a diffusers directory, a hub id"),
    "no such model": Mistake("sample ./nowhere", "neither a directory", "of the form owner/name"),
    "no such model on the hub": Mistake(
        "sample nobody/nothing", "could not be fetched", "Check the name, the network"
    ),
    "images for a model": Mistake("sample photos", "no diffusers checkpoint", "model_index.json"),
    "a run too early": Mistake("sample early", "no model yet", "wait for its first checkpoint"),
    "a file for a model": Mistake(
        f"sample unet/unet/{WEIGHTS}", "is a file", "give the diffusers directory"
    ),
    "half of the weights": Mistake("sample cut", "not be whole", "fetch them again"),
    "Git-LFS pointer": Mistake("sample pointer", "without having git-lfs", "git lfs pull"),
    "missing shard": Mistake("sample shards", "-00002-of-00002.safetensors", "fetch them again"),
    "no config": Mistake("sample configless", "is a DDIMPipeline", "unet or transformer folder"),
    "no scheduler": Mistake("sample unplanned", "unplanned has no", "scheduler_config.json"),
    "pickled weights": Mistake("sample pickled", "Pickled weights are not", "convert them with"),
    "checkpoint of old": Mistake("sample old.ckpt", "is a file", "give the diffusers directory"),
    "unknown toy": Mistake("sample toy:mons", "there is no toy:mons", "there are toy:moons"),
    # ------------------------------------------------------------ what is asked of a model
    "prompt for a model of none": Mistake("sample unet --prompt cat", "no prompts", "leave them"),
    "no prompt": Mistake("sample emoji", "draws what it is told", "give --prompt 'a red apple'"),
    "unknown class": Mistake("sample classes --labels 10", "label 10 is not", "from 0 to 9"),
    "class for a model of none": Mistake(
        "sample unet --labels 1", "knows no classes", "leave labels out"
    ),
    "guidance without a label for none": Mistake(
        "sample classes --guidance classifier-free", "stands for no class", "--null-label"
    ),
    "wrong label for none": Mistake(
        "sample classes --null-label 99", "not among the model's 10", "leave it out"
    ),
    "guide of no name": Mistake(
        "sample unet --guidance autoguidance", "needs the worse model", "as --guidance.model"
    ),
    "more steps than there are": Mistake(
        f"{DRAW} --out OUT --steps 5000", "cannot take 5000", "other --steps or another grid"
    ),
    "evaluations that a student has not": Mistake(
        f"{STUDENT} --steps 7", "not trained for 7", "one of --steps 2, 3, 4, 5"
    ),
    "solver for a student": Mistake(
        f"{STUDENT} --solver heun", "walks as it was taught", "leave --solver out"
    ),
    # ------------------------------------------------------------ data
    "no folder of images": Mistake(f"{PHOTOS} nowhere", "no folder 'nowhere'", "check the path"),
    "unnamed folder": Mistake(f"{PHOTOS}=", "folder of images is missing", "--data.source.path"),
    "folder without images": Mistake(f"{PHOTOS} empty", "empty holds no images", "put some there"),
    "broken images": Mistake(f"{PHOTOS} corrupt", "images in a row cannot", "column the right one"),
    "captions of missing files": Mistake(
        f"{PHOTOS} captioned", "names 6.png, which is not there", "add what is missing"
    ),
    "captions of some files": Mistake(
        f"{PHOTOS} partly --data.columns.text text", "5 of 6 images have no caption", "put a .txt"
    ),
    "no such column": Mistake(
        f"{PHOTOS} photos --data.columns.label kind", "no column 'kind'", "--data.columns.label"
    ),
    "size that the network cannot take": Mistake(
        f"{PHOTOS} photos --data.image.size 15", "cannot be halved", "another --data.image.size"
    ),
    "no such protocol": Mistake(f"{PHOTOS} foo://bar", "not known: foo", "path or URL"),
    "nothing to prepare": Mistake(
        "prepare empty --codec vae --resolution 16", "empty holds no images", "put some there"
    ),
    "no such source": Mistake(
        "prepare nowhere --codec vae", "neither a folder nor a data set", "name a folder of images"
    ),
    "no codec": Mistake("prepare photos", "name the images and what encodes", "--codec DIR"),
    "codec that is none": Mistake(f"{LATENTS} unet", "has no autoencoder", "name a diffusers"),
    "shards among images": Mistake(f"{LATENTS} vae --out photos/x", "among the images", "an --out"),
    "resolution that a codec cannot take": Mistake(
        f"{LATENTS} vae --resolution 15", "15 x 15 pixels have no latents", "multiples of 2"
    ),
    "images of another size": Mistake(
        f"{EVALUATE} 6 --reference large --reference-count 6", "16 pixels", "give --size"
    ),
    "too few images": Mistake(
        f"{EVALUATE} 500 --reference large", "holds 6 images, not 500", "--count 6 or fewer"
    ),
    "nothing to compare with": Mistake("evaluate photos", "compared with", "--reference DATA"),
    # ------------------------------------------------------------ folders
    "folder of another run": Mistake(
        f"{DRAW} --out drawn --seed 7", "seed: 0 -> 7", "Choose another --out"
    ),
    "another network": Mistake(
        f"{POINTS} --out run --network.width 24", "network.width: ", "Choose another --out"
    ),
    "folder of another kind of run": Mistake(
        "distill unet --device cpu --out run", "and 3", "Choose another --out"
    ),
    "folder that cannot be": Mistake(
        f"{DRAW} --out old.ckpt", "old.ckpt cannot be written", "choose another --out"
    ),
    "selection that cannot be written": Mistake(
        "features select unet --device cpu --out old.ckpt/x.json", "cannot be", "another --out"
    ),
    "report on no run": Mistake("report photos", "is not the folder of", "its run.json"),
    "report on nothing": Mistake("report nowhere", "is not the folder of", "holds its run.json"),
    # ------------------------------------------------------------ what is not installed
    "no weights of a detector": Mistake(
        f"{EVALUATE} 6 --reference photos --detector.weights no.safetensors",
        "no weights at no.safetensors",
        "correct --detector.weights",
    ),
    "no Ray": Mistake(f"{LATENTS} vae", "ray is not installed", "'.[scale]'", "ray"),
    "no gradio": Mistake("demo unet", "gradio is not installed", "'.[demo]'", "gradio"),
    "no torch-fidelity": Mistake(
        "evaluate photos --reference photos --count 6 --detector inception",
        "torch-fidelity is not installed",
        "'.[metrics]'",
        "torch_fidelity",
    ),
    "no 8-bit optimiser": Mistake(
        f"{POINTS} --optim adamw-8bit --out OUT", "torchao is", "'.[8bit]'", "torchao"
    ),
    # ------------------------------------------------------------ distilling, features
    "toy to distil": Mistake("distill toy:moons", "a toy is a formula", "train toy-moons"),
    "nothing to distil": Mistake("distill", "name the model to distil", "a diffusers directory"),
    "unknown activation": Mistake(
        f"{FEATURES} --selection {EARLY.replace('res', 'rez')}", "no activation", EARLY
    ),
    "no activations": Mistake(FEATURES, "name activations", "as --selection"),
    "activations of another model": Mistake(
        f"{FEATURES} --selection sd15", "has no activation", "close ones are"
    ),
    "no such selection": Mistake(
        f"{FEATURES} --selection no.json", "no.json holds no selection", "features select"
    ),
    "no images for features": Mistake(
        "features atlas unet --images nowhere", "nowhere cannot be read", "give a folder of images"
    ),
    "no such data for a task": Mistake(
        f"features evaluate unet --selection {EARLY} --data x", "no folder x", "as --data"
    ),
    "annotations of no known kind": Mistake(
        f"features evaluate unet --selection {EARLY} --data photos", "no known format", "--format"
    ),
    "levels to select at": Mistake(
        "features select unet --out OUT/x.json --sigma 0.1 0.4", "at one noise level", "--sigma"
    ),
    "levels to draw at": Mistake(
        "features atlas unet --images photos --sigma 0.1 0.4", "at one noise level", "give one"
    ),
    "annotations of a part": Mistake(
        f"features evaluate unet --selection {EARLY} --fit crop", "whole pictures", "leave out"
    ),
    "no threshold": Mistake("features evaluate unet --alphas", "alphas is ()", "at least 1 item"),
    "threshold below nothing": Mistake(
        "features evaluate unet --alphas 0.1 -1", "alphas.1 is -1.0", "greater than 0"
    ),
}


# ---------------------------------------------------------------- the folder


def _pictures(folder: Path, size: int = 16, count: int = 6) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(count):
        pixels = draw.integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def _pipeline(folder: Path, **changes: Any) -> Path:
    small_unet(**changes).save_pretrained(folder / "unet")
    diffusers.DDIMScheduler(clip_sample=False).save_pretrained(folder / "scheduler")
    (folder / "model_index.json").write_text('{"_class_name": "DDIMPipeline"}')
    return folder


def _damaged(folder: Path, whole: Path) -> None:
    """Copies of a model, each with what can happen to one on its way."""

    def weights(name: str) -> Path:
        shutil.copytree(whole, folder / name)
        return folder / name / "unet" / WEIGHTS

    cut = weights("cut")
    cut.write_bytes(cut.read_bytes()[:-1000])
    pointer = (
        "version https://git-lfs.github.com/spec/v1",
        f"oid sha256:{'0' * 64}",
        "size 167335",
    )
    weights("pointer").write_text("\n".join(pointer) + "\n")
    weights("configless").with_name("config.json").unlink()
    shutil.rmtree(weights("unplanned").parents[1] / "scheduler")
    pickled = weights("pickled")
    pickled.rename(pickled.with_suffix(".bin"))
    (folder / "old.ckpt").write_bytes(b"\x80\x04.")
    _without_a_shard(weights("shards"))


def _without_a_shard(whole: Path) -> None:
    """An index of two files, of which one is there."""
    first, second = (whole.with_stem(f"{whole.stem}-0000{n}-of-00002") for n in (1, 2))
    whole.rename(first)
    named = {"conv_in.weight": first.name, "conv_out.weight": second.name}
    index = {"metadata": {}, "weight_map": named}
    whole.with_name(f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def _data(folder: Path) -> None:
    _pictures(folder / "photos")
    _pictures(folder / "large", size=24)
    for name in ("captioned", "partly"):
        shutil.copytree(folder / "photos", folder / name)
    rows = [{"file_name": f"{number}.png", "text": "a thing"} for number in range(9)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "captioned" / "metadata.jsonl").write_text(lines)
    (folder / "partly" / "0.txt").write_text("a thing")
    (folder / "empty").mkdir()
    (folder / "corrupt").mkdir()
    for number in range(4):
        (folder / "corrupt" / f"{number}.png").write_bytes(b"not an image")


def _run_files(folder: Path) -> None:
    (folder / "broken.yaml").write_text("optim: {lr: 1e-3\nbatch: [")
    (folder / "wrong.yaml").write_text("optim: {lrr: 1e-3}")
    (folder / "list.yaml").write_text("- batch: 8\n")
    (folder / "code.yaml").write_text("out: !!python/object/apply:os.mkdir [hurt]\n")


def _begun(*folders: Path) -> None:
    """The folders of training runs."""
    config = RECIPES["toy-moons"]("tiny").model_dump(mode="json")
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"config": config}))


@pytest.fixture(scope="module")
def furnished(tmp_path_factory) -> Path:
    """Models, images and folders of runs, good and bad."""
    folder = tmp_path_factory.mktemp("mistakes")
    whole = _pipeline(folder / "unet")
    _pipeline(folder / "classes", num_class_embeds=10)
    small_autoencoder(4).save_pretrained(folder / "vae")
    _damaged(folder, whole)
    _data(folder)
    _run_files(folder)
    _begun(folder / "run", folder / "early")
    (folder / "run" / "model").mkdir()
    for name in ("emoji", "emoji-student"):
        (folder / name).symlink_to(REFERENCE / name)
    main(shlex.split(f"sample {whole} --steps 1 --count 2 --out {folder / 'drawn'}"))
    return folder


@pytest.fixture
def place(furnished, tmp_path, monkeypatch) -> Path:
    """Where commands are given; what they keep goes to a folder of the test."""
    monkeypatch.chdir(furnished)
    monkeypatch.setenv(FOLDER, str(weights_folder()))
    monkeypatch.setenv("STILLHOUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    return furnished


# ---------------------------------------------------------------- the table


def answer(words: list[str], capfd) -> str:
    """What a command says as it ends."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(words)
    code = ended.value.code
    if isinstance(code, str):  # Python itself prints it; the list of commands follows the sentence
        return code.split("\n\n")[0]
    assert code in (1, 2)
    said = capfd.readouterr().err
    assert said.count("\n") == 1, said
    return said.rstrip("\n")


def check(said: str, mistake: Mistake) -> None:
    """One sentence, not too long, about what happened and what comes next."""
    assert said.startswith("stillhouse")
    assert mistake.says in said, said
    assert mistake.advises in said, said
    assert "Traceback" not in said
    assert len(said) <= LONGEST, said


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_answered_in_a_sentence(what, place, tmp_path, monkeypatch, capfd):
    mistake = MISTAKES[what]
    if mistake.without:
        monkeypatch.setitem(sys.modules, mistake.without, None)
    words = mistake.words.replace("OUT", str(tmp_path / "out"))
    check(answer(shlex.split(words), capfd), mistake)
    assert not (place / "hurt").exists()


def test_every_row_is_of_use():
    """Thirty mistakes and more, on every command that can be got wrong; no row holds for all."""
    assert len(MISTAKES) >= 30
    assert all(len(row.says) > 3 and len(row.advises) > 3 for row in MISTAKES.values())
    asked = {row.words.split()[0] for row in MISTAKES.values()}
    assert asked >= {"prepare", "plan", "train", "distill", "report", "evaluate", "sample", "demo"}


# ---------------------------------------------------------------- no disk


@pytest.fixture
def full_disk(tmp_path) -> Iterator[Path]:
    """A disk without any room left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("mounting a small disk takes root")
    try:
        (disk / "ballast").write_bytes(bytes(8 << 10))
        yield disk
    finally:  # lazily: what was refused may hold a file open until it is collected
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


WRITERS = {
    "sample": f"{DRAW} --out OUT",
    "features": f"{FEATURES} --selection {EARLY}",
    "selection": "features select unet --device cpu --out OUT/selection.json",
    "atlas": f"features atlas unet --images photos --selection {EARLY} --out OUT/atlas.html",
    "evaluate": f"{EVALUATE} 6 --reference photos --metrics fid",
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_answered_in_a_sentence(what, place, full_disk, capfd):
    said = answer(shlex.split(WRITERS[what].replace("OUT", str(full_disk))), capfd)
    check(said, Mistake("", "No space left on device", ""))
    assert any(word in said for word in ("ake room", "another --out")), said
