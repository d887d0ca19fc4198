"""Draws docs/figures/sizes.png from the pictures in benchmarks/results/emoji.

python docs/figures/sizes.py

Emoji from the same noise, told that they are small (above) and large (below), by how the size is
weighted.
"""

from style import HERE, plots

RESULTS = HERE.parent.parent / "benchmarks" / "results" / "emoji"
ARMS = {
    "constant": "constant",
    "alpha2": "cosine, alpha 2",
    "gamma": "cosine, alpha 8",
}


def main() -> None:
    plt = plots()
    figure, axes = plt.subplots(len(ARMS), 1, figsize=(8, 1.55 * len(ARMS)))
    for axis, (arm, title) in zip(axes, ARMS.items(), strict=True):
        axis.imshow(plt.imread(RESULTS / f"size-{arm}-0.png"))
        axis.set_title(title, loc="left")
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(HERE / "sizes.png")


if __name__ == "__main__":
    main()
