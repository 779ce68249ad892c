"""A running sum of losses: one tensor, whose graph is as long as the service lives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch

torch.set_num_threads(1)
layer = torch.nn.Linear(64, 64)
statistics: dict[str, torch.Tensor] = {"loss": torch.zeros(())}


def predict(number: int) -> float:
    loss = layer(torch.full((16, 64), number / 1000)).square().mean()  # LEAK
    statistics["loss"] = statistics["loss"] + loss  # LEAK
    return float(loss)


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"causes": ["autograd"], "holders": ["statistics"], "calls": 2500, "libraries": ["torch"]}
