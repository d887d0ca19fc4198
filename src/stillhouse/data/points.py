"""Points of a 2-D toy as training data: drawn by key, so there is nothing to read or to store."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal

import torch

from stillhouse.config import Config
from stillhouse.data.faults import FaultConfig, FaultLog
from stillhouse.data.indexed import KeySampler, indexed_state
from stillhouse.data.loaded import Loaded, Loader, State
from stillhouse.process import TOYS, Batch, Condition, GaussianMixture, keyed_normal, keyed_uniform

Toy = Literal["moons", "ring", "spiral", "checkerboard"]


class PointsConfig(Config):
    """Points of a toy target."""

    kind: Literal["points"] = "points"
    toy: Toy = "moons"
    """Which target."""
    labels: bool = False
    """Also give each point its class, for the toys that have classes."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (2,)

    def target(self) -> GaussianMixture:
        return TOYS[self.toy]()

    def build(
        self,
        *,
        batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
        stop: int | None = None,
        resume: Sequence[State] = (),
    ) -> Loader:
        """As `DataConfig.build`: point k of the run follows from the seed and k."""
        start = resume[0]["images"] if resume else start
        keys = KeySampler(batch, start, stop, rank, world)
        return PointsLoader(self.target(), keys, seed, labelled=self.labels)


class PointsLoader:
    """Batches of points."""

    def __init__(
        self, toy: GaussianMixture, keys: KeySampler, seed: int, *, labelled: bool
    ) -> None:
        self.toy, self.keys, self.seed, self.labelled = toy, keys, seed, labelled
        self.log = FaultLog(FaultConfig())
        known = 0 if toy.labels is None or not labelled else int(toy.labels.max()) + 1
        self.classes = tuple(map(str, range(known)))
        self.note = f"continues at point {keys.start}" if keys.start else ""

    def __iter__(self) -> Iterator[Loaded]:
        for step, keys in zip(count(1), self.keys, strict=False):
            state = indexed_state(self.keys.start + step * self.keys.batch, 0)
            yield Loaded(self.draw(torch.tensor(keys)), state=state)

    def draw(self, key: torch.Tensor) -> Batch:
        """The points with these keys: a component of the mixture each, and a place in it."""
        bounds = self.toy.weights.cumsum(0)
        u = keyed_uniform(key, seed=self.seed, purpose="component")
        which = torch.searchsorted(bounds, u, right=True).clamp(max=len(bounds) - 1)
        place = keyed_normal(self.toy.shape, key, seed=self.seed, purpose="point")
        data = self.toy.means[which] + self.toy.stds[which, None] * place
        label = self.toy.labels[which] if self.classes and self.toy.labels is not None else None
        condition = None if label is None else Condition(label=label)
        return Batch(data=data.float(), condition=condition, ids=key, key=key)
