"""Prompts as a pipeline of diffusers encodes them: by its own method, over its own encoders.

Tokenizers and text encoders alone are loaded, from safetensors, and no code of the checkpoint runs.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from stillhouse.errors import one_line
from stillhouse.files import fingerprint
from stillhouse.metrics.exact import exactly
from stillhouse.metrics.pretrained import WEIGHTS, load_pretrained
from stillhouse.pipelines.families import Family, family_of, network_config, read_index
from stillhouse.pipelines.load import UnreadableCheckpoint, read_json
from stillhouse.process import Condition

BATCH = 32  # prompts that are encoded at once
# Classes of transformers that may stand in an index, and the type that their config says.
ENCODERS = {
    "CLIPTextModel": "clip_text_model",
    "CLIPTextModelWithProjection": "clip_text_model",
    "T5EncoderModel": "t5",
}
TOKENIZERS = {"CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast"}
VOCABULARIES = {"tokenizer.json", "vocab.json", "spiece.model"}  # one of them must be there


def parts_of(folder: Path) -> dict[str, str]:
    """The classes of the tokenizers and text encoders that the pipeline has, by name."""
    index, family = read_index(folder), family_of(folder)
    found = {}
    for role, known in (("tokenizer", TOKENIZERS), ("text_encoder", {*ENCODERS})):
        for number in family.encoders:
            name = f"{role}{number}"
            _, kind = index.get(name) or (None, None)
            if kind is None and number in family.optional:
                continue
            if kind not in known or not (folder / name).is_dir():
                raise UnreadableCheckpoint(
                    f"{folder} has no {name} that can be used (its index says {kind}): fine-tuning "
                    f"needs one of {', '.join(sorted(known))}."
                )
            found[name] = kind
    return found


def prompt_digest(folder: Path, length: int = 0) -> str:
    """SHA-256 over all that embeddings depend on: class, encoders, tokenizers, length."""
    family, index = family_of(folder), read_index(folder)
    facts = [index["_class_name"], length or family.length]
    facts.append(index.get("force_zeros_for_empty_prompt", True))
    for name, kind in parts_of(folder).items():
        files = sorted(p for p in (folder / name).iterdir() if p.is_file() and _counts(p))
        facts += [name, kind, fingerprint(files)]
    return f"sha256:{hashlib.sha256(repr(facts).encode()).hexdigest()}"


def _counts(file: Path) -> bool:
    return file.suffix in (".json", ".txt", ".model") or bool(WEIGHTS.fullmatch(file.name))


def count_tokens(folder: Path, prompts: Sequence[str]) -> int:
    """Of the longest prompt, by the last tokenizer: the one that takes most."""
    parts = parts_of(folder)
    name = [name for name in parts if name.startswith("tokenizer")][-1]
    tokens = _tokenizer(folder / name, parts[name])(list(prompts), verbose=False).input_ids
    return max(map(len, tokens))


def prompt_tokens(folder: Path, length: int = 0) -> int:
    """Tokens of an encoded prompt, by the configs alone: CLIP's, and then T5's."""
    family = family_of(folder)
    file = folder / "tokenizer" / "tokenizer_config.json"
    if "text_mask" in family.gives:  # T5 alone
        clip = 0
    else:
        clip = int(read_json(file).get("model_max_length", 77)) if file.is_file() else 77
    return clip + (length or family.length)


class PromptEncoder:
    """The text half of a pipeline. `length`: tokens of T5, where it has one (0: the usual)."""

    def __init__(
        self, folder: Path, *, length: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.family, self.device = family_of(folder), torch.device(device)
        self.length = length or self.family.length
        self.pipeline = _text_half(folder, self.family, self.device)

    def encode(self, prompts: Sequence[str]) -> Condition:
        """text [B, L, C] and text_mask; pooled [B, P], of no width where there is none; float32."""
        parts = [prompts[at : at + BATCH] for at in range(0, len(prompts), BATCH)]
        return Condition.cat([self._call(list(part), "") for part in parts])

    @property
    def null(self) -> Condition:
        """One row: what the pipeline guides away from where no negative prompt is given."""
        return self._call([""], "-")

    def _call(self, prompts: list[str], sign: str) -> Condition:
        options: dict[str, Any] = dict.fromkeys(self.family.options)
        if self.length:
            options["max_sequence_length"] = self.length
        with exactly(self.device):
            found = self.pipeline.encode_prompt(
                prompt=prompts,
                device=self.device,
                num_images_per_prompt=1,
                do_classifier_free_guidance=bool(sign),
                **options,
            )
        told = dict(zip(self.family.gives, found, strict=True))
        text = told[f"{sign}text"].float().cpu()
        mask, pooled = told.get(f"{sign}text_mask"), told.get(f"{sign}pooled")
        return Condition(
            text=text,
            text_mask=torch.ones(text.shape[:2], dtype=torch.bool)
            if mask is None
            else mask.bool().cpu(),
            pooled=text.new_zeros(len(text), 0) if pooled is None else pooled.float().cpu(),
        )


def spoken(family: Family, cond: Condition, size: tuple[int, int]) -> dict[str, Tensor | None]:
    """The fields that a network of the family is told beside the text, for images of this size."""
    pooled = cond.pooled if cond.pooled is not None and cond.pooled.shape[1] else None
    return {
        "text_mask": cond.text_mask if "text_mask" in family.gives else None,
        "pooled": pooled,
        "control": family.control(cond.control, size, len(cond)),
    }


# ---------------------------------------------------------------- loading


def _text_half(folder: Path, family: Family, device: torch.device) -> Any:
    import diffusers
    import transformers

    index, parts = read_index(folder), parts_of(folder)
    made: dict[str, Any] = {}
    for name, kind in parts.items():
        if kind in TOKENIZERS:
            made[name] = _tokenizer(folder / name, kind)
        else:
            model = getattr(transformers, kind)
            made[name] = load_pretrained(model, ENCODERS[kind], str(folder / name)).model.to(device)
    absent = [f"{role}{n}" for n in family.optional for role in ("tokenizer", "text_encoder")]
    others = {"vae", "scheduler", family.network, *absent} - made.keys()
    options = {}
    if index["_class_name"] == "StableDiffusionPipeline":
        others |= {"safety_checker", "feature_extractor"}
        options = {"requires_safety_checker": False}
    if "force_zeros_for_empty_prompt" in index:
        options["force_zeros_for_empty_prompt"] = bool(index["force_zeros_for_empty_prompt"])
    pipeline = getattr(diffusers, index["_class_name"])(**made, **dict.fromkeys(others), **options)
    if absent:  # the width of the zeros in place of an absent encoder
        width = network_config(folder).get("joint_attention_dim")
        pipeline.transformer = SimpleNamespace(config=SimpleNamespace(joint_attention_dim=width))
    return pipeline


def _tokenizer(folder: Path, kind: str) -> Any:
    import transformers

    if not VOCABULARIES & {path.name for path in folder.iterdir()}:
        # transformers makes up an empty tokenizer where there is none
        raise UnreadableCheckpoint(f"{folder} has none of {', '.join(sorted(VOCABULARIES))}.")
    try:
        return getattr(transformers, kind).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever its backend raises
        raise UnreadableCheckpoint(
            f"the tokenizer in {folder} cannot be read ({one_line(error)})."
        ) from error
