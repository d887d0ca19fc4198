"""What a network keeps when it is carried to twice the resolution: real images, small scale.

    STILLHOUSE_DATA=../shared/data STILLHOUSE_WEIGHTS=../shared/weights \\
        python benchmarks/transfer.py [NAME ...] [--plan] [--work runs/transfer]

A name is ARM-SEED, or the beginning of one. What has a file in results/transfer is not run again,
and a run that was broken off goes on where it was. `--plan` prints the commands.

`low` trains a DiT on CIFAR-10 at 16 pixels, in a VP process. Four arms go on from it at 32 pixels:
positions are resampled or extrapolated, noise levels shifted (each timestep has twice the sigma) or
still. `scratch` begins anew at 32 pixels, with the levels shifted, and sees more images. `low` sees
whole images; `parts` trains as it does on crops of 16 pixels out of 32, and `local` goes on from
there, positions resampled and levels still. Measured: held-out loss per noise level before the
first step and every 50 steps after it, and the Fréchet distance of samples at the end.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import last_values, read_lines, work_through

RESULTS = Path(__file__).parent / "results" / "transfer"
SEEDS, SAMPLES = 2, 1000
BATCH, EVERY = 128, 50 * 128
IMAGES = {"low": 128_000, "parts": 128_000, "scratch": 102_400}  # those that go on see fewer
CARRIED = 38_400
LOW, HIGH = 16, 32

COMMON = f"""--network.patch 4 --network.depth 6 --network.heads 4 --network.head-width 48
    --process vp --process.betas squaredcos_cap_v2 --objective denoising
    --objective.weighting eps --objective.density uniform-time
    --spread.precision bf16 --batch {BATCH} --optim.lr 1e-3 --optim.warmup 4000
    --optim.schedule constant
    --averages '[{{"kind": "half-life", "images": 2000}}]' --log-every {EVERY}
    --validation.every {EVERY} --validation.images 2048"""
# The last timesteps of these betas hold no signal: a walk that begins there draws noise.
GRID = "--grid.kind polynomial --grid.sigma-max 80"
SMALL = f"--data.image.size {LOW} --spread.precision fp32"


def carried(positions: str, levels: str, source: str = "low") -> str:
    shift = str(levels == "shifted").lower()
    return f"--init.positions {positions} --init.shift {shift} --init-from {{}}/{source}-{{}}/model"


ARMS = {
    "low": SMALL,
    **{
        f"{positions}-{levels}": carried(positions, levels)
        for positions in ("resample", "extrapolate")
        for levels in ("shifted", "still")
    },
    "scratch": f"--process.shift {HIGH / LOW}",
    "parts": f"{SMALL} --crop local --crop.scale {HIGH / LOW}",
    "local": carried("resample", "still", "parts"),
}
BEGUN = dict.fromkeys(ARMS, "low") | {"scratch": "scratch", "parts": "parts", "local": "parts"}
PLAN = [f"{arm}-{seed}" for seed in range(SEEDS) for arm in ARMS]


def main() -> None:
    work_through(__doc__, PLAN, commands, summary, RESULTS, drawn)


def taken_apart(name: str) -> tuple[str, int]:
    arm, seed = name.rsplit("-", 1)
    return arm, int(seed)


def commands(name: str, work: Path) -> Iterator[tuple[Path, list[str]]]:
    """The small network where there is none yet, the run, and its samples judged."""
    arm, seed = taken_apart(name)
    for part in dict.fromkeys((BEGUN[arm], arm)):
        yield training(part, seed, work)
    if arm not in ("low", "parts"):
        run = work / name
        evaluate = f"evaluate {run}/model --reference cifar10:test --detector resnet56-cifar10"
        evaluate += f" --metrics fid,kid --count {SAMPLES} --solvers dpmpp-2m --steps 20"
        evaluate = shlex.split(f"{evaluate} {GRID} --out {run}/judged")
        yield run / "judged/evaluation.json", evaluate
        sample = f"sample {run}/model --solver.kind dpmpp-2m --steps 20 --count 32 {GRID}"
        yield run / "drawn/grid.png", shlex.split(f"{sample} --out {run}/drawn")


def training(arm: str, seed: int, work: Path) -> tuple[Path, list[str]]:
    run, images = work / f"{arm}-{seed}", IMAGES.get(arm, CARRIED)
    every = f"--images {images} --checkpoint-every 25600 --preview.every {images}"
    train = f"train cifar10-dit {COMMON} {ARMS[arm].format(work, seed)} {every}"
    last = run / f"samples/images-{images:012d}.png"
    return last, shlex.split(f"{train} --seed {seed} --out {run}")


def summary(name: str, run: Path) -> dict[str, Any]:
    arm, seed = taken_apart(name)
    lines = read_lines(run)
    facts = {
        "arm": arm,
        "seed": seed,
        "parameters": json.loads((run / "run.json").read_text())["network"]["parameters"],
        "validation/loss": last_values(lines, "validation/loss", len(lines)),
        "levels": [
            {"images": line["images"], **line["validation/levels"]}
            for line in lines
            if "validation/levels" in line
        ],
    }
    judged = run / "judged/evaluation.json"
    if judged.exists():
        found = json.loads(judged.read_text())
        facts |= {"judged": found["settings"][0]["values"], "floor": found["floor"]}
    return facts


def drawn(run: Path) -> Path:
    grid = run / "drawn/grid.png"
    return grid if grid.exists() else max((run / "samples").glob("*.png"))


if __name__ == "__main__":
    main()
