"""What reading features costs: the work that an early stop leaves out, the hooks, and the memory.

    python benchmarks/features.py [--quick]

On a U-Net of SD 1.5's structure at three tenths of its width. Last line, JSON, also in
results/features.json unless --quick:

`early_stop_error` = |time with an early stop / time of a whole forward - share of its FLOPs|, the
larger of two stops: the published selection's and the second level's end; bound 0.10.
`hook_overhead` = time of a whole forward that reads the published selection / that reads nothing;
bound 1.03. `all_overhead` = the same where every activation but maps is read: most of it is memory
that, being kept, the forward cannot use again.
`memory_ratio` = peak memory with the 4 activations of the published selection / with all of the
catalogue, each in a process of its own, beyond what the loaded network takes.

Times are measured alternately in one run; ratios are medians over rounds.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timing import alternately, ratio
from torch.utils.flop_counter import FlopCounterMode

from stillhouse.features.catalogue import catalogue
from stillhouse.features.extractor import Extractor
from stillhouse.features.hooks import read
from stillhouse.features.selection import published
from stillhouse.models import DiffusersNetwork
from stillhouse.process import VP, Condition, NetworkDenoiser, alphas_cumprod, betas

RESULTS = Path(__file__).parent / "results"
STOPS = {"selection": published("sd15").ids, "level": ("up-level1-upsampler-out",)}
SIGMA, TEXT, TOKENS = 0.25, 256, 77


def denoiser(quick: bool, device: str = "cpu") -> NetworkDenoiser:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    widths = (32, 64, 128, 128) if quick else (96, 192, 384, 384)
    with torch.device(device):
        model = UNet2DConditionModel(
            sample_size=32,
            block_out_channels=widths,
            cross_attention_dim=TEXT,
            attention_head_dim=4,
        )
    scaling = VP(alphas_cumprod(betas("scaled_linear", 1000, 0.00085, 0.012)))
    return NetworkDenoiser(DiffusersNetwork(model), scaling, "eps").eval()


class Reading:
    """A network with an input, run in several ways."""

    def __init__(self, quick: bool, device: str = "cpu") -> None:
        self.denoiser = denoiser(quick, device)
        self.model: Any = self.denoiser.network.model  # type: ignore[union-attr]
        self.known = catalogue(self.model)
        self.x = torch.zeros(1, 4, 32, 32, device=device)
        self.cond = Condition(text=torch.zeros(1, TOKENS, TEXT, device=device))
        self.sigma = torch.tensor(SIGMA, dtype=torch.float64)

    @torch.no_grad()
    def forward(self) -> None:
        self.denoiser(self.x, self.sigma, self.cond)

    def hooked(self, ids: Sequence[str]) -> None:
        """To the end of the network, whatever is read."""
        read(self.model, [self.known[name] for name in ids], self.forward, early_stop=False)

    def extract(self, ids: Sequence[str]) -> None:
        Extractor(self.denoiser, ids, sigma=SIGMA).extract(self.x, self.cond, key=[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it works")
    parser.add_argument("--peak", choices=("selection", "all"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print(peak(given.peak, given.quick))
        return
    result = {"quick": given.quick, **times(given.quick), **memory(given.quick)}
    result |= {"cores": os.cpu_count(), "torch": torch.__version__}
    if not given.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "features.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def times(quick: bool) -> dict[str, Any]:
    reading, rounds = Reading(quick), 3 if quick else 25
    plain = [a.id for a in reading.known.values() if not a.is_map]
    arms: dict[str, Any] = {
        "forward": reading.forward,
        "hooked": lambda: reading.hooked(STOPS["selection"]),
        "all": lambda: reading.hooked(plain),
    }
    arms |= {name: lambda ids=ids: reading.extract(ids) for name, ids in STOPS.items()}
    seconds = alternately(arms, repeats=rounds, warmup=2)
    shares = flop_shares(quick)
    stopped = {name: ratio(seconds[name], seconds["forward"]) for name in STOPS}
    return {
        "early_stop_error": round(max(abs(stopped[name] - shares[name]) for name in STOPS), 4),
        "early_stop_time": {name: round(value, 4) for name, value in stopped.items()},
        "early_stop_flops": {name: round(value, 4) for name, value in shares.items()},
        "hook_overhead": round(ratio(seconds["hooked"], seconds["forward"]), 4),
        "all_overhead": round(ratio(seconds["all"], seconds["forward"]), 4),
        "forward_ms": round(1e3 * sorted(seconds["forward"])[rounds // 2], 1),
        "activations": len(plain),
        "rounds": rounds,
    }


def flop_shares(quick: bool) -> dict[str, float]:
    """Counted on the meta device, where nothing is computed."""
    reading = Reading(quick, "meta")

    def flops(run: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    whole = flops(reading.forward)
    return {
        name: flops(lambda ids=ids: reading.extract(ids)) / whole for name, ids in STOPS.items()
    }


# ---------------------------------------------------------------- memory


def memory(quick: bool) -> dict[str, Any]:
    few, all_ = (in_a_process(which, quick) for which in ("selection", "all"))
    return {"memory_ratio": round(few / all_, 4), "memory_mb": [round(few, 1), round(all_, 1)]}


def in_a_process(which: str, quick: bool) -> float:
    python = os.environ.get("PYTHON_EXEC", sys.executable)  # as torchrun's workers
    command = [python, __file__, "--peak", which, *(["--quick"] if quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def peak(which: str, quick: bool) -> float:
    """MB that an extraction takes at most, beyond what was there before it."""
    reading = Reading(quick)
    reading.extract(["unet-in"])  # what a first call loads is not the activations'
    ids = STOPS["selection"] if which == "selection" else list(reading.known)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    reading.extract(ids)
    return (status("VmHWM") - before) / 1024


def status(name: str) -> int:
    """kB, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
