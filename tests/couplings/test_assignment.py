"""The nearest permutation: exact, of the noise alone, without randomness."""

import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from couplings.checks import Met, brute_force, check_only_noise_moves, normal, squared
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from stillhouse.couplings import COUPLINGS, Assignment, Conditional, Independent, Nearest
from stillhouse.couplings import solve as solving
from stillhouse.couplings.assignment import blocks
from stillhouse.errors import UserError
from stillhouse.process import Condition

LABELS = torch.arange(24) % 3
ALL = {
    "independent": Independent(),
    "assignment": Assignment(),
    "l1": Assignment(cost="l1"),
    "blocks": Assignment(block=5),
    "standardised": Assignment(standardise=True),
    "averaged": Assignment(side=2),
    "within-class": Conditional(),
    "soft": Conditional(mode="soft"),
    "nearest of one": Nearest(k=1),
}
everywhere = pytest.mark.parametrize("coupling", ALL.values(), ids=ALL)


def test_every_coupling_of_the_package_is_here():
    assert {type(coupling) for coupling in ALL.values()} == set(COUPLINGS.values())


def paired_by(coupling):
    def pair(x, noise, labels):
        found = coupling(x, noise, Condition(label=labels))
        return Met(x, found.noise(noise), labels)

    return pair


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_only_noise_moves(coupling, dtype):
    x, noise = normal(24, 2, 4, 4), normal(24, 2, 4, 4, seed=1)
    check_only_noise_moves(paired_by(coupling), x.to(dtype), noise.to(dtype), LABELS)


# ------------------------------------------------- published mistakes, which the check must catch


def with_replacement(x, noise, labels):
    """The plan is sampled: some noise twice, some never."""
    plan = torch.softmax(x.flatten(1) @ noise.flatten(1).T, 1)
    rows = torch.multinomial(plan, 1, generator=torch.Generator().manual_seed(0)).flatten()
    return Met(x, noise[rows], labels)


def labels_left_behind(x, noise, labels):
    """The data is permuted instead, and its labels are not."""
    order = Assignment()(x, noise).index.argsort()
    return Met(x[order], noise, labels)


def flattened(x, noise, labels):
    return Met(x, noise.flatten(1)[Assignment()(x, noise).index], labels)


def noised_already(x, noise, labels):
    noise = noise[Assignment()(x, noise).index]
    return Met(x + 0.1 * noise, noise, labels)


def rounded(x, noise, labels):
    return Met(x, noise[Assignment()(x, noise).index].half().float(), labels)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (with_replacement, "lost or doubled"),
        (labels_left_behind, "data changed"),
        (flattened, "shape changed"),
        (noised_already, "data changed"),
        (rounded, "lost or doubled"),
    ],
)
def test_published_mistakes_are_caught(broken, complaint):
    x, noise = normal(24, 2, 4, 4), normal(24, 2, 4, 4, seed=1)
    with pytest.raises(AssertionError, match=complaint):
        check_only_noise_moves(broken, x, noise, LABELS)


# ---------------------------------------------------------------- the answer


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 7), dims=st.integers(1, 5), seed=st.integers(0, 10**6))
@pytest.mark.filterwarnings("ignore:nothing to swap")
def test_small_pools_equal_brute_force(count, dims, seed):
    x, noise = 2 * normal(count, dims, seed=seed) + 1, normal(count, dims, seed=seed + 1)
    found = squared(x, noise[Assignment()(x, noise).index])
    assert found == pytest.approx(brute_force(x, noise), rel=1e-5)
    l1 = (x - noise[Assignment(cost="l1")(x, noise).index]).abs().sum()
    assert float(l1) == pytest.approx(brute_force(x, noise, p=1), rel=1e-5)


