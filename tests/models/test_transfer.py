"""Weights carried from one network to another: what is kept, and that nothing is left unsaid."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import (
    MODELS,
    build_network,
    network_config,
    random_condition,
    small_unet,
    unit_noise,
)
from torch import Tensor

from stillhouse.errors import UserError
from stillhouse.models import DiffusersNetwork
from stillhouse.models.backbones import BACKBONES
from stillhouse.models.conditioning import Parts, Text, conditioned
from stillhouse.models.control import Layout
from stillhouse.models.networks import attended_width
from stillhouse.models.plane import PlaneNetwork
from stillhouse.models.positions import data_size
from stillhouse.models.transfer import FATES, Account, transfer
from stillhouse.pipelines import load_denoiser
from stillhouse.pipelines.save import save_denoiser
from stillhouse.process import Condition

CLASSES, TOKENS = 10, 12
EACH = pytest.mark.parametrize("name", BACKBONES)
PATCHED = pytest.mark.parametrize("name", ["dit", "mdt", "pixart", "mmdit"])
FRAMED = Layout(("flip", "aspect"), (("style", ("noto", "twemoji")),), ("height", "width"))


def network(
    name: str,
    resolution: int = 8,
    *,
    parts: Parts | None = None,
    seed: int = 0,
    channels: int = 3,
    **changes: Any,
) -> DiffusersNetwork:
    """A tiny backbone; networks of different seeds have no weight in common."""
    backbone = BACKBONES[name]
    told = {"classes": CLASSES, "token_width": TOKENS}[backbone.takes]
    torch.manual_seed(seed)
    model = backbone.build(
        "tiny", channels=channels, resolution=resolution, **{backbone.takes: told} | changes
    )
    if name == "mdt":
        torch.nn.init.normal_(model.encoder_positions, std=0.5)
        torch.nn.init.normal_(model.decoder_positions, std=0.5)
    conditioning = None if parts is None else conditioned(model, parts, attended_width(model))
    return DiffusersNetwork(model, None, conditioning).eval()


def told_by_token(name: str, classes: int = CLASSES, **parts: Any) -> Parts:
    """Classes as tokens, for the networks that take tokens."""
    return Parts(classes=classes if BACKBONES[name].takes == "token_width" else 0, **parts)


def run(net: DiffusersNetwork, size: int = 8, **said: Tensor) -> Tensor:
    x = unit_noise((2, net.model.config.in_channels, size, size))
    cond = replace(random_condition(net.condition_shapes, 2), **said)
    with torch.no_grad():
        return net(x, torch.tensor([20.0, 700.0]), cond)


def tensors(net: DiffusersNetwork) -> dict[str, Tensor]:
    return dict(net.named_parameters()) | dict(net.named_buffers())


def fates(account: Account) -> dict[str, str]:
    return {entry.name: entry.fate for entry in account.entries if entry.fate != "dropped"}


def reasons(account: Account, fate: Any = "fresh") -> dict[str, str]:
    return {entry.name: entry.why for entry in account.of(fate)}


def all_accounted(account: Account, source: DiffusersNetwork, target: DiffusersNetwork) -> None:
    """Each tensor of the target in one list; each of the source used or dropped."""
    before, after = tensors(source), tensors(target)
    lists = {fate: [e.name for e in account.of(fate)] for fate in FATES}
    names = [*lists["kept"], *lists["resampled"], *lists["fresh"]]
    assert sorted(names) == sorted(after)
    partly = {entry.name for entry in account.of("fresh") if "was kept" in entry.why}
    used = {*lists["kept"], *lists["resampled"], *partly}
    assert set(lists["dropped"]) == before.keys() - used
    for entry in account.of("kept"):
        assert entry.why or torch.equal(after[entry.name], before[entry.name]), entry.name
    sizes = {entry.name: entry.weights for entry in account.entries if entry.fate != "dropped"}
    assert sizes == {name: tensor.numel() for name, tensor in after.items()}


# ---------------------------------------------------------------- identity


@EACH
@pytest.mark.parametrize("positions", ["resample", "extrapolate"])
def test_at_equal_resolution_and_conditions_it_is_the_identity(name, positions):
    parts = told_by_token(name, layout=FRAMED, steps=True)
    source, target = network(name, parts=parts), network(name, parts=parts, seed=1)
    assert not torch.allclose(run(source), run(target), atol=1e-3)
    account = transfer(source, target, positions=positions)
    assert torch.equal(run(source), run(target))
    assert set(fates(account).values()) == {"kept"}
    assert (account.share, account.scale, account.changes) == (1, 1, ())
    assert not account.of("dropped")
    all_accounted(account, source, target)


@pytest.mark.parametrize("model", MODELS)
def test_published_checkpoints_are_carried_whole(model):
    config = network_config(model, reduced=True)
    source, target = (DiffusersNetwork(build_network(config, seed)) for seed in (0, 1))
    account = transfer(source, target)
    assert torch.equal(run(source, 16), run(target, 16))
    all_accounted(account, source, target)


def test_networks_without_images_are_carried_too():
    source, target = (DiffusersNetwork(PlaneNetwork(num_class_embeds=n + 1), n) for n in (4, 7))
    account = transfer(source, target)
    assert reasons(account) == {
        "model.label.weight": "classes: 8 x 128, was 5 x 128; the row for none was kept"
    }
    x, time = unit_noise((3, 2)), torch.tensor([0.1, 0.5, 0.9])
    none = [Condition(label=torch.full((3,), n)) for n in (4, 7)]
    with torch.no_grad():
        assert torch.equal(source(x, time, none[0]), target(x, time, none[1]))


# ---------------------------------------------------------------- resolution


@EACH
def test_resampled_it_is_the_old_network_called_with_larger_images(name):
    """diffusers resamples positions by itself where images are not of the config's size."""
    source, target = network(name), network(name, 16, seed=1)
    expected = run(source, 16)
    account = transfer(source, target)
    assert torch.equal(run(target, 16), expected)
    assert account.scale == 2
    assert not account.of("fresh")
    assert [e.name for e in account.of("resampled")] == [
        f"model.{part}"
        for part in ("encoder_positions", "decoder_positions", "pos_embed.pos_embed")
        if name != "unet" and (name == "mdt" or "embed" in part)
    ]
    all_accounted(account, source, target)


