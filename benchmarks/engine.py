"""Cost of the training engine: its step, its checkpoints, its data.

    STILLHOUSE_DATA=../shared/data python benchmarks/engine.py [--quick]

Last line, JSON, also in results/engine.json unless --quick:
`overhead` = our step / a bare PyTorch loop's, on the fashion-unet recipe, batches in memory;
`checkpoint_stall` = training time lost per asynchronous checkpoint / time of a synchronous one,
training on 1 thread;
`data_stall` = share of the time that `cifar10-unet --scale tiny` waits for data: with the smallest
network this is the hardest case, `data_stall_wider` has one that is not.
Each ratio comes with its quartiles over rounds. Without STILLHOUSE_DATA the data come from the hub.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from copy import deepcopy
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
from timing import alternately
from torch import Tensor, nn

from stillhouse.data import Prefetch
from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.loop import Engine, Item, Tracker
from stillhouse.engine.optimisers import Constant
from stillhouse.engine.trackers import read_log
from stillhouse.engine.world import World
from stillhouse.process import Batch
from stillhouse.recipes.train.catalogue import RECIPES, Scale
from stillhouse.recipes.train.learner import NAME
from stillhouse.recipes.train.networks import UNet
from stillhouse.recipes.train.training import TrainRun, build_learner, build_loader

RESULTS = Path(__file__).parent / "results"
ENDLESS = 10**12  # images: no block of steps is the run's last
HERE = World(0, 1, torch.device("cpu"))
WIDER = ("--network.channels", "64", "128", "128", "--network.layers", "2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    quick = parser.parse_args().quick
    result = {"quick": quick, **(measure_quickly() if quick else measure())}
    result |= {"cores": os.cpu_count(), "torch": torch.__version__}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "engine.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure() -> dict[str, Any]:
    """The figures that count, and beside them those of another size of network."""
    found = overhead("full", rounds=25)
    found |= _renamed(overhead("tiny", rounds=25), "tiny")
    found |= data_stall(images=12_800)
    found |= _renamed(data_stall(*WIDER, images=1_920), "wider")
    return found | checkpoint_stall((128, 256, 256), rounds=12)


def measure_quickly() -> dict[str, Any]:
    found = overhead("tiny", rounds=4, block=2)
    return found | data_stall(images=960) | checkpoint_stall((16, 32, 32), rounds=3)


def _renamed(found: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    return {f"{name}_{suffix}": value for name, value in found.items()}


def spread_of(name: str, ratios: Sequence[float]) -> dict[str, Any]:
    """The median, under the name itself, and the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {name: round(middle, 4), f"{name}_quartiles": [round(low, 4), round(high, 4)]}


def say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------- what is timed


class Kept(Tracker):
    """A tracker that keeps the losses of the log lines."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def start(self, images: int) -> None:
        pass

    def log(self, images: int, values: Mapping[str, Any]) -> None:
        self.losses.append(values[f"{NAME}/loss"])

    def close(self) -> None:
        pass


class Ours:
    """The engine with the recipe's own task, over batches that are ready."""

    def __init__(self, config: TrainRun, block: int) -> None:
        config = config.model_copy(
            update={"log_every": block * config.batch, "images": ENDLESS}  # a line per block
        )
        loader = build_loader(config, HERE, ())
        learner = build_learner(config, HERE, loader)
        with Prefetch(loader, learner.prepare) as feed:
            self.items: list[Item] = list(islice(feed, 8))
        self.kept, self.network = Kept(), learner.denoiser.network
        self.engine = Engine(
            learner, config, {NAME: config.network_config(HERE)}, HERE, trackers=[self.kept]
        )
        self.feed = cycle(self.items)

    def steps(self, number: int) -> None:
        self.engine.run(islice(self.feed, number))


class Bare:
    """The same training, written by hand (Karras et al. 2022, table 1)."""

    def __init__(self, config: TrainRun, model: nn.Module, items: Sequence[Item]) -> None:
        self.model, self.batches = model, cycle([item.batch for item in items])
        self.sigma_data = config.process.build().scaling.sigma_data
        self.clip, self.bf16 = config.clip, config.spread.precision == "bf16"
        self.parameters: list[Tensor] = list(model.parameters())
        self.averages = [p.detach().clone() for p in self.parameters]
        self.optimiser = torch.optim.AdamW(
            self.parameters, config.optim.lr, config.optim.betas, weight_decay=0, fused=True
        )
        self.losses: list[Tensor] = []

    def steps(self, number: int) -> None:
        for batch in islice(self.batches, number):
            self.step(batch)

    def step(self, batch: Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext():
            loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.parameters, 0.001)
        self.losses.append(loss.detach())

    def loss(self, batch: Batch) -> Tensor:
        x0, noise, label = batch.data, batch.noise, batch.condition.label  # type: ignore[union-attr]
        sigma, s = batch.sigma.float().view(-1, 1, 1, 1), self.sigma_data  # type: ignore[union-attr]
        total = sigma**2 + s**2
        x = x0 + sigma * noise  # type: ignore[operator]
        output = self.model(x * total.rsqrt(), sigma.flatten().log() / 4, class_labels=label).sample
        denoised = s**2 / total * x + sigma * s / total.sqrt() * output
        return (total / (sigma * s) ** 2 * (denoised - x0) ** 2).mean()


# ---------------------------------------------------------------- overhead