@pytest.mark.parametrize("count", [7, 64, 300])
def test_dot_products_give_the_squared_l2_answer(count):
    """300 rows take the warm start. Never above the pairing that was there."""
    x, noise = normal(count, 3, 8), normal(count, 3, 8, seed=1)
    x[: count // 2] *= 3  # norms differ, as those of images do
    index = Assignment()(x, noise).index
    distances = torch.cdist(x.flatten(1).double(), noise.flatten(1).double()) ** 2
    expected = linear_sum_assignment(distances.numpy())[1]
    assert squared(x, noise[index]) == pytest.approx(squared(x, noise[expected]), rel=1e-9)
    assert np.array_equal(index.numpy(), expected)
    assert squared(x, noise[index]) < squared(x, noise)


@pytest.mark.parametrize("kind", ["far apart", "equal", "one column dear"])
def test_a_warm_start_changes_no_answer(kind):
    cost = normal(300, 300).double()
    if kind == "far apart":
        cost = 1e6 * cost**3
    if kind == "equal":
        cost = torch.zeros_like(cost)
    if kind == "one column dear":
        cost[:, 7] += 1e9
    found, expected = solving.solve(cost), torch.from_numpy(linear_sum_assignment(cost)[1])
    assert sorted(found.tolist()) == list(range(300))
    rows = torch.arange(300)
    assert float(cost[rows, found].sum()) == pytest.approx(float(cost[rows, expected].sum()))


def test_costs_are_mean_distances_of_the_pool():
    x, noise = normal(50, 6), normal(50, 6, seed=1)
    found = Assignment()(x, noise)
    met = found.noise(noise)
    assert found.cost_before == pytest.approx(float((x - noise).norm(dim=1).mean()))
    assert found.cost_after == pytest.approx(float((x - met).norm(dim=1).mean()))
    assert found.reduction == pytest.approx(1 - found.cost_after / found.cost_before)
    assert found.reduction > 0.2
    assert found.seconds > 0


def test_half_precision_and_autocast_do_not_coarsen_the_cost():
    """What noises differ by is little beside what all of them share."""
    x, noise = 0.3 * normal(128, 3, 16, 16) + 2, normal(128, 3, 16, 16, seed=1)
    halves = x.to(torch.bfloat16), noise.to(torch.bfloat16)
    expected = Assignment()(*(half.float() for half in halves)).index
    assert torch.equal(Assignment()(*halves).index, expected)
    plain = Assignment()(x, noise).index
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Assignment()(x, noise).index, plain)
        coarse = x.flatten(1) @ noise.flatten(1).T
    assert not torch.equal(solving.solve(-coarse.float()), plain)


# ---------------------------------------------------------------- options


def test_blocks_never_swap_with_each_other_and_keep_most_of_the_gain():
    x, noise = normal(200, 2, 8, 8) + 1, normal(200, 2, 8, 8, seed=1)
    whole, parts = Assignment()(x, noise), Assignment(block=64)(x, noise)
    for rows in blocks(torch.arange(200), 64):
        assert len(rows) == 50  # pieces of equal length: no small one at the end
        assert sorted(parts.index[rows].tolist()) == rows.tolist()
        alone = Assignment()(x[rows], noise[rows]).index
        assert torch.equal(rows[alone], parts.index[rows])
    assert 0.6 < parts.reduction / whole.reduction < 1


def test_standardising_weighs_coordinates_alike_in_the_cost_only():
    x, noise = normal(64, 8) * torch.tensor([100.0] + [1.0] * 7), normal(64, 8, seed=1)
    x = torch.cat([x, torch.full((64, 1), 5.0)], 1)  # a constant coordinate has no deviation
    noise = torch.cat([noise, normal(64, 1, seed=2)], 1)
    plain, scaled = Assignment()(x, noise), Assignment(standardise=True)(x, noise)
    small = slice(1, 8)
    near = [float((x[:, small] - p.noise(noise)[:, small]).norm()) for p in (plain, scaled)]
    assert near[1] < near[0]
    assert scaled.cost_before == plain.cost_before  # of the data itself
    moved = Assignment(standardise=True)(3 * x - 7, noise)
    assert torch.equal(moved.index, scaled.index)


def test_averages_compare_what_images_share_with_noise():
    x = normal(100, 3, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)  # squares of 4 pixels
    noise = normal(100, 3, 16, 16, seed=1)
    whole, few = Assignment()(x, noise).index, Assignment(side=4)(x, noise).index
    assert squared(x, noise[few]) == pytest.approx(squared(x, noise[whole]), rel=1e-6)
    with pytest.raises(UserError, match=r"\[B, C, H, W\]"):
        Assignment(side=4)(x.flatten(1), noise.flatten(1))


def test_lapx_is_used_for_large_pools_where_it_is_installed(monkeypatch):
    seen = []

    def lapjvs(cost, *, return_cost, prefer_float32):
        assert not return_cost
        assert not prefer_float32
        seen.append(cost.shape)
        return linear_sum_assignment(cost)

    monkeypatch.setattr(solving, "LAPX_FROM", 300)
    monkeypatch.setattr(solving, "find_spec", lambda name: name == "lap")
    monkeypatch.setitem(sys.modules, "lap", SimpleNamespace(lapjvs=lapjvs))
    x, noise = normal(300, 4), normal(300, 4, seed=1)
    large, small = Assignment()(x, noise).index, Assignment(block=299)(x, noise).index
    assert seen == [(300, 300)]
    assert squared(x, noise[large]) < squared(x, noise[small])


# ---------------------------------------------------------------- what must not happen


@everywhere
def test_no_randomness_is_consumed(coupling):
    x, noise = normal(24, 2, 4, 4), normal(24, 2, 4, 4, seed=1)
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = coupling(x, noise, Condition(label=LABELS))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert torch.equal(coupling(x, noise, Condition(label=LABELS)).index, first.index)


