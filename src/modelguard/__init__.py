"""Keeps a model inside a web service from eating the machine."""

from __future__ import annotations

import typing

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

if typing.TYPE_CHECKING:
    from modelguard import sharing
    from modelguard.environment import presets
    from modelguard.sharing import prefork, weights

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
    "prefork",
    "presets",
    "sharing",
    "telemetry",
    "weights",
]


#: What only some services need comes in when it is asked for.
_LATER = {
    "prefork": "modelguard.sharing.prefork",
    "presets": "modelguard.environment.presets",
    "sharing": "modelguard.sharing",
    "weights": "modelguard.sharing.weights",
}


def __getattr__(name: str) -> typing.Any:
    if name in _LATER:
        from importlib import import_module

        return import_module(_LATER[name])
    if name == "__version__":
        from importlib.metadata import version

        return version("modelguard-lifecycle")
    raise AttributeError(f"module 'modelguard' has no attribute {name!r}")
