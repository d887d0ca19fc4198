"""The commands of docs/features.md run as written, in order, on a small model."""

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image
from recipes.test_features import save_model

from stillhouse.cli import main

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"
PAGE = (ROOT / "docs" / "features.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.slow
def test_commands_run_in_order(tmp_path, monkeypatch):
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not on this machine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STILLHOUSE_DATA", str(DATA))
    save_model(tmp_path / "model")
    (tmp_path / "photos").mkdir()
    for number in range(12):
        colour = (20 * number, 255 - 20 * number, 7 * number)
        Image.new("RGB", (40 + number, 50), colour).save(tmp_path / "photos" / f"{number}.png")
    assert len(COMMANDS) >= 10
    for command in COMMANDS:
        words = shlex.split(command.replace("MODEL", "model"))
        assert words[:2] == ["stillhouse", "features"]
        main(words[1:] + (["--steps", "20"] if words[2] == "evaluate" else []))
        if "--out" in words:
            assert Path(words[words.index("--out") + 1]).exists(), command
