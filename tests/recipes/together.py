"""A distillation by two processes, as torchrun starts them."""

from pathlib import Path

import loaded

from stillhouse.recipes.distill.distilling import DistillRun


def distil_by_two(config: DistillRun, folder: Path) -> None:
    """Under torchrun, with its script in this folder; it must come to its end."""
    script = folder / "both.py"
    script.write_text(
        "from stillhouse.recipes.distill.distilling import DistillRun, run\n"
        f"run(DistillRun.model_validate_json({config.model_dump_json()!r}))\n"
    )
    done = loaded.run(str(script), processes=2, timeout=None)
    assert done.returncode == 0, done.stderr[-3000:]
