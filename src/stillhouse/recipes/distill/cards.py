"""The card of a student: samples, and how far it is from its teacher beside other few steps."""

import shutil
from pathlib import Path
from typing import Any

from stillhouse.files import write_whole
from stillhouse.pipelines.few_steps import read_walk
from stillhouse.pipelines.load import LORA_WEIGHTS, read_json
from stillhouse.recipes.distill.generators import Matched
from stillhouse.recipes.distill.methods import ProgressiveConfig
from stillhouse.recipes.distill.settings import DistillRun
from stillhouse.recipes.distill.students import guidance_in
from stillhouse.recipes.parts import NoGuidance

PLOT = "comparison.png"
EVERYWHERE = (0.0, float("inf"))  # the interval of guidance at every level
NAMES = {"euler": "teacher, Euler (DDIM)", "dpmpp-3m": "teacher, DPM++ 3M", "gits": "teacher, GITS"}


def write_card(config: DistillRun, record: dict[str, Any]) -> None:
    """README.md in the student's folder, with the run's last picture and its comparison."""
    folder = config.out / "model"
    shutil.copyfile(max((config.out / "samples").glob("*.png")), folder / "samples.png")
    if (config.out / PLOT).exists():
        shutil.copyfile(config.out / PLOT, folder / PLOT)
    write_whole(folder / "README.md", spell_card(config, record).encode())


def spell_card(config: DistillRun, record: dict[str, Any]) -> str:
    generator = isinstance(config.method, Matched)
    staged = bool(config.comparison.against) or isinstance(config.method, ProgressiveConfig)
    share = "this stage" if staged else "all"
    below = f"the student with {known(config)}, from the same noise"
    if generator:
        below = "the generator's own samples, told the same where it is told anything"
    parts = [
        frontmatter(config),
        "# A one-step generator" if generator else "# A student of few evaluations",
        "![Samples](samples.png)",
        f"*First row: the teacher, {record['preview_steps']} evaluations. Below: {below}; not "
        "chosen.*",
        tell_teacher(config),
        *tell_labels(record),
        *(tell_generator(config, record) if generator else tell_walks(config, record)),
        f"Cost: {record['evaluations_per_image']:g} network evaluations per image, a backward pass "
        f"counted as two, {record['evaluations'] / 1e6:.2f} million in {share}. Its settings are "
        "in the metadata of the weights.",
    ]
    return "\n\n".join(parts) + "\n"


def frontmatter(config: DistillRun) -> str:
    """With the teacher's name on the hub, if it has one."""
    lines = ["library_name: diffusers", "tags: [stillhouse, diffusion, distillation]"]
    base = config.comparison.against or config.model
    if not Path(base).expanduser().exists():
        lines.append(f"base_model: {base}")
    return "\n".join(["---", *lines, "---"])


def tell_teacher(config: DistillRun) -> str:
    """Who it is, what it was guided by, and whether plain diffusers opens its student."""
    name, learnt, opened = called(config.model), "", ""
    if config.comparison.against:
        name += f"`, which was made from `{called(config.comparison.against)}"
    walk = read_walk(config.out / "model")
    assert walk is not None  # which its exporter has written
    guidance = guidance_in(walk)
    if not isinstance(guidance, NoGuidance):
        learnt = (
            f", guided ({guidance.kind}, weight {guidance.weight:g}), which it has learnt: it "
            "needs none at sampling"
        )
    if config.exportable and not config.adapters:
        opened = (
            f" `diffusers.DiffusionPipeline.from_pretrained` opens it; call that with "
            f"`num_inference_steps={max(walk.evaluations)}` and, where it takes one, "
            "`guidance_scale=1`."
        )
    return f"Its teacher is `{name}`{learnt}.{opened}"


def tell_labels(record: dict[str, Any]) -> list[str]:
    """What it was never told it will not draw well."""
    labels = " ".join(map(str, record.get("labels", [])))
    return [f"It was told some of its teacher's classes alone: `--labels {labels}`."] * bool(labels)


def called(model: str) -> str:
    """The name of a folder, of a run's model that of its run; what is on the hub as it is."""
    place = Path(model).expanduser().resolve()
    if not place.exists():
        return model
    return place.parent.name if place.name == "model" else place.name


def tell_walks(config: DistillRun, record: dict[str, Any]) -> list[str]:
    """Of a student that takes its teacher's walks: how near it comes to where they end."""
    made = (
        f"Distilled by `{config.method.kind}` on {taught(config, record)}, without data. It "
        f"takes {known(config)} evaluations and no other number; {tell_opening(config)}"
    )
    if "distance" not in record:  # nothing was compared
        return [made]
    counts = list(record["distance"]["student"])
    whose = "first teacher's" if record["first_teacher"] else "teacher's"
    head = ["| evaluations |", *(f" {n} |" for n in counts)]
    table = ["".join(head), "|---|" + "---|" * len(counts)]
    for name, values in record["distance"].items():
        label = "**student**" if name == "student" else NAMES.get(name, f"teacher, {name}")
        table.append("".join([f"| {label} |", *(f" {values[n]:.4f} |" for n in counts)]))
    return [
        made,
        f"Root mean squared distance to the {whose} {record['teacher_steps']} steps from the "
        f"same noise, images in [-1, 1], {record['count']} samples of one seed:",
        "\n".join(table),
        *tell_guidance(config, record),
        *([f"![Distances]({PLOT})"] if (config.out / PLOT).exists() else []),
        f"That is how near it comes to its teacher, not how good its images are: {judged(config)} "
        "measures these against images of yours.",
    ]


