"""Averages of weights: profiles against brute force, synthesis, exact resume, shards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stillhouse.engine.ema import (
    Averages,
    ConstantDecay,
    HalfLife,
    PowerFunction,
    Snapshot,
    coefficients,
    combine,
    exponent,
    inner_product,
    synthesize,
)
from stillhouse.errors import UserError


class Walker(nn.Module):
    """Weights that a test sets to what it likes."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))

    def put(self, value: Tensor) -> None:
        with torch.no_grad():
            self.weight.copy_(value)


def random_walk(steps: int, size: int = 64, seed: int = 0) -> Tensor:
    """Weights that wander, and move less as training goes on."""
    generator = torch.Generator().manual_seed(seed)
    moves = torch.randn(steps, size, generator=generator, dtype=torch.float64)
    return moves.cumsum(0) / (steps**0.5)


BATCHES = [4, 4, 12, 1, 7, 32, 5, 5, 5, 20]
PROFILES = [
    HalfLife(images=30, ramp=0.0),
    HalfLife(images=20, ramp=0.5),
    ConstantDecay(decay=0.6, warmup=False),
    ConstantDecay(decay=0.7, warmup=True),
    PowerFunction(sigma_rel=0.05),
    PowerFunction(sigma_rel=0.2),
]


def shares(profile, batches: list[int]) -> tuple[np.ndarray, float]:
    """By brute force: the share of each update's weights in the average, and of the start."""
    parts, images, start = np.zeros(len(batches)), 0, 1.0
    for n, added in enumerate(batches):
        images += added
        beta = profile.beta(images, added, n)
        parts, start = parts * beta, start * beta
        parts[n] = 1 - beta
    return parts, start


# ---------------------------------------------------------------- profiles


@pytest.mark.parametrize("sigma_rel", [0.01, 0.05, 0.1, 0.2, 0.27])
def test_the_exponent_gives_its_width(sigma_rel):
    """By quadrature: the standard deviation of (gamma + 1) tau^gamma on [0, 1]."""
    gamma = exponent(sigma_rel)
    edges = np.linspace(0, 1, 200_001)
    mass, middle = np.diff(edges ** (gamma + 1)), (edges[1:] + edges[:-1]) / 2
    mean = (mass * middle).sum()
    assert np.sqrt((mass * (middle - mean) ** 2).sum()) == pytest.approx(sigma_rel, rel=1e-4)


def test_exponents_of_the_paper():
    """sigma_rel 0.05 and 0.10 are gamma 16.97 and 6.94."""
    assert exponent(0.05) == pytest.approx(16.97, abs=0.01)
    assert exponent(0.10) == pytest.approx(6.94, abs=0.01)


@pytest.mark.parametrize("sigma_rel", [0.03, 0.1, 0.25])
def test_the_power_profile_is_its_closed_form_for_batches_of_any_size(sigma_rel):
    """The share of an update is the integral of the profile over its images."""
    parts, start = shares(PowerFunction(sigma_rel=sigma_rel), BATCHES)
    edges = np.concatenate([[0], np.cumsum(BATCHES)]) / sum(BATCHES)
    expected = np.diff(edges ** (exponent(sigma_rel) + 1))
    assert start == 0
    np.testing.assert_allclose(parts, expected, rtol=1e-9, atol=1e-300)


def test_half_lives_are_counted_in_images():
    profile = HalfLife(images=30, ramp=0.0)
    assert shares(profile, [10, 20])[1] == pytest.approx(0.5)
    assert shares(profile, [1] * 60)[1] == pytest.approx(0.25)