@pytest.mark.parametrize("name", ["dit", "pixart", "mmdit"])
def test_extrapolated_it_is_the_old_weights_in_a_network_built_anew(name):
    source, target, anew = network(name), network(name, 16, seed=1), network(name, 16, seed=2)
    anew.load_state_dict(source.state_dict())
    transfer(source, target, positions="extrapolate")
    assert torch.equal(run(target, 16), run(anew, 16))
    assert not torch.allclose(run(target, 16), run(source, 16), atol=1e-3)


def patches(images: Tensor) -> Tensor:
    """[B, C, n, 2, n, 2]: patch (i, j) is [:, :, i, :, j]."""
    return images.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))


def grown(net: DiffusersNetwork, small: Tensor) -> Tensor:
    """Of an image in which each patch stands four times, what becomes of it."""
    large = patches(small).repeat_interleave(2, 2).repeat_interleave(2, 4)
    images = large.flatten(4, 5).flatten(2, 3)
    cond = random_condition(net.condition_shapes, 2)
    with torch.no_grad():
        return patches(net(images, torch.tensor([20.0, 700.0]), cond))


def silence_attention(net: DiffusersNetwork) -> None:
    for name, parameter in net.named_parameters():
        if ".to_out." in name or "to_add_out" in name:
            torch.nn.init.zeros_(parameter)


@PATCHED
def test_without_attention_a_patch_is_drawn_by_what_it_is_and_where_it_stands(name):
    """Then patch 2i of the larger image is patch i of the smaller, to the bit of a matrix product;
    or, where positions count on, patch i is."""
    source = network(name)
    silence_attention(source)
    small = unit_noise((2, 3, 8, 8))
    with torch.no_grad():
        cond = random_condition(source.condition_shapes, 2)
        low = patches(source(small, torch.tensor([20.0, 700.0]), cond))
    resampled, further = network(name, 16, seed=1), network(name, 16, seed=1)
    transfer(source, resampled)
    transfer(source, further, positions="extrapolate")
    torch.testing.assert_close(grown(resampled, small)[:, :, ::2, :, ::2], low)
    assert not torch.allclose(grown(further, small)[:, :, ::2, :, ::2], low, atol=1e-2)
    corner = patches(small).repeat(1, 1, 2, 1, 2, 1).flatten(4, 5).flatten(2, 3)
    with torch.no_grad():
        high = patches(further(corner, torch.tensor([20.0, 700.0]), cond))
    torch.testing.assert_close(high[:, :, :4, :, :4], low)


