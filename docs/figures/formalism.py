"""Draws docs/figures/formalism.png: what a denoiser does, and one level in three processes' time.

python docs/figures/formalism.py
"""

import torch
from style import BLUE, GREY, HERE, INK, ORANGE, plots

from stillhouse.process import EDM, TOYS, VP, Flow, alphas_cumprod, betas

SIGMAS = (0.05, 0.25, 0.7, 2.0)


def main() -> None:
    plt = plots()
    figure = plt.figure(figsize=(9.5, 5.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    draw_denoising(top.subplots(1, len(SIGMAS)))
    draw_times(bottom.subplots(1, 3))
    figure.savefig(HERE / "formalism.png")


def draw_denoising(axes) -> None:
    """Data, noisy states and the arrows x -> D(x, sigma)."""
    toy = TOYS["moons"]()
    generator = torch.Generator().manual_seed(3)
    data = toy.sample(1500, generator)
    x0 = toy.sample(26, generator)
    noise = torch.randn(26, 2, generator=generator, dtype=torch.float64)
    for axis, sigma in zip(axes, SIGMAS, strict=True):
        x = x0 + sigma * noise
        arrow = toy(x, torch.tensor(sigma, dtype=torch.float64)) - x
        reach = 1.9 if sigma < 1 else 4.4
        axis.scatter(*data.T, s=1.5, color=GREY, zorder=0)
        axis.quiver(*x.T, *arrow.T, angles="xy", scale_units="xy", scale=1, width=0.006, color=BLUE)
        axis.scatter(*x.T, s=11, color=ORANGE, zorder=3)
        axis.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], aspect="equal")
        axis.set_title(f"σ = {sigma}")
    axes[0].set_ylabel("x  →  denoise(x, σ)")


def draw_times(axes) -> None:
    """A network's own time as a function of the one noise level."""
    sigma = torch.logspace(-2, 2, 400, dtype=torch.float64)
    stable = VP(alphas_cumprod(betas("scaled_linear", 1000, 0.00085, 0.012)))
    inside = (sigma >= stable.sigma_min) & (sigma <= stable.sigma_max)
    panels = (
        ("VP (Stable Diffusion): timestep", sigma[inside], stable.time_at(sigma[inside])),
        ("flow (SD3): 1000 σ/(1 + σ)", sigma, Flow().time_at(sigma)),
        ("EDM: ln(σ)/4", sigma, EDM().time_at(sigma)),
    )
    for axis, (title, levels, times) in zip(axes, panels, strict=True):
        axis.semilogx(levels, times, color=INK, lw=1.6)
        axis.set(title=title, xlabel="σ", xlim=(0.01, 100))
        axis.grid(color=GREY, lw=0.4)


if __name__ == "__main__":
    main()
