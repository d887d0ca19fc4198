"""Scores of features whose noise, detail and place are known in closed form."""

import math
from fractions import Fraction

import pytest
import torch
from features.toys import inputs, small_denoiser

from stillhouse.errors import UserError
from stillhouse.features.activation import Activation
from stillhouse.features.catalogue import catalogue
from stillhouse.features.extractor import Extractor
from stillhouse.features.locality import Neighbourhoods, Placing
from stillhouse.features.properties import (
    Images,
    Scores,
    Scoring,
    asymmetry,
    granularity_change,
    score,
)
from stillhouse.features.spectra import Spectra


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def detail(*batches):
    spectra = Spectra()
    for batch in batches:
        spectra.update(batch)
    return spectra.result()


# ---------------------------------------------------------------- noise


def test_a_feature_without_noise_has_none():
    signal = noise(1, 16, 8, 16, 16).expand(2, -1, -1, -1, -1)
    found = detail(signal)
    assert (found.eta, found.eta_lo, found.eta_hi) == pytest.approx((0, 0, 0), abs=1e-6)


def test_pure_noise_is_nothing_else():
    found = detail(noise(2, 64, 8, 16, 16))
    assert (found.eta, found.eta_lo, found.eta_hi) == pytest.approx((1, 1, 1), abs=0.02)


@pytest.mark.parametrize("seeds", [2, 4])
@pytest.mark.parametrize("snr", [0.25, 1.0, 9.0])
def test_a_known_mix_has_the_share_of_its_noise(snr, seeds):
    """Whatever the channels' own scales and means are."""
    signal, added = noise(1, 64, 8, 16, 16), noise(seeds, 64, 8, 16, 16, seed=1)
    scale = torch.logspace(-2, 2, 8)[:, None, None]
    mixed = (math.sqrt(snr) * signal + added) * scale + 30 * scale
    found = detail(mixed)
    expected = 1 / (1 + snr)
    assert (found.eta, found.eta_lo, found.eta_hi) == pytest.approx((expected,) * 3, rel=0.03)


def test_bands_are_told_apart():
    """Noise in fine detail alone: eta_hi sees it, eta_lo does not."""
    column = torch.arange(16) / 16
    slow = torch.cos(2 * math.pi * 2 * column)  # |k| = 1/8
    fast = torch.cos(2 * math.pi * 6 * column)  # |k| = 3/8
    size = noise(2, 32, 4, 1, 1)
    features = (slow + size * fast).expand(2, 32, 4, 16, 16)
    found = detail(features)
    assert found.eta_lo == pytest.approx(0, abs=1e-5)
    assert found.eta_hi == pytest.approx(1, abs=0.15)
    edge = torch.cos(2 * math.pi * 4 * column)  # |k| = 1/4 is still low
    both = (slow + size * edge).expand(2, 32, 4, 16, 16)
    assert detail(both).eta_lo == pytest.approx(0.5, abs=0.1)


def test_any_split_into_batches_is_the_same():
    features = noise(3, 12, 5, 8, 12) + 3 * noise(1, 12, 5, 8, 12, seed=1) + 100
    whole, split = detail(features), detail(features[:, :5], features[:, 5:6], features[:, 6:])
    assert split == pytest.approx(whole, rel=1e-5)


def test_channels_that_do_not_vary_are_left_out():
    features = noise(2, 16, 4, 8, 8) + noise(1, 16, 4, 8, 8, seed=1)
    dead = torch.full_like(features, 7.3)
    assert detail(torch.cat([features, dead], 2)) == pytest.approx(detail(features), rel=1e-5)
    assert math.isnan(detail(dead).eta)


# ---------------------------------------------------------------- granularity


@pytest.mark.parametrize("size", [(16, 16), (16, 24), (15, 9)])
@pytest.mark.parametrize(("down", "across"), [(0, 2), (3, 0), (2, 3), (0, 4)])
def test_the_granularity_of_a_wave_is_its_frequency(size, down, across):
    height, width = size
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angle = 2 * math.pi * (down * row / height + across * column / width)
    phases = torch.linspace(0, 3, 6)[None, :, None, None, None]
    waves = torch.cos(angle + phases).expand(2, 6, 4, height, width)
    expected = math.hypot(down / height, across / width)
    assert detail(waves).kappa == pytest.approx(expected, rel=1e-4)


