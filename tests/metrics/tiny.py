"""Models and images small enough for any test."""

from pathlib import Path

import torch
from torch import Tensor


def write_models(root: Path) -> dict[str, Path]:
    """Random DINOv2 and CLIP, written by transformers."""
    from transformers import (
        CLIPConfig,
        CLIPModel,
        CLIPTextConfig,
        CLIPTokenizer,
        CLIPVisionConfig,
        Dinov2Model,
    )
    from transformers import Dinov2Config as Config

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    for name, size in (("dinov2", 224), ("dinov2-518", 518)):
        model = Dinov2Model(Config(image_size=size, patch_size=14, layerscale_value=1.0, **small))
        torch.nn.init.normal_(model.embeddings.position_embeddings)
        model.save_pretrained(root / name)
    words = ["<|startoftext|>", "<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = CLIPTokenizer({word: number for number, word in enumerate(words)}, [])
    text = CLIPTextConfig(
        vocab_size=len(words), max_position_embeddings=12, bos_token_id=0, eos_token_id=1, **small
    )
    vision = CLIPVisionConfig(image_size=48, patch_size=8, **small)
    config = CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16
    )
    CLIPModel(config).save_pretrained(root / "clip")
    tokenizer.save_pretrained(root / "clip")
    return {path.name: path for path in root.iterdir()}


def pictures(count: int = 8, height: int = 40, width: int = 56) -> Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3, height, width), generator=draw, dtype=torch.uint8)
