"""A distillation by two processes, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

from stillhouse.recipes.distill.distilling import DistillRun


def distil_by_two(config: DistillRun, folder: Path) -> None:
    """Under torchrun, with its script in this folder; it must come to its end."""
    script = folder / "both.py"
    script.write_text(
        "from stillhouse.recipes.distill.distilling import DistillRun, run\n"
        f"run(DistillRun.model_validate_json({config.model_dump_json()!r}))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [*command, "2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
