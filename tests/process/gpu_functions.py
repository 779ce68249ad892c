"""What the isolated functions of test_gpu.py stand for, in a module that their owner never imports."""

from __future__ import annotations

import torch

from modelguard import guard


def load() -> torch.nn.Linear:
    """Make a model of 268 MB on the GPU."""
    torch.manual_seed(0)
    return torch.nn.Linear(8192, 8192, device="cuda")


model = guard(load, reload_on=None)


@model
def apply(net: torch.nn.Linear, rows: int) -> float:
    """Use it."""
    return float(net(torch.ones(rows, 8192, device="cuda")).sum().item())
