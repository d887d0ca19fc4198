"""Where a coupling meets a batch: the noise it chose becomes the batch's noise.

Objectives use the noise that a batch carries, for input and target alike, so nothing else needs to
know of the coupling. It sees the whole batch of a process, before any cut into micro-batches.
"""

from dataclasses import replace
from typing import NamedTuple

from stillhouse.couplings import Coupling, KeyedDraws, Pairing
from stillhouse.objectives.base import Draws, row_keys
from stillhouse.process import Batch


class Paired(NamedTuple):
    """The batch with its noise, and how that was chosen, for the log."""

    batch: Batch
    pairing: Pairing


def pair_noise(batch: Batch, coupling: Coupling, generator: Draws) -> Paired:
    """Draws noise by key and lets the coupling choose. Data and conditions stay where they are.

    Drop conditions before: what a conditional coupling goes by is what the network will be told.
    """
    if batch.noise is not None:
        raise ValueError("this batch has noise already: a coupling chooses where noise is drawn")
    draws = KeyedDraws(row_keys(batch), generator.rows)
    noise = generator.normal(batch).to(batch.data.device)
    pairing = coupling(batch.data, noise, batch.condition, draws)
    return Paired(replace(batch, noise=pairing.noise(noise, draws)), pairing)
