"""What a teacher shows: the states that its solver passes, from noise that a key decides."""

from itertools import islice

import pytest
import torch
from distill.toys import three_on_a_circle
from torch import nn

from stillhouse.distill.grids import Native, Polynomial
from stillhouse.distill.trajectories import (
    Kept,
    Labels,
    Starts,
    Teacher,
    earlier_student,
    frozen,
)
from stillhouse.engine.world import World
from stillhouse.process import EDM, Condition, Gaussian
from stillhouse.solvers import (
    SOLVERS,
    STOCHASTIC,
    Counted,
    classifier_free,
    sample_dpmpp_3m,
    sample_euler,
)

GRIDS, DATA = Polynomial(), three_on_a_circle()
START = Starts((2,), seed=3).rows(torch.arange(16))
X = 80 * START.noise


@pytest.mark.parametrize("name", [name for name in SOLVERS if name not in STOCHASTIC])
@pytest.mark.parametrize("grids", [GRIDS, Native(EDM())], ids=["polynomial", "native"])
def test_states_are_those_at_which_shorter_walks_end(name, grids):
    solver = SOLVERS[name]
    teacher = Teacher(DATA, grids, 4, solver, lower_order_final=False)
    states, fine = teacher(X, 4, None), grids.teacher(4, 4)
    assert len(states) == 3
    for i, state in enumerate(states, 1):
        assert torch.equal(state, solver(DATA, X, fine[: 4 * i + 1]))


@pytest.mark.parametrize(("lowered", "ratio"), [(False, 0.988), (True, 1.112)])
def test_lower_order_final_moves_the_target_as_much_as_the_paper_says(lowered, ratio):
    data, x = Gaussian(std=1.0), torch.full((1, 1), 80.0, dtype=torch.float64)
    end = Teacher(data, GRIDS, lower_order_final=lowered)(x, 4, None)[-1]
    assert float(end / data.exact_flow(x, 80.0, 0.006)) == pytest.approx(ratio, abs=1e-3)


def test_the_papers_teacher_is_the_default():
    states = Teacher(DATA, GRIDS)(X, 4, None)
    fine = GRIDS.teacher(4, 4)
    assert torch.equal(states[-1], sample_dpmpp_3m(DATA, X, fine, lower_order_final=True))


def test_guidance_may_be_inside_the_teacher():
    guided = classifier_free(DATA, Condition(label=torch.tensor([-1])), 2.0)
    cond = Condition(label=torch.arange(16) % 3)
    found, plain = (Teacher(d, GRIDS)(X, 4, cond)[-1] for d in (guided, DATA))
    expected = sample_dpmpp_3m(guided, X, GRIDS.teacher(4, 4), cond, lower_order_final=True)
    assert torch.equal(found, expected)
    assert not torch.equal(found, plain)


class Told(nn.Module):
    """Remembers what it was told; has a weight that could have a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.steps: list[list[int]] = []

    def forward(self, x, sigma, cond=None):
        self.steps.append([] if cond is None or cond.steps is None else cond.steps.tolist())
        return self.weight * DATA(x, sigma)


def test_a_student_of_seven_timestamps_teaches_as_it_samples():
    """Its own step condition and its own AFS: five evaluations for N = 3."""
    student = frozen(Told())
    teacher = earlier_student(student, GRIDS, afs=True, told=True)
    states = teacher(X, 3, None)
    assert student.steps == [[7] * 16] * 5
    whole = sample_euler(DATA, X, GRIDS.teacher(3, 3), afs=True)
    half = sample_euler(DATA, X, GRIDS.teacher(3, 3)[:4], afs=True)
    assert torch.equal(states[0], half)
    assert torch.equal(states[1], whole)


def test_a_teacher_of_a_first_stage_is_not_told_and_has_no_analytical_step():
    student, counted = frozen(Told()), Counted(DATA)
    Teacher(student, GRIDS)(X, 4, None)
    Teacher(counted, GRIDS)(X, 4, None)
    assert student.steps == [[]] * 12
    assert counted.evaluations == 12


def test_a_teacher_gives_no_gradient_even_if_it_could():
    states = Teacher(Told().eval(), GRIDS)(X, 4, None)
    assert not any(state.requires_grad for state in states)


def test_a_teacher_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="frozen"):
        Teacher(Told().train(), GRIDS)(X, 4, None)


def test_frozen_networks_have_neither_dropout_nor_gradient():
    network = frozen(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    assert not any(module.training for module in network.modules())
    assert not any(p.requires_grad for p in network.parameters())


def test_a_start_depends_on_seed_and_key_alone():
    starts = Starts((2,), seed=3, conditions=Labels(10, seed=3))
    whole, alone = starts.rows(torch.arange(40)), starts.rows(torch.tensor([17]))
    assert torch.equal(whole.noise[17:18], alone.noise)
    assert torch.equal(whole.condition.label[17:18], alone.condition.label)
    assert not torch.equal(Starts((2,), seed=4).rows(torch.arange(40)).noise, whole.noise)
    assert len(whole.noise.unique()) == 80


def test_labels_are_of_every_class():
    assert Labels(10, seed=0)(torch.arange(200)).label.unique().tolist() == list(range(10))


def test_two_processes_share_the_batches_of_one():
    starts = Starts((2,), seed=3)
    worlds = [World(rank, size, torch.device("cpu")) for rank, size in ((0, 1), (0, 2), (1, 2))]
    one, *parts = (list(islice(starts.feed(24, 8, world), 3)) for world in worlds)
    for item, *shares in zip(one, *parts, strict=True):
        joined = torch.cat([share.batch.noise for share in shares])
        assert torch.equal(joined, item.batch.noise)
        assert [share.state for share in shares] == [item.state] * 2
        assert item.state["images"] == int(item.batch.key[-1]) + 1
    assert int(one[0].batch.key[0]) == 24


def test_starts_come_again_after_as_many_as_are_distinct():
    starts, here = Starts((2,), seed=3, distinct=6), World(1, 2, torch.device("cpu"))
    feed = starts.feed(0, 4, here)
    batches = [next(feed).batch for _ in range(4)]
    assert [batch.key.tolist() for batch in batches] == [[2, 3], [0, 1], [4, 5], [2, 3]]
    assert [batch.turn.tolist() for batch in batches] == [[0, 0], [1, 1], [1, 1], [2, 2]]
    again, once = starts.rows(torch.tensor([2, 3])), Starts((2,), seed=3).rows(torch.arange(4))
    assert torch.equal(again.noise, once.noise[2:])


def test_kept_trajectories_are_made_once(tmp_path):
    kept, made = Kept(tmp_path / "walks"), []

    def make():
        made.append(1)
        return [X + i for i in range(3)]

    here = World(0, 1, torch.device("cpu"))
    for _ in range(3):
        found = kept(START.key, 4, make, here)
        assert all(torch.equal(state, X + i) for i, state in enumerate(found))
    assert len(made) == 1
    kept(START.key, 5, make, here)
    kept(START.key + 1, 4, make, here)
    assert len(made) == 3


def test_where_one_process_has_no_trajectories_all_make_theirs(tmp_path):
    """Or those with a sharded teacher would wait for the others for ever."""

    class Another(World):
        def total(self, value):
            return float(value) + 1  # of the other process, which was killed before it wrote

    made, here = [], Another(0, 2, torch.device("cpu"))
    for _ in range(2):
        Kept(tmp_path)(START.key, 4, lambda: made.append(1) or [X], here)
    assert len(made) == 2
