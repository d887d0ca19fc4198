"""One-step generators of the Fashion-MNIST reference model, and students of walks: small scale.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/one_step.py [NAME ...] [--plan] [--work runs/distill]

A name is ARM-SEED, or the beginning of one. What has a file in results/one_step is not run again,
and a run that was broken off goes on where it was. `--plan` prints the commands.

| arm | what |
|---|---|
| `teacher` | the teacher with 50 steps |
| `sfd1` | SFD's student of one step, with the budget of a generator (165,000) |
| `sfdv` | SFD-v's student with 2 to 5 steps (benchmarks/distill.py has the same) |
| `second` | the same, taught to take one step (likewise) |
| `instruct` | Diff-Instruct |
| `emd4`, `emd8`, `emd16` | EM distillation with so many Langevin steps |
| `full8` | EMD-8 whose generator learns the noise of the chain too, which EMD cancels |
| `emd8low`, `full8low` | the two at a learning rate of 3e-5 in place of 1e-4 |

The generators are judged twice: after the same number of updates, and after the same number of
network evaluations, a backward pass counted as two. SFD-v has a fifth of them, the second stage as
many on top of its teacher's. Measured on samples: Fréchet and kernel distance, precision and
recall, density and coverage.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distill
from experiments import read_lines, work_through

RESULTS = Path(__file__).parent / "results" / "one_step"
TEACHER = distill.ROOT / "reference/fashion"
SEEDS, SAMPLES = 2, 1000
BUDGET, UPDATES, BATCH = 160_000, 256, 16
# Levels from where images are all but clean to where their classes are no longer told apart.
LEARNING = "--optim.lr 1e-4 --method.start 5 --method.low 0.1 --method.high 20"
AVERAGE = """--averages '[{"kind": "half-life", "images": 400, "ramp": 0}]'"""
# Each with its cost of one image, in network evaluations (docs/distill.md).
GENERATORS = {
    "instruct": ("--method diff-instruct", 9),
    **{f"emd{k}": (f"--method emd --langevin {k}", 4 * k + 7) for k in (4, 8, 16)},
    "full8": ("--method emd --langevin 8 --method.bookkeeping full", 4 * 8 + 7),
}
# The rate was chosen with Diff-Instruct: noisier gradients may want a lower one.
LOW = {
    f"{arm}low": (f"{GENERATORS[arm][0]} --optim.lr 3e-5", 4 * 8 + 7) for arm in ("emd8", "full8")
}
GENERATORS |= LOW
# Of walks: which student of benchmarks/distill.py it is, and the steps that it is judged at.
STUDENTS = {"sfd1": ("sfd1more", "1"), "sfdv": ("sfdv", "2 3 4 5"), "second": ("one", "1")}
PLAN = [
    f"{arm}-{seed}"
    for seed in range(SEEDS)
    for arm in (*STUDENTS, *GENERATORS)
    if seed == 0 or arm not in LOW
]
Commands = Iterator[tuple[Path, list[str]]]


def main() -> None:
    work_through(__doc__, ["teacher-0", *PLAN], commands, summary, RESULTS, drawn)


def commands(name: str, work: Path) -> Commands:
    """The generator, and its samples judged."""
    arm, seed = name.split("-")
    run = work / name
    if arm in GENERATORS:
        yield from generating(arm, seed, run)
    elif arm == "teacher":
        long = "--solvers dpmpp-3m --steps 50 --lower-order-final false"
        yield judging(TEACHER, run / "judged", long)
    else:
        student, steps = STUDENTS[arm]
        made, teacher = f"fashion-{student}-{seed}", TEACHER
        if arm == "second":
            teacher = work / f"fashion-sfdv-{seed}"
            yield distill.distilling(teacher.name, work, str(TEACHER))
        yield distill.distilling(made, work, str(teacher))
        yield judging(work / made / "model", run / "judged", f"--steps {steps}")


def generating(arm: str, seed: str, run: Path) -> Commands:
    """In legs, each judged: the state of a run after some updates is that of a shorter run."""
    method, _ = GENERATORS[arm]
    words = f"distill {TEACHER} {distill.MODELS['fashion'].flags} {LEARNING} {AVERAGE} {method}"
    words += f" --batch {BATCH} --log-every {10 * BATCH} --checkpoint-every 1600 --seed {seed}"
    words += f" --preview.every 2048 --comparison.count 128 --out {run}"
    for images in sorted(set(legs(arm).values())):
        out = run / f"judged-{images}"
        yield out / "evaluation.json", shlex.split(f"{words} --images {images}")
        yield judging(run / "model", out, "--steps 1")


def legs(arm: str) -> dict[str, int]:
    """Images after which a generator is judged."""
    _, each = GENERATORS[arm]
    return {"updates": UPDATES * BATCH, "evaluations": BUDGET // each // BATCH * BATCH}


def judging(model: Path, out: Path, steps: str) -> tuple[Path, list[str]]:
    flags = f"{distill.MODELS['fashion'].judge} --metrics fid,kid,prdc --count {SAMPLES} {steps}"
    return out / "evaluation.json", shlex.split(f"evaluate {model} {flags} --out {out}")


def summary(name: str, run: Path) -> dict[str, Any]:
    arm, seed = name.split("-")
    record: dict[str, Any] = {"arm": arm, "seed": int(seed)}
    if arm not in GENERATORS:
        return record | {"judged": distill.judged(run / "judged"), "evaluations": paid(arm, run)}
    found = json.loads((run / "comparison.json").read_text())
    watched = [
        {k: v for k, v in line.items() if k == "images" or k.startswith("watch/")}
        for line in read_lines(run)
        if any(k.startswith("watch/") for k in line)
    ]
    return record | {
        "legs": {
            equal: {"images": images, **distill.judged(run / f"judged-{images}")[0]}
            for equal, images in legs(arm).items()
        },
        **{key: found[key] for key in ("energy", "spread", "images", "evaluations")},
        "watched": watched,
    }


def paid(arm: str, run: Path) -> float:
    """Network evaluations of a student of walks, and of its own teacher where that is one."""
    taught = {"teacher": (), "second": ("sfdv", "one")}.get(arm, STUDENTS.get(arm, ())[:1])
    seed = run.name.split("-")[1]
    files = [run.parent / f"fashion-{student}-{seed}/comparison.json" for student in taught]
    return sum(json.loads(file.read_text())["evaluations"] for file in files)


def drawn(run: Path) -> Path:
    previews = sorted(run.glob("samples/*.png"))
    return previews[-1] if previews else run / "judged/evaluation.png"


if __name__ == "__main__":
    main()
