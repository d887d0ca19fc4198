"""Positions of patches at another resolution, in memory and through a file."""

from typing import Any

import pytest
import torch
from small_models import build_network, network_config, unit_noise
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.models.backbones import BACKBONES
from stillhouse.models.positions import carry_positions, data_size, grid_of

CHANNELS, TOKENS, CLASSES = 3, 12, 10
WITH_POSITIONS = ("dit", "mdt", "pixart", "mmdit")
EACH = pytest.mark.parametrize("name", WITH_POSITIONS)


def build(name: str, resolution: int = 8, seed: int = 0, **changes: Any) -> Any:
    backbone = BACKBONES[name]
    told = {"classes": CLASSES, "token_width": TOKENS}[backbone.takes]
    torch.manual_seed(seed)
    model = backbone.build(
        "tiny", channels=CHANNELS, resolution=resolution, **{backbone.takes: told} | changes
    )
    if name == "mdt":
        with torch.no_grad():
            model.encoder_positions.copy_(unit_noise(model.encoder_positions.shape, 5))
            model.decoder_positions.copy_(unit_noise(model.decoder_positions.shape, 6))
    return model.eval()


def sd3(resolution: int = 16, **changes: Any) -> Any:
    """A small version of the published one: positions are a table of 24 x 24."""
    config = network_config("sd3", reduced=True) | {"sample_size": resolution} | changes
    return build_network(config)


def table(model: Any, size: int) -> Tensor:
    """What is added to the patches of an image, [patches, patches, width]."""
    embed = model.pos_embed
    proj = embed.proj
    count = size // embed.patch_size
    with torch.no_grad():
        kept = [p.clone() for p in proj.parameters()]
        for parameter in proj.parameters():
            parameter.zero_()
        found = embed(torch.zeros(1, proj.in_channels, size, size)).view(count, count, -1)
        for parameter, weights in zip(proj.parameters(), kept, strict=True):
            parameter.copy_(weights)
        if hasattr(model, "encoder_positions"):
            from stillhouse.models.mdt import resampled

            found = found + resampled(model.encoder_positions, count, count)
    return found


def through_a_file(model: Any, folder: Any) -> Any:
    model.save_pretrained(folder)
    again, report = type(model).from_pretrained(
        folder, output_loading_info=True, low_cpu_mem_usage=False
    )
    assert not any(report.values())
    return again.eval()


# ---------------------------------------------------------------- the two ways


@EACH
@pytest.mark.parametrize("scale", [2, 3])
def test_resampled_positions_contain_the_old_ones_at_every_nth_patch(name, scale, tmp_path):
    source, target = build(name), build(name, 8 * scale, seed=1)
    low = table(source, 8)
    carry_positions(source, target, "resample")
    for model in (target, through_a_file(target, tmp_path)):
        high = table(model, 8 * scale)
        assert torch.equal(high[::scale, ::scale], low)
        assert not torch.allclose(high[:4, :4], low, atol=1e-2)
        assert torch.equal(table(model, 8), low)  # smaller images stay what they were
        assert data_size(model) == 8 * scale


@EACH
@pytest.mark.parametrize("scale", [2, 3])
def test_extrapolated_positions_begin_with_the_old_ones(name, scale, tmp_path):
    source, target = build(name), build(name, 8 * scale, seed=1)
    low = table(source, 8)
    carry_positions(source, target, "extrapolate")
    for model in (target, through_a_file(target, tmp_path)):
        high = table(model, 8 * scale)
        assert torch.equal(high[:4, :4], low)
        assert not torch.allclose(high[::scale, ::scale], low, atol=1e-2)
        assert data_size(model) == model.config.sample_size == 8 * scale


@EACH
def test_resampling_goes_down_as_well(name, tmp_path):
    source, target = build(name, 16), build(name, 8)
    carry_positions(source, target, "resample")
    for model in (target, through_a_file(target, tmp_path)):
        assert torch.equal(table(model, 8), table(source, 16)[::2, ::2])


@EACH
@pytest.mark.parametrize("how", ["resample", "extrapolate"])
def test_at_the_same_size_positions_are_the_same_whatever_they_are(name, how):
    """Also those of a model that was itself resampled."""
    source = build(name, 16, seed=1)
    carry_positions(build(name), source, "resample")
    target = build(name, 16)
    assert set(carry_positions(source, target, how).values()) == {""}
    assert torch.equal(table(target, 16), table(source, 16))
    assert grid_of(target) == grid_of(source)


@EACH
def test_two_steps_are_one(name):
    middle, twice, once = build(name, 16), build(name, 32), build(name, 32)
    carry_positions(build(name), middle, "resample")
    carry_positions(middle, twice, "resample")
    carry_positions(build(name), once, "resample")
    assert torch.equal(table(twice, 32), table(once, 32))


