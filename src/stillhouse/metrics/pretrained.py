"""Models of transformers, from a folder or the hub: safetensors only, complete, never any code."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stillhouse.errors import UserError, one_line
from stillhouse.files import fingerprint

WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
# What is fetched from the hub: never pickles, never code.
HUB_FILES = ["*.json", "merges.txt", "model*.safetensors"]


class Loaded(NamedTuple):
    """A model, and what it was read from."""

    model: Any  # float32, eval
    folder: Path
    digest: str  # of the weights, in the order of the files


def load_pretrained(model: Any, kind: str, name: str) -> Loaded:
    """`model`: the class; `kind`: the type that the config must say; `name`: folder or hub id."""
    from transformers.utils import logging

    folder = Path(name).expanduser()
    folder = folder if folder.is_dir() else _fetch(name)
    config = _read_json(folder / "config.json")
    if (found := config.get("model_type")) != kind:
        raise UserError(f"{folder} holds a model of type {found}; {kind} is needed")
    _check_kernels(folder, config)
    files = _weight_files(folder)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded, report = model.from_pretrained(
            folder,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # transformers has no error class of its own
        raise UserError(
            f"the {kind} in {folder} could not be loaded ({one_line(error)})"
        ) from error
    finally:
        if shown:
            logging.enable_progress_bar()
    missing = sorted(map(str, report["missing_keys"]))
    if missing:  # transformers leaves random weights in their place
        raise UserError(
            f"the weights in {folder} do not fit its config: {len(missing)} tensors missing "
            f"(first: {missing[0]})"
        )
    return Loaded(loaded.eval().requires_grad_(False), folder, fingerprint(files))


def _check_kernels(folder: Path, config: dict[str, Any]) -> None:
    """transformers would fetch attention from the hub, which is code, where a config names it."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    asked = [value for part in parts for key, value in part.items() if "attn_impl" in key]
    if strange := [value for value in asked if "/" in str(value)]:
        raise UserError(
            f"{folder / 'config.json'} asks for code of the hub ({strange[0]}), which is never "
            "run: take its attn_implementation away"
        )


def _fetch(name: str) -> Path:
    """From the hub, or from its cache when offline (HF_HUB_OFFLINE=1)."""
    from huggingface_hub import get_repo_discussions, snapshot_download

    fetch = partial(snapshot_download, name, allow_patterns=HUB_FILES)
    try:
        folder = Path(fetch())
        if not any(WEIGHTS.fullmatch(path.name) for path in folder.iterdir()):
            # Old models are pickles on the main branch; the hub's robot offers them converted.
            offers = get_repo_discussions(name, author="SFconvertbot")
            number = next((o.num for o in offers if o.is_pull_request), None)
            folder = folder if number is None else Path(fetch(revision=f"refs/pr/{number}"))
    except Exception as error:  # a bad name, a refusal, or whatever the network's client raises
        raise UserError(
            f"{name} is no local folder and could not be fetched from the hub ({one_line(error)}): "
            "check the name and the network, or download it first and give its folder with "
            "--detector.model"
        ) from error
    return folder


def _weight_files(folder: Path) -> list[Path]:
    """One file, or its shards; an index may name no other files."""
    files = sorted(path for path in folder.iterdir() if WEIGHTS.fullmatch(path.name))
    if not files:
        raise UserError(
            f"{folder} has no model.safetensors. Pickled weights are not loaded: convert them with "
            "transformers' save_pretrained, and give that folder"
        )
    whole = [path for path in files if path.name == "model.safetensors"]
    index = folder / "model.safetensors.index.json"
    if not whole and index.is_file():
        shards = _read_json(index).get("weight_map")
        names = {str(n) for n in shards.values()} if isinstance(shards, dict) else {"nothing"}
        strange = sorted(names - {path.name for path in files})
        if strange:
            raise UserError(f"{index} names {strange[0]}, which is none of the folder's shards")
    return whole or files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({one_line(error)})") from error
    return found if isinstance(found, dict) else {}
