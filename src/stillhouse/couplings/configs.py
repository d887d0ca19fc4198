"""Configs of couplings. Each builds its coupling; a global pool needs the processes' exchange."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from stillhouse.config import Config
from stillhouse.couplings.assignment import BLOCK, Assignment, Cost
from stillhouse.couplings.conditional import Conditional, Mode
from stillhouse.couplings.nearest import Metric, Nearest
from stillhouse.couplings.pairing import Coupling, Independent
from stillhouse.couplings.pooled import Exchange, Pooled


class BaseConfig(Config):
    """What every coupling says of itself."""

    @property
    def pooled(self) -> bool:
        """Whether `build` wants an exchange, where there are several processes."""
        return False


class IndependentConfig(BaseConfig):
    """Every datum meets noise of its own."""

    kind: Literal["independent"] = "independent"

    def build(self, exchange: Exchange | None = None) -> Coupling:
        return Independent()


class PoolConfig(BaseConfig):
    """What solving a pool takes."""

    cost: Cost = "l2"
    """Squared L2 distance, or l1 to compare."""
    block: Annotated[int, Field(ge=2)] = BLOCK
    """Larger pools are solved in blocks of this many images; 512 keeps 90% of the gain at 2048."""
    standardise: bool = False
    """Divide each coordinate by its deviation over the pool, for the cost only."""
    side: NonNegativeInt = 0
    """Compare images averaged to this many pixels a side, to send less; 0: as they are."""
    pool: Literal["process", "global"] = "process"
    """Swap noise among the images of each process, or of all."""

    @property
    def pooled(self) -> bool:
        return self.pool == "global"

    def _pooled(self, coupling: Assignment, exchange: Exchange | None) -> Coupling:
        return Pooled(coupling, exchange) if self.pooled and exchange is not None else coupling


class AssignmentConfig(PoolConfig):
    """The permutation of the batch's noise nearest to its data."""

    kind: Literal["assignment"] = "assignment"

    def build(self, exchange: Exchange | None = None) -> Coupling:
        options = self.model_dump(exclude={"kind", "pool"})
        return self._pooled(Assignment(**options), exchange)


class NearestConfig(BaseConfig):
    """The nearest of k noises, for each datum by itself."""

    kind: Literal["nearest"] = "nearest"
    k: PositiveInt = 4
    """Noises to choose from. Drawing them is the cost."""
    metric: Metric = "cosine"
    """l2 is the published one: it makes the noise too small."""

    def build(self, exchange: Exchange | None = None) -> Coupling:
        return Nearest(self.k, self.metric)


class ConditionalConfig(PoolConfig):
    """Assignment that keeps noise from telling the condition."""

    kind: Literal["conditional"] = "conditional"
    mode: Mode = "within-class"
    """Swap within a class only, or softly: at a price between conditions, labels or text."""
    weight: NonNegativeFloat = 2.0
    """That price, in standard deviations of the cost; 0 is plain assignment. For soft."""

    def build(self, exchange: Exchange | None = None) -> Coupling:
        options = self.model_dump(exclude={"kind", "pool"})
        return self._pooled(Conditional(**options), exchange)


CouplingConfig = Annotated[
    IndependentConfig | AssignmentConfig | NearestConfig | ConditionalConfig,
    Field(discriminator="kind"),
]
