"""What a run of a generator is assembled from: every setting and every network in its place."""

import pytest
import torch
from recipes.students import CLASSES, EDM, HERE, bare, distilling
from small_models import relative_error

from stillhouse.distill.emd import METHODS
from stillhouse.distill.langevin import Langevin
from stillhouse.pipelines import load_denoiser
from stillhouse.process import Condition
from stillhouse.recipes.distill.distilling import networks
from stillhouse.recipes.distill.generators import Emd, FDistill, ReverseKL, SidConfig
from stillhouse.recipes.parts import ClassifierFree
from stillhouse.solvers import classifier_free

COMMON = {"weighting": "eps", "score_steps": 3, "low": 0.2, "high": 40.0, "start": 6.0}


def task_of(model, out, **changes):
    *_, task = networks(distilling(model, out, evaluations="1", **changes), (1,), HERE)
    return task


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (
            Emd(langevin=3, noise_step=0.2, latent_step=0.01, stretch=3.0, bookkeeping="full"),
            {"chain": Langevin(3, 0.2, 0.01, "full", 3.0)},
        ),
        (SidConfig(alpha=1.5), {"k": 1.5}),
        (FDistill(power=0.5, most=7.0), {"power": 0.5, "most": 7.0, "highest": 40.0}),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_every_setting_of_a_method_arrives(method, settings, teacher, tmp_path):
    method = method.model_copy(update=COMMON)
    task = task_of(teacher, tmp_path / "run", method=method, seed=5)
    assert task.method.func is METHODS[method.kind]
    assert task.method.keywords == settings
    assert (task.weighting, task.score_steps, task.seed) == ("eps", 3, 5)
    assert task.sigma_star == 6
    ends = task.levels.quantile(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert ends.tolist() == pytest.approx([0.2, 40.0])
    assert task.objective.density == task.levels  # of the fake score


@pytest.mark.parametrize("kind", ["diff-instruct", "dmd"])
def test_methods_without_settings_are_themselves(kind, teacher, tmp_path):
    task = task_of(teacher, tmp_path / "run", method=ReverseKL(kind=kind))
    assert task.method is METHODS[kind]


@pytest.mark.parametrize("score", ["full", "lora"])
def test_a_generator_is_taught_by_the_guided_teacher(score, tmp_path):
    """And its fake score is guided by nobody."""
    folder = bare(tmp_path / "teacher", EDM, **CLASSES)
    guided = {"guidance": ClassifierFree(weight=3.0), "null_label": 7}
    rank = {"score_rank": 2} if score == "lora" else {}
    task = task_of(folder, tmp_path / "run", method=Emd(score=score, **rank), **guided)
    plain = load_denoiser(folder).requires_grad_(False)
    by_hand = classifier_free(plain, Condition(label=torch.tensor([7])), 3.0)
    x, sigma = torch.randn(2, 3, 8, 8), torch.tensor([0.3, 2.0])
    cond = Condition(label=torch.tensor([1, 2]))
    with torch.no_grad():
        found, alone = task.teacher(x, sigma, cond), task.score.eval()(x, sigma, cond)
    assert relative_error(found, by_hand(x, sigma, cond)) < 1e-5
    assert relative_error(found, plain(x, sigma, cond)) > 0.01
    assert relative_error(alone, plain(x, sigma, cond)) < 1e-5
