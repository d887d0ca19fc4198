"""`load_denoiser`: an ordinary diffusers directory, or a hub id, read as a denoiser.

The adapter follows from the checkpoint's own config files. Weights are read from safetensors only
and no code from a checkpoint is ever run. What cannot be read ends in one sentence that says what
was found and what is supported.
"""

import json
import re
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import nn

from stillhouse.errors import UserError, one_line
from stillhouse.models import NETWORKS, Codec, DiffusersNetwork
from stillhouse.models.codecs import AUTOENCODERS
from stillhouse.models.conditioning import Conditioning, Parts, conditioned
from stillhouse.models.networks import attended_width
from stillhouse.pipelines.schedules import Trained, read_schedule
from stillhouse.process import NetworkDenoiser

NETWORK_FOLDERS = ("unet", "transformer")
# Classes of ours that are made like those of diffusers, and their modules.
OURS = {
    "PlaneNetwork": "plane",
    "MDTTransformer2DModel": "mdt",
    "QKNormUNet2DConditionModel": "qk_norm",
    "QKNormPixArtTransformer2DModel": "qk_norm",
}
# Published DiT and PixArt configs say Transformer2DModel; diffusers picks the class that it means.
LOADABLE = {*NETWORKS, *OURS, "Transformer2DModel"}
LORA_WEIGHTS = "pytorch_lora_weights.safetensors"
FACTS = "stillhouse"  # the key of our own facts in the metadata of safetensors
CONDITIONING = "conditioning"  # .json and .safetensors, beside the network
# diffusers' names of weights, whole or in shards; half precision is read where there is no other.
WEIGHTS = {
    None: re.compile(r"diffusion_pytorch_model(-\d+-of-\d+)?\.safetensors"),
    "fp16": re.compile(
        r"diffusion_pytorch_model(\.fp16|\.fp16-\d+-of-\d+|-\d+-of-\d+\.fp16)\.safetensors"
    ),
}
# What is fetched from the hub: configs of every part, weights of the ones read here; never pickles,
# never code. A star also matches slashes, so a pattern must say where a path begins.
HUB_FILES = [
    "*.json",
    *(
        f"{place}{name}*.safetensors"
        for place in ("", "unet/", "transformer/", "vae/")
        for name in ("diffusion_pytorch_model", CONDITIONING)
    ),
]
CODEC_FILES = [name for name in HUB_FILES if not name.startswith(("unet/", "transformer/"))]
CONFIG_FILES = ["*.json"]
HUB_SKIPPED = ["*.non_ema.*", "*.non_ema-*"]


class UnreadableCheckpoint(UserError, ValueError):
    """A checkpoint that cannot be loaded; the message says what was found and what is supported."""


class Places(NamedTuple):
    """Where the parts of a checkpoint are."""

    network: Path  # the folder of the network
    scheduler: Path  # the scheduler's config file


class Weights(NamedTuple):
    """Which of a folder's weights are read."""

    variant: str | None
    files: list[Path]


