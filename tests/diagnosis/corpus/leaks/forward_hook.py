"""A forward hook, left over from debugging, collects activations."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).eval()
activations: list[torch.Tensor] = []


def remember(_module: torch.nn.Module, _given: Any, output: torch.Tensor) -> None:
    activations.append(output.detach())


model[1].register_forward_hook(remember)


def predict(number: int) -> int:
    with torch.inference_mode():
        return int(model(torch.full((4, 128), number / 1000)).sum(0).argmax())  # LEAK


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"causes": ["python objects"], "holders": ["activations"], "calls": 3000, "libraries": ["torch"]}
