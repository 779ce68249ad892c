"""Events that modelguard reports, and hooks that receive them: frozen dataclasses and plain callables."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from modelguard.telemetry._hooks import (
    Hook,
    add_hook,
    describe,
    emit,
    import_events,
    level_of,
    listening,
    logger,
    set_hooks,
)
from modelguard.telemetry.reasons import Reason, ReasonKind

if TYPE_CHECKING:
    from modelguard.telemetry._events import *

__all__ = [
    "BatchErrored",
    "BatchFinished",
    "BatchSizeChosen",
    "Callback",
    "CallbackErrored",
    "CircuitClosed",
    "CircuitOpened",
    "DiscardCause",
    "Event",
    "GenerationAbandoned",
    "GenerationReleased",
    "GpuCacheEmptied",
    "GpuOutOfMemory",
    "GrowthFound",
    "GuardPaused",
    "GuardResumed",
    "Hook",
    "HostLockHeld",
    "IdleEnded",
    "LoadDiscarded",
    "LoadErrored",
    "LoadFinished",
    "LoadStarted",
    "MemoryTrimmed",
    "PolicyIgnored",
    "PostponeCause",
    "Reason",
    "ReasonKind",
    "RecycleAsked",
    "ReloadDue",
    "ReloadPostponed",
    "ReplayFinished",
    "RequestsRefused",
    "RolledBack",
    "Swap",
    "SwapChosen",
    "UnloadStarted",
    "WorkerEndCause",
    "WorkerEnded",
    "WorkerStarted",
    "WorkersReleased",
    "add_hook",
    "describe",
    "emit",
    "import_events",
    "level_of",
    "listening",
    "logger",
    "set_hooks",
]


def __getattr__(name: str) -> Any:
    # Making a dozen dataclasses takes 7 ms, too long for an import of modelguard: the first event imports them.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module("modelguard.telemetry._events"), name)
    return found
