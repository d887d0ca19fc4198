"""The card of a student: samples, and its distance to the teacher beside other ways to hurry."""

import shutil
from typing import TYPE_CHECKING, Any

from stillhouse.files import write_whole

if TYPE_CHECKING:
    from stillhouse.recipes.distill.distilling import DistillRun

NAMES = {"euler": "teacher, Euler (DDIM)", "dpmpp-3m": "teacher, DPM++ 3M", "gits": "teacher, GITS"}


def write_card(config: "DistillRun", record: dict[str, Any]) -> None:
    """README.md in the student's folder, with the run's last picture and its comparison."""
    folder = config.out / "model"
    shutil.copyfile(max((config.out / "samples").glob("*.png")), folder / "samples.png")
    shutil.copyfile(config.out / "comparison.png", folder / "comparison.png")
    write_whole(folder / "README.md", spell_card(config, record).encode())


def spell_card(config: "DistillRun", record: dict[str, Any]) -> str:
    counts = list(record["distance"]["student"])
    head = ["| evaluations |", *(f" {n} |" for n in counts)]
    table = ["".join(head), "|---|" + "---|" * len(counts)]
    for name, values in record["distance"].items():
        label = "**student**" if name == "student" else NAMES.get(name, f"teacher, {name}")
        table.append("".join([f"| {label} |", *(f" {values[n]:.4f} |" for n in counts)]))
    numbers = ", ".join(map(str, counts))
    parts = [
        "---\nlibrary_name: diffusers\ntags: [stillhouse, diffusion, distillation]\n---",
        "# A student of few evaluations",
        "![Samples](samples.png)",
        f"*First row: the teacher, {config.preview.steps} evaluations. Below: the student with "
        f"{numbers}, from the same noise; not chosen.*",
        f"Distilled by `{config.method.kind}` on {record['images']:,} walks, without data. It "
        f"takes {numbers} evaluations and no other number; `stillhouse sample` and "
        "`stillhouse.pipelines.FewStepPipeline` read how from `few_steps.json`.",
        f"Root mean squared distance to the teacher's {record['teacher_steps']} steps from the "
        f"same noise, images in [-1, 1], {record['count']} samples of one seed:",
        "\n".join(table),
        "![Distances](comparison.png)",
        f"Cost: {record['evaluations_per_image']:g} network evaluations per walk, a backward pass "
        f"counted as two, {record['evaluations'] / 1e6:.2f} million in all. The whole config is in "
        "the metadata of the weights.",
    ]
    return "\n\n".join(parts) + "\n"
