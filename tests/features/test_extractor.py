"""What is extracted is what the network computes: shapes, sums, attention, early stop, noise."""

import pytest
import torch
from features.toys import (
    BUILDERS,
    TABLE,
    as_tokens,
    denoiser_of,
    extract,
    fill_zeros,
    hooks_of,
    inputs,
    small_denoiser,
    watched,
)
from small_models import (
    MODELS,
    build_network,
    network_config,
    random_condition,
    relative_error,
    save_pipeline,
)
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from stillhouse.errors import UserError
from stillhouse.features.attention import Attended, head_maps
from stillhouse.features.catalogue import catalogue
from stillhouse.features.extractor import Extractor
from stillhouse.features.selection import published
from stillhouse.models import DiffusersNetwork
from stillhouse.pipelines import load_denoiser
from stillhouse.process import VP, Condition, Gaussian, NetworkDenoiser

WIDE = (16, 24)
VIT = "up-level1-repeat1-vit-block0"
PATH = "up_blocks.1.attentions.1.transformer_blocks.0"


# ---------------------------------------------------------------- shapes


# diffusers' DiT takes square images only.
SIZES = [*((name, None) for name in BUILDERS), *((n, WIDE) for n in BUILDERS if n != "dit-xl-2")]


def from_directory(folder, name):
    """A published pipeline at reduced width, saved by diffusers and read again."""
    save_pipeline(folder, name)
    denoiser = load_denoiser(folder)
    fill_zeros(denoiser)
    return denoiser


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_every_id_extracts_with_the_shape_it_promised(name, size, tmp_path):
    denoiser = from_directory(tmp_path, name) if name in MODELS else small_denoiser(name)
    known = catalogue(denoiser.network.model)
    found = extract(denoiser, size=size)
    height, width = inputs(denoiser, size=size)[0].shape[-2:]
    assert list(found) == list(known)
    for key, value in found.items():
        assert value.shape == (2, *known[key].shape(height, width, 5)), key
        assert bool(value.isfinite().all()), key
        assert float(value.float().std()) > 0, key


def test_sides_that_do_not_halve_evenly():
    denoiser = small_denoiser("sdxl")
    found = extract(denoiser, size=(18, 22))
    known = catalogue(denoiser.network.model)
    assert all(v.shape[1:] == known[k].shape(18, 22, 5) for k, v in found.items())


@pytest.mark.parametrize("name", ["sd15", "sd3"])
def test_bfloat16_networks_give_bfloat16_features(name):
    denoiser = small_denoiser(name)
    exact = extract(denoiser)
    rough = extract(denoiser.to(torch.bfloat16))
    assert {v.dtype for v in rough.values()} == {torch.bfloat16}
    assert max(relative_error(v.float(), exact[k]) for k, v in rough.items()) < 0.25
    last = "unet-out" if name == "sd15" else "transformer-out"
    assert relative_error(rough[last].float(), exact[last]) < 0.05


# ---------------------------------------------------------------- sums


@pytest.mark.parametrize(
    ("name", "key", "path"),
    [
        ("sd15", "up-level1-repeat2", "up_blocks.1.resnets.2"),
        ("sdxl", "down-level1-repeat0", "down_blocks.1.resnets.0"),
        ("unet2d", "mid-repeat1", "mid_block.resnets.1"),
    ],
)
def test_a_residual_block_is_its_shortcut_and_increment(name, key, path):
    denoiser = small_denoiser(name)
    model = denoiser.network.model
    resnet = model.get_submodule(path)
    with watched(model, path) as seen:
        found = extract(denoiser, [f"{key}-res-out", f"{key}-res-increment"], early_stop=False)
    given = seen["input"]
    with torch.no_grad():
        shortcut = given if resnet.conv_shortcut is None else resnet.conv_shortcut(given)
    expected = (shortcut + found[f"{key}-res-increment"]) / resnet.output_scale_factor
    torch.testing.assert_close(found[f"{key}-res-out"], expected, rtol=0, atol=1e-6)
    assert resnet.output_scale_factor == (2 if name == "unet2d" else 1)