def overhead(scale: Scale, rounds: int, block: int = 5) -> dict[str, Any]:
    """Blocks of a few steps, ours and bare in turn, each with one log line on our side."""
    config = RECIPES["fashion-unet"](scale)
    optim = config.optim.model_copy(update={"warmup": 0.0, "schedule": Constant()})
    config = config.model_copy(update={"optim": optim})
    ours = Ours(config, block)
    bare = Bare(config, deepcopy(ours.network.model), ours.items)  # type: ignore[union-attr]
    arms: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.steps(block),
        "bare": lambda: bare.steps(block),
    }
    seconds = alternately(arms, repeats=rounds, warmup=2)
    apart = _loss_difference(ours.kept.losses, bare.losses, block)
    say(
        f"fashion-unet {scale}: "
        + ", ".join(f"{n} {_per_step(s, block)}" for n, s in seconds.items())
    )
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["bare"], strict=True)]
    extra = [(a - b) / block for a, b in zip(seconds["ours"], seconds["bare"], strict=True)]
    return spread_of("overhead", ratios) | {
        "overhead_ms_per_step": round(1e3 * statistics.median(extra), 3),
        "step_ms": round(1e3 * statistics.median(seconds["bare"]) / block, 1),
        "loss_difference": apart,
        "parameters": sum(p.numel() for p in bare.parameters),
        "overhead_rounds": rounds,
        "threads": torch.get_num_threads(),
    }


def _per_step(seconds: Sequence[float], block: int) -> str:
    return f"{1e3 * min(seconds) / block:.1f} to {1e3 * max(seconds) / block:.1f} ms per step"


def _loss_difference(ours: Sequence[float], bare: Sequence[Tensor], block: int) -> float:
    """Relative, over the first block: later ones part, as any two roundings do."""
    theirs = statistics.fmean(float(loss) for loss in bare[:block])
    apart = abs(ours[0] - theirs) / theirs
    if apart > 1e-3:
        raise SystemExit(f"the two loops do not compute the same: losses {ours[0]} and {theirs}")
    return float(f"{apart:.1e}")


# ---------------------------------------------------------------- checkpoints


def checkpoint_stall(channels: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Steps with a save at their start, as many without, and a save that is waited for, in turn."""
    torch.set_num_threads(1)  # so that the writer has a core
    network = UNet(channels=channels, layers=2)
    config = RECIPES["cifar10-unet"]("tiny").model_copy(update={"network": network, "batch": 2})
    ours = Ours(config, block=1000)
    with (
        tempfile.TemporaryDirectory(prefix="stillhouse-engine-") as folder,
        closing(CheckpointStore(folder, keep_last=1)) as store,
    ):
        save = _saver(store, ours.engine)
        step, whole = _seconds(lambda: ours.steps(1), 4), _seconds(lambda: _both(save, store), 3)
        steps = max(3, math.ceil(2 * whole / step))
        late: list[bool] = []

        def saving() -> None:
            save()
            ours.steps(steps)
            late.append(store.busy)

        seconds = alternately(
            {
                "plain": lambda: ours.steps(steps),
                "saving": saving,
                "whole": lambda: _both(save, store),
            },
            repeats=rounds,
        )
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    if any(late):
        raise SystemExit(f"{sum(late)} checkpoints were not written within {steps} steps")
    return _stall(seconds) | {
        "checkpoint_mb": round(size / 2**20, 1),
        "checkpoint_steps": steps,
        "checkpoint_rounds": rounds,
    }


def _saver(store: CheckpointStore, engine: Engine) -> Callable[[], None]:
    """What `Engine.save` does; numbered, because the same moment is not saved twice."""
    number = count(1)
    config = engine.config.model_dump(mode="json")
    return lambda: store.save(next(number), engine.tensors(), {"config": config}, {"position": {}})


def _both(save: Callable[[], None], store: CheckpointStore) -> None:
    save()
    store.wait()


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """Median, after one that does not count."""
    return statistics.median(alternately({"work": work}, repeats=repeats)["work"])


def _stall(seconds: dict[str, list[float]]) -> dict[str, Any]:
    lost = [a - b for a, b in zip(seconds["saving"], seconds["plain"], strict=True)]
    whole = seconds["whole"]
    say(f"checkpoint: {min(whole):.2f} to {max(whole):.2f} s waited for")
    say(f"            {min(lost):.2f} to {max(lost):.2f} s lost in the background")
    ratios = [a / b for a, b in zip(lost, whole, strict=True)]
    return spread_of("checkpoint_stall", ratios) | {
        "checkpoint_lost_s": round(statistics.median(lost), 3),
        "checkpoint_synchronous_s": round(statistics.median(whole), 3),
    }


# ---------------------------------------------------------------- data


def data_stall(*words: str, images: int) -> dict[str, Any]:
    """As the run itself measures it, without its first lines."""
    with tempfile.TemporaryDirectory(prefix="stillhouse-engine-") as folder:
        command = [sys.executable, "-m", "stillhouse", "train", "cifar10-unet", "--scale", "tiny"]
        command += ["--images", str(images), "--out", folder, *words]
        subprocess.run(command, check=True, stdout=sys.stderr)
        lines = [line for line in read_log(Path(folder, "log.jsonl")) if "data_wait" in line]
    return _waiting(lines)


def _waiting(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    used = lines[len(lines) // 4 :]
    seconds = [1 / line["images_per_second"] for line in used]  # lines have as many images
    waits = [line["data_wait"] for line in used]
    share = sum(w * s for w, s in zip(waits, seconds, strict=True)) / sum(seconds)
    return {
        "data_stall": round(share, 4),
        "data_stall_worst_line": round(max(waits), 4),
        "data_lines": len(used),
        "images_per_second": round(1 / statistics.fmean(seconds), 1),
    }


if __name__ == "__main__":
    main()
