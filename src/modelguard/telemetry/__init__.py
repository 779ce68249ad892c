"""What modelguard tells about itself: one frozen dataclass per event, and plain callables that receive them."""

from __future__ import annotations

from modelguard.telemetry.events import (
    CallbackErrored,
    Event,
    GenerationAbandoned,
    GenerationReleased,
    LoadDiscarded,
    LoadErrored,
    LoadFinished,
    LoadStarted,
    PolicyFutile,
    RecycleAsked,
    ReloadDue,
    SwapChosen,
)
from modelguard.telemetry.hooks import Hook, add_hook, emit, set_hooks

__all__ = [
    "CallbackErrored",
    "Event",
    "GenerationAbandoned",
    "GenerationReleased",
    "Hook",
    "LoadDiscarded",
    "LoadErrored",
    "LoadFinished",
    "LoadStarted",
    "PolicyFutile",
    "RecycleAsked",
    "ReloadDue",
    "SwapChosen",
    "add_hook",
    "emit",
    "set_hooks",
]
