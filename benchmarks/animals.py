"""Activations of models trained here, without labels, on birds and pets: which are good features?

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/animals.py [NAME ...] [--plan] [--work runs/animals]

| name | what |
|---|---|
| `unet`, `dit` | trained on 9,674 pictures of 64 px, made 256 so that latents are 32 x 32 |
| `unet-random`, `dit-random` | the same networks before their first step |
| `baselines` | the same place in the other image; MobileNetV2, which has seen ImageNet's labels |

A network that must be told a class is told the only one there is. The noise level is the best of
LEVELS for all activations together on training birds, and that of the trained network for both. All
that is drawn is drawn twice (other images), and all that is noised is noised twice, so a number has
four values; scores, which take two noises, have two.

What has a file in results/animals is not run again, and a run that was broken off goes on where it
was. `--plan` prints the commands.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from math import isnan
from pathlib import Path
from typing import Any

import torch
from activations import (
    ALPHA,
    MOBILENET,
    Ids,
    See,
    drawn_pairs,
    greedy,
    matched,
    mean_iou,
    mobilenet,
    pck,
    pixels_of,
    probed,
    shown,
)
from experiments import read_lines, work_through
from torch import Tensor

from stillhouse.data.annotated import Keypoints, Masks, Pair, read_birds, read_pets
from stillhouse.features.catalogue import Catalogue
from stillhouse.features.probe import Points, probe_accuracy
from stillhouse.features.properties import Images, Scores, asymmetry, granularity_change, score
from stillhouse.features.segmentation import IGNORE
from stillhouse.features.selection import gate, keep_by_rule
from stillhouse.recipes.features.drawing import draw_matches
from stillhouse.recipes.features.reading import FeatureModel, Reading

RESULTS = Path(__file__).parent / "results" / "animals"
IMAGES = {"unet": 160_000, "dit": 80_000}  # an image costs the DiT twice as much
COMMON = """--data.source prepared --data.image.flip false --data.columns.label label --classes 1
    --process flow --objective flow --batch 64 --spread.precision bf16 --optim.schedule cosine
    --preview.count 8"""
NETWORKS = {
    "unet": "--network backbone --network.name unet --network.size small "
    "--network.widths 32 64 128 --optim.lr 7e-4",
    "dit": "--network dit --network.patch 2 --network.depth 8 --network.heads 6 "
    "--network.head-width 32 --optim.lr 5e-4",
}
BEFORE = "--images 64 --optim.lr 1e-12"  # of two flags, the last counts
PLAN = ["unet", "unet-random", "dit", "dit-random", "baselines"]

LEVELS = (0.05, 0.1, 0.2, 0.4, 0.8)
DRAWS, SEEDS = (0, 1), (0, 1)
TRIAL, PAIRS = 100, 300  # pairs to choose by, and to judge by, of a draw
TRAIN, TEST = 30, 60  # pets to learn from, and to judge by
SCORED = 16  # birds, and as many pets
ENCODED, KEEP = 4, 200  # pictures that are encoded at once, and after which they are kept

Record = dict[str, Any]


def main() -> None:
    work_through(__doc__, PLAN, commands, summary, RESULTS, judged, write_animals)


# ---------------------------------------------------------------- the models


@cache
def birds(split: str) -> Keypoints:
    return read_birds(Path(os.environ["STILLHOUSE_DATA"]) / "birds", split)


@cache
def pets(split: str) -> Masks:
    return read_pets(Path(os.environ["STILLHOUSE_DATA"]) / "pets", split)


def write_animals(name: str, work: Path) -> None:
    """All training pictures in one folder, of the one class there is."""
    import pyarrow.parquet as pq

    folder, notes = work / "animals" / "animal", work / "animals" / "metadata.jsonl"
    if name == "baselines" or notes.exists() or (work / "latents" / "index.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for data in ("birds", "pets"):
        files = sorted((Path(os.environ["STILLHOUSE_DATA"]) / data).glob("train*.parquet"))
        images = [i for file in files for i in pq.read_table(file)["image"].to_pylist()]
        for number, image in enumerate(images):
            picture = folder / f"{data}-{number:05}.jpg"
            picture.write_bytes(image["bytes"])
            lines.append(json.dumps({"file_name": f"animal/{picture.name}", "label": 0}) + "\n")
    notes.write_text("".join(lines))


def commands(name: str, work: Path) -> Iterator[tuple[Path, list[str]]]:
    """Latents, and the network, which for random weights is trained too: it chooses the level."""
    if name == "baselines":
        return
    network = name.removesuffix("-random")
    codec = f"{os.environ['STILLHOUSE_WEIGHTS']}/taesd"
    prepare = f"prepare {work}/animals --out {work}/latents --codec {codec} --resolution 256"
    prepare += " --columns.label label --precision bfloat16 --workers 1"
    yield work / "latents" / "index.json", shlex.split(prepare)
    train = f"train images {COMMON} --data.source.path {work}/latents --codec {codec}"
    train += f" --images {IMAGES[network]} {NETWORKS[network]}"
    yield finished(work / network), shlex.split(f"{train} --out {work}/{network}")
    if network != name:
        random = work / name / "model" / "model_index.json"
        yield random, shlex.split(f"{train} {BEFORE} --out {work}/{name}")


def finished(run: Path) -> Path:
    """A file that is there once the training has come to its end: a model is there before."""
    log = run / "log.jsonl"
    seen = [line.get("images", 0) for line in read_lines(run)] if log.exists() else []
    return log if max(seen, default=0) >= IMAGES[run.name] else run / "never"


def opener(data: str, split: str) -> Callable[[str], Any]:
    """Pictures by name."""
    if data == "birds":
        return birds(split).open
    return lambda name: pets(split).open(int(name))


class Eyes:
    """A network that looks at pictures. What it takes of them is kept in a file: encoding pictures
    costs more than the rest, and all networks take the same."""

    def __init__(self, folder: Path) -> None:
        self.model = FeatureModel(str(folder), Reading(), torch.device("cpu"), label=0)
        self.known: Catalogue = self.model.known
        self.ids = pool(self.known)
        self.file = folder.parent.parent / "encoded.pt"
        self.latents: dict[str, Tensor] = (
            torch.load(self.file, weights_only=True) if self.file.exists() else {}
        )
        self.stored = len(self.latents)

    def encoded(self, data: str, split: str, names: Ids) -> Tensor:
        keys = {f"{data}/{split}/{name}": name for name in names}
        new = [key for key in keys if key not in self.latents]
        for start in range(0, len(new), ENCODED):
            some = new[start : start + ENCODED]
            fresh = self.model.encoded([opener(data, split)(keys[key]) for key in some])
            self.latents |= {key: x.clone() for key, x in zip(some, fresh, strict=True)}
        if len(self.latents) >= self.stored + KEEP:
            self.keep()
        return torch.stack([self.latents[key] for key in keys])

    def keep(self) -> None:
        if len(self.latents) > self.stored:
            part = self.file.with_suffix(".part")
            torch.save(self.latents, part)
            part.replace(self.file)
            self.stored = len(self.latents)

    def at(self, sigma: float, data: str, split: str, ids: Ids = ()) -> See:
        extractor = self.model.extractor(ids or self.ids, sigma)

        def see(names: Ids, seed: int) -> dict[str, Tensor]:
            x = self.encoded(data, split, names)
            cond = self.model.condition(len(x))
            return extractor.extract(x, cond, key=[int(name) for name in names], seed=seed)

        return see


def pool(known: Catalogue) -> list[str]:
    """All but maps and what the network takes and gives; of these few blocks, each."""
    return [a.id for a in known.values() if a.stage not in ("in", "out") and not a.is_map]


def legacy(known: Catalogue) -> list[str]:
    """What earlier works take: upsamplers and the last of the way up; of a DiT, the middle."""
    outs = [a.id for a in known.values() if a.stage == "up" and a.kind.endswith("-out")]
    if outs:
        return [n for n in outs if n.endswith("-upsampler-out")] + [outs[-1]]
    blocks = [a.id for a in known.values() if a.stage == "block" and a.kind == "out"]
    return [blocks[len(blocks) // 2]]


# ---------------------------------------------------------------- one network


def judged(run: Path) -> Path:
    """The picture of matches, with all numbers in a file beside it."""
    picture = run / "features" / "matches.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    record = judge_baselines(picture) if run.name == "baselines" else judge_network(run, picture)
    (picture.parent / "record.json").write_text(json.dumps(record))
    return picture


def summary(name: str, run: Path) -> Record:
    places = {str(run.parent): "WORK", os.environ["STILLHOUSE_WEIGHTS"]: "WEIGHTS"}
    about: Record = {"name": name, "commands": []}
    for _, words in commands(name, run.parent):
        line = shlex.join(["stillhouse", *words])
        for place, word in places.items():
            line = line.replace(place, word)
        about["commands"].append(line)
    if (run / "run.json").exists():
        notes = json.loads((run / "run.json").read_text())
        about["parameters"] = notes["network"]["parameters"]
    about |= {"pairs": PAIRS, "alpha": ALPHA, "pets": [TRAIN, TEST]}
    return about | json.loads((run / "features" / "record.json").read_text())


def judge_network(run: Path, picture: Path) -> Record:
    levels = level_trials(run.with_name(run.name.removesuffix("-random")))
    sigma = float(max(levels, key=lambda level: levels[level]))
    judging = Judging(Eyes(run / "model"), sigma)
    for draw in DRAWS:
        say(run, f"draw {draw}: scores")
        judging.score(draw)
        for seed in SEEDS:
            say(run, f"draw {draw}, seed {seed}: birds")
            judging.on_birds(draw, seed, picture if draw == seed == 0 else None)
            say(run, f"draw {draw}, seed {seed}: pets")
            judging.on_pets(draw, seed)
            judging.eyes.keep()
    return {"sigma": sigma, "levels": levels, **judging.record}


def level_trials(trained: Path) -> dict[str, float]:
    """PCK of all activations together on pairs of training birds, by level."""
    file = trained / "features" / "levels.json"
    if not file.exists():
        eyes, data = Eyes(trained / "model"), birds("train")
        pairs, found = drawn_pairs(data.pairs, TRIAL, 0, len(DRAWS)), dict[str, float]()
        for sigma in LEVELS:
            say(trained, f"level {sigma}")
            points = matched(eyes.at(sigma, "birds", "train"), pairs, {"all": eyes.ids}, 0)
            found[str(sigma)] = round(pck(pairs, points["all"])[0], 5)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return json.loads(file.read_text())


class Judging:
    """One network at one noise level; every draw and seed adds a value to each list."""

    def __init__(self, eyes: Eyes, sigma: float) -> None:
        self.eyes, self.sigma = eyes, sigma
        self.rows = {name: row_of(eyes.known, name) for name in eyes.ids}
        self.arms: dict[str, Record] = {}
        self.record: Record = {"activations": self.rows, "arms": self.arms}
        self.kept: dict[str, list[str]] = {}

    def score(self, draw: int) -> None:
        """Properties, and what they and the rules leave before any label is looked at."""
        known = self.eyes.known
        scores = score(
            self.eyes.model.extractor(self.eyes.ids, self.sigma), scored_images(self.eyes, draw)
        )
        for name, found in scores.items():
            note(self.rows[name], "scores", rounded(asdict(found)))
        change = granularity_change(scores, known)
        note(self.record, "granularity_change", {str(k): round(v, 5) for k, v in change.items()})
        if any(a.stage == "up" for a in known.values()):
            note(self.record, "asymmetry", round(asymmetry(scores, known), 4))
        self.kept = filters(scores, known)
        for arm, ids in self.kept.items():
            note(self.arms.setdefault(arm, {}), "ids", ids)

    def on_birds(self, draw: int, seed: int, picture: Path | None) -> None:
        train, test, left = birds("train"), birds("test"), self.kept["rules+gate"]
        trial = drawn_pairs(train.pairs, TRIAL, draw, len(DRAWS))
        chosen = greedy(self.eyes.at(self.sigma, "birds", "train", left), trial, left, seed)
        note(self.arms.setdefault("selected", {}), "ids on birds", chosen)
        pairs = drawn_pairs(test.pairs, PAIRS, draw, len(DRAWS))
        see = self.eyes.at(self.sigma, "birds", "test")
        found = matched(see, pairs, {**self.kept, "selected": chosen}, seed)
        for name, points in found.items():
            shares = [round(value, 5) for value in pck(pairs, points)]
            note(self.rows[name] if name in self.rows else self.arms[name], "pck", shares)
        if picture is not None:
            draw_some(pairs, found["selected"], picture)

    def on_pets(self, draw: int, seed: int) -> None:
        train, test = pets_points(partial(self.eyes.at, self.sigma, "pets"), draw, seed)
        chosen = probed(train, self.kept["rules+gate"])
        note(self.arms.setdefault("selected", {}), "ids on pets", chosen)
        for name, row in self.rows.items():
            note(row, "accuracy", round(probe_accuracy(train, test, [name], ridge=1e-2), 5))
        for arm, ids in {**self.kept, "selected": chosen}.items():
            note(self.arms[arm], "iou", round(mean_iou(train, test, ids, seed), 5))


def scored_images(eyes: Eyes, draw: int) -> Iterator[Images]:
    """Training pets with their masks, and training birds; none that a head learns from."""
    masks, keypoints = pets("train"), birds("train")
    last = len(masks.names) - draw * SCORED
    names = masks.names[last - SCORED : last]
    labels = torch.stack([masks.mask(int(name)) for name in names])
    cond = eyes.model.condition(SCORED)
    x = eyes.encoded("pets", "train", names)
    yield Images(x, [int(n) for n in names], cond, labels.masked_fill(labels == IGNORE, -1))
    names = keypoints.names[draw * SCORED : (draw + 1) * SCORED]
    yield Images(eyes.encoded("birds", "train", names), [int(n) for n in names], cond)


def filters(scores: Mapping[str, Scores], known: Catalogue) -> dict[str, list[str]]:
    """The arms that no label of a task has a part in."""
    rules = keep_by_rule(known, list(scores))
    return {
        "legacy": legacy(known),
        "all": list(scores),
        "rules": rules,
        "gate": gate(scores, known),
        "gate-quarter": gate(scores, known, share=0.25),
        "rules+gate": gate({name: scores[name] for name in rules}, known),
    }


def pets_points(see: Callable[[str], See], draw: int, seed: int) -> tuple[Points, Points]:
    """Of this draw's images to learn from and to judge by; `see` is told which split."""
    train, test = (
        pixels_of(see(which), pets(which), range(draw * count, (draw + 1) * count), seed)
        for which, count in (("train", TRAIN), ("test", TEST))
    )
    return train, test