def known(config: DistillRun) -> str:
    """The numbers of evaluations that the student takes."""
    walk = read_walk(config.out / "model")
    assert walk is not None  # which its exporter has written
    return ", ".join(map(str, walk.evaluations))


def tell_opening(config: DistillRun) -> str:
    """What reads the student, and how it is walked."""
    if not config.adapters:
        return (
            "`stillhouse sample` and `stillhouse.pipelines.FewStepPipeline` read how from "
            "`few_steps.json`."
        )
    lines = "\n".join(opening_adapters(config, "PIPELINE", "THIS_FOLDER"))
    return f"adapters are opened by diffusers, in the teacher's pipeline:\n\n```py\n{lines}\n```"


def opening_adapters(config: DistillRun, pipeline: str, place: str) -> list[str]:
    """Python that does: the base `pipeline`, with what is in `place`."""
    folder = config.out / "model"
    scheduler = read_json(folder / "scheduler/scheduler_config.json")["_class_name"]
    walk = read_walk(folder)
    assert walk is not None  # which its exporter has written
    loaded = f"pipe.load_lora_weights({place!r})"
    peft = not (folder / LORA_WEIGHTS).is_file()  # PixArt's pipelines have no loader of them
    if peft:
        loaded = f"peft.PeftModel.from_pretrained(pipe.transformer, {place!r})  # in place"
    return [
        "import diffusers, peft" if peft else "import diffusers",
        f"pipe = diffusers.DiffusionPipeline.from_pretrained({pipeline!r})",
        f"scheduler = diffusers.{scheduler}",
        f"pipe.scheduler = scheduler.from_pretrained({place!r}, subfolder='scheduler')",
        loaded,
        f"pipe('WHAT TO DRAW', num_inference_steps={max(walk.evaluations)}, guidance_scale=1)",
    ]


def tell_guidance(config: DistillRun, record: dict[str, Any]) -> list[str]:
    """What a row of the teacher costs beside the student's."""
    walk = read_walk(config.out / "model")
    if len(record["distance"]) == 1 or walk is None:  # there is none
        return []
    guidance = guidance_in(walk)  # also where a later stage is compared with the first teacher
    if guidance.calls == 1:
        return []
    most = "" if getattr(guidance, "interval", EVERYWHERE) == EVERYWHERE else "up to "
    return [
        f"The teacher is guided: for n evaluations its network is called {most}{guidance.calls}n "
        "times, the student's n times."
    ]


def judged(config: DistillRun) -> str:
    """The command; it opens no adapters, but reads a folder of what they have drawn."""
    if config.adapters:
        return "`stillhouse evaluate FOLDER_OF_ITS_IMAGES --reference DATA`"
    steps = "1" if isinstance(config.method, Matched) else "N"
    told = " --prompts FILE" if config.prompts else ""
    return f"`stillhouse evaluate THIS_FOLDER --reference DATA --steps {steps}{told}`"


def taught(config: DistillRun, record: dict[str, Any]) -> str:
    walks, images = getattr(config.method, "walks", 0), record["images"]
    again = 0 < walks < images
    return (
        f"{walks:,} walks, seen {images / walks:.1f} times each" if again else f"{images:,} walks"
    )


def tell_generator(config: DistillRun, record: dict[str, Any]) -> list[str]:
    """Of one that draws what its teacher draws, but not from the same noise."""
    made = (
        f"Distilled by `{config.method.kind}` on {record['images']:,} samples of its own, without "
        f"data. It answers at noise level {record['start']:g} and no other; `stillhouse sample` "
        "and `stillhouse.pipelines.FewStepPipeline` read that from `few_steps.json`."
    )
    measures = f"{judged(config)[:-1]} --metrics fid,prdc` measures quality and variety."
    if "energy" not in record:  # nothing was compared
        return [made, measures]
    spread, energy = record["spread"], record["energy"]["student"][1]
    return [
        made,
        f"Spread of {record['count']} samples (standard deviation of a pixel in [-1, 1]): "
        f"{spread['student'][1]:.3f}, of the teacher's {record['teacher_steps']} steps "
        f"{spread['teacher']:.3f}. Much less than the teacher's would mean that it has lost some "
        "of what its teacher draws, much more that it draws what its teacher does not. Energy "
        "coefficient of "
        f"the two (0: the same distribution, 1: nothing in common): {energy:.4f}. Both see gross "
        f"failures alone: generators with energies of .002 have had a quarter of their teacher's "
        f"recall. {measures}",
    ]
