"""Students of the reference models beside solvers with as few evaluations: small scale.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/distill.py [NAME ...] [--plan] [--work runs/distill]

A name is MODEL-ARM-SEED, or the beginning of one. What has a file in results/distill is not run
again, and a run that was broken off goes on where it was. `--plan` prints the commands.

| arm | what |
|---|---|
| `teacher` | the teacher itself: quality of solvers with 1 to 5 evaluations, and 50 |
| `before` | distances of the teacher's solvers, and of SFD's student before it has learnt |
| `sfd1` ... `sfd5` | SFD, a student for each number of evaluations |
| `sfdv` | SFD-v, one student for 2 to 5 |
| `more` | SFD-v with four times the budget |
| `sfd1more` | SFD at one evaluation with five times the budget |
| `k1` | SFD at 3 evaluations with a teacher that is no finer: K = 1 |
| `half` | progressive distillation from 16 steps: 8, 4, 2 and 1 |
| `consistency` | consistency distillation, 1 to 5 evaluations |
| `one` | the second stage: one evaluation from `sfdv` |
| `halfown`, `consistencyown` | the two peers at the learning rates of their own papers |

All students of a model have the same budget of network evaluations, a backward pass counted as
two: less than a twentieth of what the teacher's training cost. `more` and `sfd1more` have more, and
`one` is charged on top of its teacher. All but `one` keep their walks, a third of the budget, and
learn from them again: with new walks for every lesson SFD's distance was .36 in place of .31
(emoji, 3 evaluations, one run each, at a learning rate of 5e-4). The stages of `half` share the
budget: its student of 4 steps has had three fifths of it.

Measured for each number of evaluations: distance to the teacher's 50 steps from the same noise,
also of the teacher's own solvers, and the Fréchet distance of features. A student of consistency
draws new noise after its first evaluation, so that its distance says little from 2 on. Emoji are
judged on prompts from all over the data set, in each of its three styles; students are taught on
prompts of the same set, from other noise. What a K of 1 saves in walks it cannot spend on
Fashion-MNIST and CIFAR-10: they are more than its lessons, none comes again, and 4% of the budget
is left.
"""

import json
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments import work_through

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "distill"
SEEDS = 2
ASKED = 167  # prompts that are judged, in each of three styles


@dataclass(frozen=True)
class Model:
    """A teacher, and how its students are made and judged."""

    flags: str  # of the distillation
    judge: str  # of the evaluation
    calls: int  # of its network in one evaluation
    budget: int  # network evaluations
    batch: int
    lowered: bool = False  # the order of the long walks' last steps, which are what a student nears


MODELS = {
    "emoji": Model(
        "--prompts emoji --guidance classifier-free --guidance.weight 3",
        f"--reference emoji --detector mobilenet-v2 --count {3 * ASKED}",
        calls=2,
        budget=100_000,
        batch=8,
    ),
    "fashion": Model(
        "--labels 0 1 2 3 4 5 6 7 8 9",
        "--reference fashion:test --detector mobilenet-v2 --count 500",
        calls=1,
        budget=33_000,
        batch=8,
    ),
    "cifar10": Model(
        "",
        "--reference cifar10:test --detector resnet56-cifar10 --count 500",
        calls=1,
        budget=25_000,
        batch=8,
        lowered=True,
    ),
}
RATE = "3e-5"  # of four: docs/results/sfd.md
HALVES = (8, 4, 2, 1)  # steps of the stages
SOLVERS = "euler dpmpp-3m gits"


@dataclass(frozen=True)
class Arm:
    """A method, its students' evaluations, and what it costs in network evaluations."""

    flags: str
    evaluations: str
    walk: float = 0  # of the teacher, guided where it is
    lesson: float = 0  # forwards of the student, a backward counted as two
    later: float = 0  # of students that teach, which are guided no more
    again: bool = True  # whether walks are kept and learnt from again
    times: int = 1  # the budget
    rate: str = RATE  # of learning, which falls to 0 by a cosine

    def images(self, model: "Model") -> int:
        """As many as the budget pays for, in whole batches."""
        paid = self.times * model.budget - self.walks(model) * self.walking(model)
        each = self.lesson + (0 if self.again else self.walking(model))
        return int(paid / each) // model.batch * model.batch

    def walking(self, model: "Model") -> float:
        """What a walk costs; of stages, one in each."""
        return model.calls * self.walk + self.later

    def walks(self, model: "Model") -> int:
        """A third of the budget goes into walks where they are kept."""
        if not self.again:
            return 0
        paid = self.times * model.budget / 3
        return int(paid / self.walking(model)) // model.batch * model.batch


