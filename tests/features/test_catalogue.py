"""Ids and modules, on the meta device: the counts of the paper's code, and a round trip."""

from fractions import Fraction

import pytest
import torch
from features.toys import BUILDERS
from small_models import MODELS, build_network, network_config

from stillhouse.errors import UserError
from stillhouse.features.catalogue import catalogue, look_up


def published_network(model):
    with torch.device("meta"):
        return build_network(network_config(model))


@pytest.fixture(scope="module", params=MODELS)
def network(request):
    return request.param, published_network(request.param)


FACTS = {  # ids, millions of parameters
    "sd15": (197, 859.5),
    "sdxl": (612, 2567.5),
    "pixart-alpha": (28 * 8 + 3, 611.3),
    "sd3": (24 * 7 + 3, 2028.3),
    "dit-xl-2": (28 * 6 + 3, 749.8),
}


def test_a_published_network_has_its_ids(network):
    name, model = network
    count, parameters = FACTS[name]
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(parameters, abs=0.05)
    assert len(catalogue(model)) == count


def test_an_id_leads_to_a_module_and_back(network):
    _, model = network
    known = catalogue(model)
    modules = dict(model.named_modules())
    assert all(a.module in modules for a in known.values())
    direct = [a for a in known.values() if not a.is_map and a.kind != "in"]
    back = {a.module: a.id for a in direct}
    assert len(back) == len(direct)
    assert all(known[back[a.module]] == a for a in direct)
    assert list(known) == [a.id for a in known.values()]


SDXL = {
    "unet-in": ("conv_in", "in", Fraction(1), 4),
    "unet-after-conv-in": ("conv_in", "in", Fraction(1), 320),
    "down-level1-repeat0-res-out": ("down_blocks.1.resnets.0", "down", Fraction(1, 2), 640),
    "down-level1-downsampler-out": ("down_blocks.1.downsamplers.0", "down", Fraction(1, 4), 640),
    "mid-repeat1-res-increment": ("mid_block.resnets.1.conv2", "mid", Fraction(1, 4), 1280),
    "mid-vit-block9-out": (
        "mid_block.attentions.0.transformer_blocks.9",
        "mid",
        Fraction(1, 4),
        1280,
    ),
    "up-level0-repeat0-vit-block7-cross-q": (
        "up_blocks.0.attentions.0.transformer_blocks.7.attn2.to_q",
        "up",
        Fraction(1, 4),
        1280,
    ),
    "up-level1-repeat2-vit-block1-self-k": (
        "up_blocks.1.attentions.2.transformer_blocks.1.attn1.to_k",
        "up",
        Fraction(1, 2),
        640,
    ),
    "up-level0-repeat1-vit-block3-ffn-inner": (
        "up_blocks.0.attentions.1.transformer_blocks.3.ff.net.0",
        "up",
        Fraction(1, 4),
        5120,
    ),
    "up-level1-repeat0-vit-out": ("up_blocks.1.attentions.0", "up", Fraction(1, 2), 640),
    "up-level1-upsampler-out": ("up_blocks.1.upsamplers.0", "up", Fraction(1), 640),
    "up-level2-repeat2-res-out": ("up_blocks.2.resnets.2", "up", Fraction(1), 320),
    "unet-out": ("conv_out", "out", Fraction(1), 4),
}


def test_the_table_of_the_specification_on_sdxl():
    known = catalogue(published_network("sdxl"))
    for name, expected in SDXL.items():
        a = known[name]
        assert (a.module, a.stage, a.scale, a.channels) == expected, name
    cross = known["up-level0-repeat0-vit-block0-cross-map"]
    assert cross.module == "up_blocks.0.attentions.0.transformer_blocks.0.attn2"
    assert cross.shape(128, 96, text_tokens=77) == (77, 32, 24)
    assert known["mid-vit-block0-self-map"].shape(128, 96) == (32 * 24, 32, 24)


def test_transformers_have_blocks_for_stages():
    known = catalogue(published_network("sd3"))
    a = known["block23-self-q"]
    assert (a.module, a.stage, a.block) == ("transformer_blocks.23.attn.to_q", "block", 23)
    assert (a.scale, a.channels) == (Fraction(1, 2), 1536)
    assert known["block3-out"].module == "transformer_blocks.3"


def test_a_second_attention_among_image_tokens_has_its_own_ids():
    known = catalogue(BUILDERS["sd35"]())
    assert known["block2-dual-k"].module == "transformer_blocks.2.attn2.to_k"
    assert "block1-dual-k" not in known


def test_an_unknown_id_names_close_ones():
    known = catalogue(published_network("sd15"))
    with pytest.raises(UserError, match=r"close ones are.* up-level1-repeat2-res-out"):
        look_up(known, ["up-level1-repeat2-res"])
    with pytest.raises(UserError, match="no activation 'zzzz'; close ones are unet-in"):
        look_up(known, ["zzzz"])
    with pytest.raises(UserError, match="at least one id"):
        look_up(known, [])


def test_unknown_networks_and_blocks_are_refused():
    with pytest.raises(UserError, match="activations of a Linear are not known; supported: UNet"):
        catalogue(torch.nn.Linear(2, 2))
    odd = BUILDERS["unet2d"]().config | {
        "down_block_types": ("SkipDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "SkipUpBlock2D"),
        "block_out_channels": (32, 32),
    }
    with pytest.raises(UserError, match="U-Net with SkipDownBlock2D, SkipUpBlock2D cannot"):
        catalogue(build_network({**odd, "_class_name": "UNet2DModel"}))
