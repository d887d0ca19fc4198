"""Configs build the objective they describe and refuse what they don't know."""

import pytest
from pydantic import TypeAdapter, ValidationError

from stillhouse.errors import UserError
from stillhouse.objectives import (
    OBJECTIVES,
    Denoising,
    EasyConsistency,
    FlowMatching,
    ImprovedConsistency,
)
from stillhouse.objectives.configs import ObjectiveConfig
from stillhouse.process import EDM, VP, Flow, alphas_cumprod, betas, levels

PARSE = TypeAdapter(ObjectiveConfig)
VP_PROCESS = VP(alphas_cumprod(betas("linear")))


def build(config: dict, scaling=None, images: float = 1e6):
    return PARSE.validate_python(config).build(scaling or EDM(), images)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_kind_builds_its_objective_with_the_components_own_defaults(kind):
    objective = build({"kind": kind})
    assert type(objective) is OBJECTIVES[kind]
    curriculum = {"total_images": 1e6} if "consistency" in kind else {}
    assert objective == OBJECTIVES[kind](**curriculum)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_configs_go_through_json(kind):
    config = PARSE.validate_python({"kind": kind})
    assert PARSE.validate_json(PARSE.dump_json(config)) == config


def test_sigma_data_is_the_processs_own():
    assert build({"kind": "denoising"}, EDM(sigma_data=0.8)).constants.sigma_data == 0.8
    assert build({"kind": "denoising", "weighting": "v"}, VP_PROCESS).constants.sigma_data == 1.0


def test_densities_are_built_for_the_process():
    uniform = {"kind": "uniform-time"}
    vp = build({"kind": "denoising", "weighting": "eps", "density": uniform}, VP_PROCESS)
    assert vp.density == levels.UniformTime(VP_PROCESS, discrete=True)
    flow = build({"kind": "flow", "density": uniform}, EDM())
    assert flow.density == levels.UniformTime(Flow())
    ranged = build({"kind": "denoising", "density": {"kind": "log-uniform"}}, EDM())
    assert ranged.density == levels.LogUniform(0.002, 80.0)
    shifted = build({"kind": "flow", "density": {"kind": "logit-normal", "shift": 3.0}})
    assert shifted.density == levels.Shifted(levels.LogitNormal(), 3.0)


def test_options_reach_the_objective():
    assert build({"kind": "denoising", "weighting": "min-snr", "gamma": 3.0}) == Denoising(
        weighting="min-snr", constants=Denoising().constants._replace(gamma=3.0)
    )
    assert build({"kind": "flow"}) == FlowMatching()
    easy = build({"kind": "easy-consistency", "q": 4.0, "stages": 3})
    assert easy == EasyConsistency(total_images=1e6, q=4.0, stages=3)
    improved = build({"kind": "consistency", "last_steps": 40, "sigma_max": 20.0})
    assert improved == ImprovedConsistency(total_images=1e6, last_steps=40, sigma_max=20.0)


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "denoise"},
        {"kind": "denoising", "wieghting": "edm"},
        {"kind": "denoising", "weighting": "p2"},
        {"kind": "flow", "density": {"kind": "log-normal", "std": 0}},
        {"kind": "easy-consistency", "q": 1.0},
    ],
)
def test_unknown_keys_and_values_are_refused(config):
    with pytest.raises(ValidationError):
        PARSE.validate_python(config)


def test_what_cannot_work_is_said():
    with pytest.raises(UserError, match="log-normal"):
        build({"kind": "denoising", "density": {"kind": "uniform-time"}}, EDM())
    with pytest.raises(UserError, match="sigma_min < sigma_max"):
        build({"kind": "consistency", "sigma_min": 2.0, "sigma_max": 1.0})
