"""Draws the README's first picture: a model, its student, and walks from noise to data.

    python docs/figures/teaser.py

Everything in it comes from this repository: `reference/emoji`, `reference/emoji-student` and a toy.
"""

from typing import Any

import torch
from style import BLUE, GREY, HERE, INK, ORANGE, plots
from torch import Tensor

from stillhouse import levels, starting_noise
from stillhouse.process import TOYS
from stillhouse.recipes.parts import ClassifierFree, NoGuidance
from stillhouse.recipes.sampling import SampleRun, build_grid, draw_batch, walked, wish_of
from stillhouse.recipes.subjects import load_subject
from stillhouse.solvers import sample_euler

REFERENCE = HERE.parents[1] / "reference"
PROMPTS = (
    *("red apple", "smiling face", "blue car", "green heart"),
    *("orange cat", "yellow star", "house", "slice of pizza"),
)
STYLES = 3  # the model goes through its styles in turn: every prompt is drawn in each
ROWS = {
    "text to emoji, 20 guided steps: 40 calls of the network": ("emoji", 20),
    "its student, distilled without data: 3 calls": ("emoji-student", 3),
}


def main() -> None:
    plt = plots()
    figure = plt.figure(figsize=(10, 5.2))
    plane, strips = figure.subfigures(1, 2, width_ratios=[1, 1.9])
    walks(plane)
    for strip, (title, (name, steps)) in zip(strips.subfigures(2), ROWS.items(), strict=True):
        gallery(strip, title, draw(name, steps))
    figure.savefig(HERE / "teaser.png")


def draw(name: str, steps: int) -> Tensor:
    """Every prompt in every style, from the same noises for every model: [n, 3, side, side]."""
    guidance = ClassifierFree(weight=3.0) if name == "emoji" else NoGuidance()
    run = SampleRun(
        model=str(REFERENCE / name), steps=steps, guidance=guidance, prompt=PROMPTS, device="cpu"
    )
    device = torch.device("cpu")
    subject = load_subject(run.model, wish_of(run, device))
    run = walked(run, subject)
    noises = list(range(STYLES * len(PROMPTS)))
    grid = build_grid(run, subject, device)
    return subject.decode(draw_batch(run, subject, grid, noises, device)).clamp(-1, 1)


def gallery(figure: Any, title: str, images: Tensor) -> None:
    """A row per style, a column per prompt."""
    figure.suptitle(title, fontsize=9, color=INK, y=0.97)
    spaces = {"wspace": 0.05, "hspace": 0.05}
    axes = figure.subplots(STYLES, len(PROMPTS), gridspec_kw=spaces)
    for axis, image in zip(axes.flat, images, strict=True):
        axis.imshow(((image + 1) / 2).movedim(0, -1).numpy())
        axis.set_axis_off()
    for axis, prompt in zip(axes[0], PROMPTS, strict=True):
        axis.set_title(prompt, fontsize=7, color=INK, pad=2)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.85)


def walks(figure: Any) -> None:
    """Walks of the exact denoiser of two moons, drawn where the noise has become small."""
    moons = TOYS["moons"]()
    grid = levels.polynomial(60, sigma_min=0.01, sigma_max=80)
    path: list[Tensor] = []
    start = 80 * starting_noise((2,), range(600), seed=0)
    end = sample_euler(moons, start, grid, callback=lambda step: path.append(step.x))
    seen = torch.stack([x for x, sigma in zip(path, grid, strict=False) if sigma < 4] + [end])
    axis = figure.subplots()
    axis.plot(*seen[:, :150].unbind(-1), color=GREY, linewidth=0.5)
    axis.scatter(*seen[0, :150].T, s=3, color=ORANGE)
    axis.scatter(*end.T, s=2, color=BLUE, zorder=3)
    axis.set(xlim=(-4.2, 4.2), ylim=(-5.6, 5.6))
    axis.set_axis_off()
    figure.suptitle("one contract\ndenoise(x, sigma, cond) → x0", fontsize=9, color=INK)
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.02, top=0.9)


if __name__ == "__main__":
    main()
