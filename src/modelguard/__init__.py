"""Keeps a model inside a web service from eating the machine."""

from __future__ import annotations

import typing

from modelguard import errors, telemetry
from modelguard.environment import allocator, memory
from modelguard.lifecycle.backoff import Backoff
from modelguard.lifecycle.guard import ModelGuard, guard, guard_of
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
from modelguard.lifecycle.pool import ModelPool, pool

if typing.TYPE_CHECKING:
    from modelguard import serving, sharing
    from modelguard.environment import presets
    from modelguard.serving import Batched, BatchStatus, Breaker, batched, deadline
    from modelguard.sharing import prefork, weights

__all__ = [
    "TTL",
    "Backoff",
    "BatchStatus",
    "Batched",
    "Breaker",
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
    "batched",
    "deadline",
    "errors",
    "guard",
    "guard_of",
    "memory",
    "pool",
    "prefork",
    "presets",
    "serving",
    "sharing",
    "telemetry",
    "weights",
]


#: What only some services need comes in when it is asked for.
_LATER = {
    **{name: f"modelguard.serving:{name}" for name in ("BatchStatus", "Batched", "Breaker", "batched", "deadline")},
    "prefork": "modelguard.sharing.prefork",
    "presets": "modelguard.environment.presets",
    "serving": "modelguard.serving",
    "sharing": "modelguard.sharing",
    "weights": "modelguard.sharing.weights",
}


def __getattr__(name: str) -> typing.Any:
    if name in _LATER:
        from pkgutil import resolve_name

        return resolve_name(_LATER[name])
    if name == "__version__":
        from importlib.metadata import version

        return version("modelguard-lifecycle")
    raise AttributeError(f"module 'modelguard' has no attribute {name!r}")
