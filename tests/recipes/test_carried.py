"""Networks carried to twice the side: what they can do at once, and after 200 steps.

Images are smooth: a bright spot whose place is that of its class, on a wave. At any resolution they
are the same scene, so positions that are resampled still say where the spot belongs, and those that
are extrapolated put it elsewhere.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from stillhouse.models import DiffusersNetwork
from stillhouse.models.backbones import BACKBONES
from stillhouse.models.conditioning import Parts, conditioned
from stillhouse.models.networks import attended_width
from stillhouse.models.transfer import transfer
from stillhouse.objectives import Denoising, Draws, LevelCurve, log_edges, validate
from stillhouse.process import Batch, Condition, NetworkDenoiser
from stillhouse.process.levels import UniformTime
from stillhouse.recipes.train.processes import Vp

CLASSES, LOW, HIGH = 4, 4, 8
EDGES = log_edges(0.02, 50.0, 5)
HIDDEN = 3  # the first level whose noise hides the spot, which is 3 high
STEPS, ROWS = 200, 8
ARMS = list(product(("resample", "extrapolate"), (True, False)))  # positions, levels shifted
# Half as wide as "tiny", with one block of every kind; a U-Net that narrow learns too little.
HALF = {"num_attention_heads": 2}
SMALLER: dict[str, dict[str, Any]] = {
    "dit": {**HALF, "num_layers": 1},
    "mdt": {**HALF, "num_layers": 3, "decoder_layers": 1},
    "pixart": {**HALF, "num_layers": 1, "cross_attention_dim": 64},
    "mmdit": {**HALF, "num_layers": 2, "caption_projection_dim": 64},
}


def scenes(size: int, count: int, seed: int) -> Batch:
    """The same scenes at any size."""
    made = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (count,), generator=made)
    phase = torch.rand(count, 1, 1, generator=made) * 2 * math.pi
    at = (torch.arange(size) + 0.5) / size
    y, x = at[:, None], at[None, :]
    top, left = 0.25 + 0.5 * (label // 2), 0.25 + 0.5 * (label % 2)
    spot = torch.exp(-((y - top[:, None, None]) ** 2 + (x - left[:, None, None]) ** 2) / 0.02)
    image = 3 * spot - 0.5 + 0.3 * torch.sin(2 * math.pi * x + phase)
    keys = torch.arange(count) + seed * count
    return Batch(image[:, None], condition=Condition(label=label), key=keys)


def network(name: str, size: int) -> DiffusersNetwork:
    backbone = BACKBONES[name]
    by_token = backbone.takes == "token_width"
    told: dict[str, Any] = {backbone.takes: 8 if by_token else CLASSES, **SMALLER.get(name, {})}
    torch.manual_seed(0)
    model = backbone.build("tiny", channels=1, resolution=size, **told)
    if not by_token:
        return DiffusersNetwork(model)
    return DiffusersNetwork(
        model, None, conditioned(model, Parts(classes=CLASSES), attended_width(model))
    )


class Lesson:
    """A network that learns scenes of one size."""

    def __init__(self, network: DiffusersNetwork, size: int, shift: float = 1.0) -> None:
        trained = Vp(betas="squaredcos_cap_v2", shift=shift).build()
        self.denoiser = NetworkDenoiser(network, trained.scaling, trained.prediction)
        self.objective = Denoising(UniformTime(trained.scaling, discrete=True), "eps")
        self.size = size

    def learn(self, steps: int) -> None:
        weights = list(self.denoiser.parameters())
        optimiser = torch.optim.AdamW(weights, 2e-3, fused=True)
        for step in range(steps):
            batch = scenes(self.size, ROWS, step)
            loss = self.objective(self.denoiser, batch, Draws(0)).total
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimiser.step()
            optimiser.zero_grad()

    def losses(self) -> Tensor:
        """Held out, per noise level."""
        with torch.no_grad():
            held_out = [scenes(self.size, 128, 10_000 + n) for n in range(2)]
            curve: LevelCurve = validate(
                self.objective, self.denoiser.eval(), held_out, Draws(1), EDGES
            )
        self.denoiser.train()
        return torch.tensor([math.nan if v is None else v for v in curve.as_lists()["loss"]])


def carried(low: DiffusersNetwork, name: str, positions: Any, shifted: bool) -> Lesson:
    high = network(name, HIGH)
    transfer(low, high, positions=positions)
    return Lesson(high, HIGH, HIGH / LOW if shifted else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONES)
def test_what_is_carried_knows_where_things_are_and_goes_on_learning(name):
    before = Lesson(network(name, LOW), LOW)
    before.learn(400)
    first, last = {}, {}
    for positions, shifted in ARMS:
        lesson = carried(before.denoiser.network, name, positions, shifted)
        first[positions, shifted] = lesson.losses()
        if name == "unet" and positions == "extrapolate":  # without positions it is the same again
            assert torch.equal(first["resample", shifted], first["extrapolate", shifted])
            continue
        lesson.learn(STEPS)
        last[positions, shifted] = lesson.losses()
        assert last[positions, shifted].isfinite().all()
        assert last[positions, shifted].sum() < 0.8 * first[positions, shifted].sum()
    for shifted in (True, False):
        kept, beyond = (first[positions, shifted] for positions in ("resample", "extrapolate"))
        # Where noise hides the spot, only positions and class say where it is.
        assert name == "unet" or (kept < beyond)[HIDDEN:].all()
    # Shifted, a network is at first told of half the noise that its patches show, and of the levels
    # that it learns fewer are low.
    assert (first["resample", True] > first["resample", False])[1:HIDDEN].all()
    assert (last["resample", True] > last["resample", False])[: HIDDEN - 1].all()


def test_the_scenes_are_the_same_at_any_size():
    low, high = (scenes(size, 4, seed=3) for size in (LOW, HIGH))
    assert torch.equal(low.condition.label, high.condition.label)
    smaller = torch.nn.functional.avg_pool2d(high.data, 2)
    assert (smaller - low.data).square().mean() < 0.1 * low.data.var()