def test_ramp_and_warmup_forget_the_start():
    ramped = HalfLife(images=1000, ramp=0.05)
    assert shares(ramped, BATCHES)[1] == 0
    assert ramped.beta(20_100, 100, 9) == 0.5 ** (100 / 1000)
    assert ramped.beta(10_100, 100, 9) == 0.5 ** (100 / 500)
    warm = ConstantDecay(decay=0.99)
    assert [warm.beta(0, 1, n) for n in (0, 1, 10_000)] == [0.1, 2 / 11, 0.99]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_averages_are_the_shares_of_the_weights(profile):
    module, walk = Walker(), random_walk(len(BATCHES), 6)
    start = torch.arange(6, dtype=torch.float64)
    module.put(start)
    averages = Averages(module, [profile])
    for weights, images in zip(walk, np.cumsum(BATCHES), strict=True):
        module.put(weights)
        averages.update(float(images))
    parts, rest = shares(profile, BATCHES)
    expected = torch.from_numpy(parts) @ walk + rest * start
    torch.testing.assert_close(averages.weights[profile.name]["weight"], expected)
    assert (averages.images, averages.updates) == (sum(BATCHES), len(BATCHES))
    assert list(averages.weights[profile.name]) == ["weight"]  # not what is frozen


def test_what_cannot_be_counted_is_refused():
    averages = Averages(Walker(), [HalfLife()])
    averages.update(8)
    with pytest.raises(ValueError, match="seen 8 images already"):
        averages.update(8)
    with pytest.raises(UserError, match="twice"):
        Averages(Walker(), [HalfLife(), HalfLife()])


def test_half_precision_weights_have_float32_averages():
    module = nn.Linear(3, 2).bfloat16()
    averages = Averages(module, [ConstantDecay(decay=0.9999, warmup=False)])
    before = averages.weights["constant-0.9999"]["weight"].clone()
    with torch.no_grad():
        module.weight.add_(1)
    averages.update(1)
    after = averages.weights["constant-0.9999"]["weight"]
    assert after.dtype == torch.float32
    torch.testing.assert_close(after - before, torch.full((2, 3), 1e-4), rtol=0.01, atol=0)
    with averages.applied("constant-0.9999"):
        assert module.weight.dtype == torch.bfloat16


# ---------------------------------------------------------------- post-hoc synthesis


def test_inner_products_are_their_integrals():
    def profile(tau: np.ndarray, end: float, gamma: float) -> np.ndarray:
        return np.where(tau <= end, (gamma + 1) * tau**gamma / end ** (gamma + 1), 0)

    tau = (np.arange(400_000) + 0.5) / 400_000 * 10
    for a, b in [((4.0, 3.0), (9.0, 17.0)), ((9.0, 3.0), (4.0, 17.0)), ((5.0, 2.0), (5.0, 2.0))]:
        integral = (profile(tau, *a) * profile(tau, *b)).mean() * 10
        arguments = [np.array(value) for value in (*a, *b)]
        assert float(inner_product(*arguments)) == pytest.approx(integral, rel=1e-3)


def track(walk: Tensor, every: int, sigma_rels: list[float], batch: int = 4):
    """Averages of a walk, tracked directly, with snapshots of the first two on the way."""
    module, snapshots = Walker(walk.shape[1]), []
    averages = Averages(module, [PowerFunction(sigma_rel=s) for s in sigma_rels])
    for step, weights in enumerate(walk, start=1):
        module.put(weights)
        averages.update(batch * step)
        if step % every == 0:
            snapshots += [s for s in averages.snapshots() if s.sigma_rel in sigma_rels[:2]]
    return averages, snapshots


@pytest.mark.parametrize("unseen", [0.07, 0.13, 0.2])
def test_an_unseen_width_is_synthesized_from_snapshots(unseen):
    averages, snapshots = track(random_walk(1600), 50, [0.05, 0.1, unseen])
    assert len(snapshots) == 64
    direct = averages.weights[f"power-{unseen:g}"]["weight"]
    made = synthesize(snapshots, unseen)["weight"]
    assert float((made - direct).norm() / direct.norm()) < 0.01
    for tracked in (0.05, 0.1):  # and it is not just any average
        other = averages.weights[f"power-{tracked:g}"]["weight"]
        assert float((other - direct).norm() / direct.norm()) > 0.02


