"""`save_denoiser`: a trained network as a diffusers model folder, readable by both libraries.

    config.json, diffusion_pytorch_model.safetensors, scheduler_config.json

`UNet2DModel.from_pretrained(folder)` and `load_denoiser(folder)` both read it. The run's config and
what else a reader should know are in the metadata of the safetensors file. What the network is told
beside its own class (control, classes as tokens) is in conditioning.json and .safetensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillhouse.files import write_whole
from stillhouse.models import Codec, DiffusersNetwork
from stillhouse.pipelines.load import CONDITIONING, FACTS

WEIGHTS = "diffusion_pytorch_model.safetensors"


def save_denoiser(
    folder: Path,
    network: DiffusersNetwork,
    weights: Mapping[str, Tensor],
    scheduler: Mapping[str, Any],
    *,
    facts: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes `weights`, by the network's own names, and the config of its scheduler.

    The model's weights come last, and every file appears whole: a folder that has them is complete.
    """
    import diffusers

    folder.mkdir(parents=True, exist_ok=True)
    model: Any = network.model
    model.save_config(folder)
    _forget_place(folder / "config.json")
    process = getattr(diffusers, scheduler["_class_name"]).from_config(dict(scheduler))
    process.save_config(folder)
    if network.conditioning is None:
        for old in folder.glob(f"{CONDITIONING}.*"):  # of another model that was here
            old.unlink()
    else:
        parts = json.dumps(network.conditioning.parts.as_json(), indent=2) + "\n"
        write_whole(folder / f"{CONDITIONING}.json", parts.encode())
        file = _file(_of("conditioning.", weights), {}, dtype)
        write_whole(folder / f"{CONDITIONING}.safetensors", file)
    write_whole(folder / WEIGHTS, _file(_of("model.", weights), facts, dtype))


def save_codec(folder: Path, codec: Codec) -> None:
    """Beside the model, where `load_codec` finds it, in the precision that it has."""
    autoencoder: Any = codec.autoencoder
    target = folder / "vae"
    autoencoder.save_config(target)
    _forget_place(target / "config.json")
    weights = autoencoder.state_dict()
    write_whole(target / WEIGHTS, _file(weights, {}, next(autoencoder.parameters()).dtype))


def _of(part: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(part): w for k, w in weights.items() if k.startswith(part)}


def _file(weights: Mapping[str, Tensor], facts: Mapping[str, Any], dtype: torch.dtype) -> bytes:
    from safetensors.torch import save

    cast = {
        k: w.to(dtype if w.is_floating_point() else None).contiguous() for k, w in weights.items()
    }
    return _settled(save(cast, metadata={"format": "pt", FACTS: json.dumps(dict(facts))}))


def _forget_place(config: Path) -> None:
    """diffusers notes the folder that a model was once read from."""
    kept = {k: v for k, v in json.loads(config.read_text()).items() if k != "_name_or_path"}
    write_whole(config, (json.dumps(kept, indent=2) + "\n").encode())


def _settled(file: bytes) -> bytes:
    """safetensors writes its metadata in random order: the same weights shall be the same file."""
    start = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(file)[start:]])
