"""Reference packages, in a folder of their own and run in a process of their own.

The folder ($STILLHOUSE_PARITY, filled by .ci/run) is no part of the environment because torchvision
in it has no compiled operators here, which breaks transformers wherever both are importable.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from stillhouse.errors import UserError
from stillhouse.models.text import packaged

# Operators that torchvision expects of its compiled part: declared, they are enough to import it.
PRELUDE = """
import sys
import numpy as np
import torch
_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
given = dict(np.load(sys.argv[1]))
found = {}
"""
END = "\nnp.savez(sys.argv[2], **found)\n"


def parity_folder() -> Path:
    """Where the packages are; without them a test is skipped, but never in CI."""
    folder = os.environ.get("STILLHOUSE_PARITY", "")
    if folder and Path(folder).is_dir():
        return Path(folder)
    missing("STILLHOUSE_PARITY does not name the folder of reference packages (see .ci/run)")


def minilm_folder() -> str:
    """The sentence encoder that a package brings with it; likewise."""
    try:
        return packaged("minilm")
    except UserError as error:
        missing(str(error))


def missing(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def run_reference(script: str, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """Runs a script among the reference packages: it reads the dict `given`, fills `found`."""
    path = os.pathsep.join(filter(None, (str(parity_folder()), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / name) for name in ("given.npz", "found.npz")]
        np.savez(files[0], **arrays)
        ended = subprocess.run(
            [sys.executable, "-c", PRELUDE + script + END, *files],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        with np.load(files[1]) as found:
            return dict(found)