@everywhere
@pytest.mark.filterwarnings("ignore:nothing to swap")
def test_a_batch_of_one_or_none_is_left_as_it_is(coupling):
    for count in (0, 1):
        x, noise = normal(count, 2, 4, 4), normal(count, 2, 4, 4, seed=1)
        found = coupling(x, noise, Condition(label=torch.zeros(count).long()))
        assert torch.equal(found.noise(noise), noise)
        assert found.reduction == 0


def test_a_pool_in_which_nothing_can_move_says_so():
    with pytest.warns(UserWarning, match="`nearest`"):
        Assignment()(normal(1, 4), normal(1, 4, seed=1))
    with pytest.warns(UserWarning, match="among 3 rows"):
        Conditional()(normal(3, 4), normal(3, 4, seed=1), Condition(label=torch.arange(3)))


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind != "independent"])
@pytest.mark.parametrize(("value", "name"), [(float("nan"), "NaN"), (float("inf"), "Inf")])
def test_numbers_that_are_none_are_named(kind, value, name):
    coupling = ALL[kind]
    x, noise = normal(24, 2, 4, 4), normal(24, 2, 4, 4, seed=1)
    broken = x.clone()
    broken[5, 1, 2, 3] = broken[9, 0, 0, 0] = value
    with pytest.raises(UserError, match=f"row 5 and 1 more of the batch's data holds {name}"):
        coupling(broken, noise, Condition(label=LABELS))
    noise[7] = value
    with pytest.raises(UserError, match=f"row 7 of the batch's noise holds {name}"):
        coupling(x, noise, Condition(label=LABELS))


def test_values_under_a_padding_mask_change_nothing():
    x, noise = normal(40, 6, 3), normal(40, 6, 3, seed=1)
    mask = torch.arange(6)[None] < (torch.arange(40) % 6 + 1)[:, None]
    for coupling in (Assignment(), Conditional(), Nearest(k=1)):
        cond = Condition(label=torch.arange(40) % 3)
        found = coupling(x, noise, cond, mask=mask)
        filled = torch.where(mask[..., None], x, 1e4)
        again = coupling(filled, noise, cond, mask=mask)
        assert torch.equal(again.index, found.index)
        assert (again.cost_before, again.cost_after) == (found.cost_before, found.cost_after)
    found = Assignment()(x, noise, mask=mask)
    unmasked = Assignment()(torch.where(mask[..., None], x, 1e4), noise)
    assert not torch.equal(unmasked.index, found.index)  # the mistake that the mask prevents
    assert found.cost_after < found.cost_before
    real = mask[..., None]
    expected = ((x - noise) * real).flatten(1).norm(dim=1).mean()
    assert found.cost_before == pytest.approx(float(expected))
    with pytest.raises(UserError, match="padded data"):
        Assignment(cost="l1")(x, noise, mask=mask)


def test_padded_data_meets_noise_of_unit_variance():
    """By distances it would not: |noise|^2 counts where data is, and the short ones are taken."""
    x, noise = 0.5 * normal(200, 512), normal(200, 512, seed=1)
    mask = torch.arange(512)[None] < (256 * (torch.arange(200) % 2 + 1))[:, None]
    real = mask.float()
    distances = real @ (noise**2).T - 2 * (x * real) @ noise.T
    error = (2 / int(mask.sum())) ** 0.5
    variance = [
        float((noise[rows] ** 2)[mask].mean())
        for rows in (Assignment()(x, noise, mask=mask).index, linear_sum_assignment(distances)[1])
    ]
    assert abs(variance[0] - 1) < 3 * error
    assert variance[1] < 1 - 3 * error


def test_noise_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="noise of its shape"):
        Assignment()(normal(4, 3), normal(1, 3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Assignment(cost="L2"), "cost is one of l2, l1, not 'L2'"),
        (lambda: Assignment(block=0), "at least 2, not 0"),
        (lambda: Nearest(metric="L2"), "metric is one of cosine, l2, not 'L2'"),
        (lambda: Nearest(k=0), "k is how many noises"),
        (lambda: Conditional(mode="Soft"), "mode is one of within-class, soft, not 'Soft'"),
        (lambda: Assignment()(normal(4), normal(4)), r"\[B, \.\.\.\], not the shape \(4,\)"),
        (
            lambda: Assignment()(normal(4, 3, 5, 5), normal(4, 3, 5, 5), mask=torch.ones(4, 5, 5)),
            r"\[B, 1, H, W\], not \(4, 5, 5\)",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.timing
def test_the_solve_beats_scipy_on_distances():
    x, noise = normal(1024, 3072) * 0.5, normal(1024, 3072, seed=1)
    distances = torch.cdist(x, noise).numpy()
    cost = -(x @ noise.T)
    ours, theirs = [], []
    for _ in range(2):  # by the thread's own clock: neighbours count less
        began = time.thread_time()
        solving.solve(cost)
        middle = time.thread_time()
        linear_sum_assignment(distances)
        ours.append(middle - began)
        theirs.append(time.thread_time() - middle)
    assert min(theirs) / min(ours) > 2.5
