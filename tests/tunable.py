"""Small whole pipelines of the classes that can be fine-tuned, and a folder of captioned images."""

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from small_models import build_network, network_config, part, save_scheduler, small_autoencoder

from stillhouse.engine.world import World
from stillhouse.recipes.encoded import read_once
from stillhouse.recipes.train.training import TrainRun, build_learner, build_loader
from stillhouse.recipes.train.tuning import fitted

HERE = World(0, 1, torch.device("cpu"))
FAMILIES = ("sd15", "sdxl", "pixart-alpha", "sd3")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS, SIDE = 12, 32  # of a CLIP's prompt; pixels of an image
COLOURS = {"red": (200, 30, 30), "green": (40, 180, 60), "blue": (30, 60, 190)}
# How many layers each network keeps: enough for every kind of block.
SHALLOW: dict[str, dict[str, Any]] = {
    "sd15": {
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
    },
    "sdxl": {
        "block_out_channels": (16, 32),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 1,
        "transformer_layers_per_block": (1, 1),
        "attention_head_dim": (2, 2),
    },
    "pixart-alpha": {"num_layers": 2},
    "sd3": {"num_layers": 2},
}


def clip(width: int, projected: int = 0) -> tuple[Any, Any]:
    """A tokenizer and a text encoder, with a projection where its width is given."""
    import transformers as t

    words = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{c}</w>" for c in LETTERS)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = t.CLIPTokenizer(vocabulary, [], model_max_length=TOKENS)
    config = t.CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        projection_dim=projected or 8,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = t.CLIPTextModelWithProjection if projected else t.CLIPTextModel
    return tokenizer, model(config)


def t5(width: int) -> tuple[Any, Any]:
    import transformers as t

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0)]
    tokenizer = t.T5Tokenizer([*pieces, *((letter, -3.0) for letter in LETTERS)], extra_ids=0)
    sizes = {"d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return tokenizer, t.T5EncoderModel(t.T5Config(vocab_size=40, d_model=width, **sizes))


def encoders(family: str) -> list[tuple[Any, Any]]:
    return {
        "sd15": lambda: [clip(24)],
        "sdxl": lambda: [clip(8), clip(16, 40)],
        "pixart-alpha": lambda: [t5(32)],
        "sd3": lambda: [clip(16, 16), clip(24, 24), t5(48)],
    }[family]()


def save_whole(folder: Path, family: str) -> Path:
    """The pipeline as diffusers saves it."""
    torch.manual_seed(0)
    network = build_network({**network_config(family, reduced=True), **SHALLOW[family]})
    for weight in network.parameters():  # some start at zero, which would hide mistakes
        torch.nn.init.normal_(weight, std=0.1) if not weight.any() else None
    index = {k: v for k, v in part(family, "model_index").items() if "safety" not in k}
    index.pop("feature_extractor", None)
    network.save_pretrained(folder / ("unet" if "unet" in index else "transformer"))
    shift = {"shift_factor": 0.06} if family == "sd3" else {}
    small_autoencoder(network.config.in_channels, **shift).save_pretrained(folder / "vae")
    save_scheduler(folder / "scheduler", part(family, "scheduler"))
    for number, (tokenizer, model) in enumerate(encoders(family), start=1):
        suffix = "" if number == 1 else f"_{number}"
        tokenizer.save_pretrained(folder / f"tokenizer{suffix}")
        model.save_pretrained(folder / f"text_encoder{suffix}")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def pipeline(folder: Path, **parts: Any) -> Any:
    """As a user of diffusers opens it."""
    found = diffusers.DiffusionPipeline.from_pretrained(folder, use_safetensors=True, **parts)
    found.set_progress_bar_config(disable=True)
    return found


def write_images(folder: Path, count: int = 12, *, metadata: bool = True) -> Path:
    """Images of several shapes with captions, in metadata.jsonl or in a .txt beside each."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    lines = []
    for i in range(count):
        name = list(COLOURS)[i % 3]
        noise = random.integers(0, 50, (40 + 3 * i, 50, 3))
        pixels = np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")
        caption = f"a {name} {LETTERS[i]}"
        lines.append(json.dumps({"file_name": f"{i:02d}.png", "text": caption}) + "\n")
        if not metadata:
            (folder / f"{i:02d}.txt").write_text(caption + "\n")
    if metadata:
        (folder / "metadata.jsonl").write_text("".join(lines))
    return folder


def tuning(model: Path, images: Path, out: Path, **changes: Any) -> TrainRun:
    """A few steps of fine-tuning."""
    from stillhouse.recipes.train.catalogue import RECIPES

    base = RECIPES["finetune"]("tiny")
    data = base.data.model_copy(
        update={
            "source": base.data.source.model_copy(update={"path": str(images)}),
            "image": base.data.image.model_copy(update={"size": SIDE}),
        }
    )
    usual = {
        "model": str(model),
        "data": data,
        "images": 16,
        "batch": 4,
        "log_every": 4,
        "checkpoint_every": 16,
        "preview": base.preview.model_copy(update={"every": 16, "count": 2, "steps": 2}),
        "out": out,
    }
    return base.model_copy(update=usual | changes)


def prepared(config: TrainRun) -> tuple[Any, Any, Any]:
    """The learner of a run, its first batch as it comes and as it is trained on."""
    config = fitted(config)
    loader = build_loader(config, HERE, ())
    learner = build_learner(config, HERE, loader)
    loader = read_once(config, HERE, loader, learner.codec)
    batch = next(iter(loader)).batch
    return learner, batch, learner.prepare(batch)
