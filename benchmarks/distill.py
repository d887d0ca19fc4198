"""Students of the reference models beside solvers with as few evaluations: small scale.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/distill.py [NAME ...] [--plan] [--work runs/distill]

A name is MODEL-ARM-SEED, or the beginning of one. What has a file in results/distill is not run
again, and a run that was broken off goes on where it was. `--plan` prints the commands.

| arm | what |
|---|---|
| `sfd1` ... `sfd5` | SFD, a student for each number of evaluations |
| `sfdv` | SFD-v, one student for 2 to 5 |
| `k1` | SFD at 3 evaluations with a teacher that is no finer: K = 1 |
| `half1`, `half2`, `half4` | progressive distillation from 16 steps |
| `consistency` | consistency distillation, 1 to 5 evaluations |
| `one` | the second stage: one evaluation from `sfdv` |

All arms of a model but `one`, which is charged on top of its teacher, have the same budget of
network evaluations, a backward pass counted as two. Measured for each number of evaluations:
distance to the teacher's 50 steps from the same noise, also of the teacher's own solvers, and the
Fréchet distance of features.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import work_through

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "distill"
SEEDS, SAMPLES = 2, 500


@dataclass(frozen=True)
class Model:
    """A teacher, and how its students are made and judged."""

    flags: str  # of the distillation
    judge: str  # of the evaluation
    calls: int  # of its network in one evaluation
    budget: int  # network evaluations
    batch: int


MODELS = {
    "emoji": Model(
        "--prompts emoji --guidance classifier-free --guidance.weight 3",
        "--reference emoji --detector mobilenet-v2",
        calls=2,
        budget=400_000,
        batch=64,
    ),
    "fashion": Model(
        "--labels 0 1 2 3 4 5 6 7 8 9",
        "--reference fashion:test --detector mobilenet-v2",
        calls=1,
        budget=120_000,
        batch=32,
    ),
}
LEARNING = "--optim.lr 3e-4 --optim.schedule cosine"


@dataclass(frozen=True)
class Arm:
    """A method, its students' evaluations, and what an image costs on average."""

    flags: str
    evaluations: str
    teacher: float  # evaluations of it
    student: float  # forwards, a backward counted as two; and of students that teach


def sfd(n: float, refinement: int = 4) -> tuple[float, float]:
    return refinement * (n + 1), 3 * n


def halving(last: int) -> tuple[float, float]:
    """Mean over the stages, all of which have as many images; the first alone is guided."""
    first, *rest = [n for n in (8, 4, 2, 1) if n >= last]
    stages = 1 + len(rest)
    return 2 * first / stages, 2 * sum(rest) / stages + 3


ARMS = {
    **{f"sfd{n}": Arm("--method sfd", str(n), *sfd(n)) for n in range(1, 6)},
    "sfdv": Arm("--method sfd-v", "2..5", *sfd(3.5)),
    "k1": Arm("--method sfd --method.refinement 1", "3", *sfd(3, 1)),
    **{
        f"half{n}": Arm("--method progressive --method.first 16", str(n), *halving(n))
        for n in (1, 2, 4)
    },
    "consistency": Arm("--method consistency", "1..5", 36, 4),
    "one": Arm("--method sfd --method.refinement 3", "1", 0, 6 + 3),  # its teacher is a student
}
PLAN = [f"{model}-{arm}-{seed}" for model in MODELS for seed in range(SEEDS) for arm in ARMS]


def main() -> None:
    work_through(__doc__, PLAN, commands, summary, RESULTS, drawn)


def taken_apart(name: str) -> tuple[str, str, int]:
    model, arm, seed = name.split("-")
    return model, arm, int(seed)


def images_of(model: Model, arm: Arm) -> int:
    """As many as the budget pays for, in whole batches."""
    cost = model.calls * arm.teacher + arm.student
    return int(model.budget / cost) // model.batch * model.batch


def commands(name: str, work: Path) -> Iterator[tuple[Path, list[str]]]:
    """The student (after its own teacher, where that is one), and its samples judged."""
    model, arm, seed = taken_apart(name)
    if arm == "one":
        yield distilling(f"{model}-sfdv-{seed}", work, str(ROOT / "reference" / model))
    run = work / name
    teacher = str(work / f"{model}-sfdv-{seed}") if arm == "one" else ""
    yield distilling(name, work, teacher or str(ROOT / "reference" / model))
    student = last_stage(name, work)
    numbers = [n for n in range(1, 6) if n in known(ARMS[arm].evaluations)]
    steps = " ".join(map(str, numbers))
    judge = f"evaluate {student}/model {MODELS[model].judge} --metrics fid,kid --count {SAMPLES}"
    judge += f" --steps {steps} --out {run}/judged {prompts_of(model, work)}"
    yield run / "judged/evaluation.json", shlex.split(judge)


def distilling(name: str, work: Path, teacher: str) -> tuple[Path, list[str]]:
    model, arm, seed = taken_apart(name)
    made, how = MODELS[model], ARMS[arm]
    flags = made.flags if arm != "one" else made.flags.split(" --guidance")[0]
    count = images_of(made, how)
    words = f"distill {teacher} {how.flags} --evaluations {how.evaluations} {flags} {LEARNING}"
    words += f" --images {count} --batch {made.batch} --preview.every {count} --seed {seed}"
    done = last_stage(name, work) / "comparison.json"
    return done, shlex.split(f"{words} --comparison.count 256 --out {work / name}")


def last_stage(name: str, work: Path) -> Path:
    """The folder of a run, or of the last of its stages."""
    _, arm, _ = taken_apart(name)
    run = work / name
    return run / f"{ARMS[arm].evaluations}-steps" if arm.startswith("half") else run


def known(evaluations: str) -> range:
    first, _, last = evaluations.partition("..")
    return range(int(first), int(last or first) + 1)


def prompts_of(model: str, work: Path) -> str:
    """A file with the captions of the data set, where the model takes some."""
    if model != "emoji":
        return ""
    from stillhouse.recipes.distill.told import find_prompts

    file = work / "prompts.txt"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(find_prompts("emoji", "text")) + "\n")
    return f"--prompts {file}"


def summary(name: str, run: Path) -> dict[str, Any]:
    model, arm, seed = taken_apart(name)
    stage = last_stage(name, run.parent)
    compared = json.loads((stage / "comparison.json").read_text())
    judged = json.loads((run / "judged/evaluation.json").read_text())
    return {
        "model": model,
        "arm": arm,
        "seed": seed,
        "images": images_of(MODELS[model], ARMS[arm]),
        **{key: compared[key] for key in ("distance", "count", "teacher_steps")},
        "judged": {row["steps"]: row["values"] for row in judged["settings"]},
        "floor": judged["floor"],
    }


def drawn(run: Path) -> Path:
    return max(last_stage(run.name, run.parent).glob("samples/*.png"))


if __name__ == "__main__":
    main()
