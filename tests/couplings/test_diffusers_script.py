"""The guide's two lines, put into an ordinary diffusers script that is then run."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import warm
from couplings.checks import bytes_of
from diffusers import DDPMScheduler
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import mse_loss

from stillhouse.couplings import Assignment

SCRIPT = Path(__file__).with_name("diffusers_script.py")
GUIDE = Path(__file__).parents[2] / "docs" / "immiscible.md"
LINES = ["import stillhouse", "noise = noise[stillhouse.couplings.assign(clean_images, noise)]"]


def fenced(language: str) -> list[str]:
    """What the guide shows in this language, block by block."""
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def patched(script: str, diff: str) -> str:
    """Each line with a plus goes below the line before it, which the script must hold once."""
    lines, above = script.splitlines(), None
    for mark, text in ((row[:1], row[1:].strip()) for row in diff.splitlines()):
        if mark == "+":
            assert above is not None, f"{text}: where?"
            indent = len(lines[above]) - len(lines[above].lstrip())
            lines.insert(above := above + 1, " " * indent + text)
        elif text != "...":
            (above,) = (number for number, line in enumerate(lines) if line.strip() == text)
    return "\n".join(lines) + "\n"


def test_the_guide_changes_two_lines_and_no_more():
    (diff,) = fenced("diff")
    assert [row[1:].strip() for row in diff.splitlines() if row[0] == "+"] == LINES
    assert not [row for row in diff.splitlines() if row[0] == "-"]
    before, after = SCRIPT.read_text(), patched(SCRIPT.read_text(), diff)
    assert "stillhouse." not in before
    assert [line.strip() for line in after.splitlines() if line not in before] == LINES


# ---------------------------------------------------------------- as a process


class Run(NamedTuple):
    """What a run of the script has left: its losses, and the tensors of its first step."""

    folder: Path
    losses: list[float]
    clean: Tensor
    noisy: Tensor
    timesteps: Tensor
    prediction: Tensor

    def noise(self) -> Tensor:
        """As recovered from what the network was given."""
        scheduler: Any = DDPMScheduler.from_pretrained(self.folder / "scheduler")
        alpha = scheduler.alphas_cumprod[self.timesteps].double().view(-1, 1, 1, 1)
        return (self.noisy - alpha.sqrt() * self.clean) / (1 - alpha).sqrt()


def write_images(folder: Path) -> None:
    """Ramps from one colour to another."""
    folder.mkdir()
    ends = np.random.default_rng(0).integers(0, 256, (64, 2, 1, 1, 3))
    ramp = np.linspace(0, 1, 16)[:, None, None] * np.ones((1, 16, 1))
    for number, (top, bottom) in enumerate(ends):
        image = Image.fromarray((top + (bottom - top) * ramp).astype(np.uint8))
        image.save(folder / f"{number:02}.png")


def run(code: str, folder: Path, steps: int = 30) -> Run:
    """The script as a process of its own."""
    folder.mkdir()
    (folder / "train.py").write_text(code)
    write_images(folder / "images")
    words = ["--train_data_dir", "images", "--output_dir", "out", "--max_train_steps", str(steps)]
    done = warm.run("train.py", *words, cwd=folder, timeout=None, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    out = folder / "out"
    first_step = torch.load(out / "first_step.pt", weights_only=True)
    return Run(out, json.loads((out / "losses.json").read_text()), *first_step)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    """As people have it, as the guide has it, and with the mistake of public code."""
    script, folder = SCRIPT.read_text(), tmp_path_factory.mktemp("scripts")
    guide = patched(script, fenced("diff")[0])
    inside = guide.replace(LINES[1], "paired = " + LINES[1].removeprefix("noise = "))
    mistaken = inside.replace("add_noise(clean_images, noise,", "add_noise(clean_images, paired,")
    assert len({script, guide, inside, mistaken}) == 4
    return {
        "plain": run(script, folder / "plain"),
        "guide": run(guide, folder / "guide"),
        "mistaken": run(mistaken, folder / "mistaken", steps=1),
    }


def check_target(found: Run) -> None:
    """The loss is that of the noise in the network's input."""
    expected = float(mse_loss(found.prediction.double(), found.noise()))
    assert found.losses[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "guide"])
def test_it_trains(runs, name):
    losses = runs[name].losses
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "guide"])
def test_the_target_is_the_noise_of_the_input(runs, name):
    check_target(runs[name])


@pytest.mark.slow
def test_a_target_that_keeps_the_old_noise_is_caught(runs):
    with pytest.raises(AssertionError):
        check_target(runs["mistaken"])


@pytest.mark.slow
def test_only_noise_has_moved_and_to_the_nearest_data(runs):
    """Nothing random is consumed: both scripts draw the same images, levels and noise."""
    plain, guide = runs["plain"], runs["guide"]
    assert torch.equal(guide.clean, plain.clean)
    assert torch.equal(guide.timesteps, plain.timesteps)
    noise, met = (found.noise().flatten(1) for found in (plain, guide))
    distances = torch.cdist(plain.clean.double().flatten(1), noise) ** 2
    nearest = torch.from_numpy(linear_sum_assignment(distances.numpy())[1])
    assert not torch.equal(nearest, torch.arange(len(nearest)))
    # Recovered at other levels, and so with other rounding: up to 1e-7/sqrt(1 - alpha).
    torch.testing.assert_close(met, noise[nearest], rtol=0, atol=1e-4)


# ---------------------------------------------------------------- the guide's other lines


def test_the_lines_for_classes_captions_and_single_images_do_what_they_say():
    names: dict = {}
    by_class, by_caption, by_draws = fenced("python")
    exec(by_class, names)
    labels, latents = names["labels"], names["latents"]
    whose = {bytes_of(row): int(label) for row, label in zip(names["drawn"], labels, strict=True)}
    assert [whose[bytes_of(row)] for row in names["noise"]] == labels.tolist()
    assert not torch.equal(names["noise"], names["drawn"])
    exec(by_caption, names)
    embedding, index = names["embedded"].pooled, names["index"]
    assert sorted(index.tolist()) == list(range(len(latents)))
    plain = Assignment()(latents, names["drawn"]).index
    nearness = [
        torch.cosine_similarity(embedding, embedding[rows]).mean() for rows in (index, plain)
    ]
    assert nearness[0] > nearness[1]
    exec(by_draws, names)
    noises = names["noises"]
    cosines = torch.cosine_similarity(latents[None].flatten(2), noises.flatten(2), dim=2)
    assert torch.equal(names["noise"], noises[cosines.argmax(0), torch.arange(len(latents))])
