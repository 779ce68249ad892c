"""A network in inference mode, with inputs of one shape."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch

torch.set_num_threads(1)
encoder = torch.nn.Sequential(
    torch.nn.Conv1d(64, 128, 5), torch.nn.ReLU(), torch.nn.Conv1d(128, 64, 3), torch.nn.AdaptiveAvgPool1d(4)
).eval()


def predict(number: int) -> float:
    with torch.inference_mode():
        return float(encoder(torch.full((1, 64, 200), number / 1000)).sum())


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"calls": 600, "libraries": ["torch"]}
