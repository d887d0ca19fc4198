"""The card of a student: samples, and how far it is from its teacher beside other few steps."""

import shutil
from typing import TYPE_CHECKING, Any

from stillhouse.files import write_whole
from stillhouse.recipes.distill.generators import Matched

if TYPE_CHECKING:
    from stillhouse.recipes.distill.distilling import DistillRun

PLOT = "comparison.png"
NAMES = {"euler": "teacher, Euler (DDIM)", "dpmpp-3m": "teacher, DPM++ 3M", "gits": "teacher, GITS"}


def write_card(config: "DistillRun", record: dict[str, Any]) -> None:
    """README.md in the student's folder, with the run's last picture and its comparison."""
    folder = config.out / "model"
    shutil.copyfile(max((config.out / "samples").glob("*.png")), folder / "samples.png")
    if (config.out / PLOT).exists():
        shutil.copyfile(config.out / PLOT, folder / PLOT)
    write_whole(folder / "README.md", spell_card(config, record).encode())


def spell_card(config: "DistillRun", record: dict[str, Any]) -> str:
    generator = isinstance(config.method, Matched)
    numbers = ", ".join(map(str, record["spread"]["student"]))
    parts = [
        "---\nlibrary_name: diffusers\ntags: [stillhouse, diffusion, distillation]\n---",
        "# A one-step generator" if generator else "# A student of few evaluations",
        "![Samples](samples.png)",
        f"*First row: the teacher, {record['preview_steps']} evaluations. Below: the student with "
        f"{numbers}, from the same noise; not chosen.*",
        *(tell_generator(config, record) if generator else tell_walks(config, record)),
        f"Cost: {record['evaluations_per_image']:g} network evaluations per image, a backward pass "
        f"counted as two, {record['evaluations'] / 1e6:.2f} million in all. The whole config is in "
        "the metadata of the weights.",
    ]
    return "\n\n".join(parts) + "\n"


def tell_walks(config: "DistillRun", record: dict[str, Any]) -> list[str]:
    """Of a student that takes its teacher's walks: how near it comes to where they end."""
    counts = list(record["distance"]["student"])
    numbers = ", ".join(map(str, counts))
    whose = "first teacher's" if record["first_teacher"] else "teacher's"
    head = ["| evaluations |", *(f" {n} |" for n in counts)]
    table = ["".join(head), "|---|" + "---|" * len(counts)]
    for name, values in record["distance"].items():
        label = "**student**" if name == "student" else NAMES.get(name, f"teacher, {name}")
        table.append("".join([f"| {label} |", *(f" {values[n]:.4f} |" for n in counts)]))
    return [
        f"Distilled by `{config.method.kind}` on {taught(config, record)}, without data. It "
        f"takes {numbers} evaluations and no other number; `stillhouse sample` and "
        "`stillhouse.pipelines.FewStepPipeline` read how from `few_steps.json`.",
        f"Root mean squared distance to the {whose} {record['teacher_steps']} steps from the "
        f"same noise, images in [-1, 1], {record['count']} samples of one seed:",
        "\n".join(table),
        *([f"![Distances]({PLOT})"] if (config.out / PLOT).exists() else []),
    ]


def taught(config: "DistillRun", record: dict[str, Any]) -> str:
    walks, images = getattr(config.method, "walks", 0), record["images"]
    again = 0 < walks < images
    return (
        f"{walks:,} walks, seen {images / walks:.1f} times each" if again else f"{images:,} walks"
    )


def tell_generator(config: "DistillRun", record: dict[str, Any]) -> list[str]:
    """Of one that draws what its teacher draws, but not from the same noise."""
    spread, energy = record["spread"], record["energy"]["student"][1]
    return [
        f"Distilled by `{config.method.kind}` on {record['images']:,} samples of its own, without "
        f"data. It answers at noise level {record['start']:g} and no other; `stillhouse sample` "
        "and `stillhouse.pipelines.FewStepPipeline` read that from `few_steps.json`.",
        f"Spread of {record['count']} samples (standard deviation of a pixel in [-1, 1]): "
        f"{spread['student'][1]:.3f}, of the teacher's {record['teacher_steps']} steps "
        f"{spread['teacher']:.3f}. Much less than the teacher's would mean that it has lost some "
        "of what its teacher draws; `stillhouse evaluate` measures recall. Energy coefficient of "
        f"the two (0: the same distribution, 1: nothing in common): {energy:.4f}.",
    ]
