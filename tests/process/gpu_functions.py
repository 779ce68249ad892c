"""What the isolated functions of test_gpu.py stand for, in a module that their owner never imports."""

from __future__ import annotations

import os

import torch

from modelguard import Errors, GpuMemoryGrowth, guard


def load() -> torch.nn.Linear:
    """Make a model of 268 MB on the GPU."""
    torch.manual_seed(0)
    return torch.nn.Linear(8192, 8192, device="cuda")


model = guard(load, reload_on=None)


@model
def apply(net: torch.nn.Linear, rows: int) -> float:
    """Use it."""
    return float(net(torch.ones(rows, 8192, device="cuda")).sum().item())


fragile = guard(load, reload_on=Errors(1))
kept: list[torch.Tensor] = []


@fragile
def index(net: torch.nn.Linear, number: int) -> float:
    """Read one of four numbers. Beyond them the device fails for good; -1 runs out of memory."""
    if number == -1:
        torch.empty(1 << 42, device="cuda")
    return float(torch.ones(4, device="cuda")[torch.tensor([number], device="cuda")].sum().item())


leaky = guard(load, reload_on=GpuMemoryGrowth("500 MB"))


@leaky
def leak(net: torch.nn.Linear) -> int:
    """Keep 100 MB."""
    kept.append(torch.zeros(100_000_000, dtype=torch.uint8, device="cuda"))
    return os.getpid()
