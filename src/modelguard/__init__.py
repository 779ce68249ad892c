"""Keep a model inside a web service from exhausting the machine's memory.

Names are imported when they are first used, so ``import modelguard`` costs next to nothing.
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from modelguard import allocator, control, errors, memory, prefork, presets, serving, sharing, telemetry, weights
    from modelguard.isolation._isolation_options import Bounds, Host
    from modelguard.isolation.isolate import Isolated, isolate
    from modelguard.lifecycle._guard_options import Loading, Replay, Swap
    from modelguard.lifecycle._models import Loaded
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
    from modelguard.serving import AutoSize, Batched, BatchStatus, Breaker, Buffer, Execution, Fair, Weight, deadline
    from modelguard.serving.batched import batched

__all__ = [
    "TTL",
    "AutoSize",
    "Backoff",
    "BatchStatus",
    "Batched",
    "Between",
    "Bounds",
    "Breaker",
    "Buffer",
    "Changed",
    "Cron",
    "Errors",
    "Execution",
    "Fair",
    "GpuMemoryGrowth",
    "GpuMemoryLimit",
    "Host",
    "Idle",
    "Isolated",
    "Loaded",
    "Loading",
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
    "isolation._isolation_options": "Bounds Host",
    "isolation.isolate": "Isolated isolate",
    "lifecycle._guard_options": "Loading Replay Swap",
    "lifecycle._models": "Loaded",
    "lifecycle.cron": "Cron",
    "lifecycle.guard": "ModelGuard guard guard_of",
    "lifecycle.policies": "Backoff TTL Between Changed Errors GpuMemoryGrowth GpuMemoryLimit Idle MemoryGrowth"
    " MemoryLimit Modified Policy Snapshot Uses",
    "lifecycle.pool": "ModelPool pool",
    "lifecycle.replicas": "ModelReplicas replicas",
    "serving": "AutoSize BatchStatus Batched Breaker Buffer Execution Fair Weight batched deadline",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> typing.Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("modelguard-lifecycle")
    if name not in __all__:
        raise AttributeError(f"module 'modelguard' has no attribute {name!r}")
    module = importlib.import_module(f"modelguard.{_MODULE_OF.get(name, name)}")
    globals()[name] = value = getattr(module, name) if name in _MODULE_OF else module
    return value
