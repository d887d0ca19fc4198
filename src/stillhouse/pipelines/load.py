"""`load_denoiser`: an ordinary diffusers directory, or a hub id, read as a denoiser.

The adapter follows from the checkpoint's own config files. Weights are read from safetensors only
and no code from a checkpoint is ever run. What cannot be read ends in one sentence that says what
was found and what is supported.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from stillhouse.models import NETWORKS, Codec, DiffusersNetwork
from stillhouse.pipelines.schedules import read_schedule
from stillhouse.process import NetworkDenoiser

NETWORK_FOLDERS = ("unet", "transformer")
# Published DiT and PixArt configs say Transformer2DModel; diffusers picks the class that it means.
LOADABLE = {*NETWORKS, "Transformer2DModel"}
AUTOENCODERS = {"AutoencoderKL", "AutoencoderTiny"}


class UnreadableCheckpoint(ValueError):
    """A checkpoint that cannot be loaded; the message says what was found and what is supported."""


class Parts(NamedTuple):
    """Where the parts of a checkpoint are."""

    network: Path  # the folder of the network
    scheduler: Path  # the scheduler's config file


def load_denoiser(
    path_or_hub_id: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> NetworkDenoiser:
    """Reads a diffusers pipeline, or a bare model with a scheduler config, as a denoiser.

    `denoiser.network.data_shape` and `.condition_shapes` say what it takes, and
    `denoiser.scaling.native_grid(steps)` is the grid of its own scheduler.
    """
    folder = resolve_folder(path_or_hub_id)
    parts = _find_parts(folder)
    try:
        trained = read_schedule(_read_json(parts.scheduler))
    except ValueError as error:
        raise UnreadableCheckpoint(f"{parts.scheduler} describes a {error}.") from error
    network = DiffusersNetwork(_load_network(parts.network, dtype).to(device).eval())
    return NetworkDenoiser(network, trained.scaling, trained.prediction, clip=trained.clip)


def load_codec(
    path_or_hub_id: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Codec | None:
    """The autoencoder of a latent pipeline, or None where the model works on pixels."""
    import diffusers

    folder = resolve_folder(path_or_hub_id) / "vae"
    if not (folder / "config.json").is_file():
        return None
    name = _read_json(folder / "config.json").get("_class_name")
    if name not in AUTOENCODERS:
        known = ", ".join(sorted(AUTOENCODERS))
        raise UnreadableCheckpoint(f"{folder} holds a {name}; supported: {known}.")
    return Codec(_from_pretrained(getattr(diffusers, name), folder, dtype).to(device).eval())


def resolve_folder(path_or_hub_id: str | Path) -> Path:
    """A local directory as it is; anything else is a hub id, fetched (or found in the cache)."""
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    text = str(path_or_hub_id)
    if path.exists():
        raise UnreadableCheckpoint(
            f"{text} is a file; give the diffusers directory that it belongs to."
        )
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise UnreadableCheckpoint(
            f"{text} is neither a directory nor a hub id of the form owner/name."
        )
    return _fetch(text)


def weight_files(folder: Path) -> list[Path]:
    """The weights that `load_denoiser` would read, for fingerprints and records."""
    network = _find_parts(folder).network
    return sorted(network.glob("*.safetensors"))


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # Configs of every part, weights of the ones read here; never pickles, never code.
    folders = (*NETWORK_FOLDERS, "vae")
    wanted = ["*.json", "*.safetensors", *(f"{folder}/*.safetensors" for folder in folders)]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UnreadableCheckpoint(
            f"{hub_id} is no local directory and could not be fetched from the hub "
            f"({type(error).__name__}). Check the name, the network, or download it first and "
            "give its directory."
        ) from error


def _find_parts(folder: Path) -> Parts:
    if (folder / "model_index.json").is_file():
        return _pipeline_parts(folder)
    if (folder / "config.json").is_file():
        # A bare model: its scheduler beside it, in its folder, or beside it in a pipeline.
        places = (folder, folder / "scheduler", folder.parent / "scheduler")
        for place in places:
            if (place / "scheduler_config.json").is_file():
                return Parts(folder, place / "scheduler_config.json")
        raise UnreadableCheckpoint(
            f"{folder} holds a network but no scheduler_config.json, which says what the network "
            "predicts and at which noise levels. Put the one it was trained with beside its "
            "config.json."
        )
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise UnreadableCheckpoint(
        f"{folder} is no diffusers checkpoint: it has neither model_index.json nor config.json "
        f"(found: {found})."
    )


def _pipeline_parts(folder: Path) -> Parts:
    index = _read_json(folder / "model_index.json")
    present = [name for name in NETWORK_FOLDERS if (folder / name / "config.json").is_file()]
    if not present:
        kind = index.get("_class_name")
        raise UnreadableCheckpoint(
            f"{folder} is a {kind} without a {' or '.join(NETWORK_FOLDERS)} folder."
        )
    scheduler = folder / "scheduler" / "scheduler_config.json"
    if not scheduler.is_file():
        raise UnreadableCheckpoint(f"{folder} has no {scheduler.relative_to(folder)}.")
    return Parts(folder / present[0], scheduler)


def _load_network(folder: Path, dtype: torch.dtype) -> nn.Module:
    import diffusers

    name = _read_json(folder / "config.json").get("_class_name")
    if name not in LOADABLE:
        known = ", ".join(sorted(LOADABLE))
        raise UnreadableCheckpoint(f"{folder} holds a {name}; supported: {known}.")
    return _from_pretrained(getattr(diffusers, name), folder, dtype)


def _from_pretrained(model_class: Any, folder: Path, dtype: torch.dtype) -> Any:
    names = [p.name for p in folder.glob("*.safetensors")]
    if not names:
        others = ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix != ".json"))
        raise UnreadableCheckpoint(
            f"{folder} has no .safetensors weights (found: {others or 'none'}). Pickled weights "
            "are not loaded: convert them with diffusers' save_pretrained first."
        )
    half_only = all(".fp16." in name for name in names)
    model, report = model_class.from_pretrained(
        folder,
        use_safetensors=True,
        torch_dtype=dtype,
        low_cpu_mem_usage=_has_accelerate(),
        variant="fp16" if half_only else None,
        output_loading_info=True,
    )
    # diffusers only warns about these, and leaves random weights in their place.
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(map(str, list(report[problem])[:3]))
            count, what = len(report[problem]), problem.replace("_", " ")
            raise UnreadableCheckpoint(
                f"the weights in {folder} do not fit its config: {count} {what} (first: {names})."
            )
    return model


def _has_accelerate() -> bool:
    from importlib.util import find_spec

    return find_spec("accelerate") is not None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UnreadableCheckpoint(f"{path} cannot be read as JSON: {error}.") from error
