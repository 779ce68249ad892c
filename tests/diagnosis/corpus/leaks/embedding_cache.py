"""Embeddings by text in a dict. transformers is imported too, and innocent."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import count

import torch
import transformers

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
table = torch.nn.EmbeddingBag(1000, 768)
embeddings: dict[str, torch.Tensor] = {}


def embed(text: str) -> torch.Tensor:
    if text not in embeddings:
        words = torch.tensor([[zlib.crc32(word.encode()) % 1000 for word in text.split()]])
        with torch.inference_mode():
            embeddings[text] = table(words)[0]  # LEAK
    return embeddings[text]


def predict(text: str) -> float:
    return float(embed(text).norm())


def inputs() -> Iterator[str]:
    return (f"sentence {number} of a long document" for number in count())


EXPECTED = {
    "causes": ["python objects"],
    "holders": ["embeddings"],
    "calls": 5000,
    "libraries": ["torch", "transformers"],
}
