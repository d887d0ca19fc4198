"""The published configs of five models: built whole, without memory, on the meta device."""

import math
from dataclasses import dataclass

import pytest
import torch
from small_models import (
    MODELS,
    build_network,
    call,
    network_config,
    part,
    random_condition,
    unit_noise,
)

from stillhouse.models import NETWORKS, DiffusersNetwork
from stillhouse.models.networks import Shapes
from stillhouse.pipelines.schedules import read_schedule
from stillhouse.process import VP, Condition, Flow, Prediction


@dataclass(frozen=True)
class Published:
    """What is known of a published network."""

    name: str  # of its class
    parameters: int
    data_shape: tuple[int, int, int]
    condition_shapes: Shapes


PUBLISHED = {
    "sd15": Published("UNet2DConditionModel", 859_520_964, (4, 64, 64), {"text": (None, 768)}),
    "sdxl": Published(
        "UNet2DConditionModel",
        2_567_463_684,
        (4, 128, 128),
        {"text": (None, 2048), "pooled": (1280,), "control": (6,)},
    ),
    "pixart-alpha": Published(
        "PixArtTransformer2DModel",
        611_349_152,
        (4, 128, 128),
        {"text": (None, 4096), "control": (3,)},
    ),
    "sd3": Published(
        "SD3Transformer2DModel",
        2_028_328_000,
        (16, 128, 128),
        {"text": (None, 4096), "pooled": (2048,)},
    ),
    "dit-xl-2": Published("DiTTransformer2DModel", 749_826_464, (4, 32, 32), {"label": ()}),
}


@pytest.mark.parametrize("model", MODELS)
def test_real_network_is_wrapped_with_its_exact_size(model):
    expected = PUBLISHED[model]
    with torch.device("meta"):
        network = DiffusersNetwork(build_network(network_config(model)))
    assert type(network.model).__name__ == expected.name
    assert sum(p.numel() for p in network.parameters()) == expected.parameters
    assert network.data_shape == expected.data_shape
    assert network.condition_shapes == expected.condition_shapes


@pytest.fixture(params=MODELS, ids=str)
def small(request) -> DiffusersNetwork:
    return DiffusersNetwork(build_network(network_config(request.param, reduced=True)))


# How diffusers' own pipelines call each network.
NATIVE_CALLS = {
    "sd15": lambda model, x, time, c: model(x, time, encoder_hidden_states=c.text),
    "sdxl": lambda model, x, time, c: model(
        x,
        time,
        encoder_hidden_states=c.text,
        added_cond_kwargs={"text_embeds": c.pooled, "time_ids": c.control},
    ),
    "pixart-alpha": lambda model, x, time, c: model(
        x,
        encoder_hidden_states=c.text,
        timestep=time,
        added_cond_kwargs={"resolution": c.control[:, :2], "aspect_ratio": c.control[:, 2:]},
    ),
    "sd3": lambda model, x, time, c: model(
        hidden_states=x,
        timestep=time,
        encoder_hidden_states=c.text,
        pooled_projections=c.pooled,
    ),
    "dit-xl-2": lambda model, x, time, c: model(x, timestep=time, class_labels=c.label),
}


@pytest.mark.parametrize("model", MODELS)
def test_networks_are_called_as_pipelines_call_them(model):
    network = DiffusersNetwork(build_network(network_config(model, reduced=True)))
    x, time = unit_noise((2, *network.data_shape)), torch.full((2,), 500.0)
    cond = random_condition(network.condition_shapes, 2)
    with torch.no_grad():
        native = NATIVE_CALLS[model](network.model, x, time, cond).sample
    assert torch.equal(call(network), native[:, : x.shape[1]])


def test_every_condition_field_is_read_and_none_else_is_needed(small):
    base = call(small)
    assert base.shape == (2, *small.data_shape)  # variance channels are cut off
    assert bool(torch.isfinite(base).all())
    for name in small.condition_shapes:
        changed = {**vars(random_condition(small.condition_shapes, 2))}
        changed[name] = changed[name] + 1
        x, time = unit_noise((2, *small.data_shape)), torch.full((2,), 500.0)
        with torch.no_grad():
            assert not torch.equal(small(x, time, Condition(**changed)), base), name


def test_a_missing_condition_is_named_with_its_shape(small):
    with pytest.raises(ValueError, match="needs a condition with") as raised:
        small(unit_noise((2, *small.data_shape)), torch.full((2,), 500.0), None)
    for name in small.condition_shapes:
        assert f"{name} ['B'" in str(raised.value)


@pytest.mark.parametrize("model", ["sd15", "pixart-alpha"])
def test_masked_tokens_do_not_matter(model):
    network = DiffusersNetwork(build_network(network_config(model, reduced=True)))
    cond = vars(random_condition(network.condition_shapes, 2))
    mask = torch.tensor([[True, True, True, False, False]] * 2)
    other = torch.where(mask[..., None], cond["text"], cond["text"] + 3)
    x, time = unit_noise((2, *network.data_shape)), torch.full((2,), 500.0)
    with torch.no_grad():
        first = network(x, time, Condition(**{**cond, "text_mask": mask}))
        second = network(x, time, Condition(**{**cond, "text": other, "text_mask": mask}))
        unmasked = network(x, time, Condition(**{**cond, "text": other}))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
    assert float((first - unmasked).abs().max()) > 1e-3


def test_an_unknown_class_is_refused():
    with pytest.raises(ValueError, match="cannot call a Linear; supported: UNet2DModel"):
        DiffusersNetwork(torch.nn.Linear(2, 2))
    assert {published.name for published in PUBLISHED.values()} < set(NETWORKS)


# beta_start, beta_end, linear in sqrt(beta), prediction, spacing, offset
SCHEDULES: dict[str, tuple[float, float, bool, Prediction, str, int]] = {
    "sd15": (0.00085, 0.012, True, "eps", "leading", 1),
    "sdxl": (0.00085, 0.012, True, "eps", "leading", 1),
    "pixart-alpha": (0.0001, 0.02, False, "eps", "linspace", 0),
    "dit-xl-2": (0.0001, 0.02, False, "eps", "leading", 0),
}


@pytest.mark.parametrize("model", SCHEDULES)
def test_discrete_schedules_are_read(model):
    start, end, scaled, prediction, spacing, offset = SCHEDULES[model]
    trained = read_schedule(part(model, "scheduler"))
    assert isinstance(trained.scaling, VP)
    assert (trained.prediction, trained.clip) == (prediction, None)
    assert (trained.scaling.spacing, trained.scaling.offset) == (spacing, offset)
    power = 2 if scaled else 1
    ramp = [start ** (1 / power), end ** (1 / power)]
    betas = [(ramp[0] + (ramp[1] - ramp[0]) * t / 999) ** power for t in range(1000)]
    signal = math.prod(1 - beta for beta in betas)
    assert len(trained.scaling.alphas_cumprod) == 1000
    assert trained.scaling.sigma_min == pytest.approx(math.sqrt(betas[0] / (1 - betas[0])))
    assert trained.scaling.sigma_max == pytest.approx(math.sqrt((1 - signal) / signal))


def test_flow_schedule_is_read():
    trained = read_schedule(part("sd3", "scheduler"))
    assert trained == (Flow(shift_scale=3.0, time_scale=1000, first_time=1e-3), "flow", None)
