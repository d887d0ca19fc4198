"""Draws docs/figures/levels.png: where training levels lie, and ten levels of each grid.

python docs/figures/levels.py
"""

from typing import Any

import torch
from style import BLUE, GREY, HERE, INK, ORANGE, plots
from torch import Tensor

from stillhouse.process import EDM, VP, Flow, alphas_cumprod, betas, levels

COUNT = 10
LOW, HIGH = 0.0008, 200.0
STABLE = VP(alphas_cumprod(betas("scaled_linear", 1000, 0.00085, 0.012)))
PIXELS = VP(alphas_cumprod(betas("linear", 1000, 0.0001, 0.02)))


def main() -> None:
    plt = plots()
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9.5, 6.0), sharex=True, height_ratios=(1, 1.25), layout="constrained"
    )
    draw_densities(top)
    draw_grids(bottom)
    figure.savefig(HERE / "levels.png")


def draw_densities(axis: Any) -> None:
    """Share of training levels per unit of ln sigma."""
    sigma = torch.logspace(-3.1, 2.3, 800, dtype=torch.float64)
    densities = (
        ("log-normal: EDM", levels.LogNormal(), BLUE),
        ("logit-normal: flow", levels.LogitNormal(), ORANGE),
        ("uniform-time: VP (DDPM's betas)", levels.UniformTime(PIXELS), INK),
        ("log-normal, four times the side", levels.Shifted(levels.LogNormal(), 4.0), GREY),
    )
    for name, density, colour in densities:
        axis.plot(middles(sigma), slope(density.cdf(sigma), sigma), color=colour, label=name)
    axis.set(title="Where training draws its levels", ylabel="density in ln σ", ylim=(0, None))
    axis.legend(loc="upper right")


def slope(cdf: Tensor, sigma: Tensor) -> Tensor:
    return (cdf.diff() / sigma.log().diff()).clamp(min=0)


def middles(sigma: Tensor) -> Tensor:
    return (sigma[1:] * sigma[:-1]).sqrt()


def draw_grids(axis: Any) -> None:
    """The levels that a walk of ten steps visits, without its last, 0."""
    flow = Flow()
    grids = {
        "polynomial, ρ = 7 (EDM's own)": EDM().native_grid(COUNT),
        "log-snr": levels.uniform_log_snr(COUNT, 0.002, 80.0),
        "native, VP (Stable Diffusion's betas)": STABLE.native_grid(COUNT),
        "native, flow": flow.native_grid(COUNT),
        "native, flow, shift 3 (SD3)": Flow(shift_scale=3.0).native_grid(COUNT),
    }
    for row, grid in enumerate(grids.values()):
        inside = grid[(grid > 0) & (grid < HIGH)]
        axis.plot([LOW, HIGH], [row, row], color=GREY, lw=0.6, zorder=0)
        axis.scatter(inside, [row] * len(inside), s=26, color=BLUE)
        if grid[0] >= HIGH:  # the cap that stands for pure noise
            axis.annotate("10⁵ →", (HIGH, row), color=ORANGE, ha="right", va="bottom", fontsize=8)
    axis.set_yticks(range(len(grids)), list(grids))
    axis.invert_yaxis()
    axis.set(title="Ten levels of each grid", xscale="log", xlim=(LOW * 0.9, HIGH), xlabel="σ")
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)


if __name__ == "__main__":
    main()