@PATCHED
def test_with_attention_the_larger_image_is_drawn_alike_only_if_resampled(name):
    """Attention to four copies of a token is attention to it; their positions differ a little."""
    source, small = network(name), unit_noise((2, 3, 8, 8))
    cond = random_condition(source.condition_shapes, 2)
    with torch.no_grad():
        low = patches(source(small, torch.tensor([20.0, 700.0]), cond))
    errors = {}
    for how in ("resample", "extrapolate"):
        target = network(name, 16, seed=1)
        transfer(source, target, positions=how)
        high = grown(target, small)[:, :, ::2, :, ::2]
        errors[how] = float((high - low).norm() / low.norm())
    assert errors["resample"] < 0.25 * errors["extrapolate"]


@EACH
@pytest.mark.parametrize("positions", ["resample", "extrapolate"])
def test_it_comes_back_from_a_file_as_it_was(name, positions, tmp_path):
    parts = told_by_token(name, layout=FRAMED)
    source, target = network(name, parts=parts), network(name, 16, parts=parts, seed=1)
    transfer(source, target, positions=positions)
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    save_denoiser(tmp_path, target, target.state_dict(), flow, facts={})
    again: Any = load_denoiser(tmp_path).network
    assert torch.equal(run(again, 16), run(target, 16))
    assert data_size(again.model) == 16
    # And goes on from there.
    next_one, wanted = network(name, 32, parts=parts, seed=2), network(name, 32, parts=parts)
    transfer(again, next_one, positions=positions)
    transfer(target, wanted, positions=positions)
    assert torch.equal(run(next_one, 32), run(wanted, 32))


# ---------------------------------------------------------------- codec


@EACH
def test_other_channels_start_input_and_output_anew(name):
    source, target = network(name), network(name, channels=16, seed=1)
    initial = {k: v.clone() for k, v in tensors(target).items()}
    account = transfer(source, target)
    ends = {"unet": ("conv_in", "conv_out"), "dit": ("pos_embed.proj", "proj_out_2")}
    inward, outward = ends.get(name, ("pos_embed.proj", "proj_out"))
    assert reasons(account).keys() == {
        f"model.{end}.{kind}" for end in (inward, outward) for kind in ("weight", "bias")
    }
    for entry in account.of("fresh"):
        assert torch.equal(tensors(target)[entry.name], initial[entry.name])
        assert entry.why.startswith("input: " if inward in entry.name else "output: ")
    assert account.changes == ("in_channels: 3 -> 16", "out_channels: 3 -> 16")
    assert run(target).shape == (2, 16, 8, 8)
    all_accounted(account, source, target)


def test_another_codec_of_as_many_channels_is_asked_for_by_name():
    source, target = network("pixart"), network("pixart", seed=1)
    account = transfer(source, target, fresh=("input", "output", "*.scale_shift_table"))
    found = reasons(account)
    assert set(found.values()) == {
        "input: as asked for",
        "output: as asked for",
        "*.scale_shift_table: as asked for",
    }
    assert found["model.pos_embed.proj.bias"] == "input: as asked for"
    assert not torch.equal(target.model.pos_embed.proj.weight, source.model.pos_embed.proj.weight)
    all_accounted(account, source, target)


@pytest.mark.parametrize("model", ["dit-xl-2", "pixart-alpha"])
def test_variances_are_dropped_where_the_target_has_none(model):
    config = network_config(model, reduced=True)
    source = DiffusersNetwork(build_network(config))
    target = DiffusersNetwork(build_network(config | {"out_channels": 4}, seed=1))
    account = transfer(source, target)
    assert torch.equal(run(target, 16), run(source, 16)[:, :4])
    assert not account.of("fresh")
    said = [why for why in reasons(account, "kept").values() if why]
    assert len(said) == 2
    assert all(why.endswith("4 of 8 channels, without variances") for why in said)


# ---------------------------------------------------------------- classes


@EACH
def test_other_classes_start_anew_and_none_stays_none(name):
    source = network(name, parts=told_by_token(name))
    changes = {} if told_by_token(name).classes else {"classes": 7}
    target = network(name, parts=told_by_token(name, 7), seed=1, **changes)
    account = transfer(source, target)
    assert reasons(account)
    assert all("classes: 8 x" in why and "was 11 x" in why for why in reasons(account).values())
    none = [torch.full((2,), net.null_label) for net in (source, target)]
    assert torch.equal(run(source, label=none[0]), run(target, label=none[1]))
    assert not torch.allclose(run(source), run(target), atol=1e-4)
    all_accounted(account, source, target)


def test_other_classes_of_the_same_number_are_asked_for():
    source, target = network("dit"), network("dit", seed=1)
    mine = "model.transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight"
    initial = tensors(target)[mine].clone()
    account = transfer(source, target, fresh=["classes"])
    found = tensors(target)[mine]
    assert torch.equal(found[:CLASSES], initial[:CLASSES])
    assert torch.equal(found[CLASSES], tensors(source)[mine][CLASSES])
    assert reasons(account)[mine] == "classes: as asked for; the row for none was kept"


