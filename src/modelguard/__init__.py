"""Keep a model inside a web service from exhausting the machine's memory.

Names are imported when they are first used, so ``import modelguard`` costs next to nothing.
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from modelguard import allocator, control, errors, memory, prefork, presets, serving, sharing, telemetry, weights
    from modelguard.isolation.isolate import Isolated, isolate
    from modelguard.lifecycle._guard_options import Loaded, Replay, Swap
    from modelguard.lifecycle.cron import Cron
    from modelguard.lifecycle.guard import ModelGuard, guard, guard_of
    from modelguard.lifecycle.policies import (
        TTL,
        Backoff,
        Between,
        Changed,
        Errors,
        GpuMemoryGrowth,
        GpuMemoryLimit,
        Idle,
        MemoryGrowth,
        MemoryLimit,
        Modified,
        Policy,
        Snapshot,
        Uses,
    )
    from modelguard.lifecycle.pool import ModelPool, pool
    from modelguard.lifecycle.replicas import ModelReplicas, replicas
    from modelguard.serving import Batched, BatchStatus, Breaker, Buffer, Fair, Weight, deadline
    from modelguard.serving.batched import batched

__all__ = [
    "TTL",
    "Backoff",
    "BatchStatus",
    "Batched",
    "Between",
    "Breaker",
    "Buffer",
    "Changed",
    "Cron",
    "Errors",
    "Fair",
    "GpuMemoryGrowth",
    "GpuMemoryLimit",
    "Idle",
    "Isolated",
    "Loaded",
    "MemoryGrowth",
    "MemoryLimit",
    "ModelGuard",
    "ModelPool",
    "ModelReplicas",
    "Modified",
    "Policy",
    "Replay",
    "Snapshot",
    "Swap",
    "Uses",
    "Weight",
    "allocator",
    "batched",
    "control",
    "deadline",
    "errors",
    "guard",
    "guard_of",
    "isolate",
    "memory",
    "pool",
    "prefork",
    "presets",
    "replicas",
    "serving",
    "sharing",
    "telemetry",
    "weights",
]

_NAMES = {
    "modelguard.isolation.isolate": ("Isolated", "isolate"),
    "modelguard.lifecycle.cron": ("Cron",),
    "modelguard.lifecycle.guard": ("ModelGuard", "guard", "guard_of"),
    "modelguard.lifecycle.policies": (
        "Backoff",
        "TTL",
        "Between",
        "Changed",
        "Errors",
        "GpuMemoryGrowth",
        "GpuMemoryLimit",
        "Idle",
        "MemoryGrowth",
        "MemoryLimit",
        "Modified",
        "Policy",
        "Snapshot",
        "Uses",
    ),
    "modelguard.lifecycle.pool": ("ModelPool", "pool"),
    "modelguard.lifecycle._guard_options": ("Loaded", "Replay", "Swap"),
    "modelguard.lifecycle.replicas": ("ModelReplicas", "replicas"),
    "modelguard.serving": ("BatchStatus", "Batched", "Breaker", "Buffer", "Fair", "Weight", "batched", "deadline"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> typing.Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("modelguard-lifecycle")
    if name not in __all__:
        raise AttributeError(f"module 'modelguard' has no attribute {name!r}")
    module = _MODULE_OF.get(name)
    value = importlib.import_module(f"modelguard.{name}" if module is None else module)
    globals()[name] = value = value if module is None else getattr(value, name)
    return value
