"""Sentence encoders: captions to vectors, for retrieval where no joint model of image and text is.

Vectors are the mean of the last layer's tokens, of length 1, as sentence-transformers has them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from stillhouse.errors import UserError, one_line
from stillhouse.metrics.pretrained import load_pretrained

BATCH = 64  # texts that are encoded at once


class SentenceEncoder:
    """A BERT-like encoder from a folder or the hub, safetensors only."""

    def __init__(self, name: str, device: torch.device | str = "cpu") -> None:
        from transformers import AutoTokenizer, BertModel

        loaded = load_pretrained(BertModel, "bert", name)
        self.model, self.digest, self.device = loaded.model.to(device), loaded.digest, device
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                loaded.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever its backend raises
            raise UserError(
                f"the tokenizer in {loaded.folder} cannot be read ({one_line(error)})"
            ) from error

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """[B, D]; equal texts are encoded once."""
        distinct = list(dict.fromkeys(texts))
        parts = [distinct[at : at + BATCH] for at in range(0, len(distinct), BATCH)]
        found = torch.cat([self._encode(part) for part in parts])
        place = {text: row for row, text in enumerate(distinct)}
        return found[[place[text] for text in texts]]

    @torch.no_grad()
    def _encode(self, texts: Sequence[str]) -> Tensor:
        tokens = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt"
        ).to(self.device)
        states = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None].to(states)
        return F.normalize((states * mask).sum(1) / mask.sum(1)).float().cpu()
