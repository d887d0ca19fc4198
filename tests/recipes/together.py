"""A distillation by two processes, as torchrun starts them."""

from pathlib import Path

import loaded

from stillhouse.recipes.distill.settings import DistillRun

# Of both processes: what the teacher's weights are once it is loaded.
LOOKING = """
from stillhouse.recipes.distill import distilling

load = distilling.load_source


def looked_at(config, here):
    source = load(config, here)
    found = {type(p).__name__ for p in source.subject.bare.parameters()}
    assert found == {"DTensor"}, f"the teacher is not sharded: {found}"
    return source


distilling.load_source = looked_at
"""


def distil_by_two(config: DistillRun, folder: Path, *, sharded_teacher: bool = False) -> None:
    """Under torchrun, with its script in this folder; it must come to its end."""
    script = folder / "both.py"
    script.write_text(
        f"{LOOKING if sharded_teacher else ''}"
        "from stillhouse.recipes.distill.distilling import run\n"
        "from stillhouse.recipes.distill.settings import DistillRun\n"
        f"run(DistillRun.model_validate_json({config.model_dump_json()!r}))\n"
    )
    done = loaded.run(str(script), processes=2, timeout=None)
    assert done.returncode == 0, done.stderr[-3000:]
