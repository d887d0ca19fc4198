"""Cost of sampling: our Euler loop against bare forwards and against diffusers' pipeline.

    python benchmarks/sampling.py [--steps 5] [--repeats 25]

Last line, JSON: `overhead` = ours / as many bare forwards of the very same network;
`vs_diffusers` = diffusers' DDIM pipeline on the network as it loads / ours at equal steps, laid out
as `stillhouse sample` does (convolutions with channels last). Many short rounds: on a machine whose
speed drifts, the median of their ratios is steadier than that of a few long ones.
"""

import argparse
import json

import diffusers
import torch
from timing import alternately, ratio

from stillhouse.models import DiffusersNetwork
from stillhouse.process import VP, NetworkDenoiser, alphas_cumprod, betas, starting_noise
from stillhouse.solvers import sample_euler

BATCH, SIZE = 8, 32


def small_unet() -> diffusers.UNet2DModel:
    """About six million parameters, 32 px RGB."""
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=SIZE,
        in_channels=3,
        out_channels=3,
        block_out_channels=(64, 96, 128),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=32,
    ).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=25)
    arguments = parser.parse_args()

    model, plain = small_unet(), small_unet()
    parameters = sum(p.numel() for p in model.parameters())
    vp = VP(alphas_cumprod(betas("linear")))
    denoiser = NetworkDenoiser(DiffusersNetwork(model).for_inference(), vp, "eps")
    grid = vp.native_grid(arguments.steps)
    x = float(grid[0]) * starting_noise((3, SIZE, SIZE), range(BATCH), seed=0)
    seen, times = x / float(grid[0]), torch.full((BATCH,), 500)
    scheduler = diffusers.DDIMScheduler(
        timestep_spacing="trailing", clip_sample=False, set_alpha_to_one=True
    )
    pipeline = diffusers.DDIMPipeline(plain, scheduler)
    pipeline.set_progress_bar_config(disable=True)

    @torch.no_grad()
    def bare() -> None:
        for _ in range(arguments.steps):
            model(seen, times)

    def theirs() -> None:
        generator = torch.Generator().manual_seed(0)
        pipeline(BATCH, generator, num_inference_steps=arguments.steps, output_type="np")

    seconds = alternately(
        {"bare": bare, "ours": lambda: sample_euler(denoiser, x, grid), "diffusers": theirs},
        repeats=arguments.repeats,
    )
    result = {
        "overhead": round(ratio(seconds["ours"], seconds["bare"]), 4),
        "vs_diffusers": round(ratio(seconds["diffusers"], seconds["ours"]), 4),
        "parameters": parameters,
        "steps": arguments.steps,
        "batch": BATCH,
        "repeats": arguments.repeats,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }
    for name, values in seconds.items():
        print(f"{name:<10} {min(values):.3f} to {max(values):.3f} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
