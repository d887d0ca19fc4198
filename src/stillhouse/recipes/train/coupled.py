"""A run's coupling: built, refused where it has nothing to go by, doubted where it would leak."""

from stillhouse.couplings import Coupling
from stillhouse.couplings.configs import ConditionalConfig, CouplingConfig, IndependentConfig
from stillhouse.couplings.pooled import GroupExchange
from stillhouse.engine.world import WORK, World, gloo_group
from stillhouse.errors import UserError


def build_coupling(coupling: CouplingConfig, here: World) -> Coupling | None:
    """None where noise is independent. A pool over processes talks in a group of its own."""
    if isinstance(coupling, IndependentConfig):
        return None
    shared = coupling.pooled and here.size > 1
    return coupling.build(GroupExchange(gloo_group(WORK)) if shared else None)


def check_coupling(coupling: CouplingConfig, *, classes: bool, captions: bool) -> None:
    """Before anything is read or queued for."""
    if not isinstance(coupling, ConditionalConfig) or classes:
        return
    if coupling.mode == "within-class" and captions:
        raise UserError(
            "--coupling conditional swaps noise within a class, and captions are none: add "
            "--coupling.mode soft"
        )
    if not captions:
        raise UserError(
            "--coupling conditional goes by classes or captions, and the network is told neither: "
            "choose --coupling assignment"
        )


def coupling_note(coupling: CouplingConfig, *, classes: bool, captions: bool) -> str:
    """A warning where noise will tell what the network is told, which sampling's will not."""
    if isinstance(coupling, IndependentConfig | ConditionalConfig) or not (classes or captions):
        return ""
    told, mode = ("class", "") if classes else ("caption", " --coupling.mode soft")
    return (
        f"noise by --coupling {coupling.kind} tells something of the {told}, and in sampling it "
        f"will not: --coupling conditional{mode} lets it tell less"
    )