def test_an_earlier_moment_is_synthesized_from_the_snapshots_before_it():
    walk = random_walk(1600)
    _, snapshots = track(walk, 50, [0.05, 0.1])
    earlier, _ = track(walk[:1000], 50, [0.05, 0.1, 0.15])
    direct = earlier.weights["power-0.15"]["weight"]
    made = synthesize(snapshots, 0.15, images=4000)["weight"]
    assert float((made - direct).norm() / direct.norm()) < 0.01
    found = coefficients([(s.images, s.sigma_rel) for s in snapshots], 0.15, 4000)
    assert all(c == 0 for c, s in zip(found, snapshots, strict=True) if s.images > 4000)


def test_coefficients_sum_to_one_and_find_a_snapshot_again():
    stored = [(float(t), s) for t in range(100, 1100, 100) for s in (0.05, 0.1)]
    assert sum(coefficients(stored, 0.17, 1000)) == pytest.approx(1)
    same = coefficients(stored, 0.1, 700)
    expected = [float(point == (700.0, 0.1)) for point in stored]
    np.testing.assert_allclose(same, expected, atol=1e-6)
    # A snapshot stored twice (a run that was resumed) makes the system singular, not the answer.
    twice = coefficients([*stored, stored[-1]], 0.1, 1000)
    assert twice[-1] + twice[-2] == pytest.approx(1, abs=1e-6)
    with pytest.raises(UserError, match="no snapshot"):
        coefficients(stored, 0.1, 50)


def test_snapshots_in_half_precision_are_enough():
    averages, snapshots = track(random_walk(800), 25, [0.05, 0.1, 0.08])
    halves = [
        Snapshot(s.images, s.sigma_rel, {k: w.half() for k, w in s.weights.items()})
        for s in snapshots
    ]
    direct, made = averages.weights["power-0.08"]["weight"], synthesize(halves, 0.08)["weight"]
    assert made.dtype == torch.float32
    assert float((made - direct).norm() / direct.norm()) < 0.01


def test_snapshots_are_copies_of_power_functions_only():
    module = Walker()
    averages = Averages(module, [HalfLife(), PowerFunction(sigma_rel=0.1)])
    module.put(torch.ones(6))
    averages.update(4)
    (snapshot,) = averages.snapshots(torch.float16)
    assert (snapshot.images, snapshot.sigma_rel) == (4, 0.1)
    assert snapshot.weights["weight"].dtype == torch.float16
    averages.weights["power-0.1"]["weight"].zero_()
    assert snapshot.weights["weight"].all()


def test_combining_takes_parts_one_at_a_time_and_checks_their_names():
    parts = ((c, {"w": torch.full((2,), v)}) for c, v in [(0.5, 4.0), (-1.0, 1.0)])
    assert combine(parts)["w"].tolist() == [1.0, 1.0]
    with pytest.raises(UserError, match="lacks"):
        combine([(1.0, {"w": torch.ones(1)}), (1.0, {"v": torch.ones(1)})])


# ---------------------------------------------------------------- swapping in and out


def test_the_module_holds_the_average_and_then_itself_to_the_bit():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    averages = Averages(module, [HalfLife(images=10, ramp=0.0)])
    with torch.no_grad():
        module[0].weight.mul_(1 / 3)
    averages.update(7)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    pointers = [p.data_ptr() for p in module.parameters()]
    with averages.applied("half-life-10") as same:
        assert same is module
        assert torch.equal(module[0].weight, averages.weights["half-life-10"]["0.weight"])
        assert not torch.equal(module[0].weight, before["0.weight"])
        module(torch.randn(8, 4))  # a training-mode pass moves the batch norm's buffers
        assert not torch.equal(module[1].running_mean, before["1.running_mean"])
        with pytest.raises(RuntimeError, match="leave `applied`"):
            averages.update(9)
    after = module.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert [p.data_ptr() for p in module.parameters()] == pointers


