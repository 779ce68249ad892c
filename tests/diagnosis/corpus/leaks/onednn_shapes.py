"""Convolutions over texts of ever new lengths: oneDNN keeps a plan for each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch

torch.set_num_threads(1)
encoder = torch.nn.Sequential(torch.nn.Conv1d(128, 192, 5), torch.nn.Conv1d(192, 192, 3)).eval()


def predict(x: torch.Tensor) -> float:
    with torch.inference_mode():
        return float(encoder(x).mean())  # LEAK


def inputs() -> Iterator[torch.Tensor]:
    # No length comes twice in 499, and they do not rise.
    return (torch.zeros(1, 128, 20 + number * 197 % 499) for number in count())


EXPECTED = {
    "causes": ["onednn plans"],
    "holders": ["encoder", "LRU_CACHE_CAPACITY"],
    "calls": 480,
    "libraries": ["torch"],
}
