"""Keeps a model inside a web service from eating the machine."""

from __future__ import annotations

from modelguard import errors, telemetry
from modelguard.environment import allocator, memory
from modelguard.lifecycle.backoff import Backoff
from modelguard.lifecycle.calls import guard_of
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.making import guard, pool
from modelguard.lifecycle.policies import (
    TTL,
    Errors,
    MemoryGrowth,
    MemoryLimit,
    Modified,
    Policy,
    Snapshot,
    Uses,
)
from modelguard.lifecycle.pool import ModelPool

__all__ = [
    "TTL",
    "Backoff",
    "Errors",
    "MemoryGrowth",
    "MemoryLimit",
    "ModelGuard",
    "ModelPool",
    "Modified",
    "Policy",
    "Snapshot",
    "Uses",
    "allocator",
    "errors",
    "guard",
    "guard_of",
    "memory",
    "pool",
    "telemetry",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("modelguard-lifecycle")
    raise AttributeError(f"module 'modelguard' has no attribute {name!r}")
