"""Does the searched grid (GITS) beat rho = 7? On the analytic mixture and on a small U-Net.

    python benchmarks/gits.py [--minutes 8] [--data ../shared/data/fashion]

The U-Net (2.6M parameters) is trained for a few minutes on Fashion-MNIST, only to have a real
network to search on. Euler's endpoint error (RMSE to a fine reference, on samples that the search
has not seen) for N = 4 .. 8 timestamps, three seeds of samples. Last line: JSON.
"""

import argparse
import io
import json
import sys
import time
from pathlib import Path

import torch
from diffusers import UNet2DModel
from torch import Tensor, nn

from stillhouse.models import DiffusersNetwork
from stillhouse.process import (
    EDM,
    Denoiser,
    NetworkDenoiser,
    levels,
    predictions,
    starting_noise,
)
from stillhouse.process.toys import three_modes
from stillhouse.solvers import sample_deis, sample_euler, search_grid

SIGMA_MIN, SIGMA_MAX = 0.006, 80.0
COUNTS = list(range(4, 9))


def fashion(folder: Path) -> Tensor:
    """All training images, [60000, 1, 28, 28] in [-1, 1]."""
    import pyarrow.parquet as parquet
    from PIL import Image

    rows = [r for f in sorted(folder.glob("train*.parquet")) for r in _encoded(parquet, f)]
    pixels = [torch.frombuffer(bytearray(_grey(Image, r)), dtype=torch.uint8) for r in rows]
    return torch.stack(pixels).view(-1, 1, 28, 28) / 127.5 - 1


def _encoded(parquet, file: Path) -> list[bytes]:
    return [row["bytes"] for row in parquet.read_table(file)["image"].to_pylist()]


def _grey(image_module, encoded: bytes) -> bytes:
    return image_module.open(io.BytesIO(encoded)).convert("L").tobytes()


def small_unet() -> NetworkDenoiser:
    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=28,
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64, 96),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        norm_num_groups=16,
        attention_head_dim=32,
    )
    return NetworkDenoiser(DiffusersNetwork(model), EDM(0.5, SIGMA_MIN, SIGMA_MAX), "edm")


def train(denoiser: NetworkDenoiser, data: Tensor, minutes: float, batch: int = 64) -> int:
    """EDM's loss (unit weight on the network's own output), Adam with a short decay at the end."""
    optimiser = torch.optim.AdamW(denoiser.parameters(), 1e-3, weight_decay=0)
    started, seen, density = time.monotonic(), 0, levels.LogNormal(-0.6, 1.4)
    while (spent := (time.monotonic() - started) / (60 * minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * min(1.0, 4 * (1 - spent), (seen + batch) / 5000)
        x0 = data[torch.randint(len(data), (batch,))]
        sigma, noise = density.quantile(torch.rand(batch)), torch.randn_like(x0)
        x = x0 + predictions.rows(sigma, x0) * noise
        output = predictions.from_x0("edm", x, denoiser(x, sigma), sigma, 0.5)
        target = predictions.target("edm", x0, noise, sigma, 0.5)
        loss = nn.functional.mse_loss(output, target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        seen += batch
        if seen % (100 * batch) == 0:
            print(f"{seen} images, loss {loss.item():.4f}", file=sys.stderr, flush=True)
    return seen


def compare(denoiser: Denoiser, shape: tuple[int, ...], test: int, seeds: range) -> dict:
    """RMSE at the end of Euler's walk: searched grid and rho = 7, for every N, over seeds."""
    fine = levels.polynomial(61, SIGMA_MIN, SIGMA_MAX)
    x = SIGMA_MAX * starting_noise(shape, range(256), seed=1000)
    grids = search_grid(denoiser, x, fine, COUNTS)
    rows: dict[int, dict] = {
        n: {"grid": grids[n].tolist(), "searched": [], "rho7": []} for n in COUNTS
    }
    for seed in seeds:
        x = SIGMA_MAX * starting_noise(shape, range(test), seed=seed)
        truth = sample_deis(denoiser, x, levels.polynomial(129, SIGMA_MIN, SIGMA_MAX), order=3)
        for n, row in rows.items():
            for name, grid in (
                ("searched", grids[n]),
                ("rho7", levels.polynomial(n, SIGMA_MIN, SIGMA_MAX)),
            ):
                miss = sample_euler(denoiser, x, grid) - truth
                row[name].append(round(float(miss.square().mean().sqrt()), 4))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/fashion"))
    arguments = parser.parse_args()
    result: dict = {"mixture": compare(three_modes(), (1,), 4096, range(3))}
    denoiser = small_unet()
    seen = train(denoiser, fashion(arguments.data), arguments.minutes)
    denoiser.eval()
    result["unet"] = compare(denoiser, (1, 28, 28), 64, range(3))
    result["unet_parameters"] = sum(p.numel() for p in denoiser.parameters())
    result["unet_images_seen"] = seen
    for name in ("mixture", "unet"):
        print(
            f"\n{name}: endpoint RMSE of Euler, three seeds\n\n"
            "| N | searched | rho = 7 |\n|---|---|---|"
        )
        for n, row in result[name].items():
            print(f"| {n} | {row['searched']} | {row['rho7']} |")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