def sfd(n: float, flags: str = "--method sfd", evaluations: str = "", refinement: int = 4) -> Arm:
    return Arm(flags, evaluations or f"{n:g}", refinement * (n + 1), 3 * n)


ARMS = {
    "teacher": Arm("", "1..5"),
    "before": Arm("--method sfd", "1..5"),
    "sfdv": sfd(3.5, "--method sfd-v", "2..5"),
    **{f"sfd{n}": sfd(n) for n in range(1, 6)},
    "more": replace(sfd(3.5, "--method sfd-v", "2..5"), times=4),
    "sfd1more": replace(sfd(1), times=5),
    "k1": sfd(3, "--method sfd --method.refinement 1", refinement=1),
    "half": Arm(
        f"--method progressive --method.first {2 * HALVES[0]}",
        "1",
        walk=2 * HALVES[0],
        lesson=3,
        later=2 * sum(HALVES[1:]),
    ),
    "consistency": Arm("--method consistency", "1..5", walk=36, lesson=4),
    "one": Arm("--method sfd --method.refinement 3", "1", lesson=3, later=5, again=False),
}
ARMS["halfown"] = replace(ARMS["half"], rate="1e-4")  # Salimans & Ho 2022, CIFAR-10
ARMS["consistencyown"] = replace(ARMS["consistency"], rate="4e-4")  # Song et al. 2023, CIFAR-10
PLAN = [
    f"{model}-{arm}-{seed}"
    for seed in range(SEEDS)
    for model in MODELS
    for arm in ARMS
    if arm not in ("teacher", "before") or seed == 0
]


def main() -> None:
    work_through(__doc__, PLAN, commands, summary, RESULTS, drawn)


def taken_apart(name: str) -> tuple[str, str, int]:
    model, arm, seed = name.split("-")
    return model, arm, int(seed)


def commands(name: str, work: Path) -> Iterator[tuple[Path, list[str]]]:
    """The student (after its own teacher, where that is one), and its samples judged."""
    model, arm, seed = taken_apart(name)
    reference = str(ROOT / "reference" / model)
    if arm == "teacher":
        yield from judging_teacher(model, reference, work / name)
        return
    if arm == "one":
        yield distilling(f"{model}-sfdv-{seed}", work, reference)
        reference = str(work / f"{model}-sfdv-{seed}")
    yield distilling(name, work, reference)
    if arm == "before":
        return
    for stage, steps in students(name, work).items():
        numbers = " ".join(map(str, steps))
        words = f"evaluate {stage}/model {judge(model, work)} --steps {numbers}"
        yield stage / "judged/evaluation.json", shlex.split(f"{words} --out {stage}/judged")


def judge(model: str, work: Path) -> str:
    return f"{MODELS[model].judge} --metrics fid,kid {prompts_of(model, work)}"


def judging_teacher(model: str, reference: str, run: Path) -> Iterator[tuple[Path, list[str]]]:
    """Its guidance is that of its students' lessons; GITS is ipndm on a searched grid."""
    guided = " ".join(shlex.split(MODELS[model].flags)[2:]) if model == "emoji" else ""
    common = f"evaluate {reference} {judge(model, run.parent)} {guided}"
    few, searched = "--steps 1 2 3 4 5", "--grid searched --grid.fine 61 --grid.samples 64"
    lowered = str(MODELS[model].lowered).lower()
    for name, flags in {
        "few": f"--solvers euler dpmpp-3m {few}",
        "gits": f"--solvers ipndm {few} {searched} --lower-order-final false",
        "long": f"--solvers dpmpp-3m --steps 50 --lower-order-final {lowered}",
    }.items():
        out = run / name
        yield out / "evaluation.json", shlex.split(f"{common} {flags} --out {out}")


