"""`stillhouse features info`: which activations a model has, or what a folder of features holds."""

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from stillhouse.features.activation import Activation
from stillhouse.features.selection import candidates, keep_by_rule
from stillhouse.features.store import INDEX, StoredFeatures
from stillhouse.recipes.features.reading import Outline, Reading, read_outline


class InfoRun(Reading):
    """What there is to read."""

    match: str = "*"
    """Only ids like this: 'up-level1-*-cross-q'."""


def run(config: InfoRun) -> str:
    folder = Path(config.model).expanduser()
    if config.model and (folder / INDEX).is_file():
        return "\n".join(_stored(StoredFeatures(folder)))
    return "\n".join(_activations(read_outline(config), config.match))


def _stored(found: StoredFeatures) -> Iterator[str]:
    facts = found.facts
    yield f"{len(found)} images of {facts.source} ({facts.reading})"
    yield f"{facts.dtype}, seed {facts.seed}, {len(facts.shards())} files"
    for part in facts.parts:
        told = f", {part.condition}" if part.condition else ""
        yield f"{part.model} at sigma {part.sigma:g}{told}"
        yield f"  {part.digest}"
    for name, shape in found.shapes.items():
        yield f"  {name}  {' x '.join(map(str, shape))}"


def _activations(model: Outline, pattern: str) -> Iterator[str]:
    known = model.known
    pool = candidates(known)
    kept = set(keep_by_rule(known, pool))
    counts = Counter(activation.stage for activation in known.values())
    stages = ", ".join(f"{count} {stage}" for stage, count in counts.items())
    yield f"{model.name}: {len(known)} activations ({stages}) of {model.reading}"
    yield f"the paper compares {len(pool)} of them, its rules leave {len(kept)} (marked *)"
    shown = [activation for name, activation in known.items() if fnmatch(name, pattern)]
    width = max((len(activation.id) for activation in shown), default=0)
    for activation in shown:
        mark = "*" if activation.id in kept else " "
        shape = shape_words(activation, model.latent)
        yield f"{mark} {activation.id:<{width}}  {shape:<16} {activation.module or '(all)'}"


def shape_words(activation: Activation, latent: tuple[int, int]) -> str:
    channels, height, width = activation.shape(*latent)
    count = "tokens" if activation.kind == "cross-map" else str(channels)
    return f"{count} x {height} x {width}"
