"""Draws docs/figures/solvers.png: error against evaluations for every deterministic solver.

python docs/figures/solvers.py

Endpoint RMSE to the true ODE (fine reference in float64), from sigma 80 to 0.006 on the rho = 7
grid, for two distributions whose denoiser is exact. Also prints the table of the docs page.
"""

from functools import partial

import torch
from style import GREY, HERE, plots
from torch import Tensor

from stillhouse.process import TOYS, GaussianMixture, levels
from stillhouse.process.toys import three_modes
from stillhouse.solvers import (
    Counted,
    sample_deis,
    sample_dpm2,
    sample_dpmpp_2m,
    sample_dpmpp_3m,
    sample_euler,
    sample_heun,
    sample_ipndm,
    sample_rho_ab,
    sample_unipc,
)

SOLVERS = {
    "euler": (sample_euler, "#8a949e", "-"),
    "heun": (sample_heun, "#d1862f", "-"),
    "dpm2": (sample_dpm2, "#d1862f", ":"),
    "ipndm (4)": (sample_ipndm, "#7a4fa3", "-"),
    "rho-ab (3)": (sample_rho_ab, "#7a4fa3", ":"),
    "dpmpp-2m": (sample_dpmpp_2m, "#1d5b8f", "-"),
    "dpmpp-3m": (sample_dpmpp_3m, "#1d5b8f", "--"),
    "dpmpp-3m exact = deis (3)": (partial(sample_dpmpp_3m, variant="exact"), "#1d5b8f", ":"),
    "unipc (3)": (sample_unipc, "#b5342c", "-"),
}
STEPS = (4, 5, 6, 8, 10, 12, 16, 20, 26, 32, 48, 64, 96, 128)
LOW, HIGH = 0.006, 80.0


def start(data: GaussianMixture) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return HIGH * torch.randn(512, *data.shape, generator=generator, dtype=torch.float64)


def errors(data: GaussianMixture) -> dict[str, list[tuple[int, float]]]:
    """(evaluations, RMSE) per solver, for every number of steps."""
    x = start(data)
    truth = sample_deis(data, x, levels.uniform_log_snr(4000, LOW, HIGH), order=4)
    table: dict[str, list[tuple[int, float]]] = {}
    for name, (solver, _, _) in SOLVERS.items():
        table[name] = []
        for steps in STEPS:
            counted = Counted(data)
            y = solver(counted, x, levels.polynomial(steps + 1, LOW, HIGH))
            table[name].append((counted.evaluations, float((y - truth).square().mean().sqrt())))
    return table


def print_table(table: dict[str, list[tuple[int, float]]], evaluations: tuple[int, ...]) -> None:
    print("| solver | " + " | ".join(map(str, evaluations)) + " |")
    print("|---|" + "---|" * len(evaluations))
    for name, row in table.items():
        found = dict(row)
        cells = [f"{found[n]:.3f}" if n in found else "" for n in evaluations]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    plt = plots()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for axis, (title, data) in zip(
        axes, {"1-D mixture": three_modes(), "moons": TOYS["moons"]()}.items(), strict=True
    ):
        table = errors(data)
        print(f"\n{title}")
        print_table(table, (8, 10, 12, 16, 20, 32, 64))
        for name, row in table.items():
            _, colour, line = SOLVERS[name]
            axis.loglog(*zip(*row, strict=True), line, color=colour, lw=1.5, label=name)
        axis.set(title=title, xlabel="evaluations of the denoiser", xlim=(4, 140))
        ticks = [4, 6, 10, 16, 32, 64, 128]
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.minorticks_off()
        axis.grid(color=GREY, lw=0.4)
    axes[0].set_ylabel("RMSE to the true ODE")
    axes[1].legend(fontsize=8, loc="lower left")
    figure.savefig(HERE / "solvers.png")


if __name__ == "__main__":
    main()
