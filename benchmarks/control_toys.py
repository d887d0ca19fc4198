"""Two toys that show what control conditions do to an image, with known answers.

    python benchmarks/control_toys.py [--quick]

`size`: 16 numbers, of which 8 are content, one of two modes, and 8 are detail, whose amplitude is
.3 or 1.5 as the "size" says. Mode and size agree in 85% of the data. Changing the size alone, from
the same noise, should change the detail and leave the mode: `flips` counts the modes that change.
`flip`: pictures whose left half is red and right half blue, half of them mirrored. Drawn with
flip = 0, does the picture have red on the left? A model that was not told of flips cannot know.

Last line, JSON, also in results/control_toys.json unless --quick.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from stillhouse.models import DiffusersNetwork
from stillhouse.models.conditioning import Parts, conditioned
from stillhouse.models.control import Gamma, Layout
from stillhouse.models.plane import PlaneNetwork
from stillhouse.objectives import Draws, FlowMatching
from stillhouse.process import Batch, Condition, Flow, NetworkDenoiser, levels
from stillhouse.solvers import sample_euler

RESULTS = Path(__file__).parent / "results"
PROCESS = Flow()
SEEDS, STEPS, BATCH = 3, 3000, 256
DRAWN, WALK = 1000, 50  # samples, and steps of their walk
LAST = PROCESS.time_max
GAMMAS = [
    Gamma("constant", 1.0, LAST),
    *(Gamma("cosine", alpha, LAST) for alpha in (1.0, 4.0, 8.0)),
    *(Gamma("late", alpha, LAST) for alpha in (2.0, 4.0)),
]
CONTENT, MODE, AMPLITUDES, AGREEMENT = 8, 1.25, (0.3, 1.5), 0.85
SIDE = 4  # pixels of the pictures
Drawn = tuple[Tensor, Tensor | None]  # data, control


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it works")
    quick = parser.parse_args().quick
    seeds, steps = (1, 50) if quick else (SEEDS, STEPS)
    sizes = {
        f"{g.shape} {g.alpha:g}": spread([size_toy(g, seed, steps) for seed in range(seeds)])
        for g in (GAMMAS[:2] if quick else GAMMAS)
    }
    flips = {
        name: spread([flip_toy(told, seed, steps) for seed in range(seeds)])
        for name, told in (("told", True), ("not told", False))
    }
    result = {"quick": quick, "steps": steps, "size": sizes, "flip": flips}
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "control_toys.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def spread(found: list[dict[str, float]]) -> dict[str, Any]:
    """Mean and deviation over seeds."""
    values = {key: [one[key] for one in found] for key in found[0]}
    return {
        key: {"mean": round(fmean(v), 4), "std": round(stdev(v), 4) if len(v) > 1 else None}
        for key, v in values.items()
    }


# ---------------------------------------------------------------- the toys


def size_toy(gamma: Gamma, seed: int, steps: int) -> dict[str, float]:
    """How often the mode changes with the size, and the amplitude of the detail at both sizes."""
    denoiser = train(size_data, Layout(detail=("size",)), gamma, seed, steps)
    small, large = (walk(denoiser, torch.full((DRAWN, 1), size), seed) for size in (0.0, 1.0))
    modes = [x[:, :CONTENT].mean(1) > 0 for x in (small, large)]
    amplitudes = [float(x[:, CONTENT:].std()) for x in (small, large)]
    flips = float((modes[0] != modes[1]).double().mean())
    return {"flips": flips, "small": amplitudes[0], "large": amplitudes[1]}


def size_data(count: int, random: torch.Generator) -> Drawn:
    size = torch.randint(2, (count, 1), generator=random).float()
    agrees = torch.rand(count, 1, generator=random) < AGREEMENT
    mode = torch.where(agrees, size, 1 - size) * 2 - 1
    content = MODE * mode + 0.2 * torch.randn(count, CONTENT, generator=random)
    amplitude = torch.where(size > 0, AMPLITUDES[1], AMPLITUDES[0])
    return torch.cat([content, amplitude * torch.randn(count, CONTENT, generator=random)], 1), size


def flip_toy(told: bool, seed: int, steps: int) -> dict[str, float]:
    """The share of pictures with red on the left, drawn with flip = 0."""
    layout = Layout(composition=("flip",)) if told else Layout()
    denoiser = train(flip_data if told else hidden(flip_data), layout, GAMMAS[0], seed, steps)
    drawn = walk(denoiser, torch.zeros(DRAWN, 1) if told else None, seed)
    left = drawn.view(-1, 3, SIDE, SIDE)[..., : SIDE // 2].mean((2, 3))
    return {"red left": float((left[:, 0] > left[:, 2]).double().mean())}


def flip_data(count: int, random: torch.Generator) -> Drawn:
    flip = torch.randint(2, (count, 1), generator=random).float()
    left = torch.arange(SIDE) < SIDE // 2
    red = torch.where(flip[..., None] > 0, ~left, left).expand(count, SIDE, SIDE)
    picture = torch.stack([red, torch.zeros_like(red), ~red], 1) * 2.0 - 1
    return (picture + 0.1 * torch.randn(picture.shape, generator=random)).flatten(1), flip


def hidden(data: Callable[[int, torch.Generator], Drawn]) -> Callable[..., Drawn]:
    return lambda count, random: (data(count, random)[0], None)


# ---------------------------------------------------------------- training and drawing


def train(
    data: Callable[[int, torch.Generator], Drawn],
    layout: Layout,
    gamma: Gamma,
    seed: int,
    steps: int,
) -> NetworkDenoiser:
    """A perceptron, flow matching with times drawn evenly."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    dims = data(1, random)[0].shape[1]
    model = PlaneNetwork(dims, dims)
    parts = Parts(layout=layout, gamma=gamma)
    network = DiffusersNetwork(model, conditioning=conditioned(model, parts))
    denoiser = NetworkDenoiser(network, PROCESS, "flow")
    objective, draws = FlowMatching(), Draws(seed)
    times = levels.UniformTime(PROCESS)
    optimiser = torch.optim.AdamW(denoiser.parameters(), 2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        x, control = data(BATCH, random)
        noise = torch.randn(x.shape, generator=random)
        sigma = times.quantile(torch.rand(BATCH, generator=random))
        batch = Batch(data=x, condition=Condition(control=control), noise=noise, sigma=sigma)
        optimiser.zero_grad()
        objective(denoiser, batch, draws).total.backward()
        optimiser.step()
        schedule.step()
    return denoiser.eval()


@torch.no_grad()
def walk(denoiser: NetworkDenoiser, control: Tensor | None, seed: int) -> Tensor:
    """The same noise for the same seed, whatever the control."""
    network: Any = denoiser.network
    noise = torch.randn(
        DRAWN, *network.data_shape, generator=torch.Generator().manual_seed(1000 + seed)
    )
    grid = denoiser.scaling.native_grid(WALK)
    start = denoiser.scaling.start(noise, grid[0])
    return sample_euler(denoiser, start, grid, Condition(control=control))


if __name__ == "__main__":
    main()
