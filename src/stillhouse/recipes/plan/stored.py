"""What a run leaves on the disk: checkpoints, and the model that it exports. Bytes of tensors."""

from typing import NamedTuple

from stillhouse.models import Codec, DiffusersNetwork
from stillhouse.pipelines.families import family_of, whole_folder
from stillhouse.pipelines.save import copied_files
from stillhouse.recipes.plan.ledger import held
from stillhouse.recipes.plan.shadows import moments
from stillhouse.recipes.train.training import TrainRun
from stillhouse.recipes.train.tuning import Tuned

COUNTED = "counted"


class Stored(NamedTuple):
    """How much, and how it is known."""

    size: float
    how: str


def checkpoint(config: TrainRun, network: DiffusersNetwork) -> Stored:
    """Weights, what the optimiser knows of them, and averages. Of adapters (LoRA) only they are
    stored: what they are added to is in the pipeline."""
    trained = _learnt(network)
    size = held(network.state_dict().values()) + len(config.averages) * trained
    low = config.optim.kind == "adamw-8bit"
    how = "estimated: counted but for 8-bit moments, from torchao's blocks of 256"
    return Stored(size + moments(config, trained), how if low else COUNTED)


def exported(config: TrainRun, network: DiffusersNetwork, codec: Codec | None) -> Stored:
    """The network and its codec, adapters alone, or a whole pipeline."""
    if not isinstance(config.network, Tuned):
        parts = [network] if codec is None else [network, codec.autoencoder]
        return Stored(sum(held(part.state_dict().values()) for part in parts), COUNTED)
    if config.network.method == "lora":
        return Stored(_learnt(network), COUNTED)
    size = held(network.state_dict().values()) + _beside(config.network)
    how = "estimated: its network, and the other files of the pipeline, where they cannot be linked"
    return Stored(size, how)


def _beside(network: Tuned) -> int:
    """What is copied of the pipeline."""
    folder = whole_folder(network.path)
    own = family_of(folder).network
    parts = [part for part in folder.iterdir() if part.is_dir() and part.name != own]
    return sum(file.stat().st_size for part in parts for file in copied_files(part))


def _learnt(network: DiffusersNetwork) -> int:
    return held(p for p in network.parameters() if p.requires_grad)
