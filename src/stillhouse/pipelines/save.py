"""`save_denoiser`: a trained network as a diffusers model folder, readable by both libraries.

    config.json, diffusion_pytorch_model.safetensors, scheduler_config.json

`UNet2DModel.from_pretrained(folder)` and `load_denoiser(folder)` both read it. The run's config and
what else a reader should know are in the metadata of the safetensors file. What the network is told
beside its own class (control, classes as tokens) is in conditioning.json and .safetensors.

A fine-tuned network goes back into a copy of its pipeline (`save_pipeline`), adapters into one file
that the pipeline's `load_lora_weights` opens (`save_lora`).
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stillhouse.files import tensors_file, write_whole
from stillhouse.models import Codec, DiffusersNetwork
from stillhouse.models.adapters import adapters_of, save_adapters
from stillhouse.pipelines.families import INDEX, family_of, read_index
from stillhouse.pipelines.load import CONDITIONING, FACTS, LORA_WEIGHTS, read_json

WEIGHTS = "diffusion_pytorch_model.safetensors"
LORA_FACTS = "lora_adapter_metadata"  # where diffusers looks for rank and alpha
COPIED = {".json", ".txt", ".model", ".safetensors"}  # never pickles, never code
WEIGHTLESS = ("tokenizer", "scheduler", "feature_extractor", "image_processor")


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
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = network.model
    model.save_config(folder)
    _forget_place(folder / "config.json")
    save_scheduler(folder, scheduler)
    if network.conditioning is None:
        for old in folder.glob(f"{CONDITIONING}.*"):  # of another model that was here
            old.unlink()
    else:
        parts = json.dumps(network.conditioning.parts.as_json(), indent=2) + "\n"
        write_whole(folder / f"{CONDITIONING}.json", parts.encode())
        file = _file(_of("conditioning.", weights), {}, dtype)
        write_whole(folder / f"{CONDITIONING}.safetensors", file)
    write_whole(folder / WEIGHTS, _file(_of("model.", weights), facts, dtype))


def save_scheduler(folder: Path, config: Mapping[str, Any]) -> None:
    """As its class writes it, with all that the config leaves to its defaults."""
    import diffusers

    getattr(diffusers, config["_class_name"]).from_config(dict(config)).save_config(folder)


def save_codec(folder: Path, codec: Codec) -> None:
    """Beside the model, where `load_codec` finds it, in the precision that it has."""
    autoencoder: Any = codec.autoencoder
    target = folder / "vae"
    autoencoder.save_config(target)
    _forget_place(target / "config.json")
    weights = autoencoder.state_dict()
    write_whole(target / WEIGHTS, _file(weights, {}, next(autoencoder.parameters()).dtype))


# ---------------------------------------------------------------- fine-tuned pipelines


def save_pipeline(
    folder: Path,
    source: Path,
    network: DiffusersNetwork,
    weights: Mapping[str, Tensor],
    *,
    facts: Mapping[str, Any],
    scheduler: Mapping[str, Any] | None = None,
) -> None:
    """The pipeline in `source` with this network in place of its own.

    Its other parts are copied once, their weights linked where the disk allows it. Parts without
    safetensors are left out, as diffusers allows it for all that does not draw. The size that it
    draws by itself stays as it was, and so does its scheduler unless the config of one is given.
    """
    family, index = family_of(source), read_index(source)
    index.pop("_name_or_path", None)
    if scheduler is not None:
        save_scheduler(folder / "scheduler", scheduler)  # before the parts, which are kept then
        index["scheduler"] = ["diffusers", scheduler["_class_name"]]
    parts = [k for k, v in index.items() if isinstance(v, list) and k != family.network]
    for part in parts:
        if (source / part).is_dir() and _is_whole(source / part):
            _copy_part(source / part, folder / part)
        else:
            index[part] = [None, None]
    if index.get("safety_checker", [None])[0] is None and "safety_checker" in index:
        index["requires_safety_checker"] = False
    target, model = folder / family.network, network.model
    target.mkdir(parents=True, exist_ok=True)
    model.save_config(target)  # type: ignore[operator]
    own = read_json(source / family.network / "config.json")
    _forget_place(target / "config.json", sample_size=own.get("sample_size"))
    write_whole(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())
    write_whole(target / WEIGHTS, _file(_of("model.", weights), facts, torch.float32))


def _is_whole(part: Path) -> bool:
    return part.name.startswith(WEIGHTLESS) or any(part.glob("*.safetensors"))


def copied_files(part: Path) -> list[Path]:
    """What goes with a fine-tuned network, of another part of its pipeline."""
    files = [p for p in part.iterdir() if p.is_file() and p.suffix in COPIED]
    plain = [p for p in files if ".fp16" not in p.name and ".non_ema" not in p.name]
    # The same in half precision is not needed.
    return plain if any(p.suffix == ".safetensors" for p in plain) else files


def _copy_part(source: Path, target: Path) -> None:
    if target.is_dir():
        return
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in copied_files(source):
        _link_or_copy(file.resolve(), partial / file.name)
    partial.rename(target)


def _link_or_copy(source: Path, target: Path) -> None:
    """Weights are only ever replaced as whole files; what a person may edit is copied.

    The hub's cache keeps files under names without a suffix.
    """
    if target.suffix == ".safetensors":
        try:
            os.link(source, target)
            return
        except OSError:  # another disk, or one that has no links
            pass
    shutil.copyfile(source, target)


def save_lora(
    folder: Path,
    source: Path,
    weights: Mapping[str, Tensor],
    adapter: Mapping[str, Any],
    *,
    facts: Mapping[str, Any],
) -> None:
    """Adapters of the pipeline in `source`, in the layout that its own loader opens.

    `adapter`: the arguments of peft's LoraConfig. A pipeline without `load_lora_weights` (PixArt)
    gets peft's own layout: `PeftModel.from_pretrained(pipeline.transformer, folder)`.
    """
    family = family_of(source)
    learnt = _of("model.", weights)
    folder.mkdir(parents=True, exist_ok=True)
    if not family.loads_lora:
        return save_adapters(folder, learnt, adapter, _known(facts))
    told = {f"{family.network}.{key}": value for key, value in adapter.items()}
    named = {f"{family.network}.{key}": w for key, w in adapters_of(learnt).items()}
    file = _file(named, facts, torch.float32, {LORA_FACTS: json.dumps(told, sort_keys=True)})
    return write_whole(folder / LORA_WEIGHTS, file)


# ---------------------------------------------------------------- files


def _of(part: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(part): w for k, w in weights.items() if k.startswith(part)}


def _file(
    weights: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    dtype: torch.dtype,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    cast = {k: w.to(dtype if w.is_floating_point() else None) for k, w in weights.items()}
    return tensors_file(cast, {**_known(facts), **(metadata or {})})


def _known(facts: Mapping[str, Any]) -> dict[str, str]:
    return {"format": "pt", FACTS: json.dumps(dict(facts))}


def _forget_place(config: Path, **changes: Any) -> None:
    """diffusers notes the folder that a model was once read from."""
    kept = {k: v for k, v in read_json(config).items() if k != "_name_or_path"} | changes
    write_whole(config, (json.dumps(kept, indent=2) + "\n").encode())
