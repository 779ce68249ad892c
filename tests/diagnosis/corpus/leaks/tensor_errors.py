"""Failed requests are kept for a report; the frames of their tracebacks hold the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch

torch.set_num_threads(1)
layer = torch.nn.Linear(256, 256)
failed: list[tuple[int, Exception]] = []


def forward(number: int) -> torch.Tensor:
    with torch.inference_mode():
        hidden = layer(torch.full((16, 256), float(number)))  # LEAK
    if number % 3 == 0:
        raise RuntimeError(f"request {number} is out of range")
    return hidden


def predict(number: int) -> float:
    try:
        return float(forward(number).mean())
    except RuntimeError as error:
        failed.append((number, error))
        return 0.0


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"causes": ["tracebacks"], "holders": ["failed"], "calls": 3000, "libraries": ["torch"]}