@pytest.mark.parametrize(
    ("name", "key", "path"),
    [
        ("sd15", f"{VIT}-self-q", f"{PATH}.attn1.to_q"),
        ("sd15", f"{VIT}-cross-q", f"{PATH}.attn2.to_q"),
        ("unet2d", "mid-vit-block0-self-q", "mid_block.attentions.0.to_q"),
        ("sd3", "block1-self-k", "transformer_blocks.1.attn.to_k"),
        ("mdt", "block3-self-v", "transformer_blocks.3.attn1.to_v"),
    ],
)
def test_a_projection_is_its_weight_times_its_input(name, key, path):
    denoiser = small_denoiser(name)
    model = denoiser.network.model
    with watched(model, path) as seen:
        found = extract(denoiser, [key], size=WIDE, early_stop=False)[key]
    layer = model.get_submodule(path)
    tokens = linear(seen["input"], layer.weight, layer.bias)
    height, width = found.shape[2:]
    assert width > height
    for row, column in ((0, 0), (1, 2), (height - 1, width - 1)):
        expected = tokens[:, row * width + column]
        torch.testing.assert_close(found[:, :, row, column], expected, rtol=0, atol=1e-5)


def test_the_outputs_are_those_of_the_modules():
    denoiser = small_denoiser("sd3")
    with watched(denoiser.network.model, "transformer_blocks.2") as seen:
        found = extract(denoiser, ["block2-out"], early_stop=False)["block2-out"]
    text, image = seen["output"]
    assert text.shape[1] == 5
    assert torch.equal(as_tokens(found), image)


# ---------------------------------------------------------------- early stop


STOPS = {
    "sd15": published("sd15").ids,
    "sdxl": ("up-level0-repeat0-vit-block2-out", "up-level1-repeat0-vit-block0-cross-q"),
    "pixart-alpha": ("block1-cross-q", "block2-ffn-inner"),
    "sd3": ("block1-self-map", "block2-cross-map"),
    "mdt": ("block1-out",),
}
AFTER = {
    "sd15": ("up_blocks.3.resnets.1", "up_blocks.3.attentions.0.transformer_blocks.0.ff"),
    "sdxl": ("up_blocks.1.resnets.1", "conv_out"),
    "pixart-alpha": ("transformer_blocks.2.ff.net.2", "transformer_blocks.3"),
    "sd3": ("transformer_blocks.2.attn.add_v_proj", "transformer_blocks.3"),
    "mdt": ("transformer_blocks.2", "proj_out"),
}


@pytest.mark.parametrize("name", STOPS)
def test_an_early_stop_changes_nothing_but_the_rest(name):
    denoiser = small_denoiser(name)
    model = denoiser.network.model
    whole = extract(denoiser, list(STOPS[name]), early_stop=False)
    for path in AFTER[name]:
        with watched(model, path) as seen:
            stopped = extract(denoiser, list(STOPS[name]))
        assert seen["calls"] == 0
    assert all(torch.equal(stopped[key], whole[key]) for key in whole)
    everything = extract(denoiser, early_stop=False)
    assert all(torch.equal(everything[key], whole[key]) for key in whole)
    with watched(model, AFTER[name][0]) as seen:
        extract(denoiser, list(STOPS[name]), early_stop=False)
    assert seen["calls"] == 1


@pytest.mark.parametrize("name", BUILDERS)
def test_no_hook_is_left(name):
    denoiser = small_denoiser(name)
    extract(denoiser)
    assert hooks_of(denoiser) == 0


