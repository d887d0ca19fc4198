"""`Activation`: one place inside a network, by a readable name, with the shape it has there."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal

Stage = Literal["in", "down", "mid", "up", "block", "out"]

INCREMENTS = ("res-increment", "ffn-inner", "self-v", "dual-v")  # what a residual branch adds


@dataclass(frozen=True)
class Activation:
    """The output of a module, as a map [B, channels, height, width].

    A map of attention has no module of its own: `module` is then the attention, and there are as
    many channels as tokens that are attended to. An input is that of its module.
    """

    id: str
    module: str  # path within the network; "" is the network itself
    kind: str  # what the id ends in: res-out, self-q, cross-map, ...
    stage: Stage
    scale: Fraction  # its resolution, as a fraction of the input's
    channels: int | None  # None for maps
    level: int = 0  # resolution within the stage of a U-Net
    repeat: int = 0  # residual block within the level
    block: int = 0  # transformer block within the ViT or the network
    frame: str = ""  # path of the module whose input says how tokens lie; "" where it is a map
    patch: int = 1  # pixels of that input along one token
    part: int = 0  # which of several outputs

    @property
    def is_map(self) -> bool:
        return self.kind.endswith("-map")

    @property
    def is_increment(self) -> bool:
        return self.kind in INCREMENTS

    def shape(self, height: int, width: int, text_tokens: int = 0) -> tuple[int, int, int]:
        """Channels, height and width, for an input of that size and a text of so many tokens."""
        rows, columns = (ceil(side * self.scale) for side in (height, width))
        channels = self.channels
        if channels is None:
            channels = text_tokens if self.kind == "cross-map" else rows * columns
        return channels, rows, columns
