"""Control, step counts and classes as tokens, on all five backbones and a plain U-Net."""

import copy
import json

import pytest
import torch
from diffusers import UNet2DModel
from torch import nn

from stillhouse.models import DiffusersNetwork
from stillhouse.models.backbones import BACKBONES
from stillhouse.models.conditioning import Parts, conditioned
from stillhouse.models.control import Gamma, Layout
from stillhouse.models.networks import attended_width
from stillhouse.pipelines import load_denoiser, save_denoiser
from stillhouse.process import Condition

CLASSES, WIDTH, SIDE = 4, 24, 8
LAYOUT = Layout(
    composition=("flip", "crop_top"),
    styles=(("style", ("flat", "drawn", "3d")),),
    detail=("height",),
)
NAMES = [*BACKBONES, "plain"]  # a U-Net without attention to tokens, as unconditional models are
BY_TOKENS = [name for name, backbone in BACKBONES.items() if backbone.takes == "token_width"]
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler"}


def backbone(name):
    if name == "plain":
        widths = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        return UNet2DModel(sample_size=SIDE, num_class_embeds=CLASSES, **widths, **blocks)
    takes = BACKBONES[name].takes
    told = {takes: CLASSES if takes == "classes" else WIDTH}
    return BACKBONES[name].build("tiny", channels=3, resolution=SIDE, **told)


def build(name, *, gamma=None, steps=False, tokens=2, seed=0):
    torch.manual_seed(seed)
    model = backbone(name)
    classes = CLASSES if name in BY_TOKENS else 0
    parts = Parts(classes, tokens, LAYOUT, gamma or Gamma(alpha=4.0), steps)
    return DiffusersNetwork(model.eval(), None, conditioned(model, parts, attended_width(model)))


def said(label=1, height=64.0, flip=0.0, count=2, steps=None):
    control = torch.tensor([[flip, 3.0, 1.0, height]]).expand(count, 4).contiguous()
    many = None if steps is None else torch.full((count,), steps)
    return Condition(label=torch.full((count,), label), control=control, steps=many)


def images(count=2):
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def embeddings_of_time(network, *args):
    """What the modules that embed time give, in order."""
    seen = []
    unet = hasattr(network.model, "time_embedding")
    hooks = [
        m.register_forward_hook(lambda m, i, out: seen.append(out.detach().clone()))
        for n, m in network.model.named_modules()
        if (unet and n == "time_embedding")
        or (not unet and type(m).__name__.startswith(("CombinedTimestep", "PixArtAlphaCombined")))
    ]
    with torch.no_grad():
        network(*args)
    for hook in hooks:
        hook.remove()
    assert seen
    return seen


# ---------------------------------------------------------------- who hears what


@pytest.mark.parametrize("name", NAMES)
def test_in_pure_noise_the_size_says_nothing_and_the_crop_does(name):
    network, x = build(name), images()
    with torch.no_grad():
        for time, heard in ((1000.0, False), (0.0, True)):
            told = torch.full((2,), time)
            plain = network(x, told, said())
            assert torch.equal(plain, network(x, told, said(height=512.0))) is not heard
            assert not torch.equal(plain, network(x, told, said(flip=1.0)))


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_of_a_batch_has_its_own_time(name):
    network, x = build(name), images()
    times = torch.tensor([1000.0, 0.0])
    with torch.no_grad():
        small, large = network(x, times, said()), network(x, times, said(height=512.0))
    assert torch.equal(small[0], large[0])
    assert not torch.equal(small[1], large[1])