def distilling(name: str, work: Path, teacher: str) -> tuple[Path, list[str]]:
    model, arm, seed = taken_apart(name)
    made, how = MODELS[model], ARMS[arm]
    flags = made.flags if arm != "one" else made.flags.split(" --guidance")[0]
    untaught = arm == "before"
    count, walks = (made.batch, 0) if untaught else (how.images(made), how.walks(made))
    learning = "--optim.lr 1e-9" if untaught else f"--optim.lr {how.rate} --optim.schedule cosine"
    words = f"distill {teacher} {how.flags} --evaluations {how.evaluations} {flags} {learning}"
    words += f" --method.walks {walks}" if walks else ""
    words += f" --images {count} --batch {made.batch} --preview.every {count} --seed {seed}"
    # The teacher's own walks are the same beside every student.
    solvers = SOLVERS if untaught else ""
    words += f" --comparison.count 128 --comparison.solvers {solvers}"
    words += f" --comparison.walk.lower-order-final {str(made.lowered).lower()}"
    words += " --comparison.fine 61 --comparison.searched 64" if untaught else ""
    words += f" --comparison.against {ROOT / 'reference' / model}" if arm == "one" else ""
    words += f" --out {work / name}"
    return list(students(name, work))[-1] / "comparison.json", shlex.split(words)


def students(name: str, work: Path) -> dict[Path, list[int]]:
    """The folders of a run's students, each with the evaluations it is judged at."""
    _, arm, _ = taken_apart(name)
    run = work / name
    if arm.startswith("half"):
        return {run / f"{n}-steps": [n] for n in HALVES if n <= 5}
    first, _, last = ARMS[arm].evaluations.partition("..")
    return {run: list(range(int(first), int(last or first) + 1))}


def prompts_of(model: str, work: Path) -> str:
    """A file with some captions of the data set, where the model takes some: from all over it."""
    if model != "emoji":
        return ""
    from stillhouse.recipes.distill.told import find_prompts

    file = work / "prompts.txt"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        found = sorted(find_prompts("emoji", ""))
        file.write_text("\n".join(random.Random(0).sample(found, ASKED)) + "\n")
    return f"--prompts {file}"


def summary(name: str, run: Path) -> dict[str, Any]:
    model, arm, seed = taken_apart(name)
    record: dict[str, Any] = {"model": model, "arm": arm, "seed": seed}
    if arm == "teacher":
        return record | {"judged": {k: judged(run / k) for k in ("few", "gits", "long")}}
    made, how = MODELS[model], ARMS[arm]
    record |= {"distance": {}, "judged": {}}
    if arm != "before":
        images, walks = how.images(made), how.walks(made)
        record |= {"images": images, "walks": min(walks, images)}
    for stage in students(name, run.parent):
        compared = json.loads((stage / "comparison.json").read_text())
        for who, values in compared["distance"].items():
            record["distance"].setdefault(who, {}).update(values)
        if (stage / "judged").is_dir():
            record["judged"] |= {row["steps"]: row["values"] for row in judged(stage / "judged")}
        record |= {key: compared[key] for key in ("count", "teacher_steps")}
    all_stages = [json.loads(file.read_text()) for file in sorted(run.rglob("comparison.json"))]
    return record | {"evaluations": sum(stage["evaluations"] for stage in all_stages)}


def judged(folder: Path) -> list[dict[str, Any]]:
    found = json.loads((folder / "evaluation.json").read_text())
    keys = ("solver", "steps", "evaluations", "values")
    rows = [{key: row[key] for key in keys if key in row} for row in found["settings"]]
    return [row | {"floor": found["floor"]} for row in rows]


def drawn(run: Path) -> Path:
    if taken_apart(run.name)[1] == "teacher":
        return run / "few/evaluation.png"
    return max(list(students(run.name, run.parent))[-1].glob("samples/*.png"))


if __name__ == "__main__":
    main()