@EACH
def test_a_resampled_model_counts_on_at_its_own_steps(name):
    middle, target = build(name, 16), build(name, 32)
    carry_positions(build(name), middle, "resample")
    carry_positions(middle, target, "extrapolate")
    # But for the learnt table of an MDT at its old edge, where it was constant and now fades.
    seen = 7 if name == "mdt" else 8
    torch.testing.assert_close(table(target, 32)[:seen, :seen], table(middle, 16)[:seen, :seen])


def test_what_was_done_is_said():
    said = carry_positions(build("mdt"), build("mdt", 16), "resample")
    assert said == {
        "pos_embed.pos_embed": "positions: sinusoids at i * 0.5 for 8 a side, computed",
        "encoder_positions": "positions: a learnt table, read between its 4 x 4 entries",
        "decoder_positions": "positions: a learnt table, read between its 4 x 4 entries",
    }
    said = carry_positions(build("mdt"), build("mdt", 16), "extrapolate")
    assert said["encoder_positions"] == "positions: a learnt table of 4 x 4, zero beyond"
    assert carry_positions(build("unet"), build("unet", 16), "resample") == {}


def test_learnt_tables_stay_frozen_where_they_were():
    target = build("mdt", 16)
    target.encoder_positions.requires_grad_(False)
    carry_positions(build("mdt"), target, "resample")
    assert not target.encoder_positions.requires_grad
    assert target.decoder_positions.requires_grad


def test_a_step_that_is_no_whole_number_of_patches_is_refused():
    middle = build("dit", 12)
    carry_positions(build("dit"), middle, "resample")  # 6 patches at steps of 2/3
    with pytest.raises(UserError, match=r"8 patches at steps of 0\.666667 are no whole number"):
        carry_positions(middle, build("dit", 16), "extrapolate")


# ---------------------------------------------------------------- tables saved with the weights


@pytest.mark.parametrize("most", [24, None], ids=["published", "ours"])
def test_a_published_table_is_resampled_around_its_middle(most, tmp_path):
    source, target = sd3(), sd3(32, pos_embed_max_size=most)
    said = carry_positions(source, target, "resample")
    # 8 patches from the 9th of 24, a third of a step each; then 16 from the same place.
    assert said == {
        "pos_embed.pos_embed": "positions: sinusoids at 2.66667 + i * 0.166667 for 16 a side, "
        "computed"
    }
    for model in (target, through_a_file(target, tmp_path)):
        torch.testing.assert_close(table(model, 32)[::2, ::2], table(source, 16))
        assert data_size(model) == 32
    twice, once = sd3(64), sd3(64)
    said = carry_positions(through_a_file(target, tmp_path), twice, "resample")
    assert said["pos_embed.pos_embed"].endswith(
        "sinusoids at 2.66667 + i * 0.0833333 for 32 a side, computed"
    )
    carry_positions(source, once, "resample")
    torch.testing.assert_close(table(twice, 64), table(once, 64))


def test_a_published_table_that_is_large_enough_is_kept_to_count_on_in():
    source, target = sd3(), sd3(32)
    assert set(carry_positions(source, target, "extrapolate").values()) == {""}
    assert torch.equal(target.pos_embed.pos_embed, source.pos_embed.pos_embed)
    assert torch.equal(table(target, 32)[4:12, 4:12], table(source, 16))


def test_a_published_table_grows_where_it_would_end():
    source, target = sd3(), sd3(64)
    carry_positions(source, target, "extrapolate")
    assert target.config.pos_embed_max_size == 32
    torch.testing.assert_close(table(target, 64)[12:20, 12:20], table(source, 16))
    torch.testing.assert_close(table(target, 64)[4:28, 4:28], table(source, 48))


def test_a_table_of_something_else_is_read_between_its_entries(tmp_path):
    source, target = sd3(), sd3(32)
    source.pos_embed.pos_embed.copy_(unit_noise(source.pos_embed.pos_embed.shape))
    said = carry_positions(source, target, "resample")
    assert said["pos_embed.pos_embed"] == (
        "positions: a learnt table, read between its 8 x 8 entries"
    )
    low = table(source, 16)
    for model in (target, through_a_file(target, tmp_path)):
        high = table(model, 32)
        assert torch.equal(high[::2, ::2], low)
        torch.testing.assert_close(high[1, ::2][:7], (low[0] + low[1])[:7] / 2)
    with pytest.raises(UserError, match="a table that ends: resample"):
        carry_positions(source, sd3(64), "extrapolate")


def test_the_same_table_is_taken_over_bit_for_bit():
    source, target = sd3(), sd3()
    source.pos_embed.pos_embed.mul_(1.5)
    assert carry_positions(source, target, "resample") == {"pos_embed.pos_embed": ""}
    assert torch.equal(target.pos_embed.pos_embed, source.pos_embed.pos_embed)
    assert target.pos_embed.pos_embed is not source.pos_embed.pos_embed
