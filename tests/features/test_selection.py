"""Rules, gate and probe: 63 of 279, the published channels, and choices that are known."""

import pytest
import torch
from small_models import build_network, network_config

from stillhouse.errors import UserError
from stillhouse.features.catalogue import catalogue, look_up
from stillhouse.features.probe import Points, features_at, forward_selection, probe_accuracy
from stillhouse.features.properties import Scores
from stillhouse.features.selection import (
    SELECTIONS,
    candidates,
    gate,
    keep_by_rule,
    published,
)
from stillhouse.process import VP, alphas_cumprod, betas


@pytest.fixture(scope="module")
def known():
    with torch.device("meta"):
        return {
            name: catalogue(build_network(network_config(name))) for name in ("sd15", "sdxl", "sd3")
        }


def test_the_rules_leave_63_of_the_279_candidates_of_sdxl(known):
    pool = candidates(known["sdxl"])
    kept = keep_by_rule(known["sdxl"], pool)
    assert (len(pool), len(kept)) == (279, 63)
    first = [name for name in kept if name.startswith("up-level0")]
    second = [name for name in kept if name.startswith("up-level1")]
    assert (len(first), len(second)) == (43, 20)
    assert "up-level0-upsampler-out" in first
    assert "up-level1-upsampler-out" not in second
    keys = [name for name in kept if "-self-" in name]
    assert keys == [f"up-level1-repeat2-vit-block{k}-self-k" for k in range(2)]
    assert not any(name.endswith(("-increment", "-ffn-inner")) for name in kept)


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_the_published_selections_are_inside_what_is_kept(known, name):
    kept = keep_by_rule(known[name], candidates(known[name]))
    assert set(published(name).ids) <= set(kept)
    assert not set(published(f"legacy-{name}").ids) <= set(kept)


CHANNELS = {"sd15": 3520, "sdxl": 3840, "legacy-sd15": 3520, "legacy-sdxl": 2240}


@pytest.mark.parametrize("name", CHANNELS)
def test_the_published_selections_have_their_channels(known, name):
    model = name.removeprefix("legacy-")
    selection = published(name)
    found = look_up(known[model], selection.ids)
    assert sum(a.channels for a in found) == CHANNELS[name]
    assert set(SELECTIONS) == set(CHANNELS)
    if name == "sd15":  # 512 pixels are 64 latents
        assert [a.shape(64, 64)[1] for a in found] == [16, 16, 32, 64]
    if name == "sdxl":
        assert [a.shape(128, 128)[1] for a in found] == [32, 32, 64, 64]


def test_a_selection_knows_its_noise_level():
    abar = alphas_cumprod(betas("scaled_linear", 1000, 0.00085, 0.012))
    expected = ((1 - abar[51]) / abar[51]) ** 0.5
    assert published("sd15").sigma(VP(abar)) == pytest.approx(float(expected))
    assert published("sdxl").time == 50


def test_an_unknown_selection_names_the_others():
    with pytest.raises(UserError, match="closest is 'sd15'; choose one of sd15, sdxl"):
        published("sd-15")


def test_a_transformer_keeps_what_is_neither_self_nor_increment(known):
    kept = keep_by_rule(known["sd3"], list(known["sd3"]))
    assert kept == [f"block{k}-out" for k in range(24)]


# ---------------------------------------------------------------- gate


def scores(**values):
    given = {"eta": 0.0, "eta_lo": 0.0, "eta_hi": 0.0, "kappa": 0.0, "position": 0.0}
    return Scores(**given | values)


def test_the_gate_compares_within_one_resolution_only(known):
    sdxl = known["sdxl"]
    quiet = {f"up-level0-repeat{j}-res-out": scores(eta_hi=0.01 * j) for j in range(3)}
    noisy = {f"up-level1-repeat{j}-res-out": scores(eta_hi=0.9 - 0.1 * j) for j in range(3)}
    kept = gate(quiet | noisy, sdxl, share=0.34)
    assert kept == [f"up-level{i}-repeat{j}-res-out" for i, j in ((0, 0), (0, 1), (1, 1), (1, 2))]
    assert gate(quiet | noisy, sdxl, share=0.1) == [
        "up-level0-repeat0-res-out",
        "up-level1-repeat2-res-out",
    ]
    assert gate(quiet | noisy, sdxl, share=1.0) == list(quiet | noisy)


def test_the_gate_puts_what_could_not_be_measured_last(known):
    given = {
        "up-level0-repeat0-res-out": scores(eta=float("nan")),
        "up-level0-repeat1-res-out": scores(eta=0.9),
    }
    assert gate(given, known["sdxl"], by="eta") == ["up-level0-repeat1-res-out"]
    with pytest.raises(UserError, match="locality is not known"):
        gate(given, known["sdxl"], by="locality")
    with pytest.raises(UserError, match="between 0 and 1"):
        gate(given, known["sdxl"], share=0.0)


# ---------------------------------------------------------------- probe


def labelled(seed, count=400):
    """Four labels: one activation tells two bits of them well, others one bit or none."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    bits = torch.stack([labels % 2, labels // 2], 1).double()

    def noise(*shape):
        return torch.randn(count, *shape, generator=generator, dtype=torch.float64)

    features = {
        "nothing": noise(6),
        "first bit": torch.cat([bits[:, :1] + 0.05 * noise(1), noise(2)], 1),
        "first bit, noisy": bits[:, :1] + 0.5 * noise(1),
        "second bit": bits[:, 1:] + 0.05 * noise(1),
    }
    return Points(features, labels)


def test_forward_selection_takes_what_completes_the_others():
    train, held_out = labelled(0), labelled(1)
    steps = forward_selection(train, held_out, list(train.features))
    assert {step.id for step in steps[:2]} == {"first bit", "second bit"}
    # One bit of two tells half of the four labels.
    assert steps[0].accuracy == pytest.approx(0.5, abs=0.1)
    assert steps[1].accuracy > 0.95
    assert [s.accuracy for s in steps] == sorted(s.accuracy for s in steps)
    assert len(forward_selection(train, held_out, list(train.features), count=1)) == 1
    assert len(forward_selection(train, held_out, list(train.features), least_gain=0.1)) == 2
    with pytest.raises(UserError, match="no features of missing"):
        forward_selection(train, held_out, ["missing"])


def test_the_probe_is_judged_on_points_it_has_not_seen():
    train, held_out = labelled(0, count=40), labelled(1)
    many = torch.randn(40, 60, generator=torch.Generator().manual_seed(2))
    wide = Points({"noise": many}, train.labels)
    other = Points({"noise": torch.randn(400, 60)}, held_out.labels)
    assert probe_accuracy(wide, wide, ["noise"], 1e-6) == 1.0  # learnt by heart
    assert probe_accuracy(wide, other, ["noise"], 1e-6) == pytest.approx(0.25, abs=0.1)


def test_features_are_read_at_points_of_the_image():
    """Bilinear in the middle of four cells, exact in a cell's middle, held at the border."""
    row, column = torch.meshgrid(torch.arange(4.0), torch.arange(8.0), indexing="ij")
    maps = torch.stack([column, row])[None]
    points = torch.tensor([[[0.5 / 8, 0.5 / 4], [4 / 8, 2 / 4], [5.5 / 8, 1.5 / 4], [0.0, 1.0]]])
    expected = torch.tensor([[0.0, 0.0], [3.5, 1.5], [5.0, 1.0], [0.0, 3.0]])
    torch.testing.assert_close(features_at(maps, points), expected)