def test_a_unet_keeps_the_row_that_stands_for_none():
    source = DiffusersNetwork(small_unet(num_class_embeds=6), 5)
    target = DiffusersNetwork(small_unet(1, num_class_embeds=9), 8)
    transfer(source, target)
    label = [torch.full((2,), n) for n in (5, 8)]
    assert torch.equal(run(source, label=label[0]), run(target, label=label[1]))
    unsaid = DiffusersNetwork(small_unet(2, num_class_embeds=9))
    account = transfer(source, unsaid)
    assert "kept" not in reasons(account)["model.class_embedding.weight"]


# ---------------------------------------------------------------- control and text


@EACH
def test_control_that_is_added_changes_nothing_at_first(name):
    source = network(name, parts=told_by_token(name))
    target = network(name, parts=told_by_token(name, layout=FRAMED), seed=1)
    account = transfer(source, target)
    label = {"label": torch.tensor([1, 2])}
    said = random_condition(target.condition_shapes, 2)
    assert said.control is not None
    styles = torch.tensor([0.0, 1.0])
    control = said.control.clone()
    control[:, 2] = styles
    assert torch.equal(run(target, control=control, **label), run(source, **label))
    assert set(reasons(account).values()) == {"control: new, and changes nothing at first"}
    all_accounted(account, source, target)


@EACH
def test_control_that_is_left_out_is_dropped_by_name(name):
    source = network(name, parts=told_by_token(name, layout=FRAMED, steps=True))
    target = network(name, parts=told_by_token(name), seed=1)
    account = transfer(source, target)
    dropped = reasons(account, "dropped")
    assert set(dropped.values()) == {"not in the target"}
    assert all(k.startswith(("conditioning.control.", "conditioning.steps.")) for k in dropped)
    assert "control: flip, aspect, style, height, width -> none" in account.changes
    all_accounted(account, source, target)


def test_control_is_carried_by_name_not_by_place():
    """Columns in another order, one more and one less of each; their values move with them."""
    other = Layout(
        ("aspect", "crop_top"),
        (("mood", ("glad", "sad")), ("style", ("twemoji", "fluent", "noto"))),
        ("width", "height"),
    )
    tinted = replace(FRAMED, styles=(("tint", ("warm", "cold")), *FRAMED.styles))
    source = network("pixart", parts=Parts(classes=3, layout=tinted))
    with torch.no_grad():  # a tint that says nothing, so that it can be left out
        source.get_parameter("conditioning.control.styles.style0.weight").zero_()
    target = network("pixart", parts=Parts(classes=3, layout=other), seed=1)
    account = transfer(source, target)
    nan, label = float("nan"), torch.tensor([1, 2])
    # flip, aspect, tint, style, height, width; and aspect, crop_top, mood, style, width, height
    old = torch.tensor([[nan, 1.5, 0.0, 0.0, 64.0, 48.0], [nan, 0.5, 1.0, 1.0, 32.0, 96.0]])
    new = torch.tensor([[1.5, 7.0, 0.0, 2.0, 48.0, 64.0], [0.5, 3.0, 1.0, 0.0, 96.0, 32.0]])
    expected = run(source, control=old, label=label)
    torch.testing.assert_close(run(target, control=new, label=label), expected)
    unsaid, fluent = old.clone(), new.clone()
    unsaid[:, 3], fluent[:, 3] = nan, 1.0
    expected = run(source, control=unsaid, label=label)
    torch.testing.assert_close(run(target, control=fluent, label=label), expected)
    said = reasons(account, "kept")
    assert said["conditioning.control.composition.inward.weight"] == (
        "control: crop_top new, and change nothing at first; flip dropped"
    )
    assert "fluent new" in said["conditioning.control.styles.style1.weight"]
    assert reasons(account) == {
        "conditioning.control.styles.style0.weight": "control: new, and changes nothing at first"
    }
    assert reasons(account, "dropped") == {"conditioning.control.styles.style0.weight": "made anew"}


def test_other_columns_of_the_same_number_do_not_take_the_old_ones_place():
    source = network("dit", parts=Parts(layout=Layout(("flip",), (), ("height",))))
    target = network("dit", parts=Parts(layout=Layout(("aspect",), (), ("height",))), seed=1)
    account = transfer(source, target)
    assert len(reasons(account)) == 4
    assert all(".composition." in name for name in reasons(account))
    all_accounted(account, source, target)


CAPTIONS = Text("encoder", "sha256:1", 5)


