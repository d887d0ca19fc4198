"""Draws docs/figures/distillation_map.png: the ways from a teacher to few evaluations.

python docs/figures/distillation_map.py
"""

from typing import Any, NamedTuple

from style import BLUE, GREY, HERE, INK, ORANGE, plots

PALE, WARM = "#e8eff6", "#fbf0e2"


class Box(NamedTuple):
    """What a student is, between the numbers of evaluations that it takes, in a row of the map."""

    first: float
    last: float
    row: float
    title: str
    text: str
    colour: str


# Places on the axis, left to right: many evaluations, 8, 5, 2, 1.
TEACHER = Box(0.0, 1.5, 2.0, "teacher", "tens of\nevaluations", INK)
STUDENTS = (
    Box(
        2.6,
        6.1,
        4.0,
        "sfd-v",
        "its walk in few steps, told how many:\none student for 2 to 5",
        BLUE,
    ),
    Box(2.6, 6.1, 3.0, "sfd", "the same for one number; --exportable:\nplain diffusers", BLUE),
    Box(2.6, 6.1, 2.0, "progressive", "two steps in one, stage by stage:\n32, 16, 8, 4 ...", BLUE),
    Box(
        2.6,
        6.1,
        1.0,
        "consistency",
        "where a walk ends, from anywhere:\nany number, noise anew",
        BLUE,
    ),
)
GENERATORS = (
    Box(
        7.2,
        10.2,
        3.0,
        "second stage",
        "sfd of a student of five:\nstill its teacher's images",
        BLUE,
    ),
    Box(
        7.2,
        10.2,
        0.0,
        "emd and its family",
        "a generator of its own images:\nthree networks",
        ORANGE,
    ),
)
HEIGHT = 0.72


def main() -> None:
    plt = plots()
    figure, axis = plt.subplots(figsize=(9.8, 4.9), layout="constrained")
    for box in (TEACHER, *STUDENTS, *GENERATORS):
        draw(axis, box)
    for student in STUDENTS:
        arrow(axis, (TEACHER.last, TEACHER.row), (student.first, student.row))
    below = ((TEACHER.first + TEACHER.last) / 2, TEACHER.row - HEIGHT / 2)
    arrow(axis, below, (7.2, 0.0), ORANGE, connectionstyle="angle,angleA=90,angleB=0,rad=6")
    arrow(axis, (6.1, 4.0), (7.2, 3.0))
    arrow(axis, (6.1, 3.0), (7.2, 3.0))
    for place, name in ((0.75, "many"), (4.35, "2 to 5, or more"), (8.7, "1")):
        axis.text(place, -0.92, name, ha="center", color=INK)
    axis.text(5.1, -1.3, "evaluations of an image", ha="center", color=INK, fontsize=8)
    axis.axhline(-0.65, color=GREY, lw=0.8)
    axis.set(xlim=(-0.1, 10.3), ylim=(-1.45, 4.6))
    axis.axis("off")
    figure.savefig(HERE / "distillation_map.png")


def draw(axis: Any, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    width, middle = box.last - box.first, (box.first + box.last) / 2
    face = {BLUE: PALE, ORANGE: WARM}.get(box.colour, "#f2f3f5")
    corner = (box.first, box.row - HEIGHT / 2)
    style = "round,pad=0,rounding_size=0.08"
    patch = FancyBboxPatch(corner, width, HEIGHT, style, fc=face, ec=box.colour, lw=1.1)
    axis.add_patch(patch)
    axis.text(middle, box.row + 0.2, box.title, ha="center", va="center", weight="bold", color=INK)
    axis.text(middle, box.row - 0.11, box.text, ha="center", va="center", fontsize=7.5, color=INK)


def arrow(
    axis: Any, start: tuple[float, float], end: tuple[float, float], colour: str = BLUE, **how: Any
) -> None:
    look = {"arrowstyle": "-|>", "color": colour, "lw": 1.1, "shrinkA": 2, "shrinkB": 2}
    axis.annotate("", end, start, arrowprops=look | how)


if __name__ == "__main__":
    main()
