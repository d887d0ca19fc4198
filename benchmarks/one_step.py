"""One-step generators of the Fashion-MNIST reference model, at equal cost: small scale.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/one_step.py [NAME ...] [--plan] [--work runs/distill]

A name is ARM-SEED, or the beginning of one. What has a file in results/one_step is not run again,
and a run that was broken off goes on where it was. `--plan` prints the commands.

| arm | what |
|---|---|
| `teacher` | the teacher with 50 steps |
| `second` | SFD-v's student taught to take one step (benchmarks/distill.py has the same) |
| `instruct` | Diff-Instruct |
| `emd4`, `emd8`, `emd16` | EM distillation with so many Langevin steps |
| `full8` | EMD-8 whose generator learns the noise of the chain too, which EMD cancels |

The generators have the same budget of network evaluations, a backward pass counted as two; the
second stage has its own, a fifth of it, on top of its teacher's. Measured on samples: Fréchet and
kernel distance, precision and recall, density and coverage.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distill
from experiments import read_lines, work_through

RESULTS = Path(__file__).parent / "results" / "one_step"
SEEDS, SAMPLES = 2, 1000
BUDGET, BATCH = 160_000, 16
LEARNING = "--optim.lr 1e-4 --method.start 5"
AVERAGE = """--averages '[{"kind": "half-life", "images": 400}]'"""
# Each with its cost of one image, in network evaluations (docs/distill.md).
GENERATORS = {
    "instruct": ("--method diff-instruct", 9),
    **{f"emd{k}": (f"--method emd --langevin {k}", 4 * k + 7) for k in (4, 8, 16)},
    "full8": ("--method emd --langevin 8 --method.bookkeeping full", 4 * 8 + 7),
}
PLAN = [f"{arm}-{seed}" for seed in range(SEEDS) for arm in ("second", *GENERATORS)]


def main() -> None:
    work_through(__doc__, ["teacher-0", *PLAN], commands, summary, RESULTS, drawn)


def commands(name: str, work: Path) -> Iterator[tuple[Path, list[str]]]:
    """The generator, and its samples judged."""
    arm, seed = name.split("-")
    reference, run = distill.ROOT / "reference/fashion", work / name
    if arm == "teacher":
        model, steps = reference, "--solvers dpmpp-3m --steps 50"
    elif arm == "second":
        model, steps = work / f"fashion-one-{seed}/model", "--steps 1"
        yield from distill.commands(f"fashion-one-{seed}", work)
    else:
        model, steps = run / "model", "--steps 1"
        yield generating(arm, seed, str(reference), run)
    flags = f"{distill.MODELS['fashion'].judge} --metrics fid,kid,prdc --count {SAMPLES} {steps}"
    words = shlex.split(f"evaluate {model} {flags} --out {run}/judged")
    yield run / "judged/evaluation.json", words


def generating(arm: str, seed: str, teacher: str, run: Path) -> tuple[Path, list[str]]:
    method, each = GENERATORS[arm]
    count = BUDGET // each // BATCH * BATCH
    words = f"distill {teacher} {method} {distill.MODELS['fashion'].flags} {LEARNING} {AVERAGE}"
    words += f" --images {count} --batch {BATCH} --log-every {10 * BATCH} --checkpoint-every 1600"
    words += f" --preview.every {count // 4 // BATCH * BATCH} --comparison.count 128 --seed {seed}"
    return run / "comparison.json", shlex.split(f"{words} --out {run}")


def summary(name: str, run: Path) -> dict[str, Any]:
    arm, seed = name.split("-")
    judged = distill.judged(run / "judged")
    record: dict[str, Any] = {"arm": arm, "seed": int(seed), "judged": judged}
    compared = run / "comparison.json"
    if compared.exists():
        found = json.loads(compared.read_text())
        record |= {key: found[key] for key in ("energy", "spread", "images", "evaluations")}
        record["watched"] = [
            {k: v for k, v in line.items() if k == "images" or k.startswith("watch/")}
            for line in read_lines(run)
            if any(k.startswith("watch/") for k in line)
        ]
    return record


def drawn(run: Path) -> Path:
    previews = sorted(run.glob("samples/*.png"))
    return previews[-1] if previews else run / "judged/evaluation.png"


if __name__ == "__main__":
    main()
