"""The nearest of k noises: keyed per row, of unit variance by cosine."""

import pytest
import torch
from couplings.checks import keyed, normal

from stillhouse.couplings import Nearest, pick

SHAPE = (3, 16, 16)


def usual(draws):
    return draws(SHAPE, draws.key)


def test_the_pairing_names_the_draw_and_the_noise_comes_back_by_key():
    draws, x = keyed(40), normal(40, *SHAPE)
    found = Nearest(k=5)(x, usual(draws), None, draws)
    assert torch.equal(found.index, torch.arange(40))
    assert set(found.draw.tolist()) == set(range(5))
    noises = torch.stack([draws(SHAPE, draws.key, number) for number in range(5)])
    met = found.noise(usual(draws), draws)
    assert torch.equal(met, noises[found.draw, torch.arange(40)])
    scores = torch.stack([torch.cosine_similarity(x.flatten(1), n.flatten(1)) for n in noises])
    assert torch.equal(found.draw, scores.argmax(0))
    assert found.cost_after == pytest.approx(float((x - met).flatten(1).norm(dim=1).mean()))
    assert found.cost_after < found.cost_before
    assert torch.equal(pick(x, noises), found.draw)


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_the_choice_is_the_metrics_own(metric):
    """In few dimensions, where the length of a noise matters."""
    x, noises = normal(200, 3), normal(6 * 200, 3, seed=1).view(6, 200, 3)
    scores = {
        "cosine": torch.stack([torch.cosine_similarity(x, noise) for noise in noises]),
        "l2": torch.stack([-(x - noise).norm(dim=1) for noise in noises]),
    }
    assert torch.equal(pick(x, noises, metric), scores[metric].argmax(0))
    assert not torch.equal(scores["cosine"].argmax(0), (x * noises).sum(2).argmax(0))


@pytest.mark.parametrize(
    "candidates", [normal(4, 3), normal(5, 4, 4), normal(5, 4, 3, 1), torch.empty(0, 4, 3)]
)
def test_candidates_of_another_shape_are_refused(candidates):
    with pytest.raises(ValueError, match=r"\[k, \*x\.shape\], noises \(4, 3\) each"):
        pick(normal(4, 3), candidates)
    with pytest.raises(ValueError, match="metric is one of"):
        pick(normal(4, 3), normal(2, 4, 3), metric="L2")


def test_draws_differ_and_the_first_is_the_usual_noise():
    draws = keyed(2)
    noises = torch.stack([draws(SHAPE, draws.key, number) for number in range(3)]).flatten(0, 1)
    assert len({tuple(row.flatten()[:4].tolist()) for row in noises}) == 6
    assert torch.equal(noises[:2], usual(draws))


def test_a_rows_noise_does_not_depend_on_the_split():
    draws, x = keyed(12, first=100), normal(12, *SHAPE)
    whole = Nearest()(x, usual(draws), None, draws).noise(usual(draws), draws)
    for rows in (slice(0, 1), slice(1, 7), slice(7, 12)):
        part = keyed(rows.stop - rows.start, first=100 + rows.start)
        found = Nearest()(x[rows], usual(part), None, part)
        assert torch.equal(found.noise(usual(part), part), whole[rows])


def test_more_candidates_come_nearer():
    draws, x = keyed(60), normal(60, *SHAPE)
    gains = [Nearest(k)(x, usual(draws), None, draws).reduction for k in (1, 2, 4, 8)]
    assert gains[0] == 0
    assert gains == sorted(gains)


@pytest.mark.parametrize(("metric", "unit"), [("cosine", True), ("l2", False)])
def test_the_variance_of_the_noise_stays_one_by_cosine_only(metric, unit):
    """Choosing by distance, as published, prefers short noise: 0.97 at k = 8."""
    draws, x = keyed(100), normal(100, 3, 32, 32) * 0.5
    noise = draws((3, 32, 32), draws.key)
    found = Nearest(8, metric)(x, noise, None, draws)
    variance = float(found.noise(noise, draws).double().var())
    error = (2 / noise.numel()) ** 0.5
    assert (abs(variance - 1) < 3 * error) is unit
    if not unit:
        assert variance == pytest.approx(0.97, abs=0.01)


def test_cosine_aligns_more_than_distance():
    draws, x = keyed(100), normal(100, 3, 32, 32) * 0.5
    noise = draws((3, 32, 32), draws.key)

    def alignment(metric):
        met = Nearest(8, metric)(x, noise, None, draws).noise(noise, draws)
        return float(torch.cosine_similarity(x.flatten(1), met.flatten(1)).mean())

    assert 1.3 < alignment("cosine") / alignment("l2") < 2.5


def test_values_under_a_mask_change_nothing():
    draws, x = keyed(30), normal(30, 6, 4)
    noise = draws((6, 4), draws.key)
    mask = torch.arange(6)[None] < (torch.arange(30) % 6 + 1)[:, None]
    found = Nearest()(x, noise, None, draws, mask=mask)
    filled = torch.where(mask[..., None], x, 1e4)
    assert torch.equal(Nearest()(filled, noise, None, draws, mask=mask).draw, found.draw)
    assert not torch.equal(Nearest()(filled, noise, None, draws).draw, found.draw)


def test_it_needs_draws_to_choose_from():
    noise = normal(3, 4)
    with pytest.raises(ValueError, match="by key"):
        Nearest()(normal(3, 4), noise)
    draws = keyed(3)
    found = Nearest()(normal(3, 4), draws((4,), draws.key), None, draws)
    with pytest.raises(ValueError, match="goes by key"):
        found.noise(noise)
