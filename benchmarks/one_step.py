"""One-step generators of the reference models of images, and students of walks: small scale.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/one_step.py [NAME ...] [--plan] [--work runs/distill]

A name is MODEL-ARM-SEED, of fashion or cifar10, or the beginning of one. What has a file in
results/one_step is not run again, and a run that was broken off goes on where it was. `--plan`
prints the commands.

| arm | what |
|---|---|
| `teacher` | the teacher with 50 steps |
| `sfd1` | SFD's student of one step, with the budget of a generator |
| `sfdv` | SFD-v's student with 2 to 5 steps (benchmarks/distill.py has the same) |
| `second` | the same, taught to take one step (likewise) |
| `instruct`, `dmd` | Diff-Instruct, DMD without its regression |
| `emd4`, `emd8`, `emd16` | EM distillation with so many Langevin steps |
| `full8` | EMD-8 whose generator learns the noise of the chain too, which EMD cancels |
| `instructlow`, `emd8low`, `full8low` | at a learning rate of 3e-5 in place of 1e-4 |
| `emd8far` | EMD-8 whose chain moves the latent in steps of 4e-4 in place of 1.6e-5 |

The generators are judged twice: after the same number of updates, and after the same number of
network evaluations, a backward pass counted as two; pictures, and what is watched, are of the
longer of the two. SFD-v has a fifth of these evaluations, the second stage as many on top of its
teacher's. Measured on samples: Fréchet and kernel distance, precision and recall, density and
coverage.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distill
from experiments import read_lines, work_through

RESULTS = Path(__file__).parent / "results" / "one_step"
MODELS = ("fashion", "cifar10")
SEEDS, SAMPLES = 2, 1000
UPDATES, BATCH = 256, 16
BUDGETS = {"fashion": 160_000, "cifar10": 125_000}  # network evaluations
# Levels from where images are all but clean to where their classes are no longer told apart.
LEARNING = "--optim.lr 1e-4 --method.start 5 --method.low 0.1 --method.high 20"
# At most a tenth of the run so far: at equal evaluations runs of long chains are short.
AVERAGE = """--averages '[{"kind": "half-life", "images": 400, "ramp": 0.1}]'"""
# Each with its cost of one image, in network evaluations (docs/distill.md).
GENERATORS = {
    "instruct": ("--method diff-instruct", 9),
    "dmd": ("--method dmd", 9),
    **{f"emd{k}": (f"--method emd --langevin {k}", 4 * k + 7) for k in (4, 8, 16)},
    "full8": ("--method emd --langevin 8 --method.bookkeeping full", 4 * 8 + 7),
}
# The rate was chosen with Diff-Instruct: noisier gradients may want a lower one.
LOW, FAR = "--optim.lr 3e-5", "--method.latent-step 4e-4"
# Of which generator each is a variant, and how.
VARIANTS = {
    "instructlow": ("instruct", LOW),
    "emd8low": ("emd8", LOW),
    "full8low": ("full8", LOW),
    "emd8far": ("emd8", FAR),
}
for variant, (arm, flags) in VARIANTS.items():
    GENERATORS[variant] = (f"{GENERATORS[arm][0]} {flags}", GENERATORS[arm][1])
# Of walks: which student of benchmarks/distill.py it is, and the steps that it is judged at.
STUDENTS = {"sfd1": ("sfd1more", "1"), "sfdv": ("sfdv", "2 3 4 5"), "second": ("one", "1")}
PLAN = [
    f"{model}-{arm}-{seed}"
    for seed in range(SEEDS)
    for model in MODELS
    for arm in ("teacher", *STUDENTS, *GENERATORS)
    if seed == 0 or arm not in ("teacher", *VARIANTS)
]
JUDGED = f"judged-{SAMPLES}"  # of students of walks; `judged` is that of benchmarks/distill.py
Commands = Iterator[tuple[Path, list[str]]]


def main() -> None:
    work_through(__doc__, PLAN, commands, summary, RESULTS, drawn)


def commands(name: str, work: Path) -> Commands:
    """The generator, and its samples judged."""
    model, arm, seed = distill.taken_apart(name)
    run, teacher = work / name, reference(model)
    if arm in GENERATORS:
        yield from generating(name, run)
    elif arm == "teacher":
        lowered = str(distill.MODELS[model].lowered).lower()
        long = f"--solvers dpmpp-3m --steps 50 --lower-order-final {lowered}"
        yield judging(model, teacher, run / JUDGED, long)
    else:
        student, steps = STUDENTS[arm]
        made = f"{model}-{student}-{seed}"
        if arm == "second":
            teacher = work / f"{model}-sfdv-{seed}"
            yield distill.distilling(teacher.name, work, str(reference(model)))
        yield distill.distilling(made, work, str(teacher))
        yield judging(model, work / made / "model", run / JUDGED, f"--steps {steps}")


def generating(name: str, run: Path) -> Commands:
    """In legs, each judged: the state of a run after some updates is that of a shorter run."""
    model, arm, seed = distill.taken_apart(name)
    method, _ = GENERATORS[arm]
    words = f"distill {reference(model)} {distill.MODELS[model].flags} {LEARNING} {AVERAGE}"
    words += f" {method} --batch {BATCH} --log-every {10 * BATCH} --checkpoint-every 1600"
    words += f" --seed {seed} --preview.every 2048 --comparison.count 128 --out {run}"
    for images in sorted(set(legs(model, arm).values())):
        out = run / f"judged-{images}"
        yield out / "evaluation.json", shlex.split(f"{words} --images {images}")
        yield judging(model, run / "model", out, "--steps 1")


def reference(model: str) -> Path:
    return distill.ROOT / "reference" / model


def legs(model: str, arm: str) -> dict[str, int]:
    """Images after which a generator is judged."""
    _, each = GENERATORS[arm]
    return {"updates": UPDATES * BATCH, "evaluations": BUDGETS[model] // each // BATCH * BATCH}


def judging(model: str, denoiser: Path, out: Path, steps: str) -> tuple[Path, list[str]]:
    flags = f"{distill.MODELS[model].judge} --metrics fid,kid,prdc --count {SAMPLES} {steps}"
    return out / "evaluation.json", shlex.split(f"evaluate {denoiser} {flags} --out {out}")


def summary(name: str, run: Path) -> dict[str, Any]:
    model, arm, seed = distill.taken_apart(name)
    record: dict[str, Any] = {"model": model, "arm": arm, "seed": seed}
    if arm not in GENERATORS:
        return record | {"judged": distill.judged(run / JUDGED), "evaluations": paid(name, run)}
    found = json.loads((run / "comparison.json").read_text())
    watched = [
        {k: v for k, v in line.items() if k == "images" or k.startswith("watch/")}
        for line in read_lines(run)
        if any(k.startswith("watch/") for k in line)
    ]
    return record | {
        "legs": {
            equal: {"images": images, **distill.judged(run / f"judged-{images}")[0]}
            for equal, images in legs(model, arm).items()
        },
        **{key: found[key] for key in ("energy", "spread", "images", "evaluations")},
        "watched": watched,
    }


def paid(name: str, run: Path) -> float:
    """Network evaluations of a student of walks, and of its own teacher where that is one."""
    model, arm, seed = distill.taken_apart(name)
    taught = {"teacher": (), "second": ("sfdv", "one")}.get(arm, STUDENTS.get(arm, ())[:1])
    files = [run.parent / f"{model}-{student}-{seed}/comparison.json" for student in taught]
    return sum(json.loads(file.read_text())["evaluations"] for file in files)


def drawn(run: Path) -> Path:
    """The teacher's samples above the student's; of the teacher alone, how it was judged."""
    model, arm, seed = distill.taken_apart(run.name)
    if arm == "teacher":
        return run / JUDGED / "evaluation.png"
    if arm in STUDENTS:
        run = run.parent / f"{model}-{STUDENTS[arm][0]}-{seed}"
    return max(run.glob("samples/*.png"))


if __name__ == "__main__":
    main()