def load_denoiser(
    path_or_hub_id: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> NetworkDenoiser:
    """Reads a diffusers pipeline, or a bare model with a scheduler config, as a denoiser.

    `denoiser.network.data_shape` and `.condition_shapes` say what it takes, and
    `denoiser.scaling.native_grid(steps)` is the grid that its scheduler's config describes.
    """
    folder = resolve_folder(path_or_hub_id)
    parts = _find_parts(folder)
    trained = _read_trained(parts.scheduler)
    model = _load_network(parts.network, dtype).to(device)
    null = read_facts(parts.network).get("null_label")
    conditioning = _load_conditioning(parts.network, model, dtype)
    conditioning = None if conditioning is None else conditioning.to(device)
    network = DiffusersNetwork(model, null if isinstance(null, int) else None, conditioning)
    return NetworkDenoiser(network, trained.scaling, trained.prediction, clip=trained.clip).eval()


def load_outline(path_or_hub_id: str | Path) -> NetworkDenoiser:
    """The same from config files alone, on the meta device: shapes and names, but no weights.

    It does not know what only the weights' files say: the label for no class, a `Conditioning`.
    """
    parts = _find_parts(resolve_folder(path_or_hub_id, CONFIG_FILES))
    trained = _read_trained(parts.scheduler)
    model = _from_config(parts.network, LOADABLE)
    _check_network(parts.network, model)
    network = DiffusersNetwork(model)
    return NetworkDenoiser(network, trained.scaling, trained.prediction, clip=trained.clip).eval()


def load_codec(
    path_or_hub_id: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Codec | None:
    """The autoencoder of a latent pipeline, or in a directory of its own; None where there is none.

    A model that works on pixels has none.
    """
    folder = resolve_folder(path_or_hub_id, CODEC_FILES)
    place = folder / "vae"
    if not (place / "config.json").is_file():
        place, alone = folder, folder / "config.json"
        if not alone.is_file() or read_json(alone).get("_class_name") not in AUTOENCODERS:
            return None
    return Codec(_from_pretrained(place, {*AUTOENCODERS}, dtype)).to(device).eval()


def is_hub_id(name: str) -> bool:
    """Whether it has the form owner/name, and not that of a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def resolve_folder(path_or_hub_id: str | Path, files: list[str] = HUB_FILES) -> Path:
    """A local directory as it is; anything else is a hub id, fetched (or found in the cache)."""
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    text = str(path_or_hub_id)
    if path.exists():
        raise UnreadableCheckpoint(
            f"{text} is a file; give the diffusers directory that it belongs to."
        )
    if not is_hub_id(text):
        raise UnreadableCheckpoint(
            f"{text} is neither a directory nor a hub id of the form owner/name."
        )
    return fetch(text, files)


def checkpoint_files(folder: Path) -> dict[str, list[Path]]:
    """What `load_denoiser` and `load_codec` read, by role, for fingerprints and records."""
    parts = _find_parts(folder)
    config = parts.network / "config.json"
    beside = sorted(parts.network.glob(f"{CONDITIONING}.*"))
    files = {
        "network": [config, *_find_weights(parts.network).files, *beside],
        "scheduler": [parts.scheduler],
    }
    if (folder / "vae" / "config.json").is_file():
        files["vae"] = [folder / "vae" / "config.json", *_find_weights(folder / "vae").files]
    return files


def fetch(hub_id: str, files: list[str] = HUB_FILES, skipped: list[str] = HUB_SKIPPED) -> Path:
    """What of a repository of the hub has such names, as a folder."""
    from huggingface_hub import snapshot_download

    skipped = [*skipped, *_spare_halves(hub_id)]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=files, ignore_patterns=skipped))
    except Exception as error:  # a bad name, a refusal, or whatever the network's client raises
        raise UnreadableCheckpoint(
            f"{hub_id} is no local directory and could not be fetched from the hub "
            f"({type(error).__name__}). Check the name, the network, or download it first and "
            "give its directory."
        ) from error


def _spare_halves(hub_id: str) -> list[str]:
    """Weights of half precision beside full ones, which nobody reads and are gigabytes."""
    from huggingface_hub import list_repo_files

    try:
        names = list_repo_files(hub_id)
    except Exception:  # without a network the cache has what it has; a bad name is told of later
        return []
    weights = {
        name: re.split(r"\.|-\d", name)[0] for name in names if name.endswith(".safetensors")
    }
    full = {stem for name, stem in weights.items() if ".fp16" not in name}
    return [name for name, stem in weights.items() if ".fp16" in name and stem in full]


def _find_parts(folder: Path) -> Places:
    if (folder / "model_index.json").is_file():
        return _pipeline_parts(folder)
    if (folder / "config.json").is_file():
        # A bare model: its scheduler beside it, in its folder, or beside it in a pipeline.
        places = (folder, folder / "scheduler", folder.absolute().parent / "scheduler")
        for place in places:
            if (place / "scheduler_config.json").is_file():
                return Places(folder, place / "scheduler_config.json")
        raise UnreadableCheckpoint(
            f"{folder} holds a network but no scheduler_config.json, which says what the network "
            "predicts and at which noise levels. Put the one it was trained with beside its "
            "config.json."
        )
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise UnreadableCheckpoint(
        f"{folder} is no diffusers checkpoint: it has neither model_index.json nor config.json "
        f"(found: {found}).{inner_model(folder)}{only_adapters(folder)}"
    )


def inner_model(folder: Path) -> str:
    """A hint at the model in a run's folder."""
    return f" The model of that run is {folder / 'model'}." if (folder / "model").is_dir() else ""


def only_adapters(folder: Path) -> str:
    """A hint at what opens adapters."""
    if not any((folder / name).is_file() for name in (LORA_WEIGHTS, "adapter_config.json")):
        return ""
    return (
        " It holds adapters, which are opened in the pipeline that they were made for: by its "
        "`load_lora_weights`, or by peft (a README.md beside them has the lines)."
    )


def _pipeline_parts(folder: Path) -> Places:
    index = read_json(folder / "model_index.json")
    present = [name for name in NETWORK_FOLDERS if (folder / name / "config.json").is_file()]
    if not present:
        kind = index.get("_class_name")
        raise UnreadableCheckpoint(
            f"{folder} is a {kind} without a {' or '.join(NETWORK_FOLDERS)} folder."
        )
    scheduler = folder / "scheduler" / "scheduler_config.json"
    if not scheduler.is_file():
        raise UnreadableCheckpoint(f"{folder} has no {scheduler.relative_to(folder)}.")
    return Places(folder / present[0], scheduler)


def _read_trained(scheduler: Path) -> Trained:
    config = read_json(scheduler)
    try:
        return read_schedule(config)
    except ValueError as error:
        raise UnreadableCheckpoint(f"{scheduler} cannot be used: {error}.") from error


def _load_network(folder: Path, dtype: torch.dtype) -> nn.Module:
    model = _from_pretrained(folder, LOADABLE, dtype)
    _check_network(folder, model)
    return model


def _check_network(folder: Path, model: Any) -> None:
    if not {base.__name__ for base in type(model).__mro__} & NETWORKS.keys():
        known = ", ".join(sorted(NETWORKS))
        raise UnreadableCheckpoint(
            f"{folder} holds a {type(model).__name__} of a kind that is none of {known}."
        )
    taken, given = model.config.in_channels, model.config.out_channels or model.config.in_channels
    if given < taken:
        raise UnreadableCheckpoint(
            f"{folder} holds a network that takes {taken} channels and predicts {given}: it needs "
            "another image beside the noise, which is not supported."
        )


def _load_conditioning(folder: Path, model: nn.Module, dtype: torch.dtype) -> Conditioning | None:
    """What the network is told beside its own class, where a second file says so."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    described = folder / f"{CONDITIONING}.json"
    if not described.is_file():
        return None
    try:
        made = conditioned(model, Parts.from_json(read_json(described)), attended_width(model))
        made.load_state_dict(load_file(folder / f"{CONDITIONING}.safetensors"))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(".")
        raise UnreadableCheckpoint(
            f"{described} and its weights cannot be read ({reason})."
        ) from error
    return made.to(dtype)


def read_facts(folder: Path) -> dict[str, Any]:
    """What Stillhouse wrote into the metadata of the weights: the run, the label for no class."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_find_weights(folder).files[0], "pt") as file:
            found = json.loads((file.metadata() or {}).get(FACTS, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise UnreadableCheckpoint(f"the weights in {folder} cannot be read: {error}.") from error
    return found if isinstance(found, dict) else {}


def _class(name: str) -> Any:
    """A diffusers class, or one of ours that is made like them."""
    home = f"stillhouse.models.{OURS[name]}" if name in OURS else "diffusers"
    return getattr(import_module(home), name)


def _class_name(folder: Path, known: set[str]) -> str:
    name = str(read_json(folder / "config.json").get("_class_name"))
    if name not in known:
        supported = ", ".join(sorted(known))
        raise UnreadableCheckpoint(f"{folder} holds a {name}; supported: {supported}.")
    return name


def _from_config(folder: Path, known: set[str]) -> Any:
    """On the meta device."""
    from diffusers.utils import logging

    name = _class_name(folder, known)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            return _class(name).from_config(read_json(folder / "config.json"))
    except Exception as error:  # whatever a class makes of strange values
        raise UnreadableCheckpoint(
            f"the config of the {name} in {folder} cannot be used ({one_line(error)})."
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _from_pretrained(folder: Path, known: set[str], dtype: torch.dtype) -> Any:
    from diffusers.utils import logging

    name = _class_name(folder, known)
    variant, _ = _find_weights(folder)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a torch.dtype such as torch.bfloat16, not {dtype!r}")
    before, verbosity = torch.get_default_dtype(), logging.get_verbosity()
    logging.set_verbosity_error()  # published configs make it warn at every load
    try:
        model, report = _class(name).from_pretrained(
            folder,
            use_safetensors=True,
            torch_dtype=dtype,
            low_cpu_mem_usage=_has_accelerate(),
            variant=variant,
            output_loading_info=True,
        )
    except Exception as error:  # diffusers has no error class of its own
        reason = shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ...").rstrip(".")
        advice = " Its files may not be whole: fetch them again." * isinstance(error, OSError)
        raise UnreadableCheckpoint(
            f"the {name} in {folder} could not be loaded ({reason}).{advice}"
        ) from error
    finally:
        torch.set_default_dtype(before)  # diffusers leaves its own behind when it fails
        logging.set_verbosity(verbosity)
    # diffusers only warns about these, and leaves random weights in their place.
    for problem in ("missing_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(map(str, list(report[problem])[:3]))
            count, what = len(report[problem]), problem.replace("_", " ")
            raise UnreadableCheckpoint(
                f"the weights in {folder} do not fit its config: {count} {what} (first: {names})."
            )
    return model


def _find_weights(folder: Path) -> Weights:
    for variant, pattern in WEIGHTS.items():
        files = sorted(p for p in folder.glob("*.safetensors") if pattern.fullmatch(p.name))
        if files:
            _check_indices(folder)
            return Weights(variant, files)
    others = ", ".join(sorted(p.name for p in folder.iterdir() if p.suffix != ".json"))
    raise UnreadableCheckpoint(
        f"{folder} has no diffusion_pytorch_model.safetensors (found: {others or 'none'}). Pickled "
        "weights are not loaded: convert them with diffusers' save_pretrained first."
    )


def _check_indices(folder: Path) -> None:
    """An index of shards may name any file, and diffusers would open a pickle that it names."""
    for index in folder.glob("*.safetensors.index*.json"):
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise UnreadableCheckpoint(f"{index} has no weight_map.")
        names = map(str, shards.values())
        strange = sorted(n for n in names if not n.endswith(".safetensors") or Path(n).name != n)
        if strange:
            raise UnreadableCheckpoint(
                f"{index} names {strange[0]} among its shards; only .safetensors of "
                "its own folder are loaded."
            )


def _has_accelerate() -> bool:
    from importlib.util import find_spec

    return find_spec("accelerate") is not None


def read_json(path: Path) -> dict[str, Any]:
    """A config file of a checkpoint."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableCheckpoint(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UnreadableCheckpoint(f"{path} is not a JSON object.")
    return found
