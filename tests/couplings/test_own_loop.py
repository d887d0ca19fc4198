"""`assign`: the line for a training loop of one's own."""

import subprocess
import sys

import pytest
import torch
from couplings.checks import Met, check_only_noise_moves, normal

import stillhouse
from stillhouse.couplings import Assignment, Conditional, assign
from stillhouse.process import Condition

X, NOISE, LABELS = normal(30, 2, 4, 4), normal(30, 2, 4, 4, seed=1), torch.arange(30) % 3


def test_it_is_found_where_people_look():
    assert stillhouse.couplings.assign is assign


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_it_gives_the_couplings_index_for_any_type(dtype):
    x, noise = X.to(dtype), NOISE.to(dtype)
    index = assign(x, noise)
    assert index.dtype == torch.int64
    assert index.device == x.device
    assert torch.equal(index, Assignment()(x, noise).index)
    within = assign(x, noise, LABELS)
    assert torch.equal(within, Conditional()(x, noise, Condition(label=LABELS)).index)
    assert torch.equal(assign(x, noise, LABELS.tolist()), within)
    check_only_noise_moves(lambda a, b, c: Met(a, b[assign(a, b, c)], c), x, noise, LABELS)


def test_options_reach_the_solver():
    assert torch.equal(assign(X, NOISE, cost="l1"), Assignment(cost="l1")(X, NOISE).index)
    assert torch.equal(assign(X, NOISE, block=7), Assignment(block=7)(X, NOISE).index)
    scaled = Assignment(standardise=True)(X, NOISE).index
    assert torch.equal(assign(X, NOISE, standardise=True), scaled)
    mask = torch.ones(30, 1, 4, 4).bool()
    mask[:, :, 2:] = False
    assert torch.equal(
        assign(X, NOISE, mask=mask), Assignment()(X[:, :, :2], NOISE[:, :, :2]).index
    )


def test_it_takes_data_that_is_part_of_a_graph():
    x = X.clone().requires_grad_()
    assert torch.equal(assign(2 * x, NOISE), assign(2 * X, NOISE))


def test_different_shapes_never_swap():
    x = [normal(1, 3 + row % 2, 5, seed=row)[0] for row in range(20)]
    noise = [normal(1, 3 + row % 2, 5, seed=100 + row)[0] for row in range(20)]
    index = assign(x, noise)
    assert all(noise[j].shape == datum.shape for j, datum in zip(index.tolist(), x, strict=True))
    assert sorted(index.tolist()) == list(range(20))
    even = torch.arange(0, 20, 2)
    alone = assign(torch.stack(x[::2]), torch.stack(noise[::2]))
    assert torch.equal(index[even], even[alone])
    labels = torch.arange(20) // 4
    within = assign(x, noise, labels)
    assert torch.equal(labels[within], labels)
    assert all(noise[j].shape == datum.shape for j, datum in zip(within.tolist(), x, strict=True))
    with pytest.raises(ValueError, match="list of tensors"):
        assign(x, noise, mask=torch.ones(20, 3))


@pytest.mark.parametrize(
    ("x", "noise", "labels", "said"),
    [
        (X, NOISE, LABELS[:7], "one label each"),
        (X, NOISE, LABELS.float(), "whole numbers.*float32"),
        (X, NOISE, ["cat"] * 30, "whole numbers"),
        (X, NOISE, [None] * 30, "with one of its own for a label left out"),
        (X, NOISE[:29], None, "30 data need as many noises, not 29"),
        (list(X), list(NOISE[:29]), None, "30 data need as many noises, not 29"),
        (list(X), [*NOISE, NOISE[0]], None, "not 31"),
        (list(X), [*NOISE[:29], NOISE[29, :1]], None, r"needs noise of its shape.*\(1, 1, 4, 4\)"),
    ],
)
def test_what_does_not_belong_together_is_refused(x, noise, labels, said):
    with pytest.raises(ValueError, match=said):
        assign(x, noise, labels)


def test_nothing_is_assigned_to_nothing(recwarn):
    assert assign([], []).tolist() == assign(X[:0], NOISE[:0], []).tolist() == []
    assert not recwarn.list


def test_a_list_warns_only_if_nothing_at_all_can_move(recwarn):
    x, noise = [*X, normal(1, 7)[0]], [*NOISE, normal(1, 7, seed=1)[0]]
    index = assign(x, noise)
    assert index[30] == 30
    assert torch.equal(index[:30], assign(X, NOISE))
    assert not recwarn.list
    with pytest.warns(UserWarning, match="among 2 rows.*`couplings.pick`"):
        assign([X[0], x[30]], [NOISE[0], noise[30]])


def test_the_two_lines_in_a_loop_of_diffusers():
    """Input and target hold the same noise, as recovered from what the model is given."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler(prediction_type="v_prediction")
    latents, noise = X.clone(), NOISE.clone()
    noise = noise[stillhouse.couplings.assign(latents, noise)]
    time = torch.full((30,), 400)
    noisy = scheduler.add_noise(latents, noise, time)
    target = scheduler.get_velocity(latents, noise, time)
    alpha = scheduler.alphas_cumprod[400].sqrt()
    recovered = (noisy - alpha * latents) / (1 - alpha**2).sqrt()
    torch.testing.assert_close(target, alpha * recovered - (1 - alpha**2).sqrt() * latents)
    assert float((latents - recovered).norm()) < float((X - NOISE).norm())


def test_importing_couplings_does_not_import_scipy():
    code = "import sys, stillhouse.couplings; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