def test_waves_count_by_their_power_whichever_way_they_run():
    row, column = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    across, down = (torch.cos(2 * math.pi * 4 * axis / 16) for axis in (column, row))
    fastest = torch.cos(math.pi * column)  # 1/2 cycle per cell: twice the power of another wave
    for wave, expected in ((across + down, 0.25), (across + 2 * fastest, (0.25 + 8 * 0.5) / 9)):
        sized = torch.linspace(-1, 1, 6)[None, :, None, None, None] * wave
        assert detail(sized.expand(2, 6, 4, 16, 16)).kappa == pytest.approx(expected, rel=1e-4)
    slower = torch.cos(2 * math.pi * 2 * row / 16)
    mixed = torch.linspace(-1, 1, 6)[None, :, None, None, None] * (across + slower)
    expected = (0.25 + 0.125) / 2
    assert detail(mixed.expand(2, 6, 4, 16, 16)).kappa == pytest.approx(expected, rel=1e-4)


def test_noise_cancels_in_the_granularity():
    row = torch.arange(16)[:, None]
    wave = torch.cos(2 * math.pi * 3 * row / 16).expand(16, 16)
    images = torch.linspace(-1, 1, 64)[None, :, None, None, None] * wave
    noisy = images + noise(2, 64, 4, 16, 16)
    assert detail(noisy).kappa == pytest.approx(3 / 16, rel=0.05)
    # Its own detail alone: without the second seed it would be far finer.
    alone = noisy[:1].expand(2, -1, -1, -1, -1)
    assert detail(alone).kappa > 0.25


def test_images_that_differ_as_a_whole_are_coarse():
    flat = noise(1, 32, 4, 1, 1).expand(2, 32, 4, 8, 8)
    assert detail(flat + 50).kappa == pytest.approx(0, abs=1e-3)


# ---------------------------------------------------------------- place


