"""The events. Times are seconds, sizes are bytes of private memory, errors are one line of text."""

from __future__ import annotations

from modelguard import _public
from modelguard.telemetry.events._base import Event
from modelguard.telemetry.events._diagnosis import GrowthFound
from modelguard.telemetry.events._isolation import WorkerEndCause, WorkerEnded, WorkersReleased, WorkerStarted
from modelguard.telemetry.events._lifecycle import (
    Callback,
    CallbackErrored,
    DiscardCause,
    GenerationAbandoned,
    GenerationReleased,
    GpuCacheEmptied,
    GpuOutOfMemory,
    GuardPaused,
    GuardResumed,
    HostLockHeld,
    LoadDiscarded,
    LoadErrored,
    LoadFinished,
    LoadStarted,
    MemoryTrimmed,
    PolicyFutile,
    PostponeCause,
    RecycleAsked,
    ReloadDue,
    ReloadPostponed,
    ReplayFinished,
    RolledBack,
    Swap,
    SwapChosen,
    UnloadStarted,
)
from modelguard.telemetry.events._serving import (
    BatchErrored,
    BatchFinished,
    BatchSizeChosen,
    CircuitClosed,
    CircuitOpened,
    RequestsRefused,
)
from modelguard.telemetry.reasons import Reason  # noqa: F401 - typing.get_type_hints looks for it here

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
    "HostLockHeld",
    "LoadDiscarded",
    "LoadErrored",
    "LoadFinished",
    "LoadStarted",
    "MemoryTrimmed",
    "PolicyFutile",
    "PostponeCause",
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
]

_public.set_module(globals())