def test_no_hook_is_left_after_an_error(monkeypatch):
    denoiser = small_denoiser("sd15")
    model = denoiser.network.model
    x, _ = inputs(denoiser)
    extractor = Extractor(denoiser, [f"{VIT}-self-map"], sigma=0.5)
    with pytest.raises(ValueError, match="needs a condition"):
        extractor.extract(x, None, key=[0, 1])
    assert hooks_of(denoiser) == 0

    def fail(*_, **__):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(model.mid_block.resnets[0], "forward", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        extract(denoiser, [f"{VIT}-self-map"])
    assert hooks_of(denoiser) == 0
    both = Extractor(denoiser, ["unet-in", f"{VIT}-self-map"], sigma=0.5)
    del model.get_submodule(PATH).attn1  # the second one fails when the first has its hook
    with pytest.raises(AttributeError):
        both.extract(*inputs(denoiser), key=[0, 1])
    assert hooks_of(denoiser) == 0


SHARES = {  # of the FLOPs of a whole run
    "sd15": [(published("sd15").ids, 0.80), (["up-level1-upsampler-out"], 0.55)],
    "sdxl": [(published("sdxl").ids, 0.83), (published("sdxl").ids[:2], 0.53)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARES)
def test_an_early_stop_saves_what_the_specification_says(name):
    with torch.device("meta"):
        network = DiffusersNetwork(build_network(network_config(name)))
    denoiser = NetworkDenoiser(network, VP(TABLE), "eps").eval()
    x = torch.empty(1, *network.data_shape, device="meta")
    cond = random_condition(network.condition_shapes, 1, 77).to("meta")

    def flops(ids, early_stop=True):
        extractor = Extractor(denoiser, ids, sigma=0.5, early_stop=early_stop)
        with FlopCounterMode(display=False) as counter:
            extractor.extract(x, cond, key=[0])
        return counter.get_total_flops()

    whole = flops(["unet-in"], early_stop=False)
    for ids, share in SHARES[name]:
        assert flops(ids) / whole == pytest.approx(share, abs=0.005)


# ---------------------------------------------------------------- attention


def projected(attention, maps, values):
    """P V W_o of all heads [B, heads, N, M], [B, M, C]."""
    split = values.unflatten(-1, (attention.heads, -1)).transpose(1, 2)
    mixed = (maps @ split).transpose(1, 2).flatten(2)
    return linear(mixed, attention.to_out[0].weight, attention.to_out[0].bias)


@pytest.mark.parametrize("size", [None, WIDE], ids=["square", "wide"])
@pytest.mark.parametrize(
    ("name", "key", "path"),
    [
        ("sd15", VIT, f"{PATH}.attn1"),
        ("unet-qk", "mid-vit-block0", "mid_block.attentions.0.transformer_blocks.0.attn1"),
        ("pixart-qk", "block1", "transformer_blocks.1.attn1"),
        ("mdt", "block1", "transformer_blocks.1.attn1"),
    ],
)
def test_maps_and_values_make_the_output_of_self_attention(name, key, path, size):
    denoiser = small_denoiser(name)
    model = denoiser.network.model
    attention = model.get_submodule(path)
    ids = [f"{key}-self-{part}" for part in ("q", "k", "v", "map")]
    with watched(model, path) as seen:
        q, k, v, mean = extract(denoiser, ids, size=size, early_stop=False).values()
    with torch.no_grad():
        maps = torch.stack([*head_maps(attention, Attended(as_tokens(q), as_tokens(k)))], 1)
        output = projected(attention, maps, as_tokens(v))
    assert attention.heads > 1
    torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(output, seen["output"], rtol=0, atol=1e-5)
    torch.testing.assert_close(as_tokens(mean), maps.mean(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [None, WIDE], ids=["square", "wide"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(
    ("name", "key", "path"),
    [("sd15", VIT, f"{PATH}.attn2"), ("pixart-alpha", "block1", "transformer_blocks.1.attn2")],
)
def test_one_head_attends_to_the_text_as_its_map_says(name, key, path, masked, size):
    heads = {"sd15": {"attention_head_dim": 1}, "pixart-alpha": {"num_attention_heads": 1}}
    width = {"pixart-alpha": {"attention_head_dim": 96}}
    config = network_config(name, reduced=True) | heads[name] | width.get(name, {})
    denoiser = denoiser_of(build_network(config))
    model = denoiser.network.model
    attention = model.get_submodule(path)
    x, cond = inputs(denoiser, size=size)
    if masked:
        mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
        cond = Condition(**{**vars(cond), "text_mask": mask})
    extractor = Extractor(denoiser, [f"{key}-cross-map"], sigma=0.5, early_stop=False)
    with watched(model, path) as seen, watched(model, f"{path}.to_v") as values:
        found = extractor.extract(x, cond, key=[0, 1])[f"{key}-cross-map"]
    assert attention.heads == 1
    torch.testing.assert_close(found.sum(1), torch.ones_like(found[:, 0]), rtol=0, atol=1e-5)
    with torch.no_grad():
        output = projected(attention, as_tokens(found)[:, None], values["output"])
    torch.testing.assert_close(output, seen["output"], rtol=0, atol=1e-5)
    assert bool((found[0, 3:] < 1e-6).all()) == masked


@pytest.mark.parametrize("size", [None, WIDE], ids=["square", "wide"])
@pytest.mark.parametrize("name", ["sd3", "mmdit"])
def test_joint_attention_is_shared_between_image_and_text(name, size):
    denoiser = small_denoiser(name)
    model = denoiser.network.model
    path = "transformer_blocks.1.attn"
    attention = model.get_submodule(path)
    ids = ["block1-self-map", "block1-cross-map", "block1-self-q", "block1-self-k", "block1-self-v"]
    with (
        watched(model, path) as seen,
        watched(model, f"{path}.add_k_proj") as keys,
        watched(model, f"{path}.add_v_proj") as values,
    ):
        own, text, q, k, v = extract(denoiser, ids, size=size, early_stop=False).values()
    assert text.shape[1] == 5
    whole = torch.cat([own, text], 1)
    torch.testing.assert_close(whole.sum(1), torch.ones_like(whole[:, 0]), rtol=0, atol=1e-5)
    with torch.no_grad():
        given = Attended(as_tokens(q), as_tokens(k), keys["output"])
        maps = torch.stack([*head_maps(attention, given)], 1)
        output = projected(attention, maps, torch.cat([as_tokens(v), values["output"]], 1))
    torch.testing.assert_close(output, seen["output"][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(as_tokens(whole), maps.mean(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["sd15", "pixart-qk", "sd3"])
def test_fused_projections_give_the_same(name):
    denoiser = small_denoiser(name)
    model = denoiser.network.model
    plain = extract(denoiser)
    with torch.no_grad():
        model.fuse_qkv_projections()
        fused = extract(denoiser)
        model.unfuse_qkv_projections()
    assert max(relative_error(fused[k], v) for k, v in plain.items()) < 1e-4
    again = extract(denoiser)
    assert all(torch.equal(again[k], v) for k, v in plain.items())


@pytest.mark.parametrize("name", ["sd15", "sd3"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_feed_forward_in_chunks_gives_the_same(name, dim):
    denoiser = small_denoiser(name)
    blocks = [m for m in denoiser.modules() if hasattr(m, "set_chunk_feed_forward")]
    key = f"{VIT}-ffn-inner" if name == "sd15" else "block1-ffn-inner"
    plain = extract(denoiser, [key], size=WIDE)
    for block in blocks:
        block.set_chunk_feed_forward(1, dim)
    path = f"{PATH}.ff.net.0" if name == "sd15" else "transformer_blocks.1.ff.net.0"
    with watched(denoiser.network.model, path) as seen:
        chunked = extract(denoiser, [key], size=WIDE)
    assert seen["calls"] >= 2
    torch.testing.assert_close(chunked[key], plain[key], rtol=0, atol=1e-5)


# ---------------------------------------------------------------- noise and batches


NOISE_IDS = ["unet-in", f"{VIT}-self-map", "up-level2-repeat1-res-out"]


def test_an_image_does_not_depend_on_its_batch():
    denoiser = small_denoiser("sd15")
    extractor = Extractor(denoiser, NOISE_IDS, sigma=0.7)
    x, cond = inputs(denoiser, count=3)
    together = extractor.extract(x, cond, key=[5, 9, 2])
    for row in range(3):
        rows = slice(row, row + 1)
        alone = extractor.extract(x[rows], cond[rows], key=torch.tensor([5, 9, 2])[rows])
        for key, value in alone.items():
            torch.testing.assert_close(value, together[key][rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd3"])
def test_levels_together_equal_levels_alone(name):
    denoiser = small_denoiser(name)
    levels = [0.1, 0.7, 3.0]
    ids = STOPS[name] if name == "sd3" else ("unet-in", "up-level1-repeat0-res-out")
    together = extract(denoiser, list(ids), sigma=levels)
    for index, level in enumerate(levels):
        for key, value in extract(denoiser, list(ids), sigma=level).items():
            assert together[key].shape == (2, 3, *value.shape[1:])
            torch.testing.assert_close(together[key][:, index], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "sigma"), [("sd3", 50 / 950), ("sd15", None)])
def test_a_timestep_is_its_noise_level(name, sigma):
    denoiser = small_denoiser(name)
    x, cond = inputs(denoiser)
    abar = float(TABLE[50])
    sigma = sigma or ((1 - abar) / abar) ** 0.5
    ids = ["transformer-in" if name == "sd3" else "unet-in"]
    by_time = Extractor(denoiser, ids, t=50)
    assert by_time.sigmas == pytest.approx([sigma], rel=1e-6)
    assert not by_time.several
    several = Extractor(denoiser, ids, t=[50, 700]).extract(x, cond, key=[0, 1])[ids[0]]
    torch.testing.assert_close(several[:, 0], by_time.extract(x, cond, key=[0, 1])[ids[0]])


def test_noise_follows_from_image_seed_and_level():
    denoiser = small_denoiser("sd15")
    extractor = Extractor(denoiser, ["unet-in"], sigma=0.7)
    x, cond = inputs(denoiser)
    x = torch.zeros_like(x)

    def noise(key=(0, 1), seed=0, sigma=0.7):
        extractor.sigmas = [sigma]
        found = extractor.extract(x, cond, key=key, seed=seed)["unet-in"]
        return found / sigma * (1 + sigma**2) ** 0.5  # as the network is given it

    first = noise()
    assert torch.equal(noise(), first)
    assert torch.equal(noise((1, 0)), first.flip(0))
    for other in (noise(seed=1), noise((2, 3)), noise(sigma=0.8)):
        difference = (other - first).flatten(1).std(1)
        assert bool((difference > 1).all())  # independent: sqrt(2)
    assert float(first.std()) == pytest.approx(1, abs=0.05)
    clean = Extractor(denoiser, ["unet-in"], sigma=0).extract(x, cond, key=[0, 1])
    assert not clean["unet-in"].any()


# ---------------------------------------------------------------- refusals


def test_other_denoisers_and_levels_are_refused():
    with pytest.raises(UserError, match="not from a Gaussian: give the one that load_denoiser"):
        Extractor(Gaussian(), ["unet-in"], sigma=1.0)  # type: ignore[arg-type]
    denoiser = small_denoiser("unet2d")
    for wrong in (-1.0, [], float("nan"), [[1.0]]):
        with pytest.raises(UserError, match="sigma is one noise level"):
            Extractor(denoiser, ["unet-in"], sigma=wrong)
    for wrong in (-1.0, 1000, [], [50, 2000], float("nan"), [[1.0]]):
        with pytest.raises(UserError, match="t is a timestep or a row of them, 0 to 999, not"):
            Extractor(denoiser, ["unet-in"], t=wrong)
    for both in ({}, {"sigma": 0.1, "t": 50}):
        with pytest.raises(UserError, match="give either sigma or t"):
            Extractor(denoiser, ["unet-in"], **both)
    with pytest.raises(UserError, match=r"no activation 'unet-on'; close ones are unet-in"):
        Extractor(denoiser, ["unet-on"], sigma=1.0)
    extractor = Extractor(denoiser, ["unet-in"], sigma=1.0)
    x, cond = inputs(denoiser)
    with pytest.raises(ValueError, match="and B keys"):
        extractor.extract(x, cond, key=[0])
    denoiser.train()
    with pytest.raises(UserError, match=r"call \.eval\(\)"):
        extractor.extract(x, cond, key=[0, 1])


def test_what_would_be_read_wrongly_is_refused():
    denoiser = small_denoiser("sd15")
    denoiser.network.model.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    with pytest.raises(UserError, match="disable_freeu"):
        extract(denoiser, ["mid-repeat1-res-out"], early_stop=False)
    masked = small_denoiser("mdt")
    x, cond = inputs(masked)
    hidden = torch.zeros(2, 64, dtype=torch.bool)
    hidden[:, ::2] = True
    with pytest.raises(UserError, match="32 tokens of an image of 8 x 8"):
        Extractor(masked, ["block0-out"], sigma=1.0).extract(
            x, Condition(label=cond.label, hidden=hidden), key=[0, 1]
        )
    assert hooks_of(masked) == 0


def test_attention_of_another_kind_that_skips_projections_is_refused():
    denoiser = small_denoiser("sd15")
    attention = denoiser.network.model.get_submodule(f"{PATH}.attn1")
    attention.set_processor(lambda attn, hidden_states, *_, **__: hidden_states)
    with pytest.raises(UserError, match=f"{VIT}-self-q did not run"):
        extract(denoiser, [f"{VIT}-self-q"])