def layout(count=6, side=16):
    """Labels in blobs of any place, one image unlike the other."""
    coarse = torch.randint(3, (count, 4, 4), generator=torch.Generator().manual_seed(3))
    return coarse.repeat_interleave(side // 4, 1).repeat_interleave(side // 4, 2)


def place_only(count=6, side=16):
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    centres = torch.cartesian_prod(torch.arange(0, side, 4), torch.arange(0, side, 4))
    apart = (row - centres[:, 0, None, None]) ** 2 + (column - centres[:, 1, None, None]) ** 2
    return torch.exp(-apart / 30).expand(count, -1, -1, -1)


def label_only(labels):
    return torch.nn.functional.one_hot(labels, 3).permute(0, 3, 1, 2).float()


def auc(features, labels):
    found = Neighbourhoods()
    found.update(features, labels)
    return found.result()


def test_the_auc_is_1_for_places_and_0_for_labels():
    labels = layout()
    assert auc(place_only(), labels) > 0.95
    assert auc(label_only(labels), labels) < 0.01
    assert auc(noise(6, 64, 16, 16), labels) == pytest.approx(0.5, abs=0.05)


def test_labels_of_another_size_and_unknown_ones():
    labels = layout()
    large = labels.repeat_interleave(3, 1).repeat_interleave(3, 2)
    assert auc(place_only(), large) == auc(place_only(), labels)
    assert auc(place_only(), torch.full_like(labels, -1)) is None
    unknown = torch.where(labels == 2, -1, labels)
    assert auc(label_only(labels), unknown) < 0.01
    swapped = torch.where(unknown < 0, -1, torch.zeros_like(labels))
    assert auc(place_only(), swapped) is None  # one label has no others near


def explained(features):
    placing = Placing()
    placing.update(features)
    return placing.result()


def test_a_regression_finds_the_place_where_it_is_told():
    assert explained(place_only()) > 0.95
    assert explained(place_only(side=8).repeat(1, 20, 1, 1) + 0.01 * noise(6, 80, 8, 8)) > 0.8
    assert abs(explained(noise(40, 8, 16, 16))) < 0.05
    assert math.isnan(explained(place_only(count=1)))


def test_many_channels_are_projected_to_few():
    placing = Placing()
    placing.update(noise(8, 400, 8, 8))
    assert [half.xx.shape for half in placing.halves] == [(64, 64)] * 2
    assert -1 < placing.result() < 0.1


def test_half_a_place_explains_half():
    row = torch.arange(16.0)[:, None].expand(4, 1, 16, 16)
    assert explained(row) == pytest.approx(0.5, abs=0.01)


# ---------------------------------------------------------------- all of them


def test_all_scores_come_from_one_pass():
    denoiser = small_denoiser("sd15")
    known = catalogue(denoiser.network.model)
    wanted = [name for name in known if name.endswith(("-out", "-in", "cross-map"))]
    extractor = Extractor(denoiser, wanted, sigma=1.0)
    x, cond = inputs(denoiser, count=4)
    labels = layout(count=4)
    batches = [
        Images(x[rows], range(4)[rows], cond[rows], labels[rows])
        for rows in (slice(0, 3), slice(3, 4))
    ]
    found = score(extractor, batches)
    assert list(found) == wanted
    # The input is x + noise, both of unit variance.
    assert found["unet-in"].eta == pytest.approx(0.5, abs=0.05)
    assert all(0 <= s.eta <= 1.5 for s in found.values())
    assert all(s.locality is not None for name, s in found.items() if known[name].scale == 1)
    assert asymmetry(found, known) > 0
    assert granularity_change(found, known)[Fraction(1)] > 0
    one = Scoring()
    runs = [extractor.extract(x, cond, key=range(4), seed=s)["unet-out"] for s in (0, 1)]
    one.update(torch.stack(runs), labels)
    assert one.result().eta == pytest.approx(found["unet-out"].eta, rel=1e-4)
    with pytest.raises(UserError, match="two seeds"):
        score(extractor, batches, seeds=(3, 3))
    with pytest.raises(UserError, match="no images"):
        score(extractor, [])


def given(eta, kappa=0.1):
    return Scores(eta, eta, eta, kappa, position=0.0)


def test_asymmetry_is_down_over_the_first_half_of_up():
    known = {
        a.id: a
        for a in (
            Activation("d", "", "res-out", "down", Fraction(1), 1),
            Activation("m", "", "res-out", "mid", Fraction(1, 2), 1),
            *(
                Activation(f"u{i}{j}", "", "res-out", "up", Fraction(1, 4) * 2**i, 1, i, j)
                for i in range(3)
                for j in range(3)
            ),
            Activation("s0", "", "upsampler-out", "up", Fraction(1, 2), 1, 0),
            Activation("s1", "", "upsampler-out", "up", Fraction(1), 1, 1),
        )
    }
    early = {"u00", "u01", "u02", "s0", "u10", "u11"}  # of 3 levels of 3: up to the middle
    found = {name: given(0.1 if name in early else 0.8) for name in known}
    found["m"] = given(0.5)
    assert asymmetry(found, known) == pytest.approx(8)
    with pytest.raises(UserError, match="both ways of a U-Net"):
        asymmetry({"d": given(0.1)}, known)


def test_granularity_changes_within_a_resolution():
    known = {
        name: Activation(name, "", "res-out", "up", scale, 1)
        for name, scale in (("a", Fraction(1, 2)), ("b", Fraction(1, 2)), ("c", Fraction(1)))
    }
    found = {"a": given(0, 0.1), "b": given(0, 0.35), "c": given(0, 0.9)}
    assert granularity_change(found, known) == pytest.approx({Fraction(1, 2): 0.25, Fraction(1): 0})
    found["a"] = given(0, float("nan"))
    assert granularity_change(found, known)[Fraction(1, 2)] == 0
