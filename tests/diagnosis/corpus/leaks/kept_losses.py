"""Losses are kept for a mean, and each keeps its graph."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch

torch.set_num_threads(1)
layer = torch.nn.Linear(64, 64)
losses: list[torch.Tensor] = []


def predict(number: int) -> float:
    loss = layer(torch.full((16, 64), number / 1000)).square().mean()  # LEAK
    losses.append(loss)
    return float(loss)


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"causes": ["autograd"], "holders": ["losses"], "calls": 2500, "libraries": ["torch"]}
