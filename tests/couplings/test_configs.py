"""Configs build the coupling they describe, with its own defaults."""

import pytest
from pydantic import TypeAdapter, ValidationError

from stillhouse.couplings import COUPLINGS, Assignment, Conditional, Nearest, Pooled
from stillhouse.couplings.configs import CouplingConfig

PARSE = TypeAdapter(CouplingConfig)


class Nobody:
    rank = 0

    def collect(self, value):
        return [value]

    def share(self, value):
        return value


@pytest.mark.parametrize("kind", COUPLINGS)
def test_every_kind_builds_its_coupling(kind):
    config = PARSE.validate_python({"kind": kind})
    assert config.build() == COUPLINGS[kind]()
    assert not config.pooled
    assert PARSE.validate_json(PARSE.dump_json(config)) == config


def test_options_reach_the_coupling():
    def build(**options):
        return PARSE.validate_python(options).build()

    assert build(kind="nearest", k=8, metric="l2") == Nearest(8, "l2")
    assert build(kind="assignment", cost="l1", block=512) == Assignment("l1", 512)
    assert build(kind="conditional", mode="soft", weight=0.5, side=8, standardise=True) == (
        Conditional(side=8, standardise=True, mode="soft", weight=0.5)
    )


@pytest.mark.parametrize("kind", ["assignment", "conditional"])
def test_a_global_pool_is_made_where_processes_can_talk(kind):
    config = PARSE.validate_python({"kind": kind, "pool": "global"})
    assert config.pooled
    pooled = config.build(Nobody())
    assert isinstance(pooled, Pooled)
    assert pooled.coupling == COUPLINGS[kind]()
    assert config.build() == COUPLINGS[kind]()  # alone: the same coupling
    own = PARSE.validate_python({"kind": kind})
    assert own.build(Nobody()) == COUPLINGS[kind]()


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "sinkhorn"},
        {"kind": "nearest", "k": 0},
        {"kind": "assignment", "block": 1},
        {"kind": "nearest", "pool": "global"},
        {"kind": "conditional", "weight": -1},
        {"kind": "assignment", "cost": "cosine"},
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValidationError):
        PARSE.validate_python(wrong)