def judge_baselines(picture: Path) -> Record:
    arms: dict[str, Record] = {"same place": {}, "MobileNetV2": {}}
    for draw in DRAWS:
        pairs = drawn_pairs(birds("test").pairs, PAIRS, draw, len(DRAWS))
        see = mobilenet(opener("birds", "test"))
        found = matched(see, pairs, {"MobileNetV2": MOBILENET}, 0)
        found["same place"] = [pair.source.points for pair in pairs]  # all are squares of 64 px
        for arm, record in arms.items():
            note(record, "pck", [round(value, 5) for value in pck(pairs, found[arm])])
        points = pets_points(lambda which: mobilenet(opener("pets", which)), draw, 0)
        note(arms["MobileNetV2"], "iou", round(mean_iou(*points, MOBILENET, 0), 5))
        if draw == 0:
            draw_some(pairs, found["MobileNetV2"], picture)
    return {"arms": arms}


def draw_some(pairs: Sequence[Pair], found: Sequence[Tensor], picture: Path) -> None:
    """Five, spread over all."""
    some = range(0, len(pairs), -(-len(pairs) // 5))
    draw_matches([shown(birds("test"), pairs[n], found[n]) for n in some], picture)


# ---------------------------------------------------------------- words


def row_of(known: Catalogue, name: str) -> Record:
    a = known[name]
    facts = {"stage": a.stage, "kind": a.kind, "scale": str(a.scale), "channels": a.channels}
    return facts | {"level": a.level, "repeat": a.repeat, "block": a.block}


def note(record: Record, key: str, value: Any) -> None:
    """One more value, of another draw or seed."""
    record.setdefault(key, []).append(value)


def rounded(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {k: None if v is None or isnan(v) else round(v, 5) for k, v in values.items()}


def say(run: Path, what: str) -> None:
    print(f"# {run.name}: {what}", flush=True)


if __name__ == "__main__":
    main()
