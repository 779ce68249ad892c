"""Keep a model inside a web service from exhausting the machine's memory.

Names are imported when they are first used, so ``import modelguard`` costs next to nothing.
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:  # as checkers want it of what a package offers
    from modelguard import allocator as allocator
    from modelguard import control as control
    from modelguard import errors as errors
    from modelguard import memory as memory
    from modelguard import prefork as prefork
    from modelguard import presets as presets
    from modelguard import serving as serving
    from modelguard import sharing as sharing
    from modelguard import telemetry as telemetry
    from modelguard import weights as weights
    from modelguard.isolation._isolation_options import Bounds as Bounds
    from modelguard.isolation._isolation_options import Host as Host
    from modelguard.isolation.isolate import Isolated as Isolated
    from modelguard.isolation.isolate import isolate as isolate
    from modelguard.lifecycle._guard_options import Loading as Loading
    from modelguard.lifecycle._guard_options import Replay as Replay
    from modelguard.lifecycle._guard_options import Swap as Swap
    from modelguard.lifecycle._models import Loaded as Loaded
    from modelguard.lifecycle.cron import Cron as Cron
    from modelguard.lifecycle.guard import ModelGuard as ModelGuard
    from modelguard.lifecycle.guard import guard as guard
    from modelguard.lifecycle.guard import guard_of as guard_of
    from modelguard.lifecycle.policies import TTL as TTL
    from modelguard.lifecycle.policies import Backoff as Backoff
    from modelguard.lifecycle.policies import Between as Between
    from modelguard.lifecycle.policies import Changed as Changed
    from modelguard.lifecycle.policies import Errors as Errors
    from modelguard.lifecycle.policies import GpuMemoryGrowth as GpuMemoryGrowth
    from modelguard.lifecycle.policies import GpuMemoryLimit as GpuMemoryLimit
    from modelguard.lifecycle.policies import Idle as Idle
    from modelguard.lifecycle.policies import MemoryGrowth as MemoryGrowth
    from modelguard.lifecycle.policies import MemoryLimit as MemoryLimit
    from modelguard.lifecycle.policies import Modified as Modified
    from modelguard.lifecycle.policies import Policy as Policy
    from modelguard.lifecycle.policies import Snapshot as Snapshot
    from modelguard.lifecycle.policies import Uses as Uses
    from modelguard.lifecycle.pool import ModelPool as ModelPool
    from modelguard.lifecycle.pool import pool as pool
    from modelguard.lifecycle.replicas import ModelReplicas as ModelReplicas
    from modelguard.lifecycle.replicas import replicas as replicas
    from modelguard.serving import AutoSize as AutoSize
    from modelguard.serving import Batched as Batched
    from modelguard.serving import BatchStatus as BatchStatus
    from modelguard.serving import Breaker as Breaker
    from modelguard.serving import Buffer as Buffer
    from modelguard.serving import Execution as Execution
    from modelguard.serving import Fair as Fair
    from modelguard.serving import Weight as Weight
    from modelguard.serving import deadline as deadline
    from modelguard.serving.batched import batched as batched

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
_MODULES = "allocator control errors memory prefork presets serving sharing telemetry weights"
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULE_OF |= {module: module for module in _MODULES.split()}
__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll] - for checkers it stands above


def __getattr__(name: str) -> typing.Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("modelguard-lifecycle")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'modelguard' has no attribute {name!r}")
    module = importlib.import_module(f"modelguard.{_MODULE_OF[name]}")
    globals()[name] = value = module if _MODULE_OF[name] == name else getattr(module, name)
    return value
