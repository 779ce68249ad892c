"""What modelguard tells about itself: one frozen dataclass per event, and plain callables that receive them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from modelguard.telemetry.hooks import Hook, add_hook, emit, set_hooks

if TYPE_CHECKING:
    from modelguard.telemetry.events import (
        BatchErrored,
        BatchFinished,
        CallbackErrored,
        CircuitClosed,
        CircuitOpened,
        Event,
        GenerationAbandoned,
        GenerationReleased,
        LoadDiscarded,
        LoadErrored,
        LoadFinished,
        LoadStarted,
        MemoryTrimmed,
        PolicyFutile,
        RecycleAsked,
        ReloadDue,
        RequestsRefused,
        SwapChosen,
    )

__all__ = [
    "BatchErrored",
    "BatchFinished",
    "CallbackErrored",
    "CircuitClosed",
    "CircuitOpened",
    "Event",
    "GenerationAbandoned",
    "GenerationReleased",
    "Hook",
    "LoadDiscarded",
    "LoadErrored",
    "LoadFinished",
    "LoadStarted",
    "MemoryTrimmed",
    "PolicyFutile",
    "RecycleAsked",
    "ReloadDue",
    "RequestsRefused",
    "SwapChosen",
    "add_hook",
    "emit",
    "set_hooks",
]


def __getattr__(name: str) -> Any:
    # Making a dozen dataclasses takes 7 ms, which importing modelguard does without: they come with the first event.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("modelguard.telemetry.events"), name)