@pytest.mark.parametrize("name", BY_TOKENS)
def test_a_class_leaves_the_time_path_alone_and_control_leaves_the_tokens_alone(name):
    network, x, time = build(name), images(), torch.full((2,), 300.0)
    one, other = (embeddings_of_time(network, x, time, said(label=k)) for k in (0, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    with torch.no_grad():
        assert not torch.equal(network(x, time, said(label=0)), network(x, time, said(label=2)))
    _, told = network.conditioning(time, said())
    _, again = network.conditioning(time, said(height=512.0, flip=1.0))
    assert torch.equal(told.text, again.text)
    moved = embeddings_of_time(network, x, time, said(flip=1.0))
    assert not torch.equal(one[0], moved[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_step_count_changes_nothing_until_it_is_trained(name):
    plain, counted = build(name), build(name, steps=True)
    counted.load_state_dict(plain.state_dict(), strict=False)
    x, time = images(), torch.full((2,), 300.0)
    with torch.no_grad():
        before = plain(x, time, said())
        assert torch.equal(before, counted(x, time, said(steps=4)))
        nn.init.normal_(counted.conditioning.steps.outward.weight)
        four, five = (counted(x, time, said(steps=n)) for n in (4, 5))
    assert not torch.equal(four, five)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named(name):
    with pytest.raises(ValueError, match="control"):
        build(name)(images(), torch.zeros(2), Condition(label=torch.zeros(2).long()))


def test_a_network_that_embeds_no_time_is_refused():
    with pytest.raises(ValueError, match="a Linear has no time path that control could take"):
        conditioned(nn.Linear(2, 2), Parts(steps=True))


# ---------------------------------------------------------------- the backbone stays what it was


@pytest.mark.parametrize("name", NAMES)
def test_no_key_of_the_backbone_changes(name):
    plain = backbone(name)
    assert plain.state_dict().keys() == build(name).model.state_dict().keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_of_zeros_is_no_control(name):
    network, x, time = build(name), images(), torch.full((2,), 300.0)
    cond = Condition(label=torch.tensor([1, 1]))
    if network.conditioning.tokens is not None:
        _, cond = network.conditioning(time, cond)
    width = network.conditioning.control.composition.outward.out_features
    call = network.convention.call
    with torch.no_grad():
        beside = call(network.model, x, torch.cat([time[:, None], torch.zeros(2, width)], 1), cond)
        assert torch.equal(call(network.model, x, time, cond), beside)


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_it_is_the_same_and_the_backbone_opens_in_diffusers(name, tmp_path):
    network = build(name, steps=True)
    save_denoiser(tmp_path, network, network.state_dict(), FLOW, facts={})
    loaded = load_denoiser(tmp_path).network
    assert loaded.state_dict().keys() == network.state_dict().keys()
    assert loaded.conditioning.parts == network.conditioning.parts
    x, time = images(), torch.full((2,), 300.0)
    with torch.no_grad():
        assert torch.equal(network(x, time, said(steps=3)), loaded(x, time, said(steps=3)))
    # The backbone's own file, by its own class: nothing missing, nothing unexpected.
    plain, report = type(network.model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs, ours = plain.state_dict(), network.model.state_dict()
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)


def test_a_second_file_that_does_not_fit_is_refused_with_its_name(tmp_path):
    network = build("pixart")
    save_denoiser(tmp_path, network, network.state_dict(), FLOW, facts={})
    described = tmp_path / "conditioning.json"
    facts = json.loads(described.read_text())
    facts["layout"]["detail"] = []
    described.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"conditioning\.json and its weights cannot be read"):
        load_denoiser(tmp_path)


# ---------------------------------------------------------------- in training


def gradients(network, x, time, cond, repeat=1):
    network.zero_grad()
    total = sum(network(x, time, cond[i]).square().mean() for i in range(repeat))
    total.backward()
    return {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_gradients_are_the_plain_ones_even_with_two_calls_at_once(name):
    """The second call's control must not reach the first one's blocks when they are run again."""
    network, x, time = build(name).train(), images(), torch.tensor([100.0, 700.0])
    conds = [said(height=64.0), said(height=512.0, flip=1.0)]
    plain = gradients(network, x, time, conds, repeat=2)
    network.model.enable_gradient_checkpointing()
    checkpointed = gradients(network, x, time, conds, repeat=2)
    assert plain.keys() == checkpointed.keys()
    for key, gradient in plain.items():
        assert torch.allclose(gradient, checkpointed[key], atol=1e-7, rtol=1e-5), key
    assert any(g.abs().max() > 0 for k, g in plain.items() if "conditioning.control" in k)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_independent(name):
    network, x, time = build(name), images(), torch.full((2,), 10.0)
    other = copy.deepcopy(network)
    with torch.no_grad():
        before = network(x, time, said())
        assert torch.equal(before, other(x, time, said()))
        for parameter in other.parameters():
            parameter.add_(0.1)
        assert torch.equal(before, network(x, time, said()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_block_by_block_it_says_the_same(name):
    from stillhouse.engine.sharding import blocks

    network, x, time = build(name), images(), torch.full((2,), 10.0)
    with torch.no_grad():
        before = network(x, time, said())
        for block in blocks(network.model):
            block.compile(backend="aot_eager")
        assert torch.allclose(before, network(x, time, said()), atol=1e-5)
