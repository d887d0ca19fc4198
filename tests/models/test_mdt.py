"""MDT: a DiT where nothing is hidden; where something is, its encoder cannot see it."""

from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock
from small_models import relative_error, unit_noise
from torch import Tensor

from stillhouse.models.mdt import (
    MDTBlock,
    MDTTransformer2DModel,
    kept_tokens,
    keyed_mask,
    resampled,
)

HEADS, HEAD_WIDTH, CLASSES = 2, 8, 5
WIDTH = HEADS * HEAD_WIDTH
SHAPE = {
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_WIDTH,
    "in_channels": 3,
    "num_layers": 6,
    "sample_size": 8,
    "num_embeds_ada_norm": CLASSES,
}


def small_mdt(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = MDTTransformer2DModel(**SHAPE | {"decoder_layers": 2} | changes)
    for table in (model.encoder_positions, model.decoder_positions):
        torch.nn.init.normal_(table, std=0.1)
    return model.double().eval()


def given(count: int = 3, height: int = 8, width: int = 8) -> dict[str, Tensor]:
    return {
        "hidden_states": unit_noise((count, 3, height, width)).double(),
        "timestep": torch.tensor([20.0, 400.0, 900.0])[:count],
        "class_labels": torch.tensor([0, 4, CLASSES])[:count],
    }


def masks() -> Tensor:
    """Of 16 tokens the three rows hide 4, 7 and none."""
    mask = torch.zeros(3, 16, dtype=torch.bool)
    mask[0, [1, 2, 6, 15]] = True
    mask[1, 5:12] = True
    return mask


def decoder_sees(model: Any, **arguments: Tensor) -> Tensor:
    """What the encoder and the side interpolator hand to the decoder."""
    seen: list[Tensor] = []
    first = model.transformer_blocks[2 * model.pairs]
    hook = first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(**arguments)
    hook.remove()
    return seen[0]


def change_patches(x: Tensor, where: Tensor) -> Tensor:
    """Other pixels in the marked patches of 2 x 2."""
    pixels = where.view(-1, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    return torch.where(pixels, x + 1, x)


# ---------------------------------------------------------------- it is a DiT


def test_a_block_is_diffusers_own():
    torch.manual_seed(0)
    ours = MDTBlock(WIDTH, HEADS, HEAD_WIDTH)
    theirs = BasicTransformerBlock(
        WIDTH,
        HEADS,
        HEAD_WIDTH,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=CLASSES,
        attention_bias=True,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    ).eval()
    report = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert all("norm1.emb" in key for key in report.missing_keys)
    h, time, label = unit_noise((2, 16, WIDTH)), torch.tensor([3.0, 800.0]), torch.tensor([1, 2])
    embedded = theirs.norm1.emb(time, label, hidden_dtype=h.dtype)
    expected = theirs(h, timestep=time, class_labels=label)
    assert torch.equal(ours(h, embedded, None), expected)


def test_without_shortcuts_and_second_positions_it_is_a_dit():
    mdt = small_mdt()
    dit = DiTTransformer2DModel(**SHAPE).double().eval()
    with torch.no_grad():
        mdt.encoder_positions.zero_()
        mdt.decoder_positions.copy_(-mdt.pos_embed.pos_embed.view(4, 4, WIDTH))
        for block in mdt.transformer_blocks[mdt.pairs :]:
            block.skip.weight.copy_(torch.eye(WIDTH, 2 * WIDTH))
            block.skip.bias.zero_()
    dit.pos_embed.load_state_dict(mdt.pos_embed.state_dict())
    for theirs, ours in zip(dit.transformer_blocks, mdt.transformer_blocks, strict=True):
        theirs.load_state_dict(ours.state_dict(), strict=False)
        theirs.norm1.emb.load_state_dict(mdt.embed.state_dict())
    pairs = zip(dit.proj_out_1.parameters(), mdt.norm_out.linear.parameters(), strict=True)
    # The last modulation of a DiT is (shift, scale), that of diffusers' norm (scale, shift).
    for theirs, ours in pairs:
        theirs.data.copy_(ours.data.roll(WIDTH, 0))
    dit.proj_out_2.load_state_dict(mdt.proj_out.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(mdt(**given()).sample, dit(**given()).sample, rtol=0, atol=1e-12)


def test_shortcuts_join_the_encoders_blocks_last_to_first_and_the_input_to_the_decoder():
    model = small_mdt()
    outputs, shortcuts = [], []
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda _, inputs, output: outputs.append(output))
        block.register_forward_pre_hook(lambda _, inputs: shortcuts.append(inputs[3:]))
    model.transformer_blocks[0].register_forward_pre_hook(lambda _, i: outputs.append(i[0]))
    with torch.no_grad():
        model(**given())
    embedded, first, second = outputs[:3]
    expected = [(), (), (second,), (first,), (embedded,), (embedded,)]
    assert [[id(t) for t in row] for row in shortcuts] == [[id(t) for t in e] for e in expected]


# ---------------------------------------------------------------- what is hidden


def test_hiding_nothing_is_the_plain_pass():
    model, mask = small_mdt(), torch.zeros(3, 16, dtype=torch.bool)
    with torch.no_grad():
        assert torch.equal(model(**given()).sample, model(**given(), mask=mask).sample)


def test_the_encoder_cannot_see_what_is_hidden_and_the_decoder_can():
    model, arguments, mask = small_mdt(), given(), masks()
    other = {**arguments, "hidden_states": change_patches(arguments["hidden_states"], mask)}
    assert torch.equal(
        decoder_sees(model, **arguments, mask=mask), decoder_sees(model, **other, mask=mask)
    )
    with torch.no_grad():
        change = (model(**arguments, mask=mask).sample - model(**other, mask=mask).sample).abs()
    assert (change.flatten(1).amax(1) > 1e-4).tolist() == [True, True, False]


def test_a_kept_token_is_felt_in_every_place():
    model, arguments, mask = small_mdt(), given(), masks()
    kept = torch.zeros_like(mask)
    kept[:, 0] = True
    other = {**arguments, "hidden_states": change_patches(arguments["hidden_states"], kept)}
    change = decoder_sees(model, **arguments, mask=mask) - decoder_sees(model, **other, mask=mask)
    assert bool((change.abs().amax(2) > 1e-9).all())


def test_the_encoder_works_on_kept_tokens_only():
    model, lengths = small_mdt(), []
    for block in (*model.transformer_blocks, *model.side_blocks):
        block.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    with torch.no_grad():
        model(**given(2), mask=masks()[:2])  # 12 and 9 tokens are left
    assert lengths == [12] * 4 + [16] + [16] * 2


def test_the_side_interpolator_changes_hidden_places_alone():
    model, mask = small_mdt(), masks()
    before = decoder_sees(model, **given(), mask=mask)
    with torch.no_grad():
        model.side_blocks[0].ff.net[2].weight.add_(0.1)
        model.mask_token.add_(0.1)
    change = (decoder_sees(model, **given(), mask=mask) - before).abs().amax(2)
    assert torch.equal(change > 0, mask)


def test_a_rows_outcome_does_not_depend_on_its_company():
    model, arguments, mask = small_mdt(), given(), masks()
    with torch.no_grad():
        together = model(**arguments, mask=mask).sample
        for row in range(3):
            alone = {key: value[row : row + 1] for key, value in arguments.items()}
            one = model(**alone, mask=mask[row : row + 1]).sample
            torch.testing.assert_close(one, together[row : row + 1], rtol=0, atol=1e-12)


def test_kept_tokens_stand_in_order_and_padding_is_named():
    places, real = kept_tokens(masks()[:2])
    assert places[0].tolist() == [0, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14]
    assert places[1, :9].tolist() == [0, 1, 2, 3, 4, 12, 13, 14, 15]
    assert real is not None
    assert real[:, 0].sum(1).tolist() == [12, 9]
    assert kept_tokens(masks()[:1]).real is None


def test_masks_that_fit_nothing_are_refused():
    model = small_mdt()
    with pytest.raises(ValueError, match=r"a mask of shape \[3, 15\] for tokens of \[3, 16\]"):
        model(**given(), mask=masks()[:, 1:])
    with pytest.raises(ValueError, match="at least one token in every row"):
        model(**given(), mask=torch.ones(3, 16, dtype=torch.bool))


# ---------------------------------------------------------------- which tokens are hidden


def test_masks_follow_from_keys_alone():
    keys = torch.arange(100, 164)
    mask = keyed_mask(keys, 256, seed=3)
    assert torch.equal(mask, torch.cat([keyed_mask(part, 256, seed=3) for part in keys.split(7)]))
    assert not torch.equal(mask, keyed_mask(keys, 256, seed=4))
    assert not torch.equal(mask[0], mask[1])


def test_between_three_and_five_tenths_of_the_tokens_are_hidden_anywhere():
    mask = keyed_mask(torch.arange(2000), 100, seed=0).double()
    counts = mask.sum(1)
    assert (int(counts.min()), int(counts.max())) == (30, 49)
    # Uniform over 30..49: mean 39.5 with standard error 0.13; each place 0.395 within 0.011.
    assert float(counts.mean()) == pytest.approx(39.5, abs=0.5)
    assert float((mask.mean(0) - 0.395).abs().max()) < 0.05
    assert bool((keyed_mask(torch.arange(9), 16, seed=0, share=(0, 0)) == 0).all())


# ---------------------------------------------------------------- other sizes, files, precision


def test_learnt_positions_are_resampled():
    table = unit_noise((4, 4, 6))
    assert torch.equal(resampled(table, 4, 4), table)
    larger = resampled(table, 8, 12)
    assert torch.equal(larger[::2, ::3], table)
    torch.testing.assert_close(larger[1, 0], (table[0, 0] + table[1, 0]) / 2)
    torch.testing.assert_close(larger[0, 1], (2 * table[0, 0] + table[0, 1]) / 3)


def test_larger_images_put_the_decoders_positions_where_they_were():
    model = small_mdt()
    low, high = (model._decoder_positions(n, n).view(n, n, -1) for n in (4, 8))
    assert torch.equal(high[::2, ::2], low)


def test_a_wide_image_is_put_together_from_its_patches():
    model = small_mdt(out_channels=2)
    with torch.no_grad():
        model.proj_out.weight.zero_()
        model.proj_out.bias.copy_(torch.arange(8.0))  # patch row, patch column, channel
        image = model(**given(1, 4, 12)).sample[0]
    assert image.shape == (2, 4, 12)
    assert image[:, :2, :2].tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert torch.equal(image, image[:, :2, :2].repeat(1, 2, 6))


def test_tokens_come_back_to_their_own_places():
    """An output that only looks at its own token: the sum of the patch's pixels."""
    model = small_mdt(out_channels=1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
        for block in model.transformer_blocks[model.pairs :]:
            block.skip.weight.copy_(torch.eye(WIDTH, 2 * WIDTH))
        model.pos_embed.pos_embed.zero_()
        model.pos_embed.proj.weight[0] = 1
        model.norm_out.norm = torch.nn.Identity()
        model.proj_out.weight[:, 0] = 1
        x = given(1)["hidden_states"]
        output = model(**given(1)).sample
    sums = torch.nn.functional.avg_pool2d(x.sum(1, keepdim=True), 2) * 4
    torch.testing.assert_close(
        output, sums.repeat_interleave(2, 2).repeat_interleave(2, 3), rtol=0, atol=1e-12
    )


def test_it_comes_back_from_a_file_whole(tmp_path):
    model = small_mdt().float()
    model.save_pretrained(tmp_path)
    again, report = MDTTransformer2DModel.from_pretrained(
        tmp_path, output_loading_info=True, low_cpu_mem_usage=False
    )
    assert not any(report.values())
    arguments = given() | {"hidden_states": given()["hidden_states"].float()}
    with torch.no_grad():
        for mask in (None, masks()):
            first, second = (m(**arguments, mask=mask).sample for m in (model, again.eval()))
            assert torch.equal(first, second)


def test_the_residual_stream_stays_in_float32_under_autocast():
    model, seen = small_mdt().float(), []
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    arguments = given() | {"hidden_states": given()["hidden_states"].float()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output = model(**arguments, mask=masks()).sample
    assert set(seen) == {torch.float32}
    assert bool(torch.isfinite(output).all())


@pytest.mark.parametrize("side", [8, 12])
def test_it_computes_in_bfloat16(side):
    model, arguments = small_mdt(), given(3, side, side)
    mask = torch.arange(side**2 // 4).expand(3, -1) < 5
    with torch.no_grad():
        exact = model(**arguments, mask=mask).sample
        arguments["hidden_states"] = arguments["hidden_states"].bfloat16()
        rough = model.bfloat16()(**arguments, mask=mask).sample
    assert rough.dtype == torch.bfloat16
    assert relative_error(rough, exact) < 0.05


def test_an_encoder_that_does_not_pair_is_refused():
    with pytest.raises(ValueError, match="the encoder has 3 blocks, which must be an even number"):
        small_mdt(decoder_layers=3)