@pytest.mark.parametrize("name", ["unet", "pixart", "mmdit"])
def test_text_of_another_encoder_starts_its_projection_anew(name):
    for before, after, anew in (
        (Parts(text=CAPTIONS), Parts(text=CAPTIONS), False),
        (Parts(text=CAPTIONS), Parts(text=replace(CAPTIONS, digest="sha256:2")), True),
        (Parts(classes=4), Parts(text=CAPTIONS), True),
        (Parts(text=CAPTIONS), Parts(classes=4), False),
        (None, Parts(text=CAPTIONS), False),
    ):
        source, target = network(name, parts=before), network(name, parts=after, seed=1)
        account = transfer(source, target)
        text = {k: v for k, v in reasons(account).items() if k != "conditioning.tokens.weight"}
        assert bool(text) == anew
        assert set(text.values()) <= {"text: tokens come from another encoder"}
        all_accounted(account, source, target)


@pytest.mark.parametrize(
    ("name", "count"), [("unet", 12), ("pixart", 4), ("mmdit", 2)], ids=lambda v: str(v)
)
def test_tokens_of_another_width_start_their_projection_anew(name, count):
    source, target = network(name), network(name, token_width=20, seed=1)
    account = transfer(source, target)
    found = reasons(account)
    assert len(found) == count or name == "unet"
    assert all(why.startswith("text: ") and "20" in why for why in found.values())
    kept = "model.transformer_blocks.0.attn2.to_k.weight"
    assert name != "pixart" or fates(account)[kept] == "kept"
    all_accounted(account, source, target)


# ---------------------------------------------------------------- the account


def test_the_account_reads_as_a_list_of_what_became_of_what():
    source = network("dit", parts=Parts(layout=Layout(("flip",))))
    target = network("dit", 16, channels=4, classes=7, seed=1)
    account = transfer(source, target)
    assert str(account).splitlines() == [
        "99.4% of the weights were carried over",
        "kept       74 tensors, 1,417,984 numbers",
        "resampled  1 tensor, 2,048 numbers: positions: sinusoids at i * 0.5 for 8 a side, "
        "computed (model.pos_embed.pos_embed)",
        "fresh      2 tensors, 2,176 numbers: input: 128 x 4 x 2 x 2, was 128 x 3 x 2 x 2 "
        "(model.pos_embed.proj.weight, model.pos_embed.proj.bias)",
        "fresh      4 tensors, 4,096 numbers: classes: 8 x 128, was 11 x 128; the row for none was "
        "kept (model.transformer_blocks.*.norm1.emb.class_embedder.embedding_table.weight)",
        "fresh      1 tensor, 2,048 numbers: output: 16 x 128, was 12 x 128 "
        "(model.proj_out_2.weight)",
        "fresh      1 tensor, 16 numbers: output: 16, was 12 (model.proj_out_2.bias)",
        "dropped    4 tensors, 3,212 numbers: made anew (model.pos_embed.proj.weight, "
        "model.pos_embed.proj.bias, model.proj_out_2.weight, 1 more)",
        "dropped    4 tensors, 49,408 numbers: not in the target "
        "(conditioning.control.composition.inward.weight, "
        "conditioning.control.composition.inward.bias, "
        "conditioning.control.composition.outward.weight, 1 more)",
        "changed    control: flip -> none",
        "changed    in_channels: 3 -> 4",
        "changed    num_embeds_ada_norm: 10 -> 7",
        "changed    out_channels: 3 -> 4",
        "changed    size: 8 -> 16",
    ]


def test_what_it_was_made_of_is_said_where_it_differs():
    source, target = (
        network("dit"),
        network("dit", 16, num_attention_heads=8, attention_head_dim=16),
    )
    account = transfer(source, target)
    assert account.changes == (
        "attention_head_dim: 32 -> 16",
        "num_attention_heads: 4 -> 8",
        "size: 8 -> 16",
    )


# ---------------------------------------------------------------- refusals


def test_another_kind_of_network_is_refused():
    with pytest.raises(UserError, match="a MDTTransformer2DModel cannot go on from a DiT"):
        transfer(network("dit"), network("mdt"))


def test_a_network_that_hardly_anything_fits_is_refused():
    wide = network("dit", num_attention_heads=6)
    with pytest.raises(UserError, match=r"hardly anything .* \(0\.\d% of its weights\)"):
        transfer(network("dit"), wide)


def test_a_name_that_is_nothing_is_refused():
    with pytest.raises(UserError, match="head is no weight of the network, nor one of input, out"):
        transfer(network("dit"), network("dit"), fresh=["head"])