def test_an_error_inside_restores_the_weights_too():
    module = Walker()
    averages = Averages(module, [HalfLife()])
    module.put(torch.ones(6))
    with pytest.raises(KeyError), averages.applied("half-life-500000"):
        raise KeyError
    assert module.weight.tolist() == [1.0] * 6
    averages.update(1)
    with pytest.raises(UserError, match="there are: half-life-500000"), averages.applied("x"):
        pass


# ---------------------------------------------------------------- resume


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    walk, images = random_walk(len(BATCHES), 6).float(), np.cumsum(BATCHES)

    def run(averages: Averages, module: Walker, steps: range) -> None:
        for step in steps:
            module.put(walk[step])
            averages.update(int(images[step]))

    module = Walker()
    whole = Averages(module, PROFILES)
    run(whole, module, range(5))
    state = whole.state_dict()
    # Tensors and JSON apart, as the checkpoint keeps them.
    torch.save(state["averages"], tmp_path / "tensors.pt")
    progress = json.loads(json.dumps(state["progress"]))
    run(whole, module, range(5, 10))

    other = Walker()
    resumed = Averages(other, PROFILES)
    tensors = torch.load(tmp_path / "tensors.pt", weights_only=True)
    resumed.load_state_dict({"averages": tensors, "progress": progress})
    run(resumed, other, range(5, 10))
    for name in whole.weights:
        assert torch.equal(resumed.weights[name]["weight"], whole.weights[name]["weight"])
    assert resumed.state_dict()["progress"] == whole.state_dict()["progress"]


def test_a_checkpoint_of_other_averages_is_refused_by_name():
    state = Averages(Walker(), [HalfLife(images=5)]).state_dict()
    with pytest.raises(UserError, match=r"half-life-6.*half-life-5"):
        Averages(Walker(), [HalfLife(images=6)]).load_state_dict(state)
    with pytest.raises(UserError, match="parameters in average"):
        Averages(nn.Linear(2, 2), [HalfLife(images=5)]).load_state_dict(state)


# ---------------------------------------------------------------- shards


def sharded_check(rank: int, port: int) -> None:
    """Run by each of two processes: FSDP2 shards against the whole model in one process."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    profiles = [HalfLife(images=16), PowerFunction(sigma_rel=0.1)]

    def model() -> nn.Module:
        torch.manual_seed(0)
        # 5 rows over 2 processes: uneven shards. The last layer belongs to the root, which stays
        # gathered after a forward pass.
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    whole, split = model(), model()
    fully_shard(split[0])
    fully_shard(split)
    placements = {k: p.placements for k, p in split.named_parameters()}
    runs = []
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for module in (whole, split):
        averages = Averages(module, profiles)
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(1, 5):
            module(x).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
            averages.update(8 * step)
        runs.append((averages, module(x).detach()))
    (plain, output), (sharded, split_output) = runs
    torch.testing.assert_close(split_output, output)
    for name, weights in plain.weights.items():
        for key, value in weights.items():
            mine = sharded.weights[name][key]
            assert isinstance(mine, DTensor)
            assert mine.placements == placements[key]
            assert mine.to_local().numel() < value.numel()
            torch.testing.assert_close(mine.full_tensor(), value)
    for name in plain.weights:
        with plain.applied(name), sharded.applied(name), torch.no_grad():
            torch.testing.assert_close(split(x), whole(x))
            assert not torch.allclose(whole(x), output)
        with torch.no_grad():
            assert torch.equal(split(x), split_output)
    state = sharded.state_dict()
    again = Averages(split, profiles)
    again.load_state_dict(state)
    assert again.images == 32
    made = synthesize(again.snapshots(), 0.1)
    for key, value in plain.weights["power-0.1"].items():
        torch.testing.assert_close(made[key].full_tensor(), value)
    dist.destroy_process_group()


@pytest.mark.slow
def test_shards_of_two_processes_average_like_the_whole():
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    torch.multiprocessing.spawn(sharded_check, (number,), nprocs=2)
